"""The console script `diffusion-mp`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_USAGE = """diffusion-mp trains energy-constrained diffusion models.

  diffusion-mp                                the main job: DIFFormer-s and baselines on digits, report in runs/
  diffusion-mp --splits 3                     the same with other options (diffusion-mp digits --help lists them)
  diffusion-mp fit --config configs/X.yaml    train one model; any field can be overridden: --model.lr 0.01
                   --ckpt_path PATH           ... going on from runs/X/version_0/checkpoints/last.ckpt, say
  diffusion-mp validate | test | predict      the other subcommands of Lightning's command line (each has --help)
"""
_LIGHTNING = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the main job or, given a configuration, a subcommand of Lightning's command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    try:
        from .digits_job import digits_parser, run_digits

        command = args[0] if args and not args[0].startswith("-") else "digits"
        rest = args[1:] if args and args[0] == command else args
        if command not in ("digits", *_LIGHTNING):
            print(f"diffusion-mp has no subcommand {command!r}.\n\n{_USAGE}", file=sys.stderr)
            return 2
        if command == "digits":
            run_digits(digits_parser().parse_args(rest))
            return 0
        if command == "fit" and (options := _main_job_options(digits_parser(add_help=False), rest)):
            run_digits(options)
            return 0
        from .lightning_cli import DiffusionCLI

        DiffusionCLI(args)
    except ModuleNotFoundError as error:
        print(f"{error}. The command line needs the extra `train`: pip install 'diffusion-mp[train]'", file=sys.stderr)
        return 2
    except (FileNotFoundError, ConnectionError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _main_job_options(parser: argparse.ArgumentParser, args: list[str]) -> argparse.Namespace | None:
    """`fit` without a configuration is the main job: nothing beside its own options may be given."""
    options, unknown = parser.parse_known_args(args)
    return None if unknown else options
