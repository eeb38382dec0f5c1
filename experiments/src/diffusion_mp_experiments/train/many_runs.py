"""Many trainings: processes of one thread each, and the versions that decide a number."""

import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def each(
    work: Callable[..., R],
    runs: Sequence[tuple[Any, ...]],
    jobs: int,
) -> Iterator[tuple[tuple[Any, ...], R]]:
    """Yield every run with the result of `work(*run)`, in the order of their ends; several jobs run in `processes`."""
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
    with processes(min(jobs, len(runs))) as pool:
        running = {pool.submit(work, *run): run for run in runs}
        yield from ((running[done], done.result()) for done in as_completed(running))


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes of one thread each, which ignore signals of the keyboard and end with this process."""
    with _pool(jobs) as pool:
        try:
            yield pool
        except (
            BaseException
        ):  # also a signal; files that the others write are complete or absent
            _kill_children()
            raise


#: Trains runs as `each` does: yields every run with its result.
Runner = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]


class Workers:
    """Processes of one thread each, which train runs as `each` does until a time is over.

    They start at once, so that they import while the first one reads data, and end with the context.

    Args:
        jobs: number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def __enter__(self) -> "Workers":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def until(self, end: float, last: float | None = None) -> Runner:
        """Return a function that begins no run after the time `end` of ``time.monotonic()``.

        Args:
            end: the time after which no run begins.
            last: the time at which runs that have begun are given up in the middle. By default `end`. A process that is
                ended imports anew for seconds, so it is worth waiting for a run that ends soon.
        """

        def run(
            work: Callable[..., Any], runs: Sequence[tuple[Any, ...]]
        ) -> Iterator[Any]:
            running = {
                self._pool.submit(work, *each_run): each_run for each_run in runs
            }
            for limit in (end, end if last is None else last):
                try:
                    for done in as_completed(
                        list(running), max(0.0, limit - time.monotonic())
                    ):
                        yield running.pop(done), done.result()
                    return
                except TimeoutError:
                    # What has not begun never will.
                    running = {
                        future: each_run
                        for future, each_run in running.items()
                        if not future.cancel()
                    }
            # What still runs is late, and nobody waits for it.
            if running:
                self._end()
                self._start()

        return run

    def _start(self) -> None:
        self._pool = _pool(self.jobs)
        for _ in range(self.jobs):
            self._pool.submit(os.getpid)

    def _end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        _kill_children()


def _pool(jobs: int) -> ProcessPoolExecutor:
    # A fork would copy locks that other threads hold.
    return ProcessPoolExecutor(jobs, get_context("spawn"), _initialise)


def _kill_children() -> None:
    for child in active_children():
        child.kill()


def _initialise() -> None:
    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    torch.set_num_threads(1)
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
    gpu = (
        {"GPU": torch.cuda.get_device_name(device)}
        if torch.device(device).type == "cuda"
        else {}
    )
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        **gpu,
    }
