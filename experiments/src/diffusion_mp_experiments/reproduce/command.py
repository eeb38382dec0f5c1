"""`diffusion-mp reproduce` and `diffusion-mp results`: a table with its pictures, and the pages of all of them."""

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.reproduce import figures
from diffusion_mp_experiments.reproduce.harness import reproduce
from diffusion_mp_experiments.reproduce.report import (
    Lines,
    card,
    chosen,
    lines,
    section,
    summary,
)
from diffusion_mp_experiments.reproduce.table import (
    Record,
    Table,
    as_made,
    find_table,
    load_table,
    parsed,
    write_records,
)

_HEAD = """# Results

![Difference from the tuned GCN for every kind of model, by table](images/results.png)

Every row of the picture is one of the [tables](#tables).
For every kind of model, with and without attention, it shows the model with the best validation score.
Green models are ahead of the tuned GCN by more than one standard error, orange models are behind it by more than one.
Grey models are within one standard error.

`diffusion-mp results` writes this page and the pages of the tables from `results/*.jsonl`, so do not edit them.
`diffusion-mp reproduce TABLE` computes a table again.
The folder `configs` has a folder for each table, with a YAML file for each row.

## How to read the tables

- **Every model has the same search budget.**
  A fixed number of settings is drawn at random from a declared space.
  Each setting is trained on the tuning splits, and the setting with the best mean validation score is used.
  A row without anything to search has one trial.
- **Tuning and evaluation share no labels.**
  A fixed random part of the labels is reserved for tuning, and the reported splits are drawn from the other labels.
  Published splits are each tuned on their own training and validation nodes.
- **Test nodes select nothing.**
  Every run starts with a new model and a new optimiser.
  The validation score selects the epoch, and the test score is computed only after that.
- **Scores.**
  A score is the mean over splits, and ± after it is the standard deviation over splits.
  If a table has a single split, both are over seeds.
  No number is quoted from a paper.
- **Differences** ("ahead of GCN") are computed split by split, or seed by seed if a table has a single split.
  ± after a difference is its standard error.
  A positive difference is better, also where the score is an error.
- **Columns *identity* and *uniform*** are test scores of the trained model after its attention over all pairs was
  replaced, by the identity or by the mean over all nodes.
  A row with one of these words in its name was trained with that replacement.

"""

_TABLES = """## Tables

The page of a table has all of its models, its pictures and the settings that its searches chose.
Settings that were chosen for each split on its own are only in `results/`.
Here each table has its GCN and the three rows with the best validation scores.
The numbers are test scores: larger is better for an accuracy or an area under a curve, smaller is better for an error.

"""


_HOW_TO_READ = "[How to read this page](../results.md#how-to-read-the-tables)"

_CONFIGS_HELP = "folder of your own tables, which come before those of this package"


def run_reproduce(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "diffusion-mp reproduce", description="Makes a table of docs/results.md anew."
    )
    parser.add_argument(
        "table",
        help="the name of a table of this package, or of a folder below --configs",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ROW", help="these rows, not all"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few minutes: less of everything, as table.yaml says",
    )
    for name in ("splits", "trials", "epochs"):
        parser.add_argument(
            f"--{name}", type=count, help="instead of what table.yaml says"
        )
    parser.add_argument(
        "--jobs",
        type=count,
        default=min(4, os.cpu_count() or 1),
        help="processes of one thread each",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help="where networks train, cpu or cuda",
    )
    parser.add_argument(
        "--root", help="where the data lie, instead of data.init_args.root"
    )
    parser.add_argument("--configs", type=folder, help=_CONFIGS_HELP)
    parser.add_argument(
        "--out",
        type=folder,
        default=Path("runs/reproduce"),
        help="folder of all runs, %(default)s here",
    )
    parser.add_argument(
        "--save",
        type=folder,
        help="folder for the model of the first run of every row, with a card",
    )
    options = parser.parse_args(args)
    start = time.perf_counter()
    source = find_table(options.table, options.configs)
    table = load_table(source, options.root)
    overrides = {
        name: value
        for name in ("splits", "trials", "epochs")
        if (value := getattr(options, name)) is not None
    }
    # What is typed wins over what table.yaml says of --quick.
    table = replace(table, **{**(table.quick if options.quick else {}), **overrides})
    # Quick runs do not belong to the results, so they have a folder of their own.
    out = options.out / (f"{table.name}-quick" if options.quick else table.name)
    records = reproduce(
        table, out, options.jobs, options.only, options.save, options.device
    )
    flags = [f"--save {options.save}", *(["--quick"] if options.quick else [])]
    flags += [f"--{name} {value}" for name, value in overrides.items()]
    saved = {row.name for row in table.named(options.only)} if options.save else set()
    for record in records:
        # The model that was saved is the model of the first reported run.
        first = (
            record["kind"] == "run"
            and record["split"] == record["seed"] == 0
            and "epoch" in record
        )
        if first and record["row"] in saved:
            (options.save / f"{record['row']}.md").write_text(
                card(table, record, " ".join(flags)), "utf-8"
            )
    report = out / "report.md"
    rows = lines(table, records)
    report.write_text(illustrated(table, records, rows, _notes(source), out), "utf-8")
    text = section(table, rows)
    seconds = time.perf_counter() - start
    print(
        f"\n{text}\n{seconds:.0f} s now. With pictures: {report}. Every run: {out / 'runs.jsonl'}"
    )
    # The paths above are relative, so that a line of them can be copied.
    print(f"These paths begin in the folder {Path.cwd()}; the table is {source}")
    if not options.quick:
        words = ["diffusion-mp", "results", "--made", str(options.out)]
        if options.configs is not None:
            words += ["--configs", str(options.configs)]
        print(f"Take it over into docs/results.md: {shlex.join(words)}")


def run_results(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "diffusion-mp results",
        description="Writes docs/results.md, a page for each table and their figures.",
    )
    parser.add_argument(
        "--made",
        type=folder,
        help="the --out of `reproduce`: its tables replace those in --results",
    )
    parser.add_argument("--configs", type=folder, help=_CONFIGS_HELP)
    for name in ("results", "docs"):
        parser.add_argument(
            f"--{name}", type=folder, default=Path(name), help="folder, %(default)s"
        )
    options = parser.parse_args(args)
    print(write_page(options.configs, options.results, options.docs, options.made))


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text}"
        )
    return value


def folder(text: str) -> Path:
    return as_path(text, "folder")


def _device(text: str) -> str:
    try:
        torch.zeros(1, device=text).item()  # which "meta" lacks
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(
            f"torch cannot use {text!r}: {error}"
        ) from error
    return text


def _notes(source: Path) -> str:
    """Return what the folder of a table has to say about it, or an empty text."""
    notes = source / "notes.md"
    return notes.read_text("utf-8") if notes.is_file() else ""


def illustrated(
    table: Table,
    records: Sequence[Record],
    rows: Lines,
    notes: str,
    folder: Path,
    above: str = "",
) -> str:
    """Return the page of a table in Markdown, with `notes` below its title, and draw its pictures.

    Pictures are written to `folder`/images; `above` leads from the folder of the page to `folder`.
    """
    parts = [section(table, rows, notes)]

    def picture(ending: str, title: str) -> Path:
        name = f"images/results-{table.name}{ending}.png"
        parts.append(f"![{title}]({above}{name})\n")
        return folder / name

    (folder / "images").mkdir(parents=True, exist_ok=True)
    if table.sweep is not None:
        figures.draw_curves(
            picture("", f"{table.metric.title} along {table.sweep.title}"), table, rows
        )
        # With few layers the curves show everything.
        if max((len(line.states.get("rank", [])) for line in rows), default=0) > 8:
            figures.draw_states(
                picture("-states", "states of the trained models, layer by layer"),
                table,
                rows,
            )
        return "\n".join(parts)
    if any(name in line.differences for name in table.baselines for line in rows):
        figures.draw_differences(
            picture("", "difference of every row from the baselines"), table, rows
        )
    # A short descent is known by its ends; only a long one has a shape.
    if any(len(line.states.get("F", [])) > 16 for line in rows):
        figures.draw_energies(
            picture("-energies", "the energy F at every step of the trained networks"),
            table,
            rows,
        )
    figures.draw_search(
        picture("-search", "validation scores of all trials"), table, records
    )
    if settings := chosen(table, records):
        parts.append(f"{settings}\n")
    return "\n".join(parts)


def write_page(
    configs: Path | None, results: Path, docs: Path, made: Path | None = None
) -> Path:
    """Copy the results that `reproduce` has `made`, then write the pages and figures of all results.

    Every table has a page in `docs`/results. Return the path of the page with the list of them, `docs`/results.md.
    """
    if made is not None:
        _take_over(made, results, configs)
    # The list has the order of the names.
    paths = sorted(results.glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(
            f"There are no results in {results}; `diffusion-mp reproduce TABLE` makes some, and "
            "`diffusion-mp results --made runs/reproduce` takes them over."
        )
    pages = docs / "results"
    pages.mkdir(parents=True, exist_ok=True)
    found = []
    for path in paths:
        source = find_table(path.stem, configs)
        records = parsed(path.read_bytes(), path, "kind row seconds")
        table = as_made(load_table(source), records, path)
        rows = lines(table, records)
        if not rows:
            raise ValueError(
                f"{path} has no run of a row of the table {table.name!r}; delete it."
            )
        notes = f"{_notes(source)}\n{_HOW_TO_READ}\n".lstrip()
        text = illustrated(table, records, rows, notes, docs, above="../")
        (pages / f"{table.name}.md").write_text(text, "utf-8")
        found.append((table, rows))
    # The picture of all tables compares with the GCN, and shows one number for a model.
    compared = [
        (table, rows)
        for table, rows in found
        if any("gcn" in line.differences for line in rows) and table.sweep is None
    ]
    figures.draw_overview(docs / "images" / "results.png", compared)
    page = docs / "results.md"
    page.write_text(f"{_HEAD}{_TABLES}{summary(found, pages.name)}\n", "utf-8")
    return page


def _take_over(made: Path, results: Path, configs: Path | None) -> None:
    """Copy the results of tables, but not results of `--quick` and of other folders."""
    finished = {path.parent.name: path for path in sorted(made.glob("*/results.jsonl"))}
    if not finished:
        raise FileNotFoundError(
            f"No folder below {made} has results.jsonl; give the --out of `reproduce`."
        )
    for name, path in finished.items():
        try:
            find_table(name, configs)
        except FileNotFoundError:
            print(
                f"Left out: {path}, for {name} is no table. What --quick makes is not taken over."
            )
            continue
        results.mkdir(parents=True, exist_ok=True)
        write_records(parsed(path.read_bytes(), path), results / f"{name}.jsonl")
