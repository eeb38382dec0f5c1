"""``show_progress``: progress bars with the time left, off by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

AFTER = 5.0  # seconds
_shown: ContextVar[bool] = ContextVar("shown", default=False)


@contextmanager
def show_progress(shown: bool = True) -> Iterator[None]:
    """Show a progress bar with the time left, on stderr, for everything in the body that takes more than five seconds.

    Bars exist for searches for neighbours, for linear systems and fixed points that are found by iteration
    (``num_layers=None``), `full_graph_inference`, `kernel_error` and ``DiffusionClassifier``.

    Args:
        shown: whether to show bars. ``False`` changes nothing, so that a flag of a program can be passed on.

    Examples:
        >>> with show_progress():
        ...     edges = knn_graph(x, k=2)  # too fast for a bar
    """
    if not isinstance(shown, bool):
        raise TypeError(f"shown must be True or False; got {shown!r}.")
    # A silent estimator inside must not hide the bar that its caller asked for.
    before = _shown.set(_shown.get() or shown)
    try:
        yield
    finally:
        _shown.reset(before)


def progress_bar(
    what: str, unit: str, total: float | None = None, **options: Any
) -> tqdm[Any]:
    """Return a tqdm bar, with tqdm's options, that is visible within `show_progress`."""
    options = {"delay": AFTER, "leave": False, "disable": not _shown.get()} | options
    return tqdm(desc=what, unit=unit, total=total, **options)


def solving(
    what: str, max_iter: int
) -> Iterator[Callable[[Tensor | float, Tensor | float], None]]:
    """Yield a function of residual and goal, to be called in each iteration: it moves a bar by the digits gained."""
    with progress_bar(
        what,
        "digit",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:

        def closer(residual: Tensor | float, goal: Tensor | float) -> None:
            if not bar.disable:
                # An iteration that diverges, or starts at infinity, must not stretch
                # the bar without end.
                excess = (torch.as_tensor(residual) / goal).nan_to_num().clamp(1, 1e30)
                left = excess.max().log10().item()
                bar.total = max(bar.total or 0.0, left)
                bar.update(bar.total - left - bar.n)

        for _ in range(max_iter):
            yield closer
