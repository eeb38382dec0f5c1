"""Arrays that are made once and then mapped, also by processes at once, some of them killed."""

import hashlib
import json
import multiprocessing
import random
import signal
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import cache_racers
from diffusion_mp_experiments.graphs.cached import made_once, mapped_arrays

DAMAGES = [
    lambda cache: (cache / "b.npy").unlink(),
    lambda cache: (cache / "c.npy").write_bytes((cache / "b.npy").read_bytes()),
    lambda cache: (cache / "a.npy").write_bytes((cache / "a.npy").read_bytes()[:-8]),
    lambda cache: np.save(cache / "a.npy", np.zeros((3, 2), np.int64)),
    lambda cache: np.save(cache / "a.npy", np.zeros((2, 3))),
    lambda cache: np.save(cache / "a.npy", np.array([[{}] * 3] * 2, dtype=object)),
    lambda cache: (cache / "a.npy").write_bytes(b""),
    lambda cache: (cache / "sources.json").unlink(),
    lambda cache: (cache / "sources.json").write_text("{"),
    lambda cache: (cache / "sources.json").write_text("[]"),
    lambda cache: (cache / "sources.json").write_text(
        '{"made_by": "v1", "files": 3, "arrays": {}}'
    ),
]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def mapped(tmp_path, cache):
    """Makes or reads the arrays of `mapped.source`; `mapped.times` says how often they were made."""
    source = tmp_path / "numbers.txt"
    source.write_bytes(b"1 2 3")

    def make(arrays):
        mapped.times += 1
        arrays.create("a", (2, 3), np.int64)
        arrays.write("a", (slice(None), slice(1, 3)), np.array([[1, 2], [3, 4]]))
        arrays.put("b", np.array([len(source.read_bytes())]))

    def mapped(made_by="v1", and_then=lambda: None):
        return mapped_arrays(
            cache, lambda arrays: (make(arrays), and_then()), [source], made_by=made_by
        )

    mapped.source = source
    mapped.times = 0
    return mapped


def test_made_once_and_then_mapped_without_a_warning(mapped, cache, recwarn):
    for _ in range(2):
        arrays = mapped()
        assert arrays["a"].tolist() == [[0, 1, 2], [0, 3, 4]]
    assert mapped.times == 1
    arrays["a"][0, 0] = 7  # of this process alone
    assert mapped()["a"][0, 0] == 0
    assert not recwarn
    record = json.loads((cache / "sources.json").read_text())
    assert (
        record["files"]["numbers.txt"]["sha256"] == hashlib.sha256(b"1 2 3").hexdigest()
    )


def test_what_another_process_made_before_the_lock_was_free_is_read(cache):
    actual = iter([None, 7])
    assert (
        made_once(
            cache, lambda folder: next(actual), lambda folder: pytest.fail("made again")
        )
        == 7
    )


def test_another_source_or_maker_makes_it_anew_and_a_deleted_source_does_not(mapped):
    mapped()
    mapped.source.write_bytes(b"1 2 3 4")
    assert mapped()["b"].tolist() == [7]
    mapped("v2")
    assert mapped.times == 3
    mapped.source.unlink()
    assert mapped("v2")["b"].tolist() == [7]
    assert mapped.times == 3


def test_complete_or_absent(mapped, cache, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        mapped(and_then=Mock(side_effect=KeyboardInterrupt))
    assert not cache.exists()
    assert mapped()["a"].sum() == 10
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["cache"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_made_anew_with_a_warning(mapped, cache, damage):
    mapped()
    damage(cache)
    with pytest.warns(UserWarning, match=r"cache: .*made anew"):
        arrays = mapped()
    assert arrays["a"].tolist() == [[0, 1, 2], [0, 3, 4]]
    assert mapped.times == 2
    assert sorted(path.name for path in cache.iterdir()) == [
        "a.npy",
        "b.npy",
        "sources.json",
    ]


def test_a_folder_with_other_things_is_not_replaced(mapped, cache):
    cache.mkdir()
    (cache / "thesis.tex").touch()
    with pytest.raises(
        ValueError,
        match=r"holds thesis\.tex, which is no array; name a folder of its own",
    ):
        mapped()
    assert (cache / "thesis.tex").exists()


def test_what_a_killed_process_left_is_deleted(mapped, tmp_path):
    (tmp_path / "cache.part-1234" / "new").mkdir(parents=True)
    mapped()
    assert not (tmp_path / "cache.part-1234").exists()


PROCESSES = 4


def prepare(kind: str, folder: Path, state: str) -> Path:
    """The folder of the cache as earlier runs may have left it: absent, of yesterday, or without one of its files."""
    cache = folder / "cache" if kind == "arrays" else folder / "processed" / "cache"
    if state != "absent":
        cache_racers.RACES[kind](folder)
        if state == "broken":
            sorted(cache.glob("*.npy"))[-1].unlink()
        else:
            record = json.loads((cache / "sources.json").read_text())
            record["made_by"] = "yesterday"
            (cache / "sources.json").write_text(json.dumps(record))
    return cache


def run_race(kind: str, folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    cache = prepare(
        kind, folder, rng.choice(["absent", "absent", "yesterday", "broken"])
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusion_mp_experiments.graphs"])
    start = time.time() + 0.2
    racers = [
        context.Process(target=cache_racers.race, args=(kind, folder, start))
        for _ in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    victims = rng.sample(racers, rng.choice([0, 1, 2, PROCESSES]))
    time.sleep(max(0.0, start - time.time()))
    for victim in victims:
        time.sleep(rng.random() * 0.02)
        victim.kill()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0 or (
            racer in victims and racer.exitcode == -signal.SIGKILL
        )
    survivors = len(victims) < PROCESSES
    with warnings.catch_warnings():
        if survivors:
            # It is complete: nothing is damaged, nothing is made anew.
            warnings.simplefilter("error")
            before = cache.stat().st_ino
        cache_racers.RACES[kind](folder)
        if survivors:
            assert cache.stat().st_ino == before


@pytest.mark.parametrize("kind", cache_racers.RACES)
@pytest.mark.parametrize("races", [4, pytest.param(300, marks=pytest.mark.slow)])
def test_races(tmp_path, kind, races):
    rng = random.Random(races)
    for i in range(races):
        run_race(kind, tmp_path / str(i), rng)
