"""Time two ways to compute the same thing in turn, in one process, so that other load on the machine meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: The least duration of a burst in seconds, compared with which the clock and the loop cost little.
BURST = 5e-3


def alternating(
    first: Callable[[], Any], second: Callable[[], Any], seconds: float
) -> dict[str, list[float]]:
    """Return a low quantile (a tenth) and the median of the seconds of a call, for ``[first, second]``.

    Bursts of both follow each other, each time in the other order, until ``seconds`` have gone by, and at least twice.
    The low quantile says what the machine can do, the median what it did.
    """
    runs = (first, second)
    times: tuple[list[float], list[float]] = ([], [])
    often = [max(1, round(BURST / _seconds(run, 1))) for run in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 2:
        for way in (0, 1) if len(times[0]) % 2 else (1, 0):
            times[way].append(_seconds(runs[way], often[way]))
    return {
        "low": [float(np.quantile(found, 0.1)) for found in times],
        "median": list(map(statistics.median, times)),
    }


def _seconds(run: Callable[[], Any], often: int) -> float:
    start = time.perf_counter()
    for _ in range(often):
        run()
    return (time.perf_counter() - start) / often
