"""Arrays that are made once and then opened by memory map."""

import hashlib
import json

import numpy as np
import pytest
import torch

from diffusion_mp.data.mapped import mapped_arrays


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_bytes(b"1 2 3")
    return file


def maker(source):
    made = []

    def make(arrays):
        made.append(1)
        arrays.create("a", (2, 3), np.int64)
        arrays.write("a", (slice(None), slice(1, 3)), np.array([[1, 2], [3, 4]]))
        arrays.put("b", np.array([len(source.read_bytes())]))

    return make, made


def test_made_once_and_then_mapped(source, tmp_path):
    make, made = maker(source)
    for _ in range(2):
        arrays = mapped_arrays(tmp_path / "cache", make, [source], made_by="v1")
        assert arrays["a"].tolist() == [[0, 1, 2], [0, 3, 4]]
    assert len(made) == 1
    arrays["a"][0, 0] = 7  # of this process alone
    assert mapped_arrays(tmp_path / "cache", make, [source], made_by="v1")["a"][0, 0] == 0
    record = json.loads((tmp_path / "cache" / "sources.json").read_text())
    assert record["files"]["numbers.txt"]["sha256"] == hashlib.sha256(b"1 2 3").hexdigest()


def test_another_source_or_maker_makes_it_anew_and_a_deleted_source_does_not(source, tmp_path):
    make, made = maker(source)
    cache = tmp_path / "cache"
    mapped_arrays(cache, make, [source], made_by="v1")
    source.write_bytes(b"1 2 3 4")
    assert mapped_arrays(cache, make, [source], made_by="v1")["b"].tolist() == [7]
    mapped_arrays(cache, make, [source], made_by="v2")
    assert len(made) == 3
    source.unlink()
    assert mapped_arrays(cache, make, [source], made_by="v2")["b"].tolist() == [7]
    assert len(made) == 3


def test_complete_or_absent(source, tmp_path):
    make, _ = maker(source)

    def stopped(arrays):
        make(arrays)
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        mapped_arrays(cache, stopped, [source])
    assert not cache.exists()
    assert mapped_arrays(cache, make, [source])["a"].sum() == 10
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["cache"]


def test_no_warning_and_no_copy(source, tmp_path, recwarn):
    arrays = mapped_arrays(tmp_path / "cache", maker(source)[0], [source])
    assert not recwarn
    assert torch.equal(arrays["a"], arrays["a"].clone())
