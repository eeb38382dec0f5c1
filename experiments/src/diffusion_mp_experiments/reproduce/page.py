"""A table with its pictures, and the page of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffusion_mp_experiments.reproduce.figures import (
    draw_curves,
    draw_differences,
    draw_energies,
    draw_search,
    draw_states,
)
from diffusion_mp_experiments.reproduce.records import Record, parsed, write
from diffusion_mp_experiments.reproduce.report import chosen, lines, section
from diffusion_mp_experiments.reproduce.table import Table, load_table

_HEAD = """# Results

`diffusion-mp results` has written this page from `results/*.jsonl`; do not edit it. `diffusion-mp reproduce TABLE`
makes the numbers anew: `configs` has a folder for every table, and in it a YAML for every row.

- **The same budget for every model**: so many settings, drawn at random from one declared space, each trained on the
  tuning splits; the best mean validation metric decides. A row without anything to search has one trial.
- **Tuning and results share no label.** A fixed random part of the labels belongs to tuning, whose splits train and
  validate within it; splits of results are drawn from the others. Where splits are published, every split is tuned on
  its own training and validation nodes (nested).
- Every run has a fresh model and optimiser. Its epoch is chosen on validation; test nodes are looked at after that.
- ± beside a score is one standard deviation over splits. A difference is taken split by split, on the same splits, and
  ± beside it is its standard error; positive is better. Where there is one split, both are over seeds. Nothing is
  quoted from a paper.
- *identity*, *uniform*: the test score of the trained model with its attention over pairs replaced by the identity, or
  by the mean over all nodes, after training. Rows that say so are trained that way, too.
"""


def illustrated(table: Table, records: Sequence[Record], notes: Path, folder: Path) -> str:
    """The section of a table in Markdown, with pictures that are drawn into `folder`/images.

    What the file `notes` says, if there is one, stands above the table.
    """
    rows = lines(table, records)
    parts = [section(table, rows, notes.read_text() if notes.is_file() else "")]

    def picture(ending: str, title: str) -> Path:
        name = f"images/results-{table.name}{ending}.png"
        parts.append(f"![{title}]({name})\n")
        return folder / name

    (folder / "images").mkdir(parents=True, exist_ok=True)
    if table.sweep is not None:
        draw_curves(picture("", f"{table.metric.title} along {table.sweep.title}"), table, rows)
        if max((len(line.states.get("rank", [])) for line in rows), default=0) > 8:
            draw_states(picture("-states", "states of the trained models, layer by layer"), table, rows)
        return "\n".join(parts)
    if table.baselines:
        draw_differences(picture("", "how far each row is ahead"), table, rows)
    if any(len(line.states.get("F", [])) > 16 for line in rows):
        draw_energies(picture("-energies", "the energy F at every step of the trained networks"), table, rows)
    draw_search(picture("-search", "what the trials came to"), table, records)
    return "\n".join([*parts, f"{chosen(table, records)}\n"])


def write_page(configs: Path, results: Path, docs: Path, made: Path | None = None) -> Path:
    """Write docs/results.md and its figures from `results/*.jsonl`; first take over what was `made` by `reproduce`.

    Raises:
        FileNotFoundError: there are no results.
    """
    for path in sorted(made.glob("*/results.jsonl")) if made else []:
        if (configs / path.parent.name / "table.yaml").is_file():
            results.mkdir(exist_ok=True)
            write(parsed(path.read_text(), path), results / f"{path.parent.name}.jsonl")
    found = sorted(results.glob("*.jsonl"))
    if not found:
        raise FileNotFoundError(
            f"There are no results in {results}; `diffusion-mp reproduce TABLE` makes some, and "
            "`diffusion-mp results --made runs/reproduce` takes them over."
        )
    sections = [
        illustrated(
            load_table(configs / path.stem), parsed(path.read_text(), path), configs / path.stem / "notes.md", docs
        )
        for path in found
    ]
    page = docs / "results.md"
    page.write_text("\n".join([_HEAD, *sections]))
    return page
