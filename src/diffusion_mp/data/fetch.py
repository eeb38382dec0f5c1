"""Downloads by PyG's data sets, without anything that PyG would do with the files."""

from __future__ import annotations

from typing import Any

from torch_geometric.data import InMemoryDataset


def fetch(dataset: type[InMemoryDataset], *arguments: str) -> None:
    """Has `dataset(*arguments)` download its raw files, and neither process nor load them: PyG would unpickle them."""
    only_raw: dict[str, Any] = {"has_process": False, "load": lambda self, path: None}
    type(f"Raw{dataset.__name__}", (dataset,), only_raw)(*arguments)
