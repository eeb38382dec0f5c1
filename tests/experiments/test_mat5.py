"""MATLAB's files: what SciPy writes is read, compressed or not, and what is none of ours is refused."""

import zlib

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import eye

from diffusion_mp_experiments.files.mat5 import map_variable


@pytest.mark.parametrize("compressed", [False, True])
def test_what_scipy_writes(tmp_path, compressed):
    rng = np.random.default_rng(0)
    variables = {
        "text": "not asked for",
        "cell": np.array([1, "a"], dtype=object),
        "struct": {"a": 1},
        "sparse": eye(3, format="csc"),
        "A": rng.standard_normal((5, 3)),
        "row": np.arange(7)[None],
        "one": np.array([[3]], np.uint8),
        "empty": np.zeros((2, 0)),
        "large": rng.integers(0, 9, (1000, 1700)),
        "single": np.ones((3, 2), np.float32),
        "logical": np.ones((2, 2), bool),
    }
    savemat(tmp_path / "a.mat", variables, do_compression=compressed)
    for name in list(variables)[4:]:
        found = map_variable(tmp_path / "a.mat", name, tmp_path)
        assert found.shape == variables[name].shape
        assert np.array_equal(found, variables[name])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"A": "text"}, "no full matrix of real numbers"),
        ({"A": eye(3, format="csc")}, "no full matrix of real numbers"),
        ({"A": np.array([[1j]])}, "no full matrix of real numbers"),
        ({"A": np.zeros((2, 2, 2))}, "no matrix with rows and columns"),
        ({"B": np.eye(2)}, "it has no A"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_other_variables(tmp_path, content, message, compressed):
    savemat(tmp_path / "a.mat", content, do_compression=compressed)
    with pytest.raises(ValueError, match=message):
        map_variable(tmp_path / "a.mat", "A", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blob: blob[:124] + b"\x00\x02IM" + blob[128:], "MATLAB 7.3; save it as version 7"),
        (lambda blob: blob[:124] + b"\x01\x00MI" + blob[128:], "no MATLAB file"),
        (lambda blob: b"", "no MATLAB file"),
        (lambda blob: blob[:-8], "it ends within A"),
        (lambda blob: blob[:128] + bytes(80), "an element of type 0"),
    ],
)
def test_other_files(tmp_path, change, message):
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        map_variable(path, "A", tmp_path)


def test_a_bomb_is_unpacked_no_further_than_its_matrix(tmp_path):
    path = tmp_path / "a.mat"
    savemat(path, {"A": np.eye(4)})
    blob = path.read_bytes()
    packed = zlib.compress(blob[128:] + bytes(1 << 28), 1)
    path.write_bytes(blob[:128] + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed)
    assert np.array_equal(map_variable(path, "A", tmp_path), np.eye(4))
    assert (tmp_path / "A").stat().st_size < 300


def test_a_file_of_the_old_level_is_refused(tmp_path):
    savemat(tmp_path / "a.mat", {"A": np.eye(4)}, format="4")
    with pytest.raises(ValueError, match="no MATLAB file of version 5 to 7"):
        map_variable(tmp_path / "a.mat", "A", tmp_path)
