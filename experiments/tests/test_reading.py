"""Files as data: any fault of a parser is one sentence; texts, MATLAB's files, and pickles, which do nothing."""

import gzip
import pickle
import re
import struct
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_matrix, csr_matrix, eye

from diffusion_mp_experiments.files import pickles
from diffusion_mp_experiments.files.arrays import read_matrices
from diffusion_mp_experiments.files.pickles import as_integers, read_pickle
from diffusion_mp_experiments.files.reading import reading
from diffusion_mp_experiments.files.text_tables import (
    count_lines,
    line_blocks,
    number_blocks,
)
from small_sets import at_most

FILE = Path("folder") / "numbers.bin"
OTHER_FILES = [
    (
        lambda blob: blob[:124] + b"\x00\x02IM" + blob[128:],
        "MATLAB 7.3; save it as version 7",
    ),
    (lambda blob: blob[:124] + b"\x07\x00MI" + blob[128:], "Unknown mat file type"),
    (lambda blob: bytes(4) + blob[4:], "it is of version 4"),
    (lambda blob: blob[:-8], "could not read bytes"),
    (lambda blob: blob[:128] + bytes(80), "Did not read any bytes|Expecting miMATRIX"),
    # The reason for a process of its own: a type of numbers that does not exist crashes `scipy.io.loadmat`.
    (
        lambda blob: blob[:176] + b"\xc8" + blob[177:],
        r"it makes scipy\.io\.loadmat crash",
    ),
]
OUT_OF_RANGE = csc_matrix((np.ones(3), [0, 9, 2], [0, 1, 2, 3]), (3, 3))
OTHER_NUMBERS = [
    (
        b"0 1\n2 3\n4 -1\n",
        np.int64,
        {"below": 5, "what": "nodes"},
        r"line 3: the nodes must lie in 0\.\.4; got -1",
    ),
    (
        b"0 1\n5 3\n",
        np.int64,
        {"below": 5},
        r"line 2: the numbers must lie in 0\.\.4; got 0\.\.5",
    ),
    (b"0 1\n2.5 3\n", np.int64, {}, "from line 1 on: .*2.5"),
    (
        b"0 99999999999999999999\n",
        np.int64,
        {},
        "from line 1 on: .*99999999999999999999",
    ),
    (b"0 1\nnan 3\n", np.float32, {}, "line 2: the numbers must be finite"),
    (b"0 1\n2 -inf\n", np.float32, {}, "line 2: the numbers must be finite"),
    (b"0 1\n2 1e300\n", np.float32, {}, "line 2: the numbers must be finite"),
    (b"0 1\n\xff\xfe 1\n", np.int64, {}, "from line 1 on"),
]


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
        (lambda: {}["x"], "KeyError: 'x'"),
        (lambda: int("one"), "invalid literal for int"),
        (recursion, "RecursionError"),
    ],
)
def test_one_sentence_with_the_file_and_the_way_out(read, said):
    with (
        pytest.raises(
            ValueError, match=f"^{re.escape(f'{FILE}: {said}')}.*\\. Fetch it again\\.$"
        ) as caught,
        reading(FILE, "Fetch it again."),
    ):
        read()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "none"),
        PermissionError(13, "no"),
        MemoryError(),
        ImportError(),
        KeyboardInterrupt(),
    ],
)
def test_what_is_not_about_the_content_passes(error):
    with pytest.raises(type(error)) as caught, reading(FILE, "Fetch it again."):
        raise error
    assert caught.value is error


def test_a_sentence_that_names_the_file_stands_and_long_ones_are_cut():
    with (
        pytest.raises(ValueError, match=r"^folder/numbers\.bin has 3 rows$"),
        reading(FILE, "Fetch it again."),
    ):
        raise ValueError(f"{FILE} has 3 rows")
    with (
        pytest.raises(ValueError, match="xxx …") as caught,
        reading(FILE, "Fetch it again."),
    ):
        raise ValueError("x" * 10**6)
    assert len(str(caught.value)) < 400


def read(path, *names):
    scratch = path.parent / "scratch"
    scratch.mkdir()
    return read_matrices(path, list(names or "A"), scratch, 1 << 30)


@pytest.mark.parametrize("compressed", [False, True])
def test_what_scipy_writes(tmp_path, compressed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text(
        "raise SystemExit('the child imports what lies in the current folder')"
    )
    rng = np.random.default_rng(0)
    variables = {
        "text": "not read",
        "cell": np.array([1, "a"], dtype=object),
        "struct": {"a": 1},
        "A": rng.standard_normal((5, 3)),
        "row": np.arange(7)[None],
        "one": np.array([[3]], np.uint8),
        "empty": np.zeros((2, 0)),
        "large": rng.integers(0, 9, (1000, 1700)),
        "single": np.ones((3, 2), np.float32),
        "logical": np.ones((2, 2), bool),
        "sparse": eye(3, format="csc"),
    }
    savemat(tmp_path / "a.mat", variables, do_compression=compressed)
    names = list(variables)[3:]
    *full, sparse = read(tmp_path / "a.mat", *names)
    for name, actual in zip(names, full, strict=False):
        assert actual.shape == variables[name].shape
        assert np.array_equal(actual, variables[name])
    assert (sparse != variables["sparse"]).nnz == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"A": "text"}, "A is no matrix of real numbers"),
        ({"A": np.array([1, "a"], dtype=object)}, "A is no matrix of real numbers"),
        ({"A": np.array([[1j]])}, "A is no matrix of real numbers"),
        ({"A": np.zeros((2, 2, 2))}, "A is no matrix of real numbers"),
        ({"A": OUT_OF_RANGE}, "indices"),
        ({"B": np.eye(2)}, "it has no A"),
    ],
)
def test_other_variables(tmp_path, content, message):
    savemat(tmp_path / "a.mat", content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.mat")


@pytest.mark.parametrize(("change", "message"), OTHER_FILES)
def test_other_files(tmp_path, change, message):
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_memory_is_limited(tmp_path):
    """Compressed, a gigabyte of zeros takes a megabyte."""
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    size = 1 << 30
    blob = path.read_bytes()
    matrix = bytearray(blob[128:176])
    struct.pack_into("<I", matrix, 4, size + 48)
    struct.pack_into("<II", matrix, 32, 4, size // 32)
    machine = zlib.compressobj(1)
    packed = machine.compress(matrix + struct.pack("<II", 9, size))
    for _ in range(64):
        packed += machine.compress(bytes(1 << 24))
    packed += machine.flush()
    path.write_bytes(blob[:128] + struct.pack("<II", 15, len(packed)) + packed)
    with pytest.raises(ValueError, match="MemoryError"):
        read(path)


def numbers(path: Path, dtype=np.int64, **options) -> list[list[float]]:
    return [
        row
        for _, block in number_blocks(path, 2, dtype, **options)
        for row in block.tolist()
    ]


def zipped(path: Path, text: bytes, times: int = 1) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(times):
            file.write(text)
    return path


@pytest.mark.parametrize("text", [b"1" * 2**20, b"\0" * 2**20])
def test_a_text_without_lines_is_refused_before_it_fills_the_memory(tmp_path, text):
    """16 MB in a file of a few kB."""
    path = zipped(tmp_path / "edges.txt.gz", text, times=16)
    for read in (numbers, count_lines):
        said = r"edges\.txt\.gz, line 1: a line must have at most \d+ bytes"
        with pytest.raises(ValueError, match=said), at_most(64e6):
            read(path)


def test_empty_lines_long_rows_and_a_wrong_checksum(tmp_path):
    path = zipped(tmp_path / "edges.txt.gz", b"1 2\n" + b"\n" * 2**10)
    assert numbers(path) == [[1, 2]]
    path = tmp_path / "edges.txt"
    path.write_bytes(b"1 2\n3" + b" " * 200 + b"4\n")
    with pytest.raises(
        ValueError, match=r"edges\.txt, line 2: a line must have at most 128 bytes"
    ):
        numbers(path)
    with pytest.raises(ValueError, match="line 2: a line must have at most 100 bytes"):
        list(line_blocks(path, 100))
    blob = bytearray(gzip.compress(b"1 2\n3 4\n", compresslevel=0))
    blob[blob.index(b"3 4")] = ord("7")
    (tmp_path / "edges.txt.gz").write_bytes(blob)
    with pytest.raises(ValueError, match=r"edges\.txt\.gz: .*CRC check failed"):
        numbers(tmp_path / "edges.txt.gz")


@pytest.mark.parametrize(("text", "dtype", "options", "message"), OTHER_NUMBERS)
def test_numbers_that_are_none_or_out_of_range(
    tmp_path, recwarn, text, dtype, options, message
):
    path = tmp_path / "edges.txt"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"edges\.txt, {message}"):
        numbers(path, dtype, **options)
    assert not recwarn.list


def test_damaged_gzip_names_the_file(tmp_path):
    path = tmp_path / "edges.txt.gz"
    complete = gzip.compress(b"1 2\n" * 1000)
    path.touch()
    assert numbers(path) == []
    for damaged in (complete[:-9], complete[:20], b"1 2\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"edges\.txt\.gz: .*Fetch the file again"):
            numbers(path)


PROTOCOLS = range(6)
STRANGE = [
    b"",
    b".",
    b"]",
    b"(l",
    b"h\x01.",
    b"\x80\x04]\x94(K\x01e",
    b"I1\n(I2\n.",
    b"Pid\n.",
    b"\x97.",
    b"cnumpy\ndtype\n.b",
    # A list for a key; appends to a number, and calls one.
    b"}]K\x01s.",
    b"K\x01K\x02a.",
    b"K\x01)R.",
    # A state for a number, for a name, and for a dictionary.
    b"K\x01)b.",
    b"cnumpy\ndtype\n}b.",
    b"}}b.",
    # An extension of copyreg, and a set.
    b"\x82\x01.",
    b"\x8f.",
    # A bytearray and a text of that length.
    b"\x96" + struct.pack("<Q", 2**62) + b".",
    b"\x8d" + struct.pack("<Q", 2**62) + b".",
    # A key of nested tuples, whose hash overflows the stack.
    b"})" + b"\x85" * 10**5 + b"K\x01s.",
]
UNFILLED = [
    ({"shape": (2,)}, "does not fill an array"),
    ({"shape": (2**39, 2**39)}, "does not fill"),
    ({"shape": (-1, -1)}, "is no shape"),
    ({"shape": (True,)}, "is no shape"),
    ({"shape": (1,) * 40}, "is no shape"),
    ({"shape": [1]}, "is no shape"),
    ({"data": [1]}, "does not fill"),
    ({"dtype": "i8"}, "where a dtype belongs"),
    ({"dtype": pickles._Object(lambda state: None)}, "where a dtype belongs"),
]
NO_NUMBERS = [
    (np.array([{}], dtype=object), "'O8', which are no numbers"),
    (np.zeros(2, [("a", "i8")]), "'V8', which are no numbers"),
    (np.array(["a"]), "'U1', which are no numbers"),
    (
        pickle.dumps(np.dtype("i8"), 2).replace(
            b"X\x01\x00\x00\x00<", b"X\x01\x00\x00\x00?"
        ),
        "no byte order",
    ),
]


def unpickled(content, protocol=4):
    return read_pickle(
        content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_comes_back(protocol):
    numbers = [0, -1, 2**70, 1.5, True, None]
    values = [*numbers, "Größe", b"\x00\xff", (), (1,), (1, 2, 3, 4), [[1], []]]
    values.append({"a": [1], 3: {}})
    assert unpickled(values, protocol) == values
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.ones((2, 3), ">f4"),
        np.array(3, np.uint8),
        np.zeros((0, 4), np.float16),
        np.array([True, False]),
    ):
        actual = unpickled(array, protocol)
        assert actual.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(actual, array)
    matrix = csr_matrix(np.array([[0, 2.0, 0], [1, 0, 0]], np.float32))
    assert (unpickled(matrix, protocol) != matrix).nnz == 0
    for mapping in (defaultdict(list, {0: [1, 2], 1: []}), {0: [1, 2], 1: []}):
        assert unpickled(mapping, protocol) == mapping
    for integers in (
        [1, np.int64(2), np.uint8(3)],
        np.array([1, 2, 3], np.int32),
        (1, 2, 3),
    ):
        assert as_integers(unpickled([integers], protocol)[0]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("content", STRANGE)
def test_damaged_and_strange_pickles(content):
    with pytest.raises((ValueError, IndexError, KeyError)):
        assert isinstance(unpickled(content), np.ndarray) or as_integers(
            unpickled(content)
        )


def test_containers_within_containers_take_no_time():
    """Searching, printing or hashing lists that contain each other twice takes 2^60 steps."""
    lists = b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60)) + b"."
    tuples = b"K\x01" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))
    start = time.perf_counter()
    with pytest.raises(ValueError, match="it has"):
        as_integers(unpickled(lists))
    for content in (
        b"}" + tuples + b"K\x01s.",
        b"cnumpy\ndtype\n(" + tuples + b"tR(K\x03X\x01\x00\x00\x00<tb.",
    ):
        with pytest.raises(ValueError, match="it has"):
            unpickled(content)
    assert time.perf_counter() - start < 5
    program = r'import pickle; pickle.loads(b"})" + b"\x85" * 3_000_000 + b"K\x01s.")'
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
        < 0
    )
    # a place in the memo, for which C makes room.
    assert unpickled(b"K\x07r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") == 7
    matrix = csr_matrix(np.eye(3))
    for name, values in {
        "indices": [0, 9, 2],
        "indptr": [0, 1, 9, 3],
        "data": [1.0, 2.0],
    }.items():
        broken = matrix.copy()
        setattr(broken, name, np.array(values, getattr(matrix, name).dtype))
        with pytest.raises(ValueError, match=r"ind|dat"):
            unpickled(broken)


def dtype(code="i8", order="<"):
    return pickles._Object(lambda state: None, pickles._dtype(code, (3, order, None)))


@pytest.mark.parametrize(("options", "message"), UNFILLED)
def test_arrays_that_are_not_filled(options, message):
    with pytest.raises(ValueError, match=message):
        pickles._array(
            **{"data": bytes(8), "dtype": dtype(), "shape": (1,), "order": "C"}
            | options
        )


@pytest.mark.parametrize(("content", "message"), NO_NUMBERS)
def test_types_that_are_no_numbers(content, message):
    """A type whose state claims that the numbers are pointers makes NumPy's own unpickling crash."""
    with pytest.raises(ValueError, match=message):
        unpickled(content)
