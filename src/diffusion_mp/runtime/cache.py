"""Caches of properties, of values kept with tensors, and of the last values computed from the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from diffusion_mp.runtime.torch_private import values_only as values_only

T = TypeVar("T")


def may_keep() -> bool:
    """Return whether tensors computed now may be kept: tensors made inside a transform of torch do not outlive it."""
    return torch.compiler.is_compiling() or values_only(captured=True)


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
        # Of the class itself, as `getattr(type(coupling), name)` asks.
        if owner is None:
            return self
        value = self.compute(owner)
        if may_keep():
            # An attribute of the instance hides this descriptor, so the next access makes no call.
            setattr(owner, self.name, value)
        return value


def persistent(make: Callable[[], T]) -> T:
    """Return ``make()``, computed outside of inference mode, whose tensors later gradients could not use."""
    # While torch compiles there are no values yet that could be kept.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


class TensorState:
    """A tensor as it was, to tell whether it has been written to since.

    Its version tells that. With ``compare`` its numbers do, since torch counts no writes through NumPy or ``.data``.
    """

    def __init__(
        self,
        tensor: Tensor,
        *,
        compare: bool = False,
        freed: Callable[[Any], object] | None = None,
    ) -> None:
        # Weak, so that a cache does not keep alive what it was computed from.
        self.reference = weakref.ref(tensor, freed)
        self.version = 0
        self.copy: Tensor | None = None
        # torch counts no writes to tensors made in inference mode either.
        if compare or tensor.is_inference():
            self.copy = persistent(_as_tensor(tensor).clone)
        else:
            self.version = tensor._version

    def holds(self, tensor: Tensor | None) -> bool:
        """Return whether ``tensor`` is the same tensor, unchanged."""
        if tensor is None or tensor is not self.reference():
            return False
        if self.copy is None:
            return tensor._version == self.version
        # While torch captures or traces there are no numbers to compare.
        if not values_only():
            return True
        now = _as_tensor(tensor)
        alike = self.copy.dtype == now.dtype and self.copy.device == now.device
        return alike and torch.equal(self.copy, now)


def _as_tensor(tensor: Tensor) -> Tensor:
    # PyG's EdgeIndex takes forty times as long to compare as the tensor in it.
    return tensor.as_tensor() if isinstance(tensor, EdgeIndex) else tensor


_KEPT: dict[Hashable, tuple[list[TensorState], dict[Hashable, Any]]] = {}


def _kept_with(tensors: tuple[Tensor, ...], *, compare: bool) -> dict[Hashable, Any]:
    """Return what was computed from these tensors; nothing once one is written to, or the first is freed."""
    if not may_keep():
        return {}
    address = (id(tensors[0]), compare)
    # By address, since tensors compare by their numbers.
    states, values = _KEPT.get(address, ([], {}))
    if len(states) == len(tensors) and all(map(TensorState.holds, states, tensors)):
        return values
    first, *others = tensors
    states = [
        TensorState(first, compare=compare, freed=lambda _: _KEPT.pop(address, None)),
        *(TensorState(tensor, compare=compare) for tensor in others),
    ]
    _KEPT[address] = (states, {})
    return _KEPT[address][1]


def cached_by(tensors: tuple[Tensor, ...], key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, cached by ``key`` until one of the tensors is written to or the first is freed."""
    values = _kept_with(tensors, compare=False)
    if key not in values:
        values[key] = persistent(make)
    return cast("T", values[key])


def batch_cache(ptr: Tensor) -> dict[Hashable, Any]:
    """Return the cache of values computed from row boundaries, valid while the tensor exists and is unchanged."""
    # They are few numbers, on the CPU, so a comparison costs next to nothing.
    return _kept_with((ptr,), compare=True)


class _Entry(NamedTuple, Generic[T]):
    """A cached value, with its key, the states of its tensors, and the number of entries of these tensors."""

    key: Hashable
    states: list[TensorState]
    numbers: int
    value: T


class TensorCache(Generic[T]):
    """Cache of the last values computed from tensors, keyed by the identity of the tensors.

    An entry is valid while its tensors are alive and hold the same numbers. The numbers are compared, since a write
    through NumPy or ``.data`` does not change the version of a tensor. Values are computed from copies of the tensors,
    which no write reaches.

    The cache is not used in compiled or transformed code, nor for tensors that require gradients.

    Args:
        room: the most numbers that the copies may hold together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        # Replaced, never changed: an assignment is atomic, so other threads need no lock.
        self._entries: tuple[_Entry[T], ...] = ()

    def get(
        self,
        key: Hashable,
        tensors: tuple[Tensor | None, ...],
        make: Callable[..., T],
    ) -> T:
        """Return ``make(*tensors)``, or its cached value for an equal key and the same tensors."""
        # First, since the sizes of captured tensors may be symbols.
        if not values_only():
            return make(*tensors)
        present = []
        numbers = 0
        for tensor in tensors:
            if tensor is None:
                continue
            if not _replaceable(tensor):
                return make(*tensors)
            present.append(tensor)
            numbers += tensor.numel()
        # Tensors without numbers leave nothing to compare, and copies of large ones would fill the memory.
        if not 0 < numbers <= self.room:
            return make(*tensors)
        key = (key, *map(id, tensors))
        for entry in self._entries:
            if entry.key == key and all(map(TensorState.holds, entry.states, present)):
                return entry.value
        states = [
            TensorState(tensor, compare=True, freed=self._forget) for tensor in present
        ]
        copies = iter(states)
        # Of the copies, so that a later write to the tensor does not reach the value.
        value = make(*(each if each is None else next(copies).copy for each in tensors))
        # The most recent first, as many as there is room for.
        kept = [_Entry(key, states, numbers, value)]
        for entry in self._entries:
            numbers += entry.numbers
            if numbers <= self.room and entry.key != key:
                kept.append(entry)
        self._entries = tuple(kept)
        return value

    def _forget(self, freed: object) -> None:
        self._entries = tuple(
            entry
            for entry in self._entries
            if all(state.reference() is not None for state in entry.states)
        )


def _replaceable(tensor: Tensor) -> bool:
    """Return whether a copy can replace a tensor.

    It cannot replace a PartEdgeIndex, which holds more than its numbers, or a learned tensor, whose copy gets no
    gradient.
    """
    if type(tensor) not in (Tensor, EdgeIndex):
        return False
    return not (tensor.is_meta or tensor.requires_grad)
