"""Memory and time of one variant of a computation, each measured in a process of its own."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the peak memory of the first step in MiB, and the median time of the following steps in seconds.

    Memory is the peak resident size of the step less the peak before it, with imports and inputs in place. It is at
    least 1 MiB, since a small step hides below the peak of the imports.
    """
    before = peak()
    step()
    memory = max(peak() - before, 1.0)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {
        "memory": memory,
        "time": statistics.median(times) if times else float("nan"),
    }


def peak() -> float:
    """Return the largest resident size so far, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def allocated(step: Callable[[], Any]) -> float:
    """Return the most memory that torch has allocated at a time during a step, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted(
        (event for event in events if event["name"] == "[memory]"),
        key=lambda event: event["ts"],
    )
    return (
        max(accumulate((event["args"]["Bytes"] for event in events), initial=0)) / 2**20
    )


def in_fresh_process(script: str, variant: str) -> Any:
    """Return what the script prints as JSON when it is called with the options of this process and --run VARIANT."""
    process = subprocess.run(
        [sys.executable, script, *sys.argv[1:], "--run", variant],
        capture_output=True,
        text=True,
    )
    if process.returncode:
        sys.exit(
            f"{variant} failed with exit status {process.returncode}:\n{process.stderr}"
        )
    return json.loads(process.stdout)
