"""MATLAB's files: what SciPy writes is read, compressed or not, and what is no matrix of numbers is refused."""

import zlib

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import eye

from diffusion_mp_experiments.files.arrays import read_matrices

MEMORY = 1 << 30


def read(path, names="A", memory=MEMORY):
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return read_matrices(path, names.split(), scratch, memory)


@pytest.mark.parametrize("compressed", [False, True])
def test_what_scipy_writes(tmp_path, compressed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit('the child imports what lies in the current folder')")
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
    *full, sparse = read(tmp_path / "a.mat", " ".join(names))
    for name, found in zip(names, full, strict=False):
        assert found.shape == variables[name].shape
        assert np.array_equal(found, variables[name])
    assert (sparse != variables["sparse"]).nnz == 0


def broken_sparse():
    matrix = eye(3, format="csc")
    matrix.indices[1] = 9
    return matrix


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"A": "text"}, "A is no matrix of real numbers"),
        ({"A": np.array([1, "a"], dtype=object)}, "A is no matrix of real numbers"),
        ({"A": np.array([[1j]])}, "A is no matrix of real numbers"),
        ({"A": np.zeros((2, 2, 2))}, "A is no matrix of real numbers"),
        ({"A": broken_sparse()}, "indices"),
        ({"B": np.eye(2)}, "it has no A"),
    ],
)
def test_other_variables(tmp_path, content, message):
    savemat(tmp_path / "a.mat", content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.mat")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blob: blob[:124] + b"\x00\x02IM" + blob[128:], "MATLAB 7.3; save it as version 7"),
        (lambda blob: blob[:124] + b"\x07\x00MI" + blob[128:], "Unknown mat file type"),
        (lambda blob: bytes(4) + blob[4:], "it is of version 4"),
        (lambda blob: blob[:-8], "could not read bytes"),
        (lambda blob: blob[:128] + bytes(80), "Did not read any bytes|Expecting miMATRIX"),
    ],
)
def test_other_files(tmp_path, change, message):
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_memory_is_limited(tmp_path):
    """A gigabyte of zeros, packed."""
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    size = 1 << 30
    head = path.read_bytes()[128:176] + b"\x09\0\0\0" + size.to_bytes(4, "little")
    head = head[:4] + (size + 48).to_bytes(4, "little") + head[8:]
    head = head[:32] + (4).to_bytes(4, "little") + (size // 32).to_bytes(4, "little") + head[40:]
    machine = zlib.compressobj(1)
    packed = machine.compress(head) + b"".join(machine.compress(bytes(1 << 24)) for _ in range(64)) + machine.flush()
    blob = path.read_bytes()[:128] + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed
    path.write_bytes(blob)
    with pytest.raises(ValueError, match="MemoryError"):
        read(path)


def test_a_crash_is_a_sentence(tmp_path):
    """The reason for a process of its own: a type of numbers that does not exist crashes `scipy.io.loadmat`."""
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(3)})
    blob = bytearray(path.read_bytes())
    assert blob[176] == 9  # double
    blob[176] = 200
    path.write_bytes(blob)
    with pytest.raises(ValueError, match=r"it makes scipy\.io\.loadmat crash"):
        read(path)
