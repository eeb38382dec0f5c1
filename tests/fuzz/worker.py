"""The process that runs programs: requests come as lines of JSON, answers leave as lines of JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # what programs print does not mix with answers
    warnings.simplefilter("ignore")
    import torch

    from .judge import judge
    from .table import drawn

    torch.set_num_threads(1)
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 4 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(index: int, verdict: dict[str, Any]) -> None:
        answers.write(json.dumps({"index": index, **verdict}) + "\n")
        answers.flush()

    answer(-1, {"verdict": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        if "program" in request:
            answer(0, judge(request["program"]))
            continue
        for index in range(request["first"], request["last"]):
            program = drawn(request["seed"], index, request["name"])
            answer(index, {"name": program.name, **judge(program.as_request())})


def _data() -> int:
    """Bytes of private memory that the process has mapped, which is what the limit counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


if __name__ == "__main__":
    main()
