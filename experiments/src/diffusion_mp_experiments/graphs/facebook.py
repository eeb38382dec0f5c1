"""Friendships at one university (Facebook100), in MATLAB's format."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce

from diffusion_mp.errors import check_kind
from diffusion_mp_experiments.files.mat5 import map_variable, read_pattern
from diffusion_mp_experiments.files.reading import as_path, check_present, reading

_ROWS, _COLUMNS = "A", "local_info"
_GENDER = 1  # which column of local_info
_LARGEST = 1 << 27  # numbers of x, and bytes of the friendships; johnshopkins55 has 12 million and 4
_WAY_OUT = "Fetch it anew, from the folder data/facebook100 of https://github.com/CUAI/Non-Homophily-Large-Scale."


def load_facebook(root: str | Path, name: str) -> Data:
    """Students of one university and who is a friend of whom (Traud et al. 2012; Lim et al. 2021), johnshopkins55 say.

    Reads `root/<name>/raw/data.mat`, where PyG's `LINKXDataset` puts it, and writes nothing. The graph is the one that
    PyG makes of it: gender is the label, and the other columns, one-hot, are the features.

    Args:
        root: the folder that holds the folder `<name>`.
        name: of the university.

    Returns:
        The graph with x [N, C], edge_index [2, E] in both directions, and y [N] in −1 (unknown), 0 and 1.

    Raises:
        TypeError: name is no name.
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.

    Examples:
        >>> from scipy.io import savemat
        >>> from scipy.sparse import csc_matrix
        >>> (folder / "tiny" / "raw").mkdir(parents=True)
        >>> people = [[1, 2, 7], [2, 1, 7], [1, 0, 9]]  # the second column is gender
        >>> friends = csc_matrix([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
        >>> savemat(folder / "tiny" / "raw" / "data.mat", {"local_info": people, "A": friends}, do_compression=True)
        >>> load_facebook(folder, "tiny").y
        tensor([ 1,  0, -1])
    """
    check_kind(name, "name", str, "the name of a university, like johnshopkins55")
    path = as_path(root, "root") / name / "raw" / "data.mat"
    check_present(name, path.parent, [path], _WAY_OUT.replace("Fetch it anew,", "Fetch it as data.mat"))
    with reading(path, _WAY_OUT):
        with TemporaryDirectory() as scratch:
            table = map_variable(path, _COLUMNS, Path(scratch))
            if table.dtype.kind not in "iu" or table.shape[1] <= _GENDER or not len(table):
                raise ValueError(f"its {_COLUMNS} is no table of whole numbers but {table.dtype} {table.shape}")
            people = np.array(table, np.int64)
        pairs, shape = read_pattern(path, _ROWS, _LARGEST)
        if shape != (len(people), len(people)):
            raise ValueError(f"its {_ROWS} is a matrix {shape} of {len(people)} people")
        x, edge_index = _one_hot(np.delete(people, _GENDER, 1)), torch.from_numpy(pairs)
        y = torch.from_numpy(people[:, _GENDER]) - 1
        if int(y.min()) < -1 or int(y.max()) > 1:
            raise ValueError("its column of gender must hold 0, for not known, 1 and 2")
        return Data(x=x, edge_index=coalesce(edge_index, num_nodes=len(y)), y=y)


def _one_hot(columns: Shaped[np.ndarray, "N columns"]) -> Tensor:
    """Every column as one of its values; 0, for not known, is a value too."""
    places = [np.unique(column, return_inverse=True)[1] for column in columns.T]
    sizes = [int(place.max()) + 1 for place in places]
    if len(columns) * sum(sizes) > _LARGEST:
        raise ValueError(f"its {_COLUMNS} has {sum(sizes)} different values of {len(columns)} people")
    x = torch.zeros(len(columns), sum(sizes))
    for place, start in zip(places, np.cumsum([0, *sizes]).tolist(), strict=False):
        x[torch.arange(len(columns)), torch.from_numpy(place) + start] = 1
    return x
