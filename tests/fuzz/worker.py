"""A process that runs programs: given up when one takes too long, replaced when it dies."""

import multiprocessing
import os
import resource
import signal
import tempfile
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from .judge import judge

# Importing torch takes seconds: a server does it once, and a process that takes the place of another is its fork.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["diffusion_mp.testing", "diffusion_mp_experiments.train"]
)
STARTUP = 120.0  # seconds to import torch and the library, on a busy machine
LONGEST = 120  # seconds after which a program ends although nobody is there any more to give it up


class Worker:
    """A process for many programs. ``timeout`` seconds and ``memory`` bytes are for one of them."""

    def __init__(self, timeout: float = 10.0, memory: int = 4 << 30) -> None:
        self.timeout = timeout
        self.memory = memory
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._start()

    def judge(self, program: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict on a program, or what became of the process that ran it."""
        self._requests.send(program)
        try:
            if self._requests.poll(self.timeout):
                return self._requests.recv()
            kind = "time-out"
            text = f"no answer within {self.timeout:g} s"
        except EOFError:
            self._process.join()
            kind = "crash"
            text = f"the process ended with exit code {self._process.exitcode}"
        self._stop()
        self._start()
        return {"verdict": "bad", "kind": kind, "text": text, "where": ""}

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        self._requests, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=serve, args=(theirs, self._folder.name, self.memory), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._requests.poll(STARTUP):
            raise RuntimeError(f"no process started within {STARTUP:g} s")
        self._requests.recv()

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._requests.close()


def serve(requests: Connection, folder: str, memory: int) -> None:
    """Answer requests in a folder where programs may write, with ``memory`` more bytes than the process has now."""
    os.chdir(folder)
    os.environ["MPLBACKEND"] = "agg"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what programs print
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    judge({"steps": []})  # imports what every program imports
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests.send("ready")
    while True:
        signal.alarm(0)
        program = requests.recv()
        signal.alarm(LONGEST)
        requests.send(judge(program))


def _data() -> int:
    """Return the bytes of private memory that the process has mapped, which is what the limit counts."""
    with open("/proc/self/status") as status:
        (size,) = (line.split()[1] for line in status if line.startswith("VmData"))
    return int(size) << 10
