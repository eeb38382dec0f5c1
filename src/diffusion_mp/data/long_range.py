"""The Long Range Graph Benchmark (Dwivedi et al. 2022) through PyG's reader."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from diffusion_mp.data.agreement import check_indices
from diffusion_mp.data.arguments import as_path
from diffusion_mp.data.cached import CachedDataset, Transform
from diffusion_mp.data.fetch import fetch
from diffusion_mp.data.pickled_arrays import ARRAYS, as_integers, is_array
from diffusion_mp.data.pickled_tensors import TENSORS, as_tensor
from diffusion_mp.data.plain_pickle import Made, read_pickle
from diffusion_mp.data.reading import reading
from diffusion_mp.data.tensor_file import load_tensors
from diffusion_mp.errors import check_choice

# The ending of the raw files; PyG's folders are the lower-cased names.
_SUFFIX = {
    "Peptides-func": "pt",
    "Peptides-struct": "pt",
    "PCQM-Contact": "pt",
    "PascalVOC-SP": "pickle",
    "COCO-SP": "pickle",
}
_SPLITS = ("train", "val", "test")
_TARGETS = ("x", "edge_attr", "edge_index", "y")  # what the tuple of a graph holds
_CONTACT = ("x", "edge_attr", "edge_index", "edge_label_index", "edge_label")


def load_lrgb(
    root: str | Path,
    name: Literal["Peptides-func", "Peptides-struct", "PCQM-Contact", "PascalVOC-SP", "COCO-SP"],
    split: Literal["train", "val", "test"] = "train",
    *,
    download: bool = False,
    transform: Transform | None = None,
    pre_transform: Transform | None = None,
) -> InMemoryDataset:
    """One data set of the Long Range Graph Benchmark (Dwivedi et al. 2022), as PyG's `LRGBDataset` reads it.

    Reads `root/<name in lower case>/raw/{train,val,test}.{pt,pickle}` and keeps the graphs of `split` in `processed`
    beside `raw`, from where they are read afterwards; so `root` must be writable at first. With `download=True` and a
    file missing, PyG fetches the archive first and puts it in the place of `raw`.

    The raw files are pickles. They are read as data: one that asks for anything but tensors is refused, and none of it
    runs. What PyG itself may have left in `processed` is not opened.

    Shapes of a graph: x [N, C], edge_index [2, E] both directions, edge_attr [E, D]; y [1, 10] and [1, 11] for
    Peptides-func and -struct, [N] for the superpixels; edge_label_index and edge_label for PCQM-Contact.
    Errors: ValueError for an unknown name or split and for a damaged file; FileNotFoundError saying which files are
    missing, how to get them and where to put them; ConnectionError when the download fails.
    """
    check_choice(name, "name", _SUFFIX)
    check_choice(split, "split", _SPLITS)
    root = as_path(root, "root")
    missing = _missing(root, name)
    if missing and not download:
        raise FileNotFoundError(
            f"{name} is not at {_raw(root, name)}: missing {', '.join(missing)}. Put them there, from the archive "
            f"{_url(name)}; or, online, let PyG download them: "
            f'load_lrgb(root, "{name}", download=True).'
        )

    if missing:
        _download(root, name)
    return _LongRange(root / name.lower(), name, split, transform, pre_transform)


class _LongRange(CachedDataset):
    """The graphs of one split, from its raw file."""

    def __init__(
        self, root: Path, name: str, split: str, transform: Transform | None, pre_transform: Transform | None
    ) -> None:
        self.name, self.split = name, split
        super().__init__(root, split, None, transform=transform, pre_transform=pre_transform)

    def make(self) -> Iterator[Data]:
        """One graph for each entry of the file, a tuple of tensors."""
        path = Path(self.root) / "raw" / f"{self.split}.{_SUFFIX[self.name]}"
        names = _CONTACT if self.name == "PCQM-Contact" else _TARGETS
        with reading(path, f"Fetch it anew, from the archive {_url(self.name)}."):
            kinds = None
            for entry in load_tensors(path) if path.suffix == ".pt" else _superpixels(path, self.name):
                data = _graph(entry, names)
                kinds = kinds or _kinds(data)
                if _kinds(data) != kinds:
                    raise ValueError(f"its graphs differ in type and width: {kinds} and {_kinds(data)}")
                yield data
            if kinds is None:
                raise ValueError("it holds no graph")


def _graph(entry: Any, names: tuple[str, ...]) -> Data:
    """A graph of the tensors in a tuple, whose parts agree."""
    if not isinstance(entry, tuple) or len(entry) != len(names) or not all(isinstance(part, Tensor) for part in entry):
        raise ValueError(f"a graph must be a tuple of tensors: {', '.join(names)}")
    data = Data(**dict(zip(names, entry, strict=True)))
    shapes = {name: list(part.shape) for name, part in zip(names, entry, strict=True)}
    if data.x.dim() != 2 or data.edge_attr.dim() != 2 or shapes["edge_index"] != [2, len(data.edge_attr)]:
        raise ValueError(f"a graph must have x [N, C], edge_attr [E, D] and edge_index [2, E]; got {shapes}")
    check_indices(data.edge_index, len(data.x), "edge_index")
    if "y" in names and shapes["y"][:1] not in ([1], [len(data.x)]):
        raise ValueError(f"y must have one row for the graph or one for each node; got {shapes}")
    if "edge_label_index" in names:
        if shapes["edge_label_index"] != [2, *shapes["edge_label"]]:
            raise ValueError(f"a graph must have edge_label_index [2, L] and edge_label [L]; got {shapes}")
        check_indices(data.edge_label_index, len(data.x), "edge_label_index")
    return data


def _kinds(data: Data) -> dict[str, tuple[Any, ...]]:
    """What must be the same for all graphs: the types, and the widths of what goes with nodes, edges or graphs."""
    return {name: (part.dtype, () if name.endswith("_index") else part.shape[1:]) for name, part in data.items()}


def _superpixels(path: Path, name: str) -> Iterator[tuple[Any, ...]]:
    """The tuples of a pickle. COCO leaves out some numbers of classes; PyG knows which."""
    from torch_geometric.datasets import LRGBDataset

    classes = LRGBDataset.label_remap_coco(None) if name == "COCO-SP" else None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        graphs = read_pickle(stream, TENSORS | ARRAYS)
    for graph in graphs:
        *tensors, y = graph
        labels = as_tensor(y) if isinstance(y, Made) and not is_array(y) else torch.from_numpy(as_integers(y))
        if classes is not None:
            labels = torch.tensor([classes[label] for label in labels.tolist()], dtype=torch.int64)
        x, edge_attr, edge_index = map(as_tensor, tensors)
        yield x.float(), edge_attr.float(), edge_index, labels


def _download(root: Path, name: str) -> None:
    """Has PyG fetch and unpack the archive."""
    from torch_geometric.datasets import LRGBDataset

    try:
        fetch(LRGBDataset, str(root), name)
    except Exception as error:  # the network, the archive and the file system each raise their own
        raise ConnectionError(
            f"PyG could not download {name} from {_url(name)} into {root}: {type(error).__name__}: {error}. Fetch the "
            f"archive elsewhere and put {', '.join(_missing(root, name))} under {_raw(root, name)}."
        ) from error


def _raw(root: Path, name: str) -> Path:
    return root / name.lower() / "raw"


def _missing(root: Path, name: str) -> list[str]:
    files = [f"{split}.{_SUFFIX[name]}" for split in _SPLITS]
    return [file for file in files if not (_raw(root, name) / file).is_file()]


def _url(name: str) -> str:
    from torch_geometric.datasets import LRGBDataset

    return str(LRGBDataset.urls[name.lower()])
