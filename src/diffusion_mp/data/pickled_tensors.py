"""PyTorch tensors out of what `read_pickle` noted, as `pickle.dump` writes them, with every length checked."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion_mp.data.pickled_arrays import BYTES, as_bytes
from diffusion_mp.data.plain_pickle import PERSISTENT, Made, Name, read_pickle

_REBUILD = "torch._utils._rebuild_tensor_v2"
_LOAD = "torch.storage._load_from_bytes"
TENSORS = {_REBUILD, _LOAD, "collections.OrderedDict", *BYTES}

_STORAGES = {
    "torch.BoolStorage": "b1",
    "torch.ByteStorage": "u1",
    "torch.CharStorage": "i1",
    "torch.ShortStorage": "i2",
    "torch.IntStorage": "i4",
    "torch.LongStorage": "i8",
    "torch.HalfStorage": "f2",
    "torch.FloatStorage": "f4",
    "torch.DoubleStorage": "f8",
}


def as_tensor(value: Any) -> Tensor:
    """A tensor on the CPU that shares its memory with no other; ValueError where it is none or exceeds its numbers."""
    if not isinstance(value, Made) or value.name != _REBUILD or len(value.arguments) < 4:
        raise ValueError(f"it has a {type(value).__name__} where a tensor belongs")
    loaded, offset, size, stride = value.arguments[:4]
    if not isinstance(loaded, Made) or loaded.name != _LOAD or len(loaded.arguments) != 1:
        raise ValueError("it has a tensor without its numbers")
    numbers = _storage(as_bytes(loaded.arguments[0]))
    if not all(isinstance(part, tuple) and len(part) <= 8 for part in (size, stride)):
        raise ValueError("it has a tensor without a shape")
    if not all(type(part) is int and 0 <= part < 2**40 for part in (offset, *size, *stride)):
        raise ValueError("the shape of a tensor must be natural numbers")
    if math.prod(size) > len(numbers):
        raise ValueError(f"{len(numbers)} numbers do not fill a tensor of shape {size}")
    return numbers.as_strided(size, stride, offset).clone()  # torch refuses what lies outside


def _storage(data: bytes) -> Tensor:
    """The numbers [n] of a storage as `torch.save` wrote them before version 1.6: five pickles, a length, the bytes."""
    stream = io.BytesIO(data)
    _magic, _version, _system, about, _keys = (read_pickle(stream, _STORAGES) for _ in range(5))
    if not isinstance(about, Made) or about.name != PERSISTENT or not isinstance(about.arguments[0], tuple):
        raise ValueError("it has a tensor without a storage")
    kind = about.arguments[0][1]
    if not isinstance(kind, Name):
        raise ValueError("it has a storage without a type")
    count, rest = stream.read(8), stream.read()
    dtype = np.dtype(f"<{_STORAGES[kind.path]}")
    if len(rest) != int.from_bytes(count, "little") * dtype.itemsize:
        raise ValueError(f"{len(rest)} bytes do not fill a storage of {int.from_bytes(count, 'little')} {dtype}")
    return torch.from_numpy(np.frombuffer(rest, dtype).astype(dtype.newbyteorder("=")))
