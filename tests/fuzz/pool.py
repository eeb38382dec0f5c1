"""Worker processes: reused over many programs, given up when one takes too long, replaced when one dies."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
START = "import sys; sys.path.insert(0, {!r}); from fuzz.worker import main; main()"
STARTUP = 120.0  # seconds to import torch and the library, on a busy machine


class Worker:
    """One process, started when it is first needed. ``timeout`` seconds and ``memory`` bytes are for one program."""

    def __init__(self, timeout: float = 10.0, memory: int = 4 << 30) -> None:
        self.timeout, self.memory = timeout, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")  # where programs may write
        self._errors = Path(self._folder.name) / "errors"

    def judge(self, program: dict[str, Any]) -> dict[str, Any]:
        """The verdict on one program (`Program.as_request`)."""
        self._send({"program": program})
        return self._answer() or self._buried()

    def judge_drawn(self, seed: int, first: int, last: int, name: str | None) -> Iterator[dict[str, Any]]:
        """The verdicts on the programs ``first`` … ``last`` − 1 of a seed, each with its ``index``."""
        while first < last:
            self._send({"seed": seed, "first": first, "last": last, "name": name})
            while first < last:
                answer = self._answer()
                yield answer or self._buried() | {"index": first}
                first += 1
                if answer is None:
                    break

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _send(self, request: dict[str, Any]) -> None:
        if self._process is None:
            self._start()
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", START.format(str(TESTS)), str(self.memory)]
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)  # the worker runs in another folder
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=self._folder.name,
            )
        self._rest = b""
        if self._answer(STARTUP) is None:
            raise RuntimeError(f"a worker did not start: {self._last_words()}")

    def _last_words(self) -> str:
        """The end of what the process said on its error stream."""
        return self._errors.read_bytes()[-800:].decode(errors="replace")

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _answer(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next line, or None if the process died or is late."""
        process = self._running()
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], timeout or self.timeout)[0]:
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                return None
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _buried(self) -> dict[str, Any]:
        """What became of a program that did not answer; the next one gets a new process."""
        process = self._running()
        try:
            status = process.wait(0.5)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        if status is None:
            return {"verdict": "bad", "kind": "time-out", "text": f"no answer within {self.timeout:g} s", "where": ""}
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return {"verdict": "bad", "kind": "crash", "text": f"the process ended with {cause}", "where": ""}


def judge_all(
    seed: int, calls: int, name: str | None = None, jobs: int = 1, timeout: float = 10.0
) -> Iterator[dict[str, Any]]:
    """The verdicts on the first ``calls`` programs of a seed, by ``jobs`` processes."""
    share = -(-calls // jobs)

    def work(first: int) -> list[dict[str, Any]]:
        worker = Worker(timeout)
        try:
            return list(worker.judge_drawn(seed, first, min(first + share, calls), name))
        finally:
            worker.close()

    with ThreadPoolExecutor(jobs) as threads:
        for verdicts in threads.map(work, range(0, calls, share)):
            yield from verdicts
