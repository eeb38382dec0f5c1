"""The command: counts by verdict, the kinds of what was bad with a reproducer of each, exit 1 if there was any."""

import argparse
import sys
import time
from pathlib import Path

from .search import search
from .table import STRATEGIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random calls of everything public."
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--name", choices=list(STRATEGIES), metavar="NAME", help="only this public name"
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="seconds for one program"
    )
    parser.add_argument(
        "--report", type=Path, help="a file for the kinds (default: printed)"
    )
    options = parser.parse_args()
    began = time.monotonic()
    result = search(
        options.seed, options.calls, options.name, options.timeout, sys.stderr.isatty()
    )
    if options.report is None:
        print(result.as_markdown())
    else:
        options.report.write_text(result.as_markdown())
    print(f"{result.summary()}, {time.monotonic() - began:.0f} s")
    return int(result.verdicts["bad"] > 0)


if __name__ == "__main__":
    sys.exit(main())
