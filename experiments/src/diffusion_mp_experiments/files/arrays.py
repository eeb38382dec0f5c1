"""Arrays in files: NumPy's, read by `np.load` without pickles and within a limit of memory, and MATLAB's.

`scipy.io.loadmat` runs in a child process, since damaged files crash it.
"""

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io.matlab import matfile_version
from scipy.sparse import load_npz

_HEADER = 1024  # characters; the headers of NumPy have 118, and parsing a longer one can exhaust the stack


def map_array(path: Path) -> np.ndarray:
    """Memory-map a .npy file; writing to the array does not change the file."""
    return np.load(path, mmap_mode="c", allow_pickle=False, max_header_size=_HEADER)


def read_npz(
    path: Path, names: Sequence[str] | None, largest: int
) -> dict[str, np.ndarray]:
    """Return the named arrays of a .npz file, or all, which may take `largest` bytes together.

    Call it within `reading`.
    """
    # Unlike a file, it makes no room for bytes that a header only claims.
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as archive:
        if names is None:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
        size = sum(archive.getinfo(f"{name}.npy").file_size for name in names)
    if size > largest:
        raise ValueError(f"its arrays unpack into {size} bytes, more than {largest}")
    content.seek(0)
    try:
        with np.load(content, allow_pickle=False, max_header_size=_HEADER) as file:
            arrays = {name: file[name] for name in names}
    except MemoryError as error:
        raise ValueError(
            f"the header of an array claims more than the file has: {error}"
        ) from error
    return {
        name: array.astype(array.dtype.newbyteorder("="), copy=False)
        for name, array in arrays.items()
    }


_SECONDS = 600
_CHILD = """
import sys
import numpy as np
from scipy.io import loadmat
from scipy.sparse import issparse, save_npz
path, folder, memory, *names = sys.argv[1:]
try:
    import resource
    limit, hard = int(memory), resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
except (ImportError, ValueError, OSError):  # Windows has no such limit, and macOS refuses it
    pass
try:
    for name in names:
        matrix = loadmat(path, variable_names=[name]).get(name)  # one at a time: together they may not fit
        if matrix is None:
            raise ValueError(f"it has no {name}")
        if matrix.ndim != 2 or matrix.dtype.kind not in "biuf":
            raise ValueError(f"{name} is no matrix of real numbers")
        if issparse(matrix):
            matrix.check_format(full_check=True)
            save_npz(f"{folder}/{name}.npz", matrix)
        else:
            np.save(f"{folder}/{name}.npy", matrix, allow_pickle=False)
except (Exception, MemoryError) as error:
    sys.exit(str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}")
"""


def read_matrices(
    path: Path, names: list[str], scratch: Path, memory: int
) -> list[Any]:
    """Return the named matrices of a file of MATLAB 5 to 7: full ones mapped from the folder `scratch`, or sparse.

    The child process has `memory` bytes of address space, of which SciPy and NumPy take 0.4 GB. Call this within
    `reading`.
    """
    with path.open("rb") as file:
        if (version := matfile_version(file)[0]) != 1:
            raise ValueError(
                "it is a file of MATLAB 7.3; save it as version 7"
                if version
                else "it is of version 4"
            )
    # -P: a module in the current folder is not imported.
    command = [
        sys.executable,
        "-P",
        "-Wignore",
        "-c",
        _CHILD,
        str(path.resolve()),
        str(scratch),
        str(memory),
        *names,
    ]
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
    }  # each thread reserves memory
    try:
        # Not a fork: what this process has in memory would count towards the limit.
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"scipy.io.loadmat took more than {_SECONDS} seconds"
        ) from error
    if done.returncode:
        raise ValueError(
            done.stderr.strip()
            if done.returncode > 0
            else "it makes scipy.io.loadmat crash"
        )
    files = [(scratch / f"{name}.npy", scratch / f"{name}.npz") for name in names]
    return [
        map_array(full) if full.is_file() else load_npz(sparse)
        for full, sparse in files
    ]
