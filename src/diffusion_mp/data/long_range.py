"""The Long Range Graph Benchmark (Dwivedi et al. 2022) through PyG's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch_geometric.data import InMemoryDataset

from diffusion_mp.data.cached import Transform
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

    Reads `root/<name in lower case>/raw/{train,val,test}.{pt,pickle}` and writes `processed` beside `raw`, so `root`
    must be writable. With `download=True` and a file missing, PyG fetches the archive first and puts it in the place of
    `raw`.

    The raw files of PascalVOC-SP and COCO-SP are Python pickles, and unpickling can run any code: load only files that
    you trust. The others hold tensors, which torch reads without running any.

    Shapes of a graph: x [N, C], edge_index [2, E] both directions, edge_attr [E, D]; y [1, 10] and [1, 11] for
    Peptides-func and -struct, [N] for the superpixels; edge_label_index and edge_label for PCQM-Contact.
    Errors: ValueError for an unknown name or split; FileNotFoundError saying which files are missing, how to get them
    and where to put them; ConnectionError when the download fails.
    """
    check_choice(name, "name", _SUFFIX)
    check_choice(split, "split", _SPLITS)
    root = Path(root).expanduser()
    missing = _missing(root, name)
    if missing and not download:
        raise FileNotFoundError(
            f"{name} is not at {_raw(root, name)}: missing {', '.join(missing)}. Put them there, from the archive "
            f"{_url(name)}; or, online, let PyG download them: "
            f'load_lrgb(root, "{name}", download=True).'
        )

    from torch_geometric.datasets import LRGBDataset

    try:
        return LRGBDataset(str(root), name, split, transform, pre_transform)
    except Exception as error:
        missing = _missing(root, name)
        if not missing:  # the files came; what failed is reading them
            raise
        raise ConnectionError(
            f"PyG could not download {name} from {_url(name)} into {root}: {type(error).__name__}: {error}. "
            f"Fetch the archive elsewhere and put {', '.join(missing)} under {_raw(root, name)}."
        ) from error


def _raw(root: Path, name: str) -> Path:
    return root / name.lower() / "raw"


def _missing(root: Path, name: str) -> list[str]:
    files = [f"{split}.{_SUFFIX[name]}" for split in _SPLITS]
    return [file for file in files if not (_raw(root, name) / file).is_file()]


def _url(name: str) -> str:
    from torch_geometric.datasets import LRGBDataset

    return str(LRGBDataset.urls[name.lower()])
