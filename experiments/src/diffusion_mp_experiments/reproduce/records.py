"""Results as lines of JSON, each complete or absent whenever the process that appends them is killed."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusion_mp_experiments.train.checkpoints import replace_file

Record = dict[str, Any]


class Records:
    """The lines of a file that only one process appends to; an unfinished last line is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = parsed(complete_lines(path), path)

    def append(self, record: Record) -> None:
        """Append a line, which is on the disk when this returns."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(file, line) < len(line):
                message = f"{self.path} cannot be written: its disk is full. Make room, and start again"
                raise OSError(errno.ENOSPC, message)
            os.fsync(file)
        finally:
            os.close(file)
        self.lines.append(record)


def complete_lines(path: Path) -> str:
    """Return the text of a file, if there is one, after cutting off a last line without an end."""
    content = path.read_bytes() if path.is_file() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if complete != content:
        replace_file(path, complete)
    return complete.decode()


def parsed(text: str, path: Path) -> list[Record]:
    """Parse the lines of a file of results; a ValueError names a line that is none."""
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}. Delete that line, or the file.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} holds no result: {line[:60]}.")
        records.append(record)
    return records


def write(records: Iterable[Record], path: Path) -> None:
    replace_file(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())
