"""No file runs code, crashes the process, hangs it or takes its memory; whatever is refused is named.

Every format of `hostile.py` is damaged in many ways, replaced by files that leave a marker behind if anything obeys
them, and read in a process with a limit of memory and time.
"""

import gzip
import io
import pickle
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import Payload
from hostile import FORMATS, Format, answer, mutations

SECONDS = 20  # for one file
WAYS = ("system", "eval", "open")


class HostileReader:
    """A process that reads one folder after another; after a crash or a hang, the next one goes on."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._process = None

    def read(self, name: str, folder: Path) -> tuple[str, str]:
        """ "loaded", "refused" or "bad", and what was said of it."""
        if self._process is None:
            self._start()
        self._pipe.send((name, folder))
        try:
            if self._pipe.poll(SECONDS):
                return self._pipe.recv()
            said = f"it took more than {SECONDS} s"
        except EOFError:
            self._process.join()
            said = f"it crashed: {self._process.exitcode}"
        self.close()
        return "bad", said

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=answer, args=(theirs, Path(tempfile.mkdtemp(dir=self._scratch)))
        )
        self._process.start()
        theirs.close()
        assert self._pipe.poll(300)
        assert self._pipe.recv() == "ready"


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[HostileReader]:
    reader = HostileReader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.close()


class Example:
    """A valid example of a format; `with_content` tells what comes of it with one file's content replaced."""

    def __init__(self, format: Format, folder: Path, reader: HostileReader) -> None:
        self.format = format
        self.reader = reader
        self._numbers = count()
        self.folder = folder / "valid"
        self._copies = folder
        self.folder.mkdir()
        self.files = [
            file.relative_to(self.folder)
            for file in format.example(self.folder)
            if file.stat().st_size
        ]

    def with_content(self, content: dict[Path, bytes]) -> tuple[str, str]:
        copy = self._copies / str(next(self._numbers))
        shutil.copytree(self.folder, copy)
        for file, blob in content.items():
            (copy / file).parent.mkdir(exist_ok=True, parents=True)
            (copy / file).write_bytes(blob)
        try:
            return self.reader.read(self.format.name, copy)
        finally:
            shutil.rmtree(copy)


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def example(request, tmp_path, reader) -> Example:
    return Example(request.param, tmp_path, reader)


def check(outcomes: list[tuple[str, str]], name: str) -> None:
    """Nothing bad; the counts are printed for whoever asks (-s, or -rP)."""
    print(
        f"{name}: {len(outcomes)} files, {dict(Counter(outcome for outcome, _ in outcomes))}"
    )
    bad = Counter(
        said for outcome, said in outcomes if outcome not in ("loaded", "refused")
    )
    assert not bad, "\n".join(
        f"{times} × {said}" for said, times in bad.most_common(10)
    )


def test_the_examples_are_valid(example):
    assert example.with_content({}) == ("loaded", "")


@pytest.mark.parametrize(
    ("number", "seed"), [(40, 0), pytest.param(3000, 1, marks=pytest.mark.slow)]
)
def test_damaged_files_are_read_or_refused(example, number, seed):
    outcomes = []
    per_file = -(-number // len(example.files))
    for seed_of_file, file in enumerate(example.files, seed):
        damaged = mutations(
            (example.folder / file).read_bytes(), per_file, seed_of_file
        )
        outcomes += [example.with_content({file: blob}) for blob in damaged]
    check(outcomes, example.format.name)


def payloads(marker: Path) -> dict[str, bytes]:
    """Files that run something in whoever unpickles them, in all the shapes that readers may expect."""
    blobs = {}
    for way in WAYS:
        harm = Payload(marker, way)
        blobs |= {
            f"pickle {protocol} {way}": pickle.dumps(harm, protocol)
            for protocol in (0, 2, 4)
        }
        blobs[f"list {way}"] = pickle.dumps([{"train": harm, "x": harm}, harm])
        for name, content in {
            "torch": harm,
            "collated": ({"x": harm}, {}),
            "graphs": [(harm,) * 4],
        }.items():
            for zipped in (True, False):
                stream = io.BytesIO()
                torch.save(content, stream, _use_new_zipfile_serialization=zipped)
                blobs[f"{name} zipped={zipped} {way}"] = stream.getvalue()
        objects = np.array(
            [harm, {"train": harm, "valid": harm, "test": harm}], dtype=object
        )
        for name, save in {
            "npy": np.save,
            "npz": lambda f, a: np.savez(f, train=a, val=a, test=a),
        }.items():
            stream = io.BytesIO()
            save(stream, objects)
            blobs[f"{name} {way}"] = stream.getvalue()
    return blobs


def test_payloads_do_harm_to_those_who_unpickle(tmp_path):
    """The test can fail."""
    for way in WAYS:
        pickle.loads(pickle.dumps(Payload(tmp_path / way, way)))
        assert (tmp_path / way).exists()


def test_nothing_in_a_file_is_run(example, tmp_path):
    marker = tmp_path / "marker"
    outcomes = []
    for blob in payloads(marker).values():
        content = {
            file: gzip.compress(blob) if file.suffix == ".gz" else blob
            for file in example.files
        }
        # What PyG leaves beside its caches, and would unpickle.
        for folder in {
            position
            for file in example.files
            for position in (file.parent, file.parent.parent / "processed")
        }:
            content |= {
                folder / name: blob
                for name in ("pre_transform.pt", "pre_filter.pt", "data.pt")
            }
        outcomes.append(example.with_content(content))
        assert not marker.exists()
    check(outcomes, example.format.name)
    for name, blob in payloads(marker).items():
        if name.endswith("system"):
            check(
                [example.with_content({file: blob}) for file in example.files],
                example.format.name,
            )
    assert not marker.exists()


@cache
def gzipped_bomb() -> bytes:
    return gzip.compress(bytes([ord("1")]) * (1 << 26)) * 16


def bomb(example: Example, file: Path) -> bytes | None:
    """The file with a content of a gigabyte that takes a megabyte on the disk, where its format can be compressed."""
    blob = (example.folder / file).read_bytes()
    if file.suffix == ".gz":
        return gzipped_bomb()
    if zipfile.is_zipfile(io.BytesIO(blob)):
        stream = io.BytesIO()
        old = zipfile.ZipFile(io.BytesIO(blob))
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, True, 1) as new:
            entries = sorted(old.infolist(), key=lambda entry: entry.file_size)
            for entry in entries:
                more = 1 << 28 if entry is entries[-1] else 0
                new.writestr(entry.filename, old.read(entry) + bytes(more))
        return stream.getvalue()
    return None


@pytest.mark.exhaustive
def test_bombs(example):
    bombs = {file: bomb(example, file) for file in example.files}
    check(
        [example.with_content({file: blob}) for file, blob in bombs.items() if blob],
        example.format.name,
    )
