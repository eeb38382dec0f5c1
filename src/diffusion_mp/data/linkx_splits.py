"""The fixed splits that LINKX (Lim et al. 2021) published as pickles, read without running any."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion_mp.data.splits import Split

# What NumPy itself calls to rebuild an array; its module had another name before version 2.
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def load_linkx_splits(path: str | Path, num_nodes: int) -> list[Split]:
    """The splits of a file such as `pokec-splits.npy`: lists of node numbers under "train", "valid" and "test".

    The file is an array of dictionaries, which NumPy stores as a pickle, and unpickling can run any code; `np.load`
    reads it with `allow_pickle=True` only. Here whatever is neither an array nor a plain container is refused.

    Shapes: every split has masks [num_nodes].
    Errors: FileNotFoundError; ValueError where the file holds something else, or a node number out of range.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"No splits at {path}: take pokec-splits.npy from the folder data/splits of "
            "https://github.com/CUAI/Non-Homophily-Large-Scale."
        )
    with path.open("rb") as file:
        try:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            splits = np.ravel(_ArraysOnly(file).load())  # a single split is saved without an axis
        except (ValueError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(
                f"{path} must be an array of dictionaries of node numbers, as LINKX has: {error}"
            ) from error
    return [Split(*(_mask(path, split, key, num_nodes) for key in ("train", "valid", "test"))) for split in splits]


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module, name)


def _mask(path: Path, split: Any, key: str, num_nodes: int) -> torch.Tensor:
    if not isinstance(split, dict) or key not in split:
        raise ValueError(f"{path}: a split must have the entries train, valid and test; got {split!r:.80}.")
    nodes = torch.as_tensor(np.asarray(split[key], np.int64))
    if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < num_nodes:
        raise ValueError(f"{path}: the nodes of {key} must lie in 0..{num_nodes - 1}, got up to {int(nodes.max())}.")
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask
