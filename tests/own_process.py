"""A command line in a forked process, to be killed: a new interpreter would import for seconds."""

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import RLock

import torch
from tqdm import tqdm


def started(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path
) -> BaseProcess:
    """Start ``main(arguments)`` within a folder, with stderr in said.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    process = get_context("fork").Process(target=_run, args=(main, arguments, folder))
    process.start()
    return process


def _run(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path
) -> None:
    # By default forked processes share the lock of tqdm's bars: one that is killed while it draws would never give it
    # back, and the next bar of the process that runs the tests would wait for ever.
    tqdm.set_lock(RLock())
    torch.set_num_threads(
        1
    )  # the other threads of OpenMP were not forked, and would be waited for
    os.chdir(folder)
    sys.argv = [main.__module__]
    with (
        Path(os.devnull).open("w") as sys.stdout,
        Path("said.txt").open("w", buffering=1) as sys.stderr,
    ):
        sys.exit(main(arguments))
