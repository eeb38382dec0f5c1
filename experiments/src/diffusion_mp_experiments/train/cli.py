"""The console script `diffusion-mp`, and how a command ends."""

import linecache
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

from diffusion_mp import __version__, show_progress

_USAGE = """diffusion-mp trains energy-constrained diffusion models.

  diffusion-mp                                the table `digits`: certified networks beside others, report in runs/
  diffusion-mp --splits 3                     the same with an option of reproduce
  diffusion-mp compare DATA --minutes 10      which model is best on your own graph, molecules or table
  diffusion-mp reproduce TABLE --jobs 2       another table, or your own with --configs FOLDER; --quick takes minutes
  diffusion-mp results                        docs/results.md and a page for each table, from results/, where you are
  diffusion-mp fit --config NAME_OR_FILE      train one model; any field can be overridden: --model.lr 0.01
                   --ckpt_path PATH           ... going on from runs/X/version_0/checkpoints/last.ckpt, say
  diffusion-mp predict --config ... --ckpt_path ...    writes predictions.csv, a row per prediction
  diffusion-mp validate | test                the other subcommands of Lightning's command line (each has --help)
  diffusion-mp --version                      the version of the library
"""
_UNCONFIGURED = (
    "diffusion-mp {command} needs a model and data: --config digits_difformer_s names both, say, and any "
    "field can be overridden (--model.lr 0.005); without a file they are --data=DigitsDataModule "
    "--model.model=diffusion_mp.models.DIFFormer --model.model.hidden_channels=64. The table of the digits, "
    "diffusion-mp, needs neither."
)
_LIGHTNING = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if args and args[0] == "--version":
        print(f"diffusion-mp {__version__}")
        return 0
    # The line that was typed, without the defaults below.
    again = shlex.join(["diffusion-mp", *args])
    # Options alone belong to the table of the digits.
    if not args or args[0].startswith("-"):
        args = ["reproduce", "digits", *args]
    command = args[0]
    if command not in ("compare", "reproduce", "results", *_LIGHTNING):
        print(
            f"diffusion-mp has no subcommand {command!r}.\n\n{_USAGE}", file=sys.stderr
        )
        return 2
    return exit_code(
        partial(_run, command, args), f"Nothing is lost; start again with\n  {again}"
    )


def _run(command: str, args: list[str]) -> int:
    """Run a subcommand; its modules, which take seconds to import, are loaded here and not before."""
    if command == "compare":
        from diffusion_mp_experiments.compare.command import run_compare

        run_compare(args[1:])
    elif command in ("reproduce", "results"):
        from diffusion_mp_experiments.reproduce import command as tables

        (tables.run_reproduce if command == "reproduce" else tables.run_results)(
            args[1:]
        )
    elif not args[1:]:
        raise ValueError(_UNCONFIGURED.format(command=command))
    else:
        from diffusion_mp_experiments.train.lightning_cli import run_lightning

        run_lightning(args)
    return 0


class Stopped(SystemExit):
    """SIGINT or SIGTERM has arrived; the exit code is 130 or 143, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


def exit_code(command: Callable[[], int], if_stopped: str) -> int:
    """Run a command, turn what stops it into a sentence on stderr, and return the exit code.

    SIGINT and SIGTERM give 130 and 143, with a sentence on how to go on: the notes of the exception (PEP 678), or else
    `if_stopped`. OSError, ValueError, FloatingPointError and the TypeErrors of this library's checks give 2, with their
    notes. Other exceptions are faults of the program and pass through.

    Args:
        command: a function without arguments that returns an exit code.
        if_stopped: what to print after a signal if the exception has no notes.

    Examples:
        >>> exit_code(lambda: 0, if_stopped="Nothing is lost; start it again.")
        0
    """
    try:
        with _signals_raise(), show_progress():
            return command()
    except Stopped as stopped:
        code = int(str(stopped.code))
        message = f"\nStopped by {stopped.signal}."
        notes = getattr(stopped, "__notes__", [if_stopped])
    except (OSError, ValueError, FloatingPointError, TypeError) as error:
        if isinstance(error, TypeError) and not _is_refusal(error):
            raise
        code = 2
        message = str(error)
        notes = getattr(error, "__notes__", [])
    print("\n".join([message, *notes]), file=sys.stderr)
    return code


def _is_refusal(error: TypeError) -> bool:
    """Return whether one of our own checks has raised the error: its message is then a sentence for users.

    Python raises TypeError also for faults of a program, such as a user's own model; these need their traceback.
    """
    # The last frame is the frame of the statement that raised.
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals.get("__name__")).startswith("diffusion_mp")
    statement = linecache.getline(frame.f_code.co_filename, line).strip()
    return ours and statement.startswith("raise ")


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # where Python runs no handlers
        yield
        return
    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
