"""`diffusion-mp reproduce` and `diffusion-mp results`."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from diffusion_mp_experiments.reproduce.harness import reproduce
from diffusion_mp_experiments.reproduce.page import illustrated, write_page
from diffusion_mp_experiments.reproduce.report import lines, section
from diffusion_mp_experiments.reproduce.table import load_table


def run_reproduce(args: list[str]) -> None:
    """Makes a table, or goes on with it, and prints it."""
    parser = argparse.ArgumentParser("diffusion-mp reproduce", description="Makes a table of docs/results.md anew.")
    parser.add_argument("table", help="a folder below --configs")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows, not all")
    parser.add_argument("--quick", action="store_true", help="a few minutes: less of everything, as table.yaml says")
    for name in ("splits", "trials", "epochs"):
        parser.add_argument(f"--{name}", type=_positive, help="instead of what table.yaml says")
    parser.add_argument(
        "--jobs", type=_positive, default=min(4, os.cpu_count() or 1), help="processes of one thread each"
    )
    parser.add_argument("--root", help="where the data lie, instead of data.init_args.root")
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="folder of all tables")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder of all runs")
    options = parser.parse_args(args)
    table = load_table(options.configs / options.table, options.root)
    table = table.quickly() if options.quick else table
    told = {name: value for name in ("splits", "trials", "epochs") if (value := getattr(options, name)) is not None}
    table, start = replace(table, **told), time.perf_counter()
    folder = options.out / (f"{table.name}-quick" if options.quick else table.name)
    records = reproduce(table, folder, options.jobs, options.only)
    report = folder / "report.md"
    report.write_text(illustrated(table, records, options.configs / table.name / "notes.md", folder))
    text, seconds = section(table, lines(table, records)), time.perf_counter() - start
    print(f"\n{text}\n{seconds:.0f} s now. With pictures: {report}. Every run: {folder / 'runs.jsonl'}")
    if not options.quick:
        print(f"Take it over into docs/results.md: diffusion-mp results --made {options.out}")


def run_results(args: list[str]) -> None:
    """Writes docs/results.md and its figures."""
    parser = argparse.ArgumentParser("diffusion-mp results", description="Writes docs/results.md and its figures.")
    parser.add_argument("--made", type=Path, help="the --out of `reproduce`: its tables replace those in --results")
    for name in ("configs", "results", "docs"):
        parser.add_argument(f"--{name}", type=Path, default=Path(name), help=f"the folder {name} of a clone")
    options = parser.parse_args(args)
    print(write_page(options.configs, options.results, options.docs, options.made))


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value
