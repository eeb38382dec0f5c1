"""The process that runs programs: requests come as lines of JSON, answers leave as lines of JSON.

Importing torch takes seconds, so the process that did it only forks: a child serves, and when it dies, by its own
fault or because it took too long, another takes its place at once.
"""

import json
import os
import resource
import signal
import sys
import warnings
from typing import Any, NoReturn

from .judge import judge
from .table import drawn

LONGEST = 120  # seconds after which a program ends although nobody is there any more to give it up
END_OF_INPUT = 77  # the exit status of a child that was not asked for more


def main() -> None:
    answers = os.dup(1)
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # what programs print does not mix with answers
    status = None
    while status != END_OF_INPUT:
        child = os.fork()
        if child == 0:
            serve(answers, int(sys.argv[1]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _say(answers, {"verdict": "died", "status": status})


def serve(answers: int, memory: int) -> NoReturn:
    """Answer requests, with ``memory`` more bytes than the process has now."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(answers, {"verdict": "ready", "process": os.getpid()})
    for line in os.fdopen(0, closefd=False):
        signal.alarm(LONGEST)
        request = json.loads(line)
        if "program" in request:
            _say(answers, judge(request["program"]))
        for index in range(request.get("first", 0), request.get("last", 0)):
            signal.alarm(LONGEST)
            program = drawn(request["seed"], index, request["name"])
            _say(answers, {"index": index, **judge(program.as_request())})
        signal.alarm(0)
    os._exit(END_OF_INPUT)


def _say(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _data() -> int:
    """Bytes of private memory that the process has mapped, which is what the limit counts."""
    with open("/proc/self/status") as status:
        return next(
            int(line.split()[1]) << 10 for line in status if line.startswith("VmData")
        )
