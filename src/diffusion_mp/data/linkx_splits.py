"""The fixed splits that LINKX (Lim et al. 2021) published as pickles, read without running any."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.data.agreement import check_indices
from diffusion_mp.data.arguments import as_path
from diffusion_mp.data.npy import read_header
from diffusion_mp.data.pickled_arrays import ARRAYS, as_integers, as_objects
from diffusion_mp.data.plain_pickle import read_pickle
from diffusion_mp.data.reading import reading
from diffusion_mp.data.splits import Split

_WAY_OUT = "It must be an array of dictionaries of node numbers, as LINKX has; fetch it anew."


def load_linkx_splits(path: str | Path, num_nodes: int) -> list[Split]:
    """The splits of a file such as `pokec-splits.npy`: lists of node numbers under "train", "valid" and "test".

    The file is an array of dictionaries, which NumPy stores as a pickle. It is read as data: what asks for anything but
    arrays is refused, and none of it runs.

    Shapes: every split has masks [num_nodes].
    Errors: FileNotFoundError; ValueError where the file holds something else, or a node number out of range.
    """
    path = as_path(path, "path")
    if not path.is_file():
        raise FileNotFoundError(
            f"No splits at {path}: take pokec-splits.npy from the folder data/splits of "
            "https://github.com/CUAI/Non-Homophily-Large-Scale."
        )
    with reading(path, _WAY_OUT):
        stream = io.BytesIO(path.read_bytes())
        if read_header(stream).code != "O":
            raise ValueError("it is an array of numbers")
        splits = as_objects(read_pickle(stream, ARRAYS))
        return [Split(*(_mask(split, key, num_nodes) for key in ("train", "valid", "test"))) for split in splits]


def _mask(split: Any, key: str, num_nodes: int) -> Tensor:
    if not isinstance(split, dict) or key not in split:
        raise ValueError("a split must have the entries train, valid and test")
    nodes = torch.from_numpy(as_integers(split[key]))
    check_indices(nodes, num_nodes, f"the nodes of {key}")
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask
