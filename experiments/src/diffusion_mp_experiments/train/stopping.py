"""How a command ends: by itself, by SIGINT or SIGTERM, or by an error that is its user's to mend."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(SystemExit):
    """SIGINT or SIGTERM has come; the exit code is the one that shells give, 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


def exit_code(command: Callable[[], int], if_stopped: str) -> int:
    """Runs a command; what stops it becomes a sentence on stderr and an exit code.

    SIGINT and SIGTERM, which raise `Stopped` wherever the command is: 130 and 143, with how to go on: the notes of the
    exception (PEP 678), or else `if_stopped`. OSError, ValueError and FloatingPointError: 2, with their notes.

    Args:
        command: returns an exit code.
        if_stopped: how to go on.

    Returns:
        The exit code; exceptions of other kinds, which are faults of the program, pass.

    Examples:
        >>> exit_code(lambda: 0, if_stopped="Nothing is lost; start it again.")
        0
        >>> exit_code(lambda: len(load_checkpoint(folder / "none.ckpt")), if_stopped="")  # no traceback but a sentence
        2
    """
    try:
        with _signals_raise():
            return command()
    except Stopped as stopped:
        code, message = int(str(stopped.code)), f"\nStopped by {stopped.signal}."
        notes = getattr(stopped, "__notes__", [if_stopped])
    except (OSError, ValueError, FloatingPointError) as error:
        code, message, notes = 2, str(error), getattr(error, "__notes__", [])
    print("\n".join([message, *notes]), file=sys.stderr)
    return code


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():  # where Python runs no handlers
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
