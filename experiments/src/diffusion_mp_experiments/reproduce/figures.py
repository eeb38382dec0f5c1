"""Pictures of tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from diffusion_mp_experiments.reproduce.report import (
    Estimate,
    Lines,
    last_measures,
    points,
)
from diffusion_mp_experiments.reproduce.table import Record, Table
from diffusion_mp_experiments.reproduce.training import MEASURES

# The palette of Okabe and Ito, which colour-blind readers can tell apart; beyond its length the line style differs.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LOOKS = cycler(markersize=[4], linewidth=[1.2]) * (
    cycler(linestyle=["-", "--", ":"]) * cycler(color=_COLOURS, marker=_MARKERS)
)


@contextmanager
def _panels(
    path: Path, width: float, height: float, count: int = 1, title: str = ""
) -> Iterator[list[Axes]]:
    """Give panels side by side to draw in, and save them, with the names of the lines in the first panel below."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.grid(linewidth=0.3)
        axes.set_prop_cycle(_LOOKS)
    yield panels
    if title:
        figure.suptitle(title)
    named, names = panels[0].get_legend_handles_labels()
    if names:
        figure.legend(
            named,
            names,
            loc="outside lower center",
            ncols=min(3, len(names)),
            frameon=False,
        )
    figure.savefig(path)


def _draw_estimates(
    axes: Axes,
    positions: Any,
    estimates: Sequence[Estimate],
    errors: float,
    **look: Any,
) -> None:
    """Draw each number at its height, with so many of its errors to both sides."""
    means, deviations = np.transpose(estimates)
    # A single run has no standard error, so it gets no bar; matplotlib 3.7 stops where all of them are NaN.
    sides = errors * np.nan_to_num(deviations)
    axes.errorbar(means, positions, xerr=sides, linestyle="", capsize=2, **look)


def _name_rows(axes: Axes, titles: Sequence[str]) -> None:
    """Write titles on the vertical axis, after plotting: ticks set before would not be in the limits."""
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def draw_differences(path: Path, table: Table, lines: Lines) -> None:
    """Draw how far each row is ahead of the baselines, with twice the standard error."""
    baselines = [
        name
        for name in table.baselines
        if any(name in line.differences for line in lines)
    ]
    with _panels(path, 9, 1.5 + 0.32 * len(lines), title=table.title) as (axes,):
        for k, name in enumerate(baselines):
            shown = {
                position: line.differences[name]
                for position, line in enumerate(lines)
                if name in line.differences
            }
            # Baselines lie above each other around the line of their row.
            shift = 0.18 * (k - (len(baselines) - 1) / 2)
            label = f"ahead of {table.row(name).title}"
            _draw_estimates(
                axes, np.array(list(shown)) + shift, [*shown.values()], 2, label=label
            )
        axes.axvline(0, color="black", linewidth=0.8)
        # A constant is far behind, and others close together.
        axes.set_xscale("symlog", linthresh=table.metric.scale / 50)
        axes.xaxis.set_major_formatter("{x:g}")
        _name_rows(axes, [line.title for line in lines])
        unit = "seed by seed" if table.splits == 1 else "split by split"
        axes.set_xlabel(
            f"difference in {table.metric.title}, {unit}, ± 2 standard errors"
        )


def draw_scores(path: Path, table: Table, lines: Lines) -> None:
    """Draw the test score of every row with its standard deviation over splits."""
    with _panels(path, 8, 1.5 + 0.32 * len(lines)) as (axes,):
        _draw_estimates(axes, range(len(lines)), [line.score for line in lines], 1)
        _name_rows(axes, [line.title for line in lines])
        axes.set_xlabel(table.metric.title)


# Kinds of models, and how the titles of their rows begin; the first that fits counts.
_KINDS = {
    "certified\nblocks": ("certified transformer",),
    "certified\nDIFFormer": ("certified",),
    "Diffusion-\nClassifier": ("DiffusionClassifier",),
    "DIFFormer": ("DIFFormer",),
    "NodeFormer,\nSGFormer": ("NodeFormer", "SGFormer"),
    "label\npropagation": ("label propagation",),
    "without\na graph": ("MLP,", "logistic regression"),
    "other\ngraph nets": (
        "GAT",
        "Gated",
        "GCN",
        "GIN",
        "Graph",
        "APPNP",
        "Heat",
        "MLP +",
    ),
}


def draw_overview(path: Path, tables: Sequence[tuple[Table, Lines]]) -> None:
    """Draw how far every kind of model is ahead of the GCN: its best row on validation, with the standard error."""
    with _panels(path, 10, 1.4 + 0.25 * len(tables), len(_KINDS)) as panels:
        for position, (table, lines) in enumerate(tables):
            best = _best_of_kinds(table, lines)
            for panel, kind in zip(panels, _KINDS, strict=True):
                if kind in best:
                    mean, error = best[kind]
                    colour = "#777777"
                    if abs(mean) > error:
                        colour = _COLOURS[2 if mean > 0 else 1]
                    _draw_estimates(
                        panel, position, [best[kind]], 1, color=colour, marker="o"
                    )
        # The common part of the titles would not fit beside the panels.
        titles = [
            table.title.partition(" on ")[0].replace(" labels per", " per")
            for table, _ in tables
        ]
        for panel, kind in zip(panels, _KINDS, strict=True):
            panel.axvline(0, color="black", linewidth=0.8)
            panel.set_xscale("symlog", linthresh=5)
            panel.set(xlim=(-80, 80), ylim=(len(tables) - 0.5, -0.5))
            ticks = {-20: "−20", -5: "", 0: "0", 5: "", 20: "20"}
            panel.set_xticks(list(ticks), ticks.values(), fontsize=8)
            panel.set_yticks(range(len(tables)), titles, fontsize=9)
            # Titles stand once, on the left.
            panel.tick_params(length=0, labelleft=panel is panels[0])
            panel.set_title(kind, fontsize=9)
        panels[0].figure.supxlabel(
            "ahead of the tuned GCN by −20, −5, 0, 5, 20 points (of errors, % of the GCN's), ± 1 standard error",
            fontsize=9,
        )


def _best_of_kinds(table: Table, lines: Lines) -> dict[str, Estimate]:
    """Return how far the best row of every kind is ahead of the GCN."""
    unit = 1.0
    if table.metric.mode == "min":
        # Errors have no common scale, so they are in percent of the GCN's error.
        unit = next(line for line in lines if line.row == "gcn").score[0] / 100
    best = {}
    # The last of a kind stays, and that is the best one.
    for line in sorted(lines, key=lambda line: table.metric.sign * line.validation):
        for kind, begins in _KINDS.items():
            if f"{line.title},".startswith(begins):
                if "gcn" in line.differences:
                    mean, error = line.differences["gcn"]
                    best[kind] = (mean / unit, error / unit)
                break
    return best


def draw_search(path: Path, table: Table, records: Iterable[Record]) -> None:
    """Draw the value of every trial of every row on the tuning splits; with nested tuning, of every split."""
    values: dict[str, list[float]] = {row.name: [] for row in table.rows}
    unit = table.metric.sign * table.metric.scale
    for record in records:
        if record["kind"] == "search" and record["row"] in values:
            values[record["row"]] += [
                unit * trial["value"]
                for trial in record["trials"]
                if trial["value"] is not None
            ]
    marks = {row.title: values[row.name] for row in table.rows if values[row.name]}
    title = f"{table.title}: the search"
    with _panels(path, 9, 1.2 + 0.26 * len(marks), title=title) as (axes,):
        axes.eventplot(
            list(marks.values()), color=_COLOURS[0], linelengths=0.4, linewidths=1
        )
        _name_rows(axes, list(marks))
        axes.set_xlabel(f"validation {table.metric.title}, one mark per trial")


def draw_states(path: Path, table: Table, lines: Lines) -> None:
    """Draw every measure of the states, layer by layer, at the last value of the sweep of a table."""
    sweep, curves = points(table, lines)
    title = (
        f"{table.title}: states of the trained models, {sweep.title} {sweep.values[-1]}"
    )
    width = 4.2 * len(MEASURES) + 1
    with _panels(path, width, 4.4, len(MEASURES), title) as panels:
        for panel, (name, measure) in zip(panels, MEASURES.items(), strict=True):
            for label, curve in curves:
                last = curve.get(len(sweep.values) - 1)
                states = last.states.get(name, []) if last else []
                # Of what is missing nothing is drawn; a curve has one look in all panels.
                panel.plot(states, markersize=2, label=label if states else None)
            scale = "linear" if name == "rank" else "log"
            panel.set(xlabel="layer", ylabel=measure, yscale=scale)


def draw_curves(path: Path, table: Table, lines: Lines) -> None:
    """Draw the metric, and the spread and rank of the last states, along the sweep of a table."""
    sweep, curves = points(table, lines)
    measures = last_measures(lines)
    count = 1 + len(measures)
    names = [str(value) for value in sweep.values]
    style: dict[str, Any] = {}
    # Long names in a line would cover each other.
    if sum(map(len, names)) > 60:
        style = {"rotation": 30, "ha": "right"}
    with _panels(path, max(9, 4.2 * count + 1), 4.4, count, table.title) as panels:
        scores, *others = panels
        scores.set_ylabel(f"{table.metric.title}, ± 1 sd")
        curves = [(title, curve) for title, curve in curves if curve]
        for title, curve in curves:
            means, deviations = np.transpose([line.score for line in curve.values()])
            scores.errorbar(list(curve), means, yerr=deviations, capsize=2, label=title)
        for panel, measure in zip(others, measures, strict=True):
            for _, curve in curves:
                last = {
                    position: line.states[measure][-1]
                    for position, line in curve.items()
                    if line.states.get(measure)
                }
                panel.plot(list(last), list(last.values()))
            scale = "log" if measure == "spread" else "linear"
            panel.set(ylabel=MEASURES[measure], yscale=scale)
        for panel in panels:
            panel.set_xticks(range(len(names)), names, **style)
            panel.set_xlabel(sweep.title)


def draw_energies(path: Path, table: Table, lines: Lines) -> None:
    title = f"{table.title}: the energy of the trained networks"
    with _panels(path, 9, 4, title=title) as (axes,):
        for line in lines:
            if any(line.states.get("F", [])):
                axes.plot(line.states["F"], markersize=3, label=line.title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="steps", ylabel="F", yscale="log")


def draw_learning(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw the validation score of every row by epoch."""
    with _panels(path, 8, 5.5) as (axes,):
        for title, curve in curves.items():
            axes.plot(range(1, len(curve) + 1), curve, marker="", label=title)
        axes.set(xlabel="epoch", ylabel="validation score")


def draw_steps(path: Path, energies: Mapping[str, Sequence[float]]) -> None:
    """Draw the energy of the blocks of a trained network at every step."""
    with _panels(path, 3.2 * len(energies), 3.0, len(energies)) as panels:
        for axes, (title, values) in zip(panels, energies.items(), strict=True):
            axes.plot(values)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("energy F")
