"""Worker processes: reused over many programs, given up when one takes too long, replaced when one dies."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
START = "import sys; sys.path.insert(0, {!r}); from fuzz.worker import main; main()"
STARTUP = 120.0  # seconds to import torch and the library, on a busy machine


class Worker:
    """One worker, started when it is first needed. ``timeout`` seconds and ``memory`` bytes are for one program."""

    def __init__(self, timeout: float = 10.0, memory: int = 4 << 30) -> None:
        self.timeout = timeout
        self.memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._serving = 0  # the child that runs programs
        self._rest = b""
        self._folder = tempfile.TemporaryDirectory(
            prefix="fuzz-"
        )  # where programs may write
        self._errors = Path(self._folder.name) / "errors"

    def judge(self, program: dict[str, Any]) -> dict[str, Any]:
        self._send({"program": program})
        return self._verdict()

    def judge_drawn(
        self, seed: int, first: int, last: int, name: str | None
    ) -> Iterator[dict[str, Any]]:
        """The verdicts on the programs ``first`` … ``last`` − 1 of a seed, each with its ``index``."""
        while first < last:
            self._send({"seed": seed, "first": first, "last": last, "name": name})
            lost = False
            while first < last and not lost:
                verdict = self._verdict()
                lost = "index" not in verdict
                yield verdict | {"index": first}
                first += 1

    def close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._kill()
            self._process.kill()
            self._process.wait()
            self._process = None
        self._folder.cleanup()

    def _send(self, request: dict[str, Any]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _start(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "CUDA_VISIBLE_DEVICES": "",
        }
        paths = [
            os.path.abspath(path)
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path
        ]
        environment["PYTHONPATH"] = os.pathsep.join(
            paths
        )  # the worker runs in another folder
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START.format(str(TESTS)), str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=self._folder.name,
            )
        self._welcome()

    def _welcome(self) -> None:
        answer = self._answer(STARTUP)
        if answer is None or answer["verdict"] != "ready":
            words = self._errors.read_bytes()[-800:].decode(errors="replace")
            raise RuntimeError(f"a worker did not start: {words or answer}")
        self._serving = answer["process"]

    def _verdict(self) -> dict[str, Any]:
        """The answer to a request; if there is none, what became of it, and the next one gets a new child."""
        answer = self._answer(self.timeout)
        if answer is not None and answer["verdict"] != "died":
            return answer
        if answer is None:
            self._kill()
            while (late := self._answer(STARTUP)) is not None and late[
                "verdict"
            ] != "died":
                pass
            verdict = {
                "verdict": "bad",
                "kind": "time-out",
                "text": f"no answer within {self.timeout:g} s",
            }
        else:
            status = answer["status"]
            cause = (
                signal.Signals(-status).name if status < 0 else f"exit status {status}"
            )
            verdict = {
                "verdict": "bad",
                "kind": "crash",
                "text": f"the process ended with {cause}",
            }
        self._welcome()
        return verdict | {"where": ""}

    def _kill(self) -> None:
        if self._serving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._serving, signal.SIGKILL)
            self._serving = 0

    def _answer(self, timeout: float) -> dict[str, Any] | None:
        """The next line, or None if it is late."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], timeout)[0]:
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                return None
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)
