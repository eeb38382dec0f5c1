"""Processes that make one cache at once, some of them killed: none fails, and no folder is left that is half made."""

import multiprocessing
import random
import time
import warnings
from pathlib import Path

import cache_racers
import pytest

PROCESSES = 4


def prepare(kind: str, folder: Path, state: str) -> Path:
    """The folder of the cache as earlier runs may have left it: absent, of yesterday, or without one of its files."""
    cache = folder / "cache" if kind == "arrays" else folder / "processed" / "cache"
    if state != "absent":
        cache_racers.RACES[kind](folder)
        if state == "broken":
            next(cache.glob("a2.npy" if kind == "arrays" else "graphs.pt")).unlink()
        elif kind == "arrays":
            record = (cache / "sources.json").read_text()
            (cache / "sources.json").write_text(record.replace("today", "yesterday"))
        else:
            (cache / "graphs.pt").write_bytes((cache / "graphs.pt").read_bytes()[:-20])
    return cache


def run_race(kind: str, folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    cache = prepare(kind, folder, rng.choice(["absent", "absent", "yesterday", "broken"]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusion_mp_experiments.graphs"])
    start = time.time() + 0.2
    racers = [
        context.Process(target=cache_racers.race, args=(kind, folder, start, folder / f"log{i}.txt"))
        for i in range(PROCESSES)
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
    said = "".join(log.read_text() for log in folder.glob("log*.txt"))
    survivors = [racer for racer in racers if racer not in victims]
    assert [racer.exitcode for racer in survivors] == [0] * len(survivors), said
    assert not said
    with warnings.catch_warnings():
        if survivors:
            warnings.simplefilter("error")  # it is complete: nothing is damaged, nothing is made anew
            before = cache.stat().st_ino
        cache_racers.RACES[kind](folder)
        if survivors:
            assert cache.stat().st_ino == before


@pytest.mark.parametrize("kind", cache_racers.RACES)
def test_a_few_races(tmp_path, kind):
    rng = random.Random(0)
    for i in range(4):
        run_race(kind, tmp_path / str(i), rng)


@pytest.mark.slow
@pytest.mark.parametrize("kind", cache_racers.RACES)
def test_three_hundred_races(tmp_path, kind):
    rng = random.Random(1)
    for i in range(300):
        run_race(kind, tmp_path / str(i), rng)
