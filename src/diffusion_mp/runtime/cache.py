"""Caches of properties, of values kept with tensors, and of the last values computed from the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from diffusion_mp.runtime.torch_private import observed
from diffusion_mp.runtime.torch_private import values_only as values_only

T = TypeVar("T")


def may_keep() -> bool:
    """Return whether tensors computed now may be kept: those made inside a transform of torch do not outlive it."""
    return torch.compiler.is_compiling() or not observed()


class cached_property(Generic[T]):
    """``functools.cached_property`` without its lock, which torch.compile cannot trace."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type) -> cached_property[T]: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> T: ...
    def __get__(
        self, owner: object | None, kind: type | None = None
    ) -> cached_property[T] | T:
        if owner is None:
            return self
        value = self.compute(owner)
        if may_keep():
            # An attribute of the instance hides this descriptor, so the next access makes no call.
            setattr(owner, self.name, value)
        return value


def persistent(make: Callable[[], T]) -> T:
    """Return ``make()``, computed outside inference mode, whose tensors later gradients could not use."""
    # While torch compiles there are no values yet that could be kept.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


class TensorState:
    """A tensor as it was: its version, or its numbers with ``compare``, tell whether it has been written to since.

    torch counts no writes through NumPy or ``.data``, which a comparison of numbers sees.
    """

    def __init__(self, tensor: Tensor, *, compare: bool = False) -> None:
        # Weak, so that a cache does not keep alive what it was computed from.
        self.reference = weakref.ref(tensor)
        self.version = 0
        self.copy: Tensor | None = None
        # torch counts no writes to tensors made in inference mode either.
        if compare or tensor.is_inference():
            self.copy = tensor.clone()
        else:
            self.version = tensor._version

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether ``tensor`` is this one, unchanged."""
        if tensor is None or tensor is not self.reference():
            return False
        if self.copy is None:
            return tensor._version == self.version
        # While torch captures or traces there are no numbers to compare.
        return not values_only() or torch.equal(self.copy, tensor)


_KEPT: dict[Hashable, tuple[list[TensorState], dict[Hashable, Any]]] = {}


def _kept_with(tensors: tuple[Tensor, ...], *, compare: bool) -> dict[Hashable, Any]:
    """What was computed from these tensors; nothing once one is written to, or the first is freed."""
    if not may_keep():
        return {}
    address = (id(tensors[0]), compare)
    entry = _KEPT.get(address)
    if entry is not None:
        states, values = entry
        if len(states) == len(tensors) and all(map(TensorState.holds, states, tensors)):
            return values
    states = [TensorState(tensor, compare=compare) for tensor in tensors]
    states[0].reference = weakref.ref(tensors[0], lambda _: _KEPT.pop(address, None))
    _KEPT[address] = (states, {})
    return _KEPT[address][1]


def cached_by(tensors: tuple[Tensor, ...], key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, cached by ``key`` until one of the tensors is written to or the first is freed."""
    values = _kept_with(tensors, compare=False)
    if key not in values:
        values[key] = persistent(make)
    return cast("T", values[key])


def batch_cache(ptr: Tensor) -> dict[Hashable, Any]:
    """Return the cache of values computed from row boundaries, valid while this tensor exists and holds the same."""
    # They are few numbers, on the CPU, so a comparison costs next to nothing.
    return _kept_with((ptr,), compare=True)


class _Entry(NamedTuple, Generic[T]):
    """A cached value, with its key, weak references to its tensors and copies of what they held."""

    key: Hashable
    tensors: tuple[weakref.ref[Any], ...]
    copies: tuple[Tensor | None, ...]
    value: T

    @property
    def alive(self) -> bool:
        """Whether none of the tensors has been freed, whose references lose their callbacks."""
        return all(tensor.__callback__ is not None for tensor in self.tensors)

    def holds(self, tensors: tuple[Any, ...]) -> bool:
        """Whether the tensors, those of the key, hold the same numbers still."""
        for copy, tensor in zip(self.copies, tensors, strict=True):
            if copy is None:
                continue
            # PyG's EdgeIndex takes forty times as long to compare as the tensor in it.
            now = _as_tensor(tensor)
            if (
                copy.dtype != now.dtype
                or copy.device != now.device
                or not torch.equal(copy, now)
            ):
                return False
        return True


class TensorCache(Generic[T]):
    """Cache of the last values computed from tensors, keyed by the identity of the tensors.

    An entry is valid while its tensors are alive and hold the same numbers. These are compared, since a write through
    NumPy or ``.data`` does not change the version of a tensor. Values are computed from copies, which no write reaches.
    They hold at most ``room`` numbers. The cache is not used in compiled or transformed code, nor for tensors that
    require gradients.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        # Replaced, never changed: an assignment is atomic, so other threads need no lock.
        self._entries: tuple[_Entry[T], ...] = ()

    def get(
        self, key: Hashable, tensors: tuple[object, ...], make: Callable[..., T]
    ) -> T:
        """Return ``make(*tensors)``, or its cached value for an equal key and the same tensors."""
        if not self._can_keep(tensors):
            return make(*tensors)
        key = (key, *map(id, tensors))
        for entry in self._entries:
            if entry.key == key and entry.holds(tensors):
                return entry.value
        copies = persistent(lambda: tuple(map(_copy, tensors)))
        references = tuple(
            weakref.ref(each, self._forget) for each in tensors if each is not None
        )
        new = _Entry(key, references, copies, make(*copies))
        # The most recent first, as many as there is room for.
        kept = []
        numbers = 0
        for entry in (new, *self._entries):
            numbers += sum(copy.numel() for copy in entry.copies if copy is not None)
            if (
                numbers <= self.room
                and entry.alive
                and (entry is new or entry.key != key)
            ):
                kept.append(entry)
        self._entries = tuple(kept)
        return new.value

    def _can_keep(self, tensors: tuple[Any, ...]) -> bool:
        if not values_only():
            return False
        numbers = 0
        for tensor in tensors:
            if tensor is not None:
                # Another subclass may hold more than its numbers.
                if type(tensor) not in (Tensor, EdgeIndex):
                    return False
                # A graph of a copy would give the weights no gradient.
                if tensor.is_meta or tensor.requires_grad:
                    return False
                numbers += tensor.numel()
        return 0 < numbers <= self.room

    def _forget(self, freed: object) -> None:
        self._entries = tuple(entry for entry in self._entries if entry.alive)


def _as_tensor(tensor: Any) -> Any:
    return tensor.as_tensor() if type(tensor) is EdgeIndex else tensor


def _copy(tensor: Any) -> Any:
    return None if tensor is None else _as_tensor(tensor).clone()
