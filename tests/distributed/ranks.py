"""Runs a function on several gloo processes of this machine."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def _start(
    rank: int,
    function: Callable[..., None],
    ranks: int,
    folder: Path,
    seconds: float,
    args: Any,
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        f"file://{folder}/meet",
        timedelta(0, seconds),
        world_size=ranks,
        rank=rank,
    )
    function(*args)
    distributed.destroy_process_group()


def on_ranks(
    function: Callable[..., None],
    ranks: int,
    folder: Path,
    *args: Any,
    seconds: float = 60,
    join: bool = True,
) -> Any:
    """``function(*args)`` on every rank of a group; what one raises is raised here, with its traceback.

    With ``join=False`` nobody waits, and nobody ends the others when one of them fails: see their ``processes``.
    """
    # They are forked from a process that has imported torch and the library once: that takes seconds of each otherwise.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["diffusion_mp"])
    args = (function, ranks, folder, seconds, args)
    return multiprocessing.start_processes(
        _start, args, ranks, join=join, start_method="forkserver"
    )
