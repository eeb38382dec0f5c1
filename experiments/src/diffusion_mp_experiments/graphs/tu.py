"""Sets of small graphs with a class each, in the text files of TU Dortmund."""

from __future__ import annotations

from pathlib import Path

import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.io import read_tu_data

from diffusion_mp.errors import check_kind, describe
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.agreement import check_collated

_FILES = ("A", "graph_indicator", "graph_labels")
_WAY_OUT = "Fetch it anew, from https://chrsmrrs.github.io/datasets."


def load_tu(root: str | Path, name: str) -> list[Data]:
    r"""One set of TUDataset (Morris et al. 2020), MUTAG or PROTEINS say.

    Reads `root/<name>/raw/<name>_*.txt` with PyG's `read_tu_data` and writes nothing; PyG's own cache beside them is
    not opened. Features are the attributes of nodes, where there are any, and then their labels, one-hot. (PyG's
    `TUDataset` leaves the attributes out unless asked.)

    Args:
        root: the folder that holds the folder `<name>`.
        name: of the set.

    Returns:
        A graph for each label of a graph: x [N, C], edge_index [2, E] and y [1]; edge_attr [E, D] where edges have any.

    Raises:
        TypeError: name is no name.
        FileNotFoundError: files are missing; the sentence says which.
        ValueError: a file is damaged, or they do not belong together.

    Examples:
        >>> (folder / "TINY" / "raw").mkdir(parents=True)
        >>> files = {"A": "2, 3\n3, 2\n", "graph_indicator": "1\n2\n2\n"}
        >>> files |= {"graph_labels": "1\n-1\n", "node_labels": "0\n2\n1\n"}
        >>> for part, text in files.items():
        ...     _ = (folder / "TINY" / "raw" / f"TINY_{part}.txt").write_text(text)
        >>> [(data.num_nodes, int(data.y)) for data in load_tu(folder, "TINY")]
        [(1, 1), (2, 0)]
    """
    check_kind(name, "name", str, "the name of a data set, like MUTAG")
    raw = as_path(root, "root") / name / "raw"
    check_present(
        f"{name} of TUDataset",
        raw,
        [raw / f"{name}_{part}.txt" for part in _FILES],
        _WAY_OUT.replace("Fetch it anew,", "Unpack its archive there,"),
    )
    with reading(raw, _WAY_OUT):
        data, slices, _ = read_tu_data(str(raw), name)
        if data.x is None:
            raise ValueError("its nodes have neither labels nor attributes")
        data.x = data.x.float()
        if not data.x.isfinite().all() or data.y.dim() != 1 or data.y.is_floating_point():
            raise ValueError(f"attributes must be finite, and labels of graphs whole numbers; got {describe(data.y)}")
        slices = {key: _for_all(torch.as_tensor(slices[key]), len(data.y)) for key in data.to_dict()}
        check_collated(data.to_dict(), slices, len(data.y))
    return list(_Graphs(data, slices))


def _for_all(starts: torch.Tensor, num_graphs: int) -> torch.Tensor:
    """PyG leaves out the last graphs where they have no edges: theirs start where all others end."""
    missing = max(num_graphs + 1 - len(starts), 0)
    return torch.cat([starts, starts[-1:].expand(missing)])


class _Graphs(InMemoryDataset):
    """What PyG collated, taken apart by PyG."""

    def __init__(self, data: Data, slices: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.data, self.slices = data, slices
