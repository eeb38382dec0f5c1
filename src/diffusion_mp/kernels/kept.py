"""``kept_with``: what is found out about tensors, for as long as they exist and hold the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from diffusion_mp.pattern import kept

T = TypeVar("T")

_KEPT: dict[int, tuple[list[weakref.ref[Tensor]], list[int], dict[Hashable, Any]]] = {}


def kept_with(tensors: tuple[Tensor, ...], key: Hashable, find: Callable[[], T]) -> T:
    """What ``find`` says of these tensors, asked once for a ``key``, until one is written to or the first is gone."""
    if any(tensor.is_inference() for tensor in tensors):  # whether they are written to nobody can tell
        return find()
    place, versions = id(tensors[0]), [tensor._version for tensor in tensors]
    known = _KEPT.get(place)
    if known is None or known[1] != versions or any(a() is not b for a, b in zip(known[0], tensors, strict=True)):
        first = weakref.ref(tensors[0], lambda _: _KEPT.pop(place, None))
        known = _KEPT[place] = [first, *map(weakref.ref, tensors[1:])], versions, {}
    found = known[2]
    if key not in found:
        found[key] = kept(find)
    value: T = found[key]
    return value
