"""Checkpoints as files: complete or absent when they are written, plain data when they are read."""

import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from diffusion_mp.checks import check_kind
from diffusion_mp_experiments.files.reading import as_path


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file that at every moment, even after a kill, is either the old file or the complete new file.

    The bytes go to a neighbouring file that ends in .part, which is then renamed. Only a kill leaves such a file
    behind.

    Args:
        path: path of the file.
        data: its new content.

    Raises:
        OSError: the file cannot be written. The message names the file.

    Examples:
        >>> replace_file(folder / "note", b"complete or absent")
        >>> (folder / "note").read_bytes()
        b'complete or absent'
    """
    path = as_path(path, "path")
    check_kind(data, "data", bytes, "bytes")
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} cannot be written: it is a folder. Give the path of a file."
        )
    part = path.with_name(
        f"{path.name}.{os.getpid()}.part"
    )  # two processes never write to one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        # The one step that others can see, and it happens at once.
        part.replace(path)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror}. What stood there is as it was."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()


def save_checkpoint(state: Any, path: str | Path) -> None:
    """Save tensors and plain types to a file with `torch.save`, complete or not at all.

    Args:
        state: what to save.
        path: path of the file.

    Raises:
        OSError: the file cannot be written, see `replace_file`.

    Examples:
        >>> save_checkpoint({"x": x}, folder / "x.ckpt")
    """
    # In memory first, since `torch.save` writes to a path piece by piece.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    replace_file(path, buffer.getvalue())


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> Any:
    """Load a local file of tensors and plain types with `torch.load`; nothing in the file is ever executed.

    Args:
        path: path of the file.
        map_location: device of the tensors, as in `torch.load`. By default the CPU, which every machine has.

    Examples:
        >>> save_checkpoint({"epoch": 3}, folder / "x.ckpt")
        >>> load_checkpoint(folder / "x.ckpt")
        {'epoch': 3}
    """
    # Lightning would fetch it.
    if "://" in str(path):
        raise ValueError(
            f"path must be a file of this machine, got {path}; download it first."
        )
    path = as_path(path, "path")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not the path of a file"
        way_out = "give a path such as runs/fit/version_0/checkpoints/last.ckpt"
        raise FileNotFoundError(
            f"A checkpoint was expected, and {str(path)!r} is {kind}; {way_out}."
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (
        Exception
    ) as error:  # damaged bytes make zip, pickle and torch raise nearly anything
        raise ValueError(
            f"{path} is not a checkpoint of tensors and plain types, or is damaged ({type(error).__name__}); "
            "nothing in it was executed. Give another file, such as the best checkpoint beside it."
        ) from error


def check_writable(folder: str | Path) -> None:
    """Make the folder, and check that files can be written there: write 64 KiB and remove them again.

    Args:
        folder: path of the folder.

    Raises:
        OSError: nothing can be written. The message names the folder.

    Examples:
        >>> check_writable(folder)  # raises where it is not
    """
    folder = as_path(folder, "folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A write, since permissions say nothing of a full disk.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            f"Nothing can be written to {folder}: {error.strerror}. Give another folder."
        ) from error
