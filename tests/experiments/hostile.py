"""Damaged and malicious variants of files, what a reader may answer to them, and how a format takes part.

A format is a row of `FORMATS` in `hostile_binary.py` or `hostile_text.py`; `test_hostile_files.py` runs all of them.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from torch_geometric.data import Data

import diffusion_mp

_SECONDS = 20  # for one file


@dataclass(frozen=True)
class Format:
    """A kind of file: `make` writes a small valid example into an empty folder and returns the files to be damaged.

    `load` reads that folder with the public reader, looks at everything that came and asserts that it agrees with
    itself (`check_data` does for a graph). It may raise ValueError or FileNotFoundError, whose sentence names a file.
    """

    name: str
    make: Callable[[Path], list[Path]]
    load: Callable[[Path], object]


def formats() -> dict[str, Format]:
    """All formats by name."""
    modules = (import_module("hostile_binary"), import_module("hostile_text"))  # which import this one
    return {format.name: format for module in modules for format in module.FORMATS}


class HostileReader:
    """A process that reads one folder after another; after a crash or a hang, the next one goes on."""

    def __init__(self, log: Path) -> None:
        self._log, self._process = log, None

    def read(self, name: str, folder: Path) -> tuple[str, str]:
        """ "loaded", "refused" or "bad", and what was said of it."""
        if self._process is None:
            self._start()
        self._process.stdin.write(f"{name}\t{folder}\n")
        self._process.stdin.flush()
        answer = self._answer(_SECONDS)
        if answer:
            return tuple(json.loads(answer))
        said = f"it took more than {_SECONDS} s" if answer is None else f"it crashed: {self._process.wait()}"
        self.close()
        return "bad", f"{said}; {self._log.read_text(errors='replace')[-500:]}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        source = Path(diffusion_mp.__file__).parents[1]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
        environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")])
        command = [
            sys.executable,
            str(Path(__file__).with_name("hostile_worker.py")),
            tempfile.mkdtemp(dir=self._log.parent),
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._answer(300) == "ready\n", self._log.read_text()[-2000:]

    def _answer(self, seconds: float) -> str | None:
        """A line, nothing where the process ended, None where it takes too long."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline() if ready else None


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
    return "<!doctype html><title>404 Not Found: Größe</title>\n".encode("latin-1")


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
