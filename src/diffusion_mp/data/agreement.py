"""Whether the parts of a graph that was read agree with each other."""

from __future__ import annotations

from torch import Tensor


def check_indices(index: Tensor, limit: int | Tensor, name: str) -> None:
    """Raise ValueError unless the entries of `index` are integers in 0 .. limit − 1; a tensor has one limit for each."""
    if index.is_floating_point() or index.is_complex():
        raise ValueError(f"{name} must be integers; got {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or bool((index >= limit).any())):
        highest = limit - 1 if isinstance(limit, int) else "the number of its graph's nodes - 1"
        raise ValueError(f"{name} must lie in 0..{highest}; got {int(index.min())}..{int(index.max())}")


def check_lengths(expected: int, what: str, **lengths: int) -> None:
    """Raise ValueError unless all `lengths` are as expected of `what`."""
    for name, length in lengths.items():
        if length != expected:
            raise ValueError(f"{name} must have {expected} rows, one for each of the {what}; it has {length}")
