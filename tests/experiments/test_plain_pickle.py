"""Pickles read as data: what NumPy and SciPy write comes back, and nothing else does anything."""

import pickle
import struct
import time
from collections import defaultdict

import numpy as np
import pytest
from hostile import Payload
from scipy.sparse import csr_matrix

from diffusion_mp_experiments.files.pickled_arrays import NAMES, as_array, as_csr, as_integers, as_mapping
from diffusion_mp_experiments.files.plain_pickle import Made, read_pickle

PROTOCOLS = range(6)


def read(content, protocol=4):
    return read_pickle(content if isinstance(content, bytes) else pickle.dumps(content, protocol), NAMES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(protocol):
    values = [0, -1, 2**70, 1.5, "Größe", b"\x00\xff", True, None, (), (1,), (1, 2, 3, 4), [[1], []], {"a": [1], 3: {}}]
    if protocol < 3:
        values.remove(b"\x00\xff")
    assert read(values, protocol) == values


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.ones((2, 3), ">f4"),
        np.array(3, np.uint8),
        np.zeros((0, 4), np.float16),
        np.array([True, False]),
    ],
)
def test_arrays(array, protocol):
    found = as_array(read(array, protocol))
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_matrices_mappings_and_integers(protocol):
    matrix = csr_matrix(np.array([[0, 2.0, 0], [1, 0, 0]], np.float32))
    assert (as_csr(read(matrix, protocol)) != matrix).nnz == 0
    mapping = defaultdict(list, {0: [1, 2], 1: []})
    assert as_mapping(read(mapping, protocol)) == mapping
    assert as_mapping(read(dict(mapping), protocol)) == mapping
    for integers in ([1, np.int64(2), np.uint8(3)], np.array([1, 2, 3], np.int32), (1, 2, 3)):
        assert as_integers(read(integers, protocol)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("way", ["system", "eval", "open"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_names_are_refused_and_not_run(tmp_path, protocol, way):
    marker = tmp_path / "marker"
    for content in (Payload(marker, way), [np.ones(2), {"a": Payload(marker, way)}]):
        with pytest.raises(ValueError, match=r"it asks for \w+\.(system|eval|open), which is no array"):
            read(content, protocol)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"]",
        b"(l",
        b"h\x01.",
        b"\x80\x04]\x94(K\x01e",
        b"I1\n(I2\n.",
        b"}]K\x01s.",  # a list for a key
        b"K\x01K\x02a.",  # appends to a number
        b"K\x01)R.",  # calls a number
        b"K\x01)b.",
        b"\x82\x01.",  # an extension of copyreg
        b"Pid\n.",
        b"\x97.",
        b"\x96" + struct.pack("<Q", 2**62) + b".",  # a bytearray of that length
        b"\x8d" + struct.pack("<Q", 2**62) + b".",
        b"cnumpy\ndtype\n.b",
    ],
)
def test_damaged_and_strange_pickles(content):
    with pytest.raises((ValueError, IndexError, KeyError)):
        as_array(read(content))


def test_a_place_in_the_memo_takes_no_more_than_that():
    """The machine of Python itself makes room for all places below."""
    assert read(b"K\x07r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") == 7


def test_containers_within_containers_take_no_time():
    """Whoever goes through lists that hold each other twice, prints or hashes them, needs 2^60 steps."""
    lists = b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60)) + b"."
    start = time.perf_counter()
    value = read(lists)
    for use in (as_array, as_csr, as_integers, as_mapping):
        with pytest.raises(ValueError, match="it has"):
            use(value)
    tuples = b"K\x01" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))
    for content in (b"}" + tuples + b"K\x01s.", b"cnumpy\ndtype\n(" + tuples + b"tR."):
        with pytest.raises(ValueError, match="it has"):
            as_array(read(content))
    assert time.perf_counter() - start < 5


def made(name, *arguments, state=None):
    return Made(name, arguments, state)


DTYPE = made("numpy.dtype", "i8", False, True, state=(3, "<", None, None, None, -1, -1, 0))


def array(shape=(1,), dtype=DTYPE, data=bytes(8)):
    return made("numpy._core.multiarray._reconstruct", state=(1, shape, dtype, False, data))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (array(shape=(2,)), "8 bytes do not fill"),
        (array(shape=(2**39, 2**39)), "8 bytes do not fill"),
        (array(shape=(-1, -1)), "is no shape"),
        (array(shape=(True,)), "is no shape"),
        (array(shape=(1,) * 40), "is no shape"),
        (array(shape=[1]), "is no shape"),
        (array(dtype=made("numpy.dtype", "O8", state=DTYPE.state)), "no numbers"),
        (array(dtype=made("numpy.dtype", "V8", state=(3, "|", (DTYPE,), ("a",), {}, 8, 1, 0x3F))), "no numbers"),
        (array(dtype=made("numpy.dtype", "i8", state=(3, "?", None))), "no byte order"),
        (array(dtype=made("numpy.dtype")), "where a numpy.dtype belongs"),
        (array(data=[1]), "where the bytes of an array belong"),
        (made("numpy._core.multiarray._reconstruct", state=(1,)), "where 4 values belong"),
        (made("numpy._core.multiarray._reconstruct"), "where an array belongs"),
        (made("numpy._core.numeric._frombuffer", bytes(8), DTYPE, (2,), "C"), "8 bytes do not fill"),
    ],
)
def test_arrays_that_are_not_filled(value, message):
    """A type whose state claims that the numbers are pointers is what made NumPy's own unpickling crash."""
    with pytest.raises(ValueError, match=message):
        as_array(value)


def test_matrices_with_indices_outside():
    matrix = csr_matrix(np.eye(3))
    for name, values in {"indices": [0, 9, 2], "indptr": [0, 1, 9, 3], "data": [1.0, 2.0]}.items():
        broken = matrix.copy()
        setattr(broken, name, np.array(values, getattr(matrix, name).dtype))
        with pytest.raises(ValueError, match=r"ind|dat"):
            as_csr(read(broken))
