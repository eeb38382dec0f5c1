"""Whether batches are the same: in a module of its own, since a process that compares them imports it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch_geometric.data import Data


def same(a: Data, b: Data) -> bool:
    return set(a.keys()) == set(b.keys()) and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key]
        for key in a.keys()  # noqa: SIM118
    )


def compare(parts: Iterable[Data], expected: Iterable[Data]) -> None:
    assert all(same(a, b) for a, b in zip(parts, expected, strict=True))
