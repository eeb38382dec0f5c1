"""Cora, CiteSeer and PubMed from files already on disk."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data

from diffusion_mp.data.arguments import as_path
from diffusion_mp.data.fetch import fetch
from diffusion_mp.data.planetoid_files import PARTS, read_graph

# Lower-cased here because PyG finds `ind.cora.x` in the folder `Cora`.
_FOLDERS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def load_planetoid(root: str | Path, name: str, *, download: bool = False, normalize_features: bool = True) -> Data:
    """One citation network of Yang, Cohen & Salakhutdinov (2016), with the public split in its masks.

    Reads `root/<Name>/raw/ind.<name>.*` and writes nothing, so `root` may be read-only. With `download=True` and files
    missing, PyG's `Planetoid` downloads them into `root` first. The graph is the one that PyG makes of them, but for
    CiteSeer's 15 node numbers without any paper behind them: PyG calls them class 0, here they are unlabelled (−1) and
    never enter a split.

    The raw files are Python pickles. They are read as data: one that asks for anything but arrays, sparse matrices and
    dictionaries is refused, and none of it runs.

    Shapes: x [N, C] (rows sum to 1 unless `normalize_features=False`), edge_index [2, E] both directions, y [N].
    Errors: ValueError for an unknown name, a damaged file, and files that do not belong together; FileNotFoundError
    saying which files are missing, how to get them and where to put them; ConnectionError when the download fails.
    """
    if not isinstance(name, str) or name.lower() not in _FOLDERS:
        raise ValueError(f"name must be one of {', '.join(_FOLDERS.values())}, got {name!r}.")
    name = _FOLDERS[name.lower()]
    root = as_path(root, "root")
    raw = root / name / "raw"
    missing = _missing(raw, name)
    if missing and download:
        _download(root, name)
        missing = _missing(raw, name)
    if missing:
        raise FileNotFoundError(_how_to_get(raw, name, missing))

    from torch_geometric.transforms import NormalizeFeatures

    data = read_graph(raw / f"ind.{name.lower()}")
    return NormalizeFeatures()(data) if normalize_features else data


def _missing(raw: Path, name: str) -> list[str]:
    files = [f"ind.{name.lower()}.{part}" for part in PARTS]
    return [file for file in files if not (raw / file).is_file()]


def _download(root: Path, name: str) -> None:
    from torch_geometric.datasets import Planetoid

    try:
        fetch(Planetoid, str(root), name)
    except Exception as error:  # fsspec, aiohttp and the file system each raise their own
        raise ConnectionError(
            f"PyG could not download {name} from {Planetoid.url} into {root}: {type(error).__name__}: {error}. "
            f"Fetch the files elsewhere and put them under {root / name / 'raw'}."
        ) from error


def _how_to_get(raw: Path, name: str, missing: list[str]) -> str:
    return (
        f"{name} is not at {raw}: missing {', '.join(missing)}. "
        f"Put the eight raw files of https://github.com/kimiyoung/planetoid (folder data) there, so that root is "
        f"{raw.parent.parent} and the layout root/{name}/raw/ind.{name.lower()}.*; or, online, let PyG download them: "
        f'load_planetoid(root, "{name}", download=True).'
    )
