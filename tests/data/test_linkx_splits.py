"""LINKX's splits are pickles; what they could run is refused."""

import pickle

import numpy as np
import pytest
import torch

from diffusion_mp.data import load_linkx_splits


def save(path, splits):
    np.save(path, np.array(splits, dtype=object), allow_pickle=True)
    return path


def test_masks(tmp_path):
    splits = [
        {"train": np.array([0, 3]), "valid": np.array([1]), "test": np.array([2], dtype=np.int32)},
        {"train": [4], "valid": [], "test": [0, 1]},
    ]
    first, second = load_linkx_splits(save(tmp_path / "pokec-splits.npy", splits), num_nodes=5)
    assert first.train.tolist() == [True, False, False, True, False]
    assert first.test.nonzero().tolist() == [[2]]
    assert second.train.nonzero().tolist() == [[4]]
    assert not second.val.any()
    (alone,) = load_linkx_splits(save(tmp_path / "one.npy", splits[0]), num_nodes=5)
    assert torch.equal(alone.train, first.train)


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize("content", [Harm(), {"train": Harm(), "valid": [], "test": []}, torch.ones(2)])
def test_nothing_is_run(tmp_path, content):
    path = save(tmp_path / "pokec-splits.npy", [content, 0])
    with pytest.raises(ValueError, match=r"it asks for (torch|builtins)\S+, which is no array"):
        load_linkx_splits(path, 5)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([{"train": [5], "valid": [], "test": []}, 0], "the nodes of train must lie in 0..4, got up to 5"),
        ([{"train": [-1], "valid": [], "test": []}, 0], "the nodes of train must lie in 0..4"),
        ([{"train": [1]}, 0], "must have the entries train, valid and test"),
        ([1, 2], "must have the entries"),
    ],
)
def test_other_contents(tmp_path, splits, message):
    with pytest.raises(ValueError, match=message):
        load_linkx_splits(save(tmp_path / "pokec-splits.npy", splits), 5)


def test_no_array_at_all(tmp_path):
    path = tmp_path / "pokec-splits.npy"
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="must be an array of dictionaries"):
        load_linkx_splits(path, 5)
    with pytest.raises(FileNotFoundError, match=r"take pokec-splits\.npy from"):
        load_linkx_splits(tmp_path / "absent.npy", 5)
