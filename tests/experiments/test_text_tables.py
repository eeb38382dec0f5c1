"""Tables in text: what a file can make the reader hold, and what it refuses by file and line."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from peak_memory import at_most

from diffusion_mp_experiments.files import text_tables
from diffusion_mp_experiments.files.text_tables import LONGEST, count_lines, line_blocks, number_blocks


def numbers(path: Path, dtype=np.int64, **options) -> list[list[float]]:
    return [row for _, block in number_blocks(path, 2, dtype, progress=False, **options) for row in block.tolist()]


def zipped(path: Path, text: bytes, times: int = 1) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(times):
            file.write(text)
    return path


@pytest.mark.parametrize("text", [b"1" * 2**20, b"\0" * 2**20])
def test_a_text_without_lines_is_refused_before_it_fills_the_memory(tmp_path, text):
    """128 MB in a file of 600 kB: the reader keeps a block of 4 MB and a line of 16."""
    path = zipped(tmp_path / "edges.txt.gz", text, times=128)
    assert path.stat().st_size < 1e6
    for read in (numbers, lambda path: count_lines(path, progress=False)):
        said = rf"edges\.txt\.gz, line 1: a line must have at most {LONGEST} bytes"
        with pytest.raises(ValueError, match=said), at_most(64e6):
            read(path)


def test_empty_lines_without_end_take_a_block(tmp_path):
    path = zipped(tmp_path / "edges.txt.gz", b"1 2\n" + b"\n" * 2**20, times=64)
    with pytest.raises(ValueError, match="from line 1 on: expected"), at_most(128e6):
        numbers(path)


def test_a_row_is_no_longer_than_its_numbers(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_bytes(b"1 2\n3" + b" " * 200 + b"4\n")
    with pytest.raises(ValueError, match=r"edges\.txt, line 2: a line must have at most 128 bytes"):
        numbers(path)
    with pytest.raises(ValueError, match="line 2: a line must have at most 100 bytes"):
        list(line_blocks(path, 10, longest=100, progress=False))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", [b"", b"\n", b"a\n\nbb\r\nccc", b"one\ntwo\n", b"x" * 50 + b"\n" + b"y" * 3])
def test_lines_whatever_the_blocks(tmp_path, monkeypatch, text, size):
    path = tmp_path / "text"
    path.write_bytes(text)
    monkeypatch.setattr(text_tables, "_BYTES", size)
    expected = text.split(b"\n")[: None if text and not text.endswith(b"\n") else -1]
    blocks = list(line_blocks(path, 2, progress=False))
    assert [line for _, lines in blocks for line in lines] == [line.removesuffix(b"\r") for line in expected]
    assert [start for start, _ in blocks] == [sum(len(lines) for _, lines in blocks[:i]) for i in range(len(blocks))]
    assert count_lines(path, progress=False) == len(expected)


@pytest.mark.parametrize(
    ("text", "dtype", "options", "message"),
    [
        (b"0 1\n2 3\n4 -1\n", np.int64, {"below": 5, "what": "nodes"}, r"line 3: the nodes must lie in 0\.\.4; got -1"),
        (b"0 1\n5 3\n", np.int64, {"below": 5}, r"line 2: the numbers must lie in 0\.\.4; got 0\.\.5"),
        (b"0 1\n2.5 3\n", np.int64, {}, "from line 1 on: .*2.5"),
        (b"0 99999999999999999999\n", np.int64, {}, "from line 1 on: .*99999999999999999999"),
        (b"0 1\nnan 3\n", np.float32, {}, "line 2: the numbers must be finite"),
        (b"0 1\n2 -inf\n", np.float32, {}, "line 2: the numbers must be finite"),
        (b"0 1\n2 1e300\n", np.float32, {}, "line 2: the numbers must be finite"),
        (b"0 1\n\xff\xfe 1\n", np.int64, {}, "from line 1 on"),
        (b"\n", np.int64, {}, "from line 1 on"),
        (b"  \n\t\n", np.int64, {}, "from line 1 on"),
    ],
)
def test_numbers_that_are_none_or_out_of_range(tmp_path, recwarn, text, dtype, options, message):
    path = tmp_path / "edges.txt"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"edges\.txt, {message}"):
        numbers(path, dtype, **options)
    assert not recwarn.list


@pytest.mark.parametrize("damage", [lambda blob: b"", lambda blob: blob[:-9], lambda _: b"1 2\n", lambda b: b[:20]])
def test_damaged_gzip_names_the_file(tmp_path, damage):
    path = tmp_path / "edges.txt.gz"
    path.write_bytes(damage(gzip.compress(b"1 2\n" * 1000)))
    if path.stat().st_size:
        with pytest.raises(ValueError, match=r"edges\.txt\.gz: .*Fetch the file again"):
            numbers(path)
    else:
        assert numbers(path) == []


def test_a_wrong_checksum_is_found(tmp_path):
    """One byte of what gzip stores, not compresses: only the sum at the end tells."""
    blob = bytearray(gzip.compress(b"1 2\n3 4\n", compresslevel=0))
    blob[blob.index(b"3 4")] = ord("7")
    (tmp_path / "edges.txt.gz").write_bytes(blob)
    with pytest.raises(ValueError, match=r"edges\.txt\.gz: .*CRC check failed"):
        numbers(tmp_path / "edges.txt.gz")
