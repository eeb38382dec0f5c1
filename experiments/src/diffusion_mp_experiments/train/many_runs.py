"""What many trainings share: processes of one thread each, silence, and the versions that they ran with."""

from __future__ import annotations

import logging
import os
import platform
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def each(work: Callable[..., R], runs: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[tuple[tuple[Any, ...], R]]:
    """Every run with what `work(*run)` returns, as they end: here, or with several jobs in `processes`."""
    if jobs == 1 or len(runs) <= 1:
        with one_thread():
            yield from ((run, work(*run)) for run in runs)
        return
    with processes(min(jobs, len(runs))) as pool:
        running = {pool.submit(work, *run): run for run in runs}
        yield from ((running[done], done.result()) for done in as_completed(running))


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many, of one thread each, which leave signals of the keyboard to this one and end when it does."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), _one_of_several) as pool:
        try:
            yield pool
        except BaseException:  # whatever ends this process; what the others write is complete or absent
            for child in active_children():
                child.kill()
            raise


def _one_of_several() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and lose much on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning announces hardware, limits and tips once per trainer; many trainers need none of it."""
    with lightning_from(logging.ERROR), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric|torch_geometric|torchmetrics)\b")
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


@contextmanager
def lightning_from(level: int) -> Iterator[None]:
    """Lightning logs from this level on: its announcements are of level INFO."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


def versions() -> dict[str, str]:
    """Of Python, this library and those that decide a number."""
    names = ("diffusion-mp", "torch", "torch-geometric", "pytorch-lightning", "scikit-learn", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
