"""NumPy's .npy and .npz files, read by `np.load` without pickles and within a limit of memory."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

_HEADER = 1024  # characters; the headers of NumPy have 118, and parsing a longer one can exhaust the stack


def map_array(path: Path) -> Shaped[np.ndarray, " ..."]:
    """Memory-map a .npy file; writing to the array does not change the file."""
    return np.load(path, mmap_mode="c", allow_pickle=False, max_header_size=_HEADER)


def read_npz(path: Path, names: Sequence[str], largest: int) -> dict[str, Shaped[np.ndarray, " ..."]]:
    """Return the named arrays of a .npz file, which may take `largest` bytes together. Call it within `reading`."""
    content = io.BytesIO(path.read_bytes())  # unlike a file, it makes no room for bytes that a header only claims
    with zipfile.ZipFile(content) as archive:
        size = sum(archive.getinfo(f"{name}.npy").file_size for name in names)
    if size > largest:
        raise ValueError(f"its arrays unpack into {size} bytes, more than {largest}")
    content.seek(0)
    try:
        with np.load(content, allow_pickle=False, max_header_size=_HEADER) as file:
            arrays = {name: file[name] for name in names}
    except MemoryError as error:
        raise ValueError(f"the header of an array claims more than the file has: {error}") from error
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}
