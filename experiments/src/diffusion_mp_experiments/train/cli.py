"""The console script `diffusion-mp`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial

from diffusion_mp import __version__
from diffusion_mp_experiments.train.stopping import exit_code

_USAGE = """diffusion-mp trains energy-constrained diffusion models.

  diffusion-mp                                the table `digits`: certified networks beside others, report in runs/
  diffusion-mp --splits 3                     the same with an option of reproduce
  diffusion-mp reproduce TABLE --jobs 2       another table of configs/; --quick takes minutes
  diffusion-mp results                        docs/results.md and its figures, from results/
  diffusion-mp fit --config configs/X.yaml    train one model; any field can be overridden: --model.lr 0.01
                   --ckpt_path PATH           ... going on from runs/X/version_0/checkpoints/last.ckpt, say
  diffusion-mp predict --config ... --ckpt_path ...    writes predictions.csv, a row per prediction
  diffusion-mp validate | test                the other subcommands of Lightning's command line (each has --help)
  diffusion-mp --version                      the version of the library
"""
_UNCONFIGURED = (
    "diffusion-mp {command} needs a model and data: --config configs/digits_difformer_s.yaml names both, say, and any "
    "field can be overridden (--model.lr 0.005); without a file they are --data=DigitsDataModule "
    "--model.model=diffusion_mp.models.DIFFormer --model.model.hidden_channels=64. The table of the digits, "
    "diffusion-mp, needs neither."
)
_LIGHTNING = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or without one make the table of the digits; return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if args and args[0] == "--version":
        print(f"diffusion-mp {__version__}")
        return 0
    again = shlex.join(["diffusion-mp", *args])
    if not args or args[0].startswith("-"):
        args = ["reproduce", "digits", *args]
    command = args[0]
    if command not in ("reproduce", "results", *_LIGHTNING):
        print(f"diffusion-mp has no subcommand {command!r}.\n\n{_USAGE}", file=sys.stderr)
        return 2
    return exit_code(partial(_run, command, args), f"Nothing is lost; start again with\n  {again}")


def _run(command: str, args: list[str]) -> int:
    """Run a subcommand; what it needs, which takes seconds to import, is loaded here and not before."""
    if command in ("reproduce", "results"):
        from diffusion_mp_experiments.reproduce import command as tables

        (tables.run_reproduce if command == "reproduce" else tables.run_results)(args[1:])
    elif not args[1:]:
        raise ValueError(_UNCONFIGURED.format(command=command))
    else:
        from diffusion_mp_experiments.train.lightning_cli import run_lightning

        run_lightning(args)
    return 0
