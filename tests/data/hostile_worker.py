"""Reads hostile files in a process of its own, one after another, and says of each what came of it.

A line on standard input is a format and a folder; the answer is one line of JSON: "loaded", "refused" or "bad", and
what was said. A crash or a hang is for the parent to see.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path

import torch
from hostile_formats import FORMATS

_MEMORY = 1 << 30  # bytes on top of what is mapped once everything is imported


def _answer(name: str, folder: Path) -> tuple[str, str]:
    try:
        FORMATS[name].load(folder)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
        names_a_file = str(folder) in said
        return ("refused" if names_a_file else "bad"), f"{type(error).__name__}: {said}"
    except BaseException as error:
        return "bad", f"{type(error).__name__}: {error}"
    return "loaded", ""


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    warm, *_ = sys.argv[1:] or [""]
    if warm:  # a valid example of every format, so that what readers import late is there before the limit is set
        for name, format in FORMATS.items():
            format.load(Path(warm) / name)
    _limit_memory()
    print("ready", flush=True)
    for line in sys.stdin:
        name, folder = line.rstrip("\n").split("\t")
        print(json.dumps(_answer(name, Path(folder))), flush=True)
