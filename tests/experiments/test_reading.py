"""What a file's content makes a parser raise becomes one sentence; what is not about the content stays as it is."""

import gzip
import io
import json
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from diffusion_mp_experiments.files.reading import reading

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
        (lambda: tarfile.TarFile(fileobj=io.BytesIO(b"no tar")), "ReadError"),
        (lambda: pickle.loads(b"no pickle"), "UnpicklingError"),
        (lambda: b"\xff".decode(), "UnicodeDecodeError"),
        (lambda: json.loads("{"), "JSONDecodeError"),
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


def test_a_sentence_that_names_the_file_stands():
    with pytest.raises(ValueError, match=r"^folder/numbers\.bin has 3 rows$"), reading(FILE, "Fetch it again."):
        raise ValueError(f"{FILE} has 3 rows")


def test_long_quotations_are_cut():
    with pytest.raises(ValueError, match="xxx …") as caught, reading(FILE, "Fetch it again."):
        raise ValueError("x" * 10**6)
    assert len(str(caught.value)) < 400
