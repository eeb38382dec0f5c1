"""``once``: a property that is found when it is first asked for, and from then on is an ordinary attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """Like ``functools.cached_property``, but without the lock, which torch.compile cannot enter.

    An attribute of the same name that was set before is taken instead.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find, self.__doc__ = find, find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...
    @overload
    def __get__(self, owner: object, kind: type | None = None) -> T: ...
    def __get__(self, owner: object | None, kind: type | None = None) -> once[T] | T:
        if owner is None:
            return self
        found = self.find(owner)
        setattr(owner, self.name, found)
        return found
