"""Pickles read as data: what NumPy and SciPy write comes back, and nothing else does anything."""

import pickle
import struct
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from diffusion_mp_experiments.files import pickles
from diffusion_mp_experiments.files.pickles import as_integers, read_pickle

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
]
STRANGE += [b"}]K\x01s.", b"K\x01K\x02a.", b"K\x01)R."]  # a list for a key; appends to a number, and calls one
STRANGE += [b"K\x01)b.", b"cnumpy\ndtype\n}b.", b"}}b."]  # a state for a number, for a name, and for a dictionary
STRANGE += [b"\x82\x01.", b"\x8f."]  # an extension of copyreg, and a set
STRANGE += [code + struct.pack("<Q", 2**62) + b"." for code in (b"\x96", b"\x8d")]  # a bytearray of that length
STRANGE += [b"})" + b"\x85" * 10**5 + b"K\x01s."]  # a key of nested tuples, whose hash overflows the stack
STRANGE += [b"cnumpy\ndtype\n.b"]
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
    (pickle.dumps(np.dtype("i8"), 2).replace(b"X\x01\x00\x00\x00<", b"X\x01\x00\x00\x00?"), "no byte order"),
]


def read(content, protocol=4):
    return read_pickle(content if isinstance(content, bytes) else pickle.dumps(content, protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_comes_back(protocol):
    values = [0, -1, 2**70, 1.5, "Größe", b"\x00\xff", True, None, (), (1,), (1, 2, 3, 4), [[1], []], {"a": [1], 3: {}}]
    assert read(values, protocol) == values
    arrays = [np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.ones((2, 3), ">f4")]
    for array in (*arrays, np.array(3, np.uint8), np.zeros((0, 4), np.float16), np.array([True, False])):
        found = read(array, protocol)
        assert found.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(found, array)
    matrix = csr_matrix(np.array([[0, 2.0, 0], [1, 0, 0]], np.float32))
    assert (read(matrix, protocol) != matrix).nnz == 0
    for mapping in (defaultdict(list, {0: [1, 2], 1: []}), {0: [1, 2], 1: []}):
        assert read(mapping, protocol) == mapping
    for integers in ([1, np.int64(2), np.uint8(3)], np.array([1, 2, 3], np.int32), (1, 2, 3)):
        assert as_integers(read([integers], protocol)[0]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("content", STRANGE)
def test_damaged_and_strange_pickles(content):
    with pytest.raises((ValueError, IndexError, KeyError)):
        assert isinstance(read(content), np.ndarray) or as_integers(read(content))


def test_containers_within_containers_take_no_time():
    """Searching, printing or hashing lists that contain each other twice takes 2^60 steps."""
    lists = b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60)) + b"."
    tuples = b"K\x01" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))
    start = time.perf_counter()
    with pytest.raises(ValueError, match="it has"):
        as_integers(read(lists))
    for content in (b"}" + tuples + b"K\x01s.", b"cnumpy\ndtype\n(" + tuples + b"tR(K\x03X\x01\x00\x00\x00<tb."):
        with pytest.raises(ValueError, match="it has"):
            read(content)
    assert time.perf_counter() - start < 5
    program = r'import pickle; pickle.loads(b"})" + b"\x85" * 3_000_000 + b"K\x01s.")'
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode < 0
    assert read(b"K\x07r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") == 7  # a place in the memo, for which C makes room
    matrix = csr_matrix(np.eye(3))
    for name, values in {"indices": [0, 9, 2], "indptr": [0, 1, 9, 3], "data": [1.0, 2.0]}.items():
        broken = matrix.copy()
        setattr(broken, name, np.array(values, getattr(matrix, name).dtype))
        with pytest.raises(ValueError, match=r"ind|dat"):
            read(broken)


def dtype(code="i8", order="<"):
    return pickles._Object(lambda state: None, pickles._dtype(code, (3, order, None)))


@pytest.mark.parametrize(("options", "message"), UNFILLED)
def test_arrays_that_are_not_filled(options, message):
    with pytest.raises(ValueError, match=message):
        pickles._array(**{"data": bytes(8), "dtype": dtype(), "shape": (1,), "order": "C"} | options)


@pytest.mark.parametrize(("content", "message"), NO_NUMBERS)
def test_types_that_are_no_numbers(content, message):
    """A type whose state claims that the numbers are pointers makes NumPy's own unpickling crash."""
    with pytest.raises(ValueError, match=message):
        read(content)
