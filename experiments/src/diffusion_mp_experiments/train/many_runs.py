"""Many trainings: processes of one thread each, and the versions that decide a number."""

import ctypes
import gc
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def each(
    work: Callable[..., R],
    runs: Sequence[tuple[Any, ...]],
    jobs: int = 1,
) -> Iterator[tuple[tuple[Any, ...], R]]:
    """Yield every run with the result of `work(*run)`, in the order of their ends; several jobs are `Workers`."""
    # Without another process, which would import for seconds.
    if jobs == 1 or len(runs) <= 1:
        threads = torch.get_num_threads()
        # Small matrices gain little from a second, and lose much on a busy machine.
        torch.set_num_threads(1)
        try:
            yield from ((run, work(*run)) for run in runs)
        finally:
            torch.set_num_threads(threads)
        return
    with Workers(min(jobs, len(runs))) as workers:
        yield from workers.until(math.inf)(work, runs)


#: Trains runs as `each` does: yields every run with its result.
Runner = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


class Workers:
    """Processes that train, which ignore signals of the keyboard and end with the context, or this process.

    They start at once, so that they import while the first one reads data. Whatever they still do when the context
    ends is given up: files that they write are complete or absent.

    Args:
        jobs: number of processes.
        threads: threads of each.

    Attributes:
        pool: the processes.
    """

    def __init__(self, jobs: int, threads: int = 1) -> None:
        self.jobs = jobs
        self.threads = threads

    def __enter__(self) -> "Workers":
        # A fork would copy locks that other threads hold.
        self.pool = ProcessPoolExecutor(
            self.jobs, get_context("spawn"), _initialise, (self.threads,)
        )
        for _ in range(self.jobs):
            self.pool.submit(os.getpid)
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            child.kill()

    def restart(self, jobs: int, threads: int) -> None:
        """Give up what runs, and start other processes."""
        self.__exit__()
        self.jobs = jobs
        self.threads = threads
        self.__enter__()

    def until(self, end: float, last: float | None = None) -> Runner:
        """Return a function that begins no run after the time `end` of ``time.monotonic()``.

        Args:
            end: the time after which no run begins.
            last: the time at which runs that have begun are given up in the middle. By default `end`. A process that is
                ended imports anew for seconds, so it is worth waiting for a run that ends soon.
        """

        if last is None:
            last = end

        def train(
            work: Callable[..., R], runs: Sequence[tuple[Any, ...]]
        ) -> Iterator[tuple[tuple[Any, ...], R]]:
            waiting = list(reversed(runs))
            running: dict[Future[R], tuple[Any, ...]] = {}
            while True:
                # As many as there are processes: what waits in a pool cannot be taken back from it.
                while waiting and len(running) < self.jobs and time.monotonic() < end:
                    run = waiting.pop()
                    running[self.pool.submit(_tidied, work, *run)] = run
                if not running:
                    return
                left = None
                if last < math.inf:
                    left = max(0.0, last - time.monotonic())
                done, _ = wait(running, left, FIRST_COMPLETED)
                if not done:
                    break
                for future in done:
                    yield running.pop(future), future.result()
            # What still runs is late, and nobody waits for it.
            self.restart(self.jobs, self.threads)

        return train


def _tidied(work: Callable[..., R], *run: Any) -> R:
    """Return `work(*run)`, and give freed memory back to the system; glibc would keep gigabytes for the next run."""
    try:
        return work(*run)
    finally:
        gc.collect()
        # Other C libraries have no such function.
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _initialise(threads: int) -> None:
    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    torch.set_num_threads(threads)
    # A terminal sends it to all processes, and the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process that is killed cannot end those that it has started.
    Thread(target=end_with_parent, daemon=True).start()


def versions(device: str = "cpu") -> dict[str, str]:
    """Return the versions of Python, this library and all that decide a number, and the GPU's name where it does."""
    names = (
        "diffusion-mp",
        "torch",
        "torch-geometric",
        "pytorch-lightning",
        "scikit-learn",
        "numpy",
    )
    found = {"python": platform.python_version()}
    found |= {name: version(name) for name in names}
    if torch.device(device).type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
    return found
