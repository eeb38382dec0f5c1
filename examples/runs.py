"""What the scripts of this folder share: optional packages, tables of runs, several at a time, and numbers in print."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from diffusion_mp.checks import needed_by

# a frozen dataclass of everything that decides the outcome of a run.
R = TypeVar("R", bound=Hashable)


@contextmanager
def needs(install: str) -> Iterator[None]:
    """Wrap imports: if one fails, the script says what pip should install, and ends with exit status 2."""
    try:
        with needed_by("This example", install):
            yield
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def count(text: str) -> int:
    """Parse a number of the command line that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
    """Parse the command line; with ``--quick`` the given values replace what the command line does not name."""
    values = ", ".join(
        f"{name.replace('_', '-')} {_shown(value)}" for name, value in quick.items()
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a first look: {values}, unless given otherwise",
    )
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(**quick)
    return parser.parse_args(argv)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def chosen(run: type[R], args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line that are settings of a run, except lists, which the caller multiplies."""
    fields = run.__dataclass_fields__  # type: ignore[attr-defined]
    return {
        name: value
        for name, value in vars(args).items()
        if name in fields and not isinstance(value, list)
    }


def train_all(train: Callable[..., Any], runs: Sequence[R], jobs: int) -> dict[R, Any]:
    """Return what `train(run, bar_at=line)` returns for every run; several jobs are processes of one thread each."""
    if jobs == 1:
        return {run: train(run) for run in runs}
    from diffusion_mp_experiments.train.many_runs import Workers

    with Workers(jobs) as workers:
        futures = [
            workers.pool.submit(train, run, bar_at=k % jobs)
            for k, run in enumerate(runs)
        ]
        return {run: future.result() for run, future in zip(runs, futures, strict=True)}


def stored(path: Path, run: Any) -> dict[str, Any] | None:
    """Return the checkpoint of this very run, if there is one; exit with a sentence if another run wrote it."""
    if not path.exists():
        return None
    from diffusion_mp_experiments.train import load_checkpoint

    state = load_checkpoint(path)
    before = state.get("run") if isinstance(state, dict) else None
    if not isinstance(before, dict):
        raise ValueError(
            f"{path} is no checkpoint of this script; use another --out or delete it."
        )
    changed = [name for name, value in asdict(run).items() if before.get(name) != value]
    if changed:
        raise SystemExit(
            f"{path} was made with other settings ({', '.join(changed)}); use another --out or delete it."
        )
    return state


def go_on(argv: list[str] | None) -> str:
    """Return how to start again what was stopped."""
    command = shlex.join(
        ["python", sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    )
    return f"The same command goes on where it stopped:\n  {command}"


def grouped(
    results: dict[R, Any], *fields: str
) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Yield the results of runs that agree in these fields, in the order of the first of each."""
    for key in dict.fromkeys(
        tuple(getattr(run, field) for field in fields) for run in results
    ):
        yield (
            key,
            [
                result
                for run, result in results.items()
                if tuple(getattr(run, field) for field in fields) == key
            ],
        )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and, for several values, standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"
