"""NumPy's .npz files: arrays of plain numbers in a zip archive, their sizes checked before any room is made."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from diffusion_mp_experiments.files.npy import read_array

_WAYS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # NumPy's


def read_npz(path: Path, names: Iterable[str], largest: int) -> dict[str, Shaped[np.ndarray, " ..."]]:
    """The arrays of these names; use it within `reading`.

    Args:
        path: the file.
        names: of the arrays; others are not looked at.
        largest: the bytes that they may take together.

    Raises:
        ValueError, KeyError, zipfile.BadZipFile, zlib.error: an array is absent, damaged, too large or no numbers.
    """
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for name in names:
            entry = archive.getinfo(f"{name}.npy")
            largest -= entry.file_size
            if largest < 0 or entry.compress_type not in _WAYS:
                raise ValueError(f"its {name} is not packed by NumPy, or unpacks into {entry.file_size} bytes")
            arrays[name] = read_array(archive.read(entry))
    return arrays
