"""``Recent``: what was made of tensors a moment ago, for those who come with the same tensors again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from diffusion_mp.errors import plain
from diffusion_mp.graph_ops import values_only
from diffusion_mp.pattern import kept

T = TypeVar("T")


class _Made(NamedTuple, Generic[T]):
    """A value; for which key and which tensors it was made; what they held then."""

    key: Hashable
    tensors: tuple[weakref.ref[Any], ...]
    copies: tuple[Tensor | None, ...]
    value: T

    @property
    def alive(self) -> bool:
        """Whether nobody has freed any of the tensors. (A reference to what was freed has lost its callback.)"""
        return all(tensor.__callback__ is not None for tensor in self.tensors)


class Recent(Generic[T]):
    """The last values that were made of tensors, each until one of its tensors is freed or there is no room for it.

    A value is found by the identity of its tensors, and taken if they hold what they held then: their numbers are
    compared, since a write through NumPy, ``.data`` or another process leaves the version of a tensor as it was. It is
    made of copies, so that it keeps none of the tensors alive, and no write into them reaches it.

    Nothing is kept, or taken, while torch compiles or traces, nor of tensors that are being learned.

    Args:
        room: how many numbers the copies of all values may hold together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._made: tuple[_Made[T], ...] = ()  # replaced as a whole, so that every thread sees one that was whole

    def of(self, key: Hashable, tensors: tuple[object, ...], make: Callable[..., T]) -> T:
        """``make(*tensors)``, or what it gave a moment ago for an equal key and the same tensors."""
        if not self._can_keep(tensors):
            return make(*tensors)
        key, now = (key, *map(id, tensors)), [cast("Tensor | None", plain(tensor)) for tensor in tensors]
        for made in self._made:
            if made.key == key and all(map(_same, made.copies, now)):
                return made.value
        copies = kept(lambda: tuple(None if tensor is None else tensor.clone() for tensor in now))
        given = tuple(weakref.ref(tensor, self._forget) for tensor in tensors if tensor is not None)
        new = _Made(key, given, copies, make(*copies))
        found, numbers = [], 0
        for made in (new, *self._made):
            numbers += sum(copy.numel() for copy in made.copies if copy is not None)
            if numbers <= self.room and made.alive and (made is new or made.key != key):
                found.append(made)
        self._made = tuple(found)
        return new.value

    def _can_keep(self, tensors: tuple[object, ...]) -> bool:
        """Whether these are tensors, one at least, with numbers that nobody learns, and torch only computes."""
        if not values_only():
            return False
        numbers = 0
        for tensor in tensors:
            if tensor is not None:
                if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, EdgeIndex):
                    return False
                if tensor.is_meta or tensor.requires_grad:
                    return False
                numbers += tensor.numel()
        return 0 < numbers <= self.room

    def _forget(self, freed: object) -> None:
        self._made = tuple(made for made in self._made if made.alive)


def _same(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None:
        return before is now
    return before.dtype == now.dtype and before.device == now.device and torch.equal(before, now)
