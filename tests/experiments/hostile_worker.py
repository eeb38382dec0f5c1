"""Reads hostile files in a process of its own, one after another, and says of each what came of it.

A line on standard input is a format and a folder; the answer is a line of JSON: "loaded", "refused" or "bad", and what
was said. A crash and a hang are for `HostileReader`, which runs this file, to see.
"""

import json
import os
import resource
import sys
import warnings
from pathlib import Path

import torch
from hostile import FORMATS

_MEMORY = 1 << 30  # bytes on top of what is mapped once everything is imported


def _read(name: str, folder: Path) -> tuple[str, str]:
    try:
        FORMATS[name].read(folder)
    except (ValueError, FileNotFoundError) as error:
        said = f"{type(error).__name__}: {error}"
        return ("refused" if str(folder) in said else "bad"), said
    except BaseException as error:
        return "bad", f"{type(error).__name__}: {error}"
    return "loaded", ""


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever readers print
    for format in FORMATS.values():  # what readers import late is there before memory is limited
        folder = Path(sys.argv[1]) / format.name
        folder.mkdir()
        format.example(folder)
        format.read(folder)
    _limit_memory()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, place = line.rstrip("\n").split("\t")
        print(json.dumps(_read(name, Path(place))), file=answers, flush=True)
