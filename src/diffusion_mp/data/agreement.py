"""Whether the parts of a graph that was read agree with each other."""

from __future__ import annotations

from torch import Tensor


def check_indices(index: Tensor, limit: int | Tensor, name: str) -> None:
    """Raise ValueError unless `index` holds integers in 0 .. limit − 1; a tensor has a limit for each of them."""
    if index.is_floating_point() or index.is_complex():
        raise ValueError(f"{name} must be integers; got {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or bool((index >= limit).any())):
        highest = limit - 1 if isinstance(limit, int) else "the number of its graph's nodes - 1"
        raise ValueError(
            f"{name} must lie in 0..{highest}, got up to {int(index.max())} and down to {int(index.min())}"
        )
