"""Caches of properties, of values kept with tensors, and of the last values computed from the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from diffusion_mp.errors import plain
from diffusion_mp.runtime.torch_private import observed

T = TypeVar("T")


def values_only(*, captured: bool = False) -> bool:
    """Whether torch computes values only, and does not compile, transform or record, nor capture a CUDA graph.

    With ``captured`` it may capture one: calls run as they come, but there are no values to look at.
    """
    return not (
        torch.compiler.is_compiling()
        or observed()
        or (
            not captured
            and torch.cuda.is_initialized()
            and torch.cuda.is_current_stream_capturing()
        )
    )


def may_keep() -> bool:
    """Return whether tensors computed now may be kept: those made inside a transform of torch do not outlive it."""
    return torch.compiler.is_compiling() or not observed()


class cached_property(Generic[T]):
    """``functools.cached_property`` without its lock, which torch.compile cannot trace."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type) -> cached_property[T]: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> T: ...
    def __get__(self, owner: object | None, kind: type | None = None) -> cached_property[T] | T:
        if owner is None:
            return self
        found = self.find(owner)
        if may_keep():
            setattr(owner, self.name, found)
        return found


def persistent(make: Callable[[], T]) -> T:
    """Return ``make()``, computed outside inference mode, whose tensors later gradients could not use."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


class TensorState:
    """A tensor, or ``None``, as it was: whether it has been written to since is told by its version.

    torch counts no writes through NumPy or ``.data``. It counts none at all of tensors made in inference mode, whose
    numbers are compared.
    """

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        #: Whether torch counts what is written to it.
        self.counted = tensor is not None and not tensor.is_inference()
        self.version = 0
        self.copy: Tensor | None = None
        if tensor is None:
            return
        if self.counted:
            self.version = tensor._version
        else:
            self.copy = tensor.clone()

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is this one, unchanged."""
        if tensor is not self.tensor:
            return False
        if tensor is None:
            return True
        if self.copy is None:
            return tensor._version == self.version
        # What is captured or traced can not be looked at.
        return not values_only() or torch.equal(self.copy, tensor)


_CACHED: dict[int, tuple[list[weakref.ref[Tensor]], list[int], dict[Hashable, Any]]] = {}


def cached_by(tensors: tuple[Tensor, ...], key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, cached by ``key`` until one of the tensors is written to or the first is freed."""
    if not may_keep() or any(
        tensor.is_inference() for tensor in tensors
    ):  # these do not count writes
        return make()
    place = id(tensors[0])
    versions = [tensor._version for tensor in tensors]
    known = _CACHED.get(place)
    if (
        known is None
        or known[1] != versions
        or any(a() is not b for a, b in zip(known[0], tensors, strict=True))
    ):
        first = weakref.ref(tensors[0], lambda _: _CACHED.pop(place, None))
        known = _CACHED[place] = [first, *map(weakref.ref, tensors[1:])], versions, {}
    found = known[2]
    if key not in found:
        found[key] = persistent(make)
    return cast("T", found[key])


_OF_BATCHES: dict[int, tuple[weakref.ref[Tensor], Tensor, dict[Hashable, Any]]] = {}


def batch_cache(ptr: Tensor) -> dict[Hashable, Any]:
    """Return the cache of values computed from row boundaries, valid while this tensor exists and holds the same."""
    if not may_keep():
        return {}
    key = id(ptr)
    known = _OF_BATCHES.get(id(ptr))
    if known is None or known[0]() is not ptr or not torch.equal(known[1], ptr):
        known = _OF_BATCHES[key] = (
            weakref.ref(ptr, lambda _: _OF_BATCHES.pop(key, None)),
            ptr.clone(),
            {},
        )
    return known[2]


class _Made(NamedTuple, Generic[T]):
    """A cached value, with its key, weak references to its tensors and copies of what they held."""

    key: Hashable
    tensors: tuple[weakref.ref[Any], ...]
    copies: tuple[Tensor | None, ...]
    value: T

    @property
    def alive(self) -> bool:
        """Whether none of the tensors has been freed, whose references lose their callbacks."""
        return all(tensor.__callback__ is not None for tensor in self.tensors)


class TensorCache(Generic[T]):
    """Cache of the last values computed from tensors, keyed by the identity of the tensors.

    An entry is valid while its tensors are alive and hold the same numbers. These are compared, since a write through
    NumPy or ``.data`` does not change the version of a tensor. Values are computed from copies, which no write reaches.
    They hold at most ``room`` numbers. The cache is not used in compiled or transformed code, nor for tensors that
    require gradients.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._made: tuple[
            _Made[T], ...
        ] = ()  # replaced as a whole, which is atomic for other threads

    def get(self, key: Hashable, tensors: tuple[object, ...], make: Callable[..., T]) -> T:
        """Return ``make(*tensors)``, or its cached value for an equal key and the same tensors."""
        if not self._can_keep(tensors):
            return make(*tensors)
        key = (key, *map(id, tensors))
        now = [cast("Tensor | None", plain(tensor)) for tensor in tensors]
        for made in self._made:
            if made.key == key and all(map(_same, made.copies, now)):
                return made.value
        copies = persistent(
            lambda: tuple(None if tensor is None else tensor.clone() for tensor in now)
        )
        given = tuple(weakref.ref(tensor, self._forget) for tensor in tensors if tensor is not None)
        new = _Made(key, given, copies, make(*copies))
        found = []
        numbers = 0
        for made in (new, *self._made):
            numbers += sum(copy.numel() for copy in made.copies if copy is not None)
            if numbers <= self.room and made.alive and (made is new or made.key != key):
                found.append(made)
        self._made = tuple(found)
        return new.value

    def _can_keep(self, tensors: tuple[Any, ...]) -> bool:
        if not values_only():
            return False
        numbers = 0
        for tensor in tensors:
            if tensor is not None:
                if (
                    type(tensor) not in (Tensor, EdgeIndex)
                    or tensor.is_meta
                    or tensor.requires_grad
                ):
                    return False
                numbers += tensor.numel()
        return 0 < numbers <= self.room

    def _forget(self, freed: object) -> None:
        self._made = tuple(made for made in self._made if made.alive)


def _same(before: Any, now: Any) -> bool:  # two tensors, or None and None
    return before is now or (
        before.dtype == now.dtype and before.device == now.device and torch.equal(before, now)
    )
