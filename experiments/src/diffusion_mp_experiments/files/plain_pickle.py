"""A pickle as data: what it would import and call is noted, and neither imported nor called.

A pickle is a program for a machine that imports names and calls them. Here Python's own machine (the one that is
written in Python) runs it with two changes: it knows only the instructions that data needs, and whatever it is asked
to import is a `Name`, which answers a call with a note of it, `Made("numpy.dtype", ("i4", False, True), ...)`. What
becomes of a note is up to `pickled_arrays.py`, which knows a handful of names; all others are refused at once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

_DATA = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)  # instructions that are left to Python's machine


class _Items(dict[Any, Any]):
    """A dictionary of strings and numbers: the hash of tuples that lie in each other many times can take for ever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, (str, int)):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        super().__setitem__(key, value)


@dataclass(eq=False, repr=False)  # both would go through values that lie in each other, for ever if made so
class Made:
    """What the pickle would make: the name it would call, the arguments, the state, and the items of a dictionary."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: _Items = field(default_factory=_Items)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


@dataclass(frozen=True, slots=True)
class Name:
    """Something that the pickle would import, such as `numpy.dtype`; a call of it is a note."""

    path: str

    def __call__(self, *arguments: Any) -> Made:
        return Made(self.path, arguments)


class _Machine(pickle._Unpickler):
    """Python's machine for pickles, in which nothing can be imported."""

    dispatch: ClassVar[dict[int, Callable[..., None]]]

    def __init__(self, stream: io.BytesIO, names: Collection[str]) -> None:
        super().__init__(stream, encoding="latin-1")  # strings of Python 2, one character per byte
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self.names:
            raise ValueError(f"it asks for {path:.120}, which is no array")
        return Name(path)

    def _push_items(self) -> None:
        self.append(_Items())  # type: ignore[attr-defined]

    def _push_dictionary(self) -> None:
        values = self.pop_mark()  # type: ignore[attr-defined]
        self._push_items()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.stack[-1][key] = value  # type: ignore[attr-defined]

    def _push_bytes(self) -> None:
        """Python's machine makes room for as many bytes as the pickle claims to have."""
        length = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        self.append(self.read(length))  # type: ignore[attr-defined]

    dispatch = {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _DATA} | {
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],  # a class is called like any other name
        pickle.EMPTY_DICT[0]: _push_items,
        pickle.DICT[0]: _push_dictionary,
        pickle.BYTEARRAY8[0]: _push_bytes,
    }


def read_pickle(content: bytes, names: Collection[str]) -> Any:
    """The object that a pickle describes: plain values and `Made`, up to and with its STOP.

    Args:
        content: the pickle; what follows its end is left alone.
        names: what it may ask for.

    Raises:
        ValueError: another name; ValueError, IndexError or KeyError: a pickle that is damaged, or needs instructions
            that no data needs.
    """
    try:
        return _Machine(io.BytesIO(content), names).load()
    except (AttributeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"it is damaged: {error}") from error
