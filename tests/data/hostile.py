"""Damaged and malicious variants of files, what a reader may answer to them, and how a format takes part.

A format is a row of `FORMATS` in `hostile_binary.py` or `hostile_text.py`; `test_hostile_files.py` runs all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_geometric.data import Data


@dataclass(frozen=True)
class Format:
    """A kind of file: `make` writes a small valid example into an empty folder and returns the files to be damaged.

    `load` reads that folder with the public reader, looks at everything that came and asserts that it agrees with
    itself (`check_data` does for a graph). It may raise ValueError or FileNotFoundError, whose sentence names a file.
    """

    name: str
    make: Callable[[Path], list[Path]]
    load: Callable[[Path], object]


def mutations(blob: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of a file's content: first one of every kind, then mostly flips of single bits and bytes."""
    rng = random.Random(seed)
    whole = (_empty, _cut_late, _header_only, _garbage, _text, _doubled, _cut)
    kinds: list[Callable[[bytes, random.Random], bytes]] = [*whole, _flip_bit, _flip_byte, _flip_head, _many, _zeros]
    for i in range(count):
        kind = kinds[i] if i < len(kinds) else rng.choice([_flip_bit, _flip_byte, _flip_head, _flip_byte, _many, _cut])
        yield kind(blob, rng)


def _empty(blob: bytes, rng: random.Random) -> bytes:
    return b""


def _cut(blob: bytes, rng: random.Random) -> bytes:
    return blob[: rng.randrange(len(blob))]


def _cut_late(blob: bytes, rng: random.Random) -> bytes:
    return blob[:-1]


def _header_only(blob: bytes, rng: random.Random) -> bytes:
    return blob[: min(16, len(blob) // 2)]


def _garbage(blob: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(max(len(blob), 64))


def _text(blob: bytes, rng: random.Random) -> bytes:
    return "<!doctype html><title>404 Not Found - Größe</title>\n".encode("latin-1")


def _doubled(blob: bytes, rng: random.Random) -> bytes:
    return blob + blob


def _zeros(blob: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(blob))
    stop = min(len(blob), start + 64)
    return blob[:start] + bytes(stop - start) + blob[stop:]


def _flip(blob: bytes, place: int, mask: int) -> bytes:
    return blob[:place] + bytes([blob[place] ^ mask]) + blob[place + 1 :]


def _flip_bit(blob: bytes, rng: random.Random) -> bytes:
    return _flip(blob, rng.randrange(len(blob)), 1 << rng.randrange(8))


def _flip_byte(blob: bytes, rng: random.Random) -> bytes:
    return _flip(blob, rng.randrange(len(blob)), rng.randrange(1, 256))


def _flip_head(blob: bytes, rng: random.Random) -> bytes:
    """Most of what a parser decides by stands at the beginning or, in a zip file, at the end."""
    reach = min(len(blob), 256)
    place = rng.randrange(reach)
    return _flip(blob, place if rng.random() < 0.7 else len(blob) - 1 - place, rng.randrange(1, 256))


def _many(blob: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(2, 9)):
        blob = _flip_byte(blob, rng)
    return blob


class Payload:
    """Where it is unpickled by anything that obeys, `marker` is there afterwards."""

    def __init__(self, marker: Path, way: str = "system") -> None:
        self.marker, self.way = marker, way

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.way == "system":
            return os.system, (f"touch '{self.marker}'",)
        if self.way == "open":
            return open, (str(self.marker), "w")
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def check_data(data: Data) -> None:
    """The parts of one graph agree: tensors, edges between nodes that exist, a row of `edge_attr` for every edge."""
    num_nodes = data.num_nodes
    assert data.edge_index.dim() == 2
    assert data.edge_index.size(0) == 2
    assert not data.edge_index.is_floating_point()
    if data.num_edges:
        assert 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < num_nodes
    for key, value in data.items():
        if key.startswith("edge_") and key not in ("edge_index", "edge_label_index", "edge_label"):
            assert value.size(0) == data.num_edges, key
        elif key == "x" or key.endswith("_mask") or (key == "y" and value.size(0) != 1):
            assert value.size(0) == num_nodes, key
