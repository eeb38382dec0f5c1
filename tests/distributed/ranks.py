"""Runs a function on several gloo processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def _start(rank: int, function: Callable[..., None], ranks: int, folder: Path, seconds: float, args: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder / 'meet'}", timedelta(seconds=seconds), world_size=ranks, rank=rank
    )
    function(*args)
    distributed.destroy_process_group()


def on_ranks(function: Callable[..., None], ranks: int, folder: Path, *args: Any, seconds: float = 60) -> None:
    """``function(*args)`` on every rank of a group; what one raises is raised here, with its traceback."""
    multiprocessing.spawn(_start, (function, ranks, folder, seconds, args), ranks)


def started(function: Callable[..., None], ranks: int, folder: Path, *args: Any, seconds: float = 60) -> list[Any]:
    """The same without waiting: the processes, which nobody ends when one of them fails."""
    return multiprocessing.spawn(_start, (function, ranks, folder, seconds, args), ranks, join=False).processes
