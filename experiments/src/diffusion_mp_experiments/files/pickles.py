"""Pickled arrays, read by Python's own machine for pickles with stand-ins for all that they may import.

An allow-list in `pickle.Unpickler.find_class` is not enough: five bytes make the machine in C reserve 32 GB for its
memo, a key of nested tuples overflows its stack, and a damaged dtype makes NumPy crash. The machine written in Python
has none of these faults. Here it interprets only the instructions that data need, and the stand-ins check every length.
"""

import io
import math
import pickle
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64
from scipy.sparse import csr_matrix

_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_INSTRUCTIONS = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE
GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE
"""
_CODES = [getattr(pickle, name)[0] for name in _INSTRUCTIONS.split()]


def read_pickle(content: bytes) -> Any:
    """Return the array, CSR matrix, mapping or plain value that a pickle of any protocol describes.

    Time and memory are proportional to its length; nothing is imported or called. Call it within `reading`.
    """
    try:
        # Strings of Python 2: a character per byte.
        value = _Machine(io.BytesIO(content), encoding="latin-1").load()
    except (AttributeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return value.value if isinstance(value, _Object) else value


def as_integers(value: Any) -> Int64[np.ndarray, " n"]:
    """Return integers [n] of a list or an array that `read_pickle` found in a container."""
    if isinstance(value, (list, tuple)):
        if not all(type(number) is int for number in value):
            raise ValueError(f"it has {reprlib.repr(value)} where integers belong")
        return np.array(value, np.int64)
    array = _value(value, np.ndarray)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(
            f"it has an array {array.dtype} {list(array.shape)} where integers [n] belong"
        )
    return array.astype(np.int64)


class _Object:
    def __init__(self, make: Callable[[Any], Any], value: Any = None) -> None:
        self._make = make
        self.value = value

    def set_state(self, state: Any) -> None:
        self.value = self._make(state)


def _value(built: Any, kind: type) -> Any:
    if not isinstance(built, _Object) or not isinstance(built.value, kind):
        raise ValueError(
            f"it has {reprlib.repr(built)} where a {kind.__name__} belongs"
        )
    return built.value


def _dtype(code: Any, state: Any) -> np.dtype[Any]:
    """Return the dtype; of the state only the byte order is read: flags can make NumPy take numbers for pointers."""
    if not isinstance(code, str) or code not in _TYPES:
        raise ValueError(
            f"it has an array of type {reprlib.repr(code)}, which are no numbers"
        )
    if state[1] not in ("<", ">", "|", "="):
        raise ValueError(f"{reprlib.repr(state[1])} is no byte order")
    return np.dtype(code).newbyteorder(state[1])


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    dtype = _value(dtype, np.dtype)
    data = data.encode("latin-1") if isinstance(data, str) else data
    # NumPy takes no more than 32 or 64 dimensions, and long products take time.
    lengths = shape if isinstance(shape, tuple) and len(shape) <= 8 else (None,)
    if not all(type(length) is int and 0 <= length < 2**40 for length in lengths):
        raise ValueError(f"{reprlib.repr(shape)} is no shape")
    if (
        not isinstance(data, (bytes, bytearray))
        or len(data) != math.prod(lengths) * dtype.itemsize
    ):
        raise ValueError(
            f"{reprlib.repr(data)} does not fill an array {dtype} of shape {shape}"
        )
    array = np.frombuffer(data, dtype).reshape(
        shape, order="F" if order == "F" else "C"
    )
    # A copy: the bytes of the pickle are read-only, and torch knows no foreign byte order.
    return array.astype(dtype.newbyteorder("="))


def _array_of_state(state: Any) -> np.ndarray:
    _, shape, dtype, in_columns, data = state
    return _array(data, dtype, shape, "F" if in_columns else "C")


def _matrix(state: Any) -> csr_matrix:
    parts = tuple(
        _value(state[name], np.ndarray).reshape(-1)
        for name in ("data", "indices", "indptr")
    )
    if any(part.dtype.kind not in "iu" for part in parts[1:]):
        raise ValueError("the indices of a matrix must be integers")
    matrix = csr_matrix(parts, shape=state["_shape"])
    matrix.check_format(full_check=True)  # every index, before anything goes by it
    return matrix


class _Items(dict[Any, Any]):
    """A dictionary of strings and numbers, since hashing tuples that contain each other can take exponential time."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, (str, int)):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        super().__setitem__(key, value)


# NumPy's modules under their names before version 2; SciPy's changed in 1.8, and Python's own in version 3.
_STAND_INS: list[tuple[str, Callable[..., Any]]] = [
    ("numpy.core.multiarray._reconstruct", lambda *_: _Object(_array_of_state)),
    (
        "numpy.core.numeric._frombuffer",
        lambda *of: _Object(_array_of_state, _array(*of)),
    ),
    (
        "numpy.core.multiarray.scalar",
        lambda dtype, data: _array(data, dtype, (), "").item(),
    ),
    ("numpy.dtype", lambda code, *_: _Object(lambda state: _dtype(code, state))),
    (
        "scipy.sparse.csr.csr_matrix scipy.sparse._csr.csr_matrix scipy.sparse._csr.csr_array",
        lambda: _Object(_matrix),
    ),
    (
        "copy_reg._reconstructor copyreg._reconstructor copyreg.__newobj__",
        lambda kind, *_: kind(),
    ),
    ("collections.defaultdict", lambda *_: _Items()),
    # Bytes in protocols 0 to 2.
    (
        "_codecs.encode",
        lambda text, encoding: text.encode({"latin1": "latin-1"}[encoding]),
    ),
    ("__builtin__.bytes builtins.bytes", lambda: b""),
    # Arguments of those above only.
    (
        "numpy.ndarray __builtin__.object builtins.object __builtin__.list builtins.list",
        lambda: None,
    ),
]


class _Machine(pickle._Unpickler):
    """Python's machine for pickles, in which nothing can be imported."""

    dispatch: ClassVar[dict[int, Callable[..., None]]]

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        for names, stand_in in _STAND_INS:
            if asked in names.split():
                return stand_in
        raise ValueError(f"it asks for {module:.60}.{name:.60}, which is no array")

    def _build(self: Any) -> None:
        state = self.stack.pop()
        self.stack[-1].set_state(state)

    def _dictionary(self: Any) -> None:
        values = self.pop_mark()
        items = _Items()
        for key, value in zip(values[::2], values[1::2], strict=True):
            items[key] = value
        self.append(items)

    def _bytes(self: Any) -> None:
        """Read bytes; the original makes room for as many bytes as the pickle claims to have."""
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _CODES} | {
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[
            pickle.REDUCE[0]
        ],  # a class is called like any other name
        pickle.BUILD[0]: _build,
        pickle.EMPTY_DICT[0]: lambda machine: machine.append(_Items()),
        pickle.DICT[0]: _dictionary,
        pickle.BYTEARRAY8[0]: _bytes,
    }
