"""A pickle as data: read instruction by instruction, with nothing in this reader that could call anything.

A pickle is a program for a machine that imports names and calls them. Here the same instructions only note what is to
be made of what: `Made("numpy.dtype", ("i4", False, True), …)`. What becomes of a note is up to its reader
(`pickled_arrays.py`, `pickled_tensors.py`), which knows a handful of names; a name that it does not know is refused.
"""

from __future__ import annotations

import io
import mmap
import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_PUSHED = {  # instructions that bring their value along
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """Something that the pickle would import, such as `numpy.dtype`."""

    path: str


@dataclass(eq=False, repr=False)  # both would go through values that lie in each other, for ever if made so
class Made:
    """What the pickle would make: the name it would call, the arguments, the state, and the items of a dictionary."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


PERSISTENT = "persistent id"  # the name of what torch keeps beside the pickle


def read_pickle(stream: io.BytesIO | mmap.mmap, names: Collection[str]) -> Any:
    """The object that the next pickle in `stream` describes: plain values and `Made`, up to and with its STOP.

    `names` are those it may ask for; strings of Python 2 are read as Latin-1, one character per byte. (A `stream` of
    these two kinds never makes room for more than there is.)
    Errors: ValueError for another name or an instruction that no data needs; ValueError, IndexError or KeyError for a
    pickle that is damaged.
    """
    machine = _Machine(frozenset(names))
    for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]  # it accepts whatever has read
        if opcode.name == "STOP":
            return machine.pop()
        machine.run(opcode.name, argument)
    raise ValueError("the pickle has no end")


class _Machine:
    """The stack of a pickle's machine; a mark begins a new one on top of it."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, instruction: str, argument: Any) -> None:
        if instruction in _PUSHED:
            self.stack.append(argument)
        elif instruction in _CONSTANTS:
            self.stack.append(_CONSTANTS[instruction])
        elif instruction in _TUPLES:
            count = _TUPLES[instruction]
            self.stack.append(tuple(reversed([self.pop() for _ in range(count)])))
        elif instruction in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif instruction in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        else:
            rest = getattr(self, f"_{instruction.lower()}", None)
            if rest is None:
                raise ValueError(f"its instruction {instruction} belongs to programs, not to data")
            rest(argument)

    def pop(self) -> Any:
        return self.stack.pop()

    def _proto(self, version: int) -> None:
        pass

    def _frame(self, length: int) -> None:
        pass

    def _memoize(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _mark(self, _: None = None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        top, self.stack = self.stack, self.below.pop()
        return top

    def _pop(self, _: None) -> None:
        self.pop()

    def _pop_mark(self, _: None) -> None:
        self._since_mark()

    def _dup(self, _: None) -> None:
        self.stack.append(self.stack[-1])

    def _empty_list(self, _: None) -> None:
        self.stack.append([])

    def _empty_dict(self, _: None) -> None:
        self.stack.append({})

    def _tuple(self, _: None) -> None:
        values = self._since_mark()
        self.stack.append(tuple(values))

    def _list(self, _: None) -> None:
        values = self._since_mark()
        self.stack.append(values)

    def _dict(self, _: None) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._store(items)

    def _append(self, _: None) -> None:
        self._extend([self.pop()])

    def _appends(self, _: None) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(values)

    def _setitem(self, _: None) -> None:
        value, key = self.pop(), self.pop()
        self._store([key, value])

    def _setitems(self, _: None) -> None:
        self._store(self._since_mark())

    def _store(self, items: list[Any]) -> None:
        target = self.stack[-1].items if isinstance(self.stack[-1], Made) else self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"it sets {len(items)} keys and values in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):  # the hash of tuples within tuples can take for ever
                raise ValueError(f"it has a {type(key).__name__} for a key")
            target[key] = value

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _: None) -> None:
        name, module = self.pop(), self.pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        path = f"{module}.{name}"
        if path not in self.names:
            raise ValueError(f"it asks for {path:.120}, which is no array")
        self.stack.append(Name(path))

    def _reduce(self, _: None) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise ValueError(f"it calls a {type(called).__name__}")
        self.stack.append(Made(called.path, arguments))

    def _newobj(self, _: None) -> None:
        self._reduce(None)

    def _build(self, _: None) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], Made):
            raise ValueError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _binpersid(self, _: None) -> None:
        self.stack.append(Made(PERSISTENT, (self.pop(),)))
