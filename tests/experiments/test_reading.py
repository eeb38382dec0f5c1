"""What a file's content makes a parser raise becomes one sentence; what is not about the content stays as it is."""

import gzip
import io
import re
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from diffusion_mp_experiments.files.reading import as_path, reading
from diffusion_mp_experiments.graphs import load_ogb, load_pokec, synthetic_pokec
from diffusion_mp_experiments.sequences import IMDb, ListOps, Pathfinder

FILE = Path("folder") / "numbers.bin"


def before_the_beginning():
    with Path(__file__).open("rb") as file:
        file.seek(-1)


def recursion():
    return recursion()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (before_the_beginning, "OSError: [Errno 22]"),
        (lambda: gzip.decompress(b"no gzip"), "BadGzipFile: Not a gzipped file"),
        (lambda: gzip.decompress(gzip.compress(b"text")[:-9]), "EOFError"),
        (lambda: zlib.decompress(b"text"), "error: Error -3"),
        (lambda: zipfile.ZipFile(io.BytesIO(b"no zip")), "BadZipFile: File is not a zip file"),
        (lambda: struct.unpack("<q", b""), "error: unpack requires a buffer of 8 bytes"),
        (lambda: {}["x"], "KeyError: 'x'"),
        (lambda: [][0], "IndexError: list index out of range"),
        (lambda: int("one"), "invalid literal for int"),
        (recursion, "RecursionError"),
    ],
)
def test_one_sentence_with_the_file_and_the_way_out(read, said):
    with (
        pytest.raises(ValueError, match=f"^{re.escape(f'{FILE}: {said}')}.*\\. Fetch it again\\.$") as caught,
        reading(FILE, "Fetch it again."),
    ):
        read()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "none"), PermissionError(13, "no"), MemoryError(), ImportError(), KeyboardInterrupt()],
)
def test_what_is_not_about_the_content_passes(error):
    with pytest.raises(type(error)) as caught, reading(FILE, "Fetch it again."):
        raise error
    assert caught.value is error


def test_a_sentence_that_names_the_file_stands_and_long_ones_are_cut():
    with pytest.raises(ValueError, match=r"^folder/numbers\.bin has 3 rows$"), reading(FILE, "Fetch it again."):
        raise ValueError(f"{FILE} has 3 rows")
    with pytest.raises(ValueError, match="xxx …") as caught, reading(FILE, "Fetch it again."):
        raise ValueError("x" * 10**6)
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("path", [5, ["a"], None])
def test_paths_and_options_of_another_kind(path):
    for read in (IMDb, load_pokec, lambda path: load_ogb(path, "ogbn-arxiv")):
        with pytest.raises(TypeError, match=r"(path|root) must be a path, a str or a pathlib\.Path; got"):
            read(path)
    if path is not None:
        with pytest.raises(TypeError, match="cache must be a path"):
            synthetic_pokec(10, 10, 3, cache=path)
    assert as_path("~/data", "root") == Path.home() / "data"
    with pytest.raises(ValueError, match="root must be a path that a file can have"):
        as_path("a\0b", "root")
    with pytest.raises(TypeError, match="operators must be a list of names; got 'MAX'"):
        ListOps(operators="MAX")
    with pytest.raises(TypeError, match="distractors must be a whole number; got"):
        Pathfinder(distractors=2.5)
