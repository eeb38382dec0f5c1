"""Processes that work until a time is over."""

import os
import time

from diffusion_mp_experiments.train.many_runs import Workers


def asleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_what_is_late_is_given_up_and_the_next_runs_are_trained() -> None:
    with Workers(2) as workers:
        first = dict(workers.until(time.monotonic() + 120)(asleep, [(0.0,), (0.1,)]))
        assert set(first) == {(0.0,), (0.1,)}
        start = time.monotonic()
        late = [run for run, _ in workers.until(start + 2)(asleep, [(0.2,), (600.0,)])]
        assert late == [(0.2,)]
        assert time.monotonic() - start < 60
        again = [run for run, _ in workers.until(start + 180)(asleep, [(0.3,)])]
        assert again == [(0.3,)]


def test_a_run_that_has_begun_may_end_later() -> None:
    with Workers(1) as workers:
        list(workers.until(time.monotonic() + 120)(asleep, [(0.0,)]))
        (process,) = workers.pool._processes
        start = time.monotonic()
        runs = [(3.0,), (0.1,), (0.2,), (0.3,), (0.4,)]
        done = [run for run, _ in workers.until(start + 1, start + 120)(asleep, runs)]
        assert done == [(3.0,)]
        assert time.monotonic() - start < 60
        assert list(workers.pool._processes) == [process]
