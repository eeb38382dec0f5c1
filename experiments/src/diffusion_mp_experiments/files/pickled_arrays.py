"""NumPy arrays, SciPy's CSR matrices and containers out of what `read_pickle` noted, every length checked."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np
from jaxtyping import Shaped
from scipy.sparse import csr_matrix

from diffusion_mp_experiments.files.plain_pickle import Made, Name

# NumPy's module had another name before version 2, SciPy's before 1.8, and Python's own before version 3.
_REBUILD = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_FROM_BUFFER = {"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"}
_SCALAR = {"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"}
_CSR = {"scipy.sparse.csr.csr_matrix", "scipy.sparse._csr.csr_matrix", "scipy.sparse._csr.csr_array"}
_NEW = {"copy_reg._reconstructor", "copyreg._reconstructor", "copyreg.__newobj__"}
_OBJECT = {"__builtin__.object", "builtins.object"}
_LIST = {"__builtin__.list", "builtins.list"}
_BYTES = {"__builtin__.bytes", "builtins.bytes"}
_ENCODE = "_codecs.encode"  # how protocols 0 to 2 write bytes

NAMES = {"numpy.ndarray", "numpy.dtype", "collections.defaultdict", _ENCODE}.union(
    *(_REBUILD, _FROM_BUFFER, _SCALAR, _CSR, _NEW, _OBJECT, _LIST, _BYTES)
)
"""What a pickle of arrays, matrices and mappings may ask for, in files of any age."""

_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


def as_array(value: Any) -> Shaped[np.ndarray, " ..."]:
    """An array of bools, integers or floating-point numbers; ValueError where it is none or is not filled."""
    if isinstance(value, Made) and value.name in _FROM_BUFFER:
        data, dtype, shape, order = _unpack(value.arguments, 4)
        return _filled(as_bytes(data), _dtype(dtype), shape, order == "F")
    shape, dtype, in_columns, data = _array_state(value)
    return _filled(as_bytes(data), _dtype(dtype), shape, bool(in_columns))


def as_csr(value: Any) -> csr_matrix:
    """A matrix in compressed rows whose indices all lie inside it."""
    if not isinstance(value, Made) or not isinstance(value.state, dict) or not _CSR & {value.name, *_called(value)}:
        raise ValueError(f"it has {_describe(value)} where a scipy.sparse.csr_matrix belongs")
    shape = _unpack(value.state["_shape"], 2)
    _size(shape)
    parts = tuple(as_array(value.state[name]).reshape(-1) for name in ("data", "indices", "indptr"))
    if any(part.dtype.kind not in "iu" for part in parts[1:]):
        raise ValueError("the indices of a matrix must be integers")
    matrix = csr_matrix(parts, shape=shape)
    matrix.check_format(full_check=True)  # every index, before anything goes by it
    return matrix


def as_integers(value: Any) -> Shaped[np.ndarray, " ..."]:
    """int64 [n] of an array, or a list, of integers."""
    if isinstance(value, (list, tuple)):
        numbers = [_integer(number) for number in value]
        return np.array(numbers, np.int64)  # OverflowError is what a larger number gives
    array = as_array(value)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"it has an array {array.dtype} {list(array.shape)} where integers [n] belong")
    return array.astype(np.int64)


def as_mapping(value: Any) -> dict[Any, Any]:
    """The items of a dict or defaultdict, as they were noted."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, Made) or value.name != "collections.defaultdict":
        raise ValueError(f"it has {_describe(value)} where a dictionary belongs")
    return value.items


def as_bytes(value: Any) -> bytes:
    """Bytes, which protocols 0 to 2 write as strings."""
    if isinstance(value, Made) and value.name in _BYTES and not value.arguments:
        return b""
    if isinstance(value, Made) and value.name == _ENCODE:
        value, encoding = _unpack(value.arguments, 2)
        if encoding != "latin1":
            raise ValueError("its bytes are not written as Latin-1")
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, (bytes, bytearray)):
        raise ValueError(f"it has {_describe(value)} where the bytes of an array belong")
    return bytes(value)


def _array_state(value: Any) -> tuple[Any, ...]:
    """shape, dtype, whether in columns, data."""
    if not isinstance(value, Made) or value.name not in _REBUILD or not isinstance(value.state, tuple):
        raise ValueError(f"it has {_describe(value)} where an array belongs")
    return _unpack(value.state[1:], 4)  # what comes first is the version


def _filled(data: bytes, dtype: np.dtype[Any], shape: Any, in_columns: bool) -> Shaped[np.ndarray, " ..."]:
    if len(data) != _size(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not fill an array {dtype} of shape {shape}")
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if in_columns else "C")
    return array.astype(dtype.newbyteorder("="))


def _dtype(value: Any) -> np.dtype[Any]:
    """A number type; its name and byte order are all that is read of the state."""
    code = _code(value)
    if code not in _TYPES:
        raise ValueError(f"it has an array of type {code}, which are no numbers")
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "="
    if order not in ("<", ">", "|", "="):
        raise ValueError(f"{_describe(order)} is no byte order")
    return np.dtype(f"{order}{code}")


def _code(value: Any) -> str:
    """The name of a NumPy type, such as i8."""
    if not isinstance(value, Made) or value.name != "numpy.dtype" or not value.arguments:
        raise ValueError(f"it has {_describe(value)} where a numpy.dtype belongs")
    (code, *_) = value.arguments
    if not isinstance(code, str):
        raise ValueError(f"it has {_describe(code)} for the name of a numpy.dtype")
    return code


def _integer(value: Any) -> int:
    if isinstance(value, Made) and value.name in _SCALAR:
        dtype, data = _unpack(value.arguments, 2)
        value = _filled(as_bytes(data), _dtype(dtype), (), False).item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"it has {_describe(value)} where an integer belongs")
    return value


def _size(shape: Any) -> int:
    lengths = shape if isinstance(shape, tuple) and len(shape) <= 8 else (None,)
    if not all(type(length) is int and 0 <= length < 2**40 for length in lengths):
        raise ValueError(f"{_describe(shape)} is no shape")
    return math.prod(shape)


def _called(value: Made) -> list[str]:
    return [argument.path for argument in value.arguments if isinstance(argument, Name)]


def _unpack(values: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(values, tuple) or len(values) != count:
        raise ValueError(f"it has {_describe(values)} where {count} values belong")
    return values


def _describe(value: Any) -> str:
    return value.name if isinstance(value, Made) else f"{reprlib.repr(value)} ({type(value).__name__})"
