"""Tar archives, read in one pass.

`tarfile` by itself reads what a header claims, and ends silently at a damaged header.
"""

import gzip
import tarfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import IO, cast

_MEMBERS = 1 << 18
_AT_ONCE = 1 << 20  # bytes
_GZIP = b"\x1f\x8b"


def members(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield the files in a .tar or .tar.gz, each with a stream of its content that is valid until the next one.

    Links, devices and folders are skipped. An archive that ends early, continues after its end, has headers that claim
    large blocks or point back, or has more than 262 144 members is refused. Call it within `reading`.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        stream = _Forward(
            cast("BufferedIOBase", gzip.GzipFile(fileobj=file)) if zipped else file
        )
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number == _MEMBERS:
                    raise tarfile.ReadError(f"it has more than {_MEMBERS} members")
                # Links and devices lead out of the archive, and sparse members may claim any size.
                if member.isreg() and not member.issparse():
                    content = archive.extractfile(member)
                else:
                    content = None
                if content is not None:
                    yield member, content
        # tarfile takes the end of the file for the end of the archive.
        if stream.last != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(
                "it is damaged or cut off: its members do not end with a block of zeros"
            )
        if stream.read(_AT_ONCE).strip(b"\0") or stream.read(1):
            raise tarfile.ReadError("it goes on after its end")


class _Forward:
    """A stream that only moves forward and returns at most `_AT_ONCE` bytes; `last` are the bytes read last."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self.last = b""

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int) -> None:
        if position < self._stream.tell():
            raise tarfile.ReadError("a header leads back to what was read before")
        self._stream.seek(position)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _AT_ONCE:
            raise tarfile.ReadError(f"a header wants {size} bytes at once")
        self.last = self._stream.read(size)
        return self.last
