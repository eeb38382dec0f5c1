"""Tar archives of anybody's making, read in one pass: nothing is written, and no header decides how much is read."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast

_MEMBERS = 1 << 18
_AT_ONCE = 1 << 20  # bytes
_GZIP = b"\x1f\x8b"
_END = bytes(tarfile.BLOCKSIZE)


def members(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """The files in a .tar or .tar.gz, each with what reads its content until the next is asked for.

    Links, devices and folders are passed over. Python's tarfile takes a damaged header for the end of the archive and a
    header's word for how much memory to fill or how far to go back, without end; here all of these are refused, and so
    is an archive that ends early, goes on after its end, or has more than 262 144 members.

    Raises:
        tarfile.TarError: and whatever else tarfile and gzip raise; see `reading`.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        stream = _Forward(cast("BufferedIOBase", gzip.GzipFile(fileobj=file)) if zipped else file)
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number == _MEMBERS:
                    raise tarfile.ReadError(f"it has more than {_MEMBERS} members")
                content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is not None:
                    yield member, content
        if stream.last != _END:
            raise tarfile.ReadError("it is damaged or cut off: its members do not end with a block of zeros")
        if stream.read(_AT_ONCE).strip(b"\0") or stream.read(1):
            raise tarfile.ReadError("it goes on after its end")


class _Forward:
    """A stream for tarfile that goes forward only and hands out at most `_AT_ONCE` bytes; `last` are the latest."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self.last = stream, b""

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, place: int) -> None:
        if place < self._stream.tell():
            raise tarfile.ReadError("a header leads back to what was read before")
        self._stream.seek(place)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise tarfile.ReadError(f"a header wants {size} bytes at once")
        self.last = self._stream.read(size)
        return self.last
