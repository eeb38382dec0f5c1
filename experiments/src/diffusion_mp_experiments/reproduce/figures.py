"""Pictures of tables."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diffusion_mp_experiments.reproduce.report import Line, points
from diffusion_mp_experiments.reproduce.table import Record, Table
from diffusion_mp_experiments.reproduce.training import MEASURES

# The palette of Okabe and Ito, which colour-blind readers can tell apart; beyond its length the line style differs.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _looks() -> Iterator[dict[str, Any]]:
    for style in ("-", "--"):
        for colour, marker in zip(_COLOURS, _MARKERS, strict=True):
            yield {
                "color": colour,
                "marker": marker,
                "linestyle": style,
                "markersize": 4,
                "linewidth": 1.2,
            }


def _panels(width: float, height: float, count: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.grid(linewidth=0.3)
    return figure, panels


def _name_rows(axes: Axes, titles: Sequence[str]) -> None:
    """Write titles on the vertical axis, after plotting: ticks set before would not be in the limits."""
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def draw_differences(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """How far each row is ahead of the baselines, with twice the standard error."""
    baselines = [
        name
        for name in table.baselines
        if any(name in line.differences for line in lines)
    ]
    figure, (axes,) = _panels(9, 1.5 + 0.32 * len(lines))
    for k, name in enumerate(baselines):
        shown = [
            (position, line.differences[name])
            for position, line in enumerate(lines)
            if name in line.differences
        ]
        means = [mean for _, (mean, _) in shown]
        # A single run has no standard error, so it gets no bar; matplotlib 3.7 stops where all of them are NaN.
        errors = [0.0 if math.isnan(error) else 2 * error for _, (_, error) in shown]
        places = [
            position + 0.18 * (k - (len(baselines) - 1) / 2) for position, _ in shown
        ]
        axes.errorbar(
            means,
            places,
            xerr=errors,
            label=f"ahead of {table.row(name).title}",
            fmt=_MARKERS[k],
            color=_COLOURS[k],
            markersize=4,
            capsize=2,
            linewidth=1,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    # a constant is far behind, and others close together.
    axes.set_xscale("symlog", linthresh=table.metric.scale / 50)
    axes.xaxis.set_major_formatter("{x:g}")
    _name_rows(axes, [line.title for line in lines])
    unit = "seed by seed" if table.splits == 1 else "split by split"
    axes.set(
        xlabel=f"difference in {table.metric.title}, {unit}, ± 2 standard errors",
        title=table.title,
    )
    figure.legend(loc="outside lower center", ncols=len(baselines), frameon=False)
    figure.savefig(path)


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


def draw_overview(path: Path, tables: Sequence[tuple[Table, Sequence[Line]]]) -> None:
    """How far every kind of model is ahead of the GCN: of each its best row on validation, with the standard error."""
    figure, panels = _panels(10, 1.4 + 0.25 * len(tables), len(_KINDS))
    for position, (table, lines) in enumerate(tables):
        if table.metric.mode == "max":
            whole = 1.0
        else:
            whole = next(line for line in lines if line.row == "gcn").score[0] / 100
        best: dict[str, Line] = {}
        for line in sorted(lines, key=lambda line: table.metric.sign * line.validation):
            if "gcn" in line.differences:
                kinds = (
                    kind
                    for kind, begins in _KINDS.items()
                    if f"{line.title},".startswith(begins)
                )
                best[next(kinds, "")] = line
        for panel, kind in zip(panels, _KINDS, strict=True):
            if kind in best:
                mean, error = (each / whole for each in best[kind].differences["gcn"])
                colour = "#777777"
                if abs(mean) > error:
                    colour = _COLOURS[2 if mean > 0 else 1]
                panel.errorbar(
                    mean,
                    position,
                    xerr=error,
                    fmt="o",
                    color=colour,
                    markersize=5,
                    capsize=2,
                    linewidth=1.2,
                )
    titles = [
        table.title.partition(" on ")[0].replace(" labels per", " per")
        for table, _ in tables
    ]
    for panel, kind in zip(panels, _KINDS, strict=True):
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=5)
        panel.set(xlim=(-80, 80), ylim=(len(tables) - 0.5, -0.5))
        panel.set_xticks([-20, -5, 0, 5, 20], ["−20", "", "0", "", "20"], fontsize=8)
        panel.set_yticks(
            range(len(tables)),
            titles if panel is panels[0] else [""] * len(tables),
            fontsize=9,
        )
        panel.tick_params(length=0)
        panel.set_title(kind, fontsize=9)
    label = "ahead of the tuned GCN by −20, −5, 0, 5, 20 points (of errors, % of the GCN's), ± 1 standard error"
    figure.supxlabel(label, fontsize=9)
    figure.savefig(path)


def draw_search(path: Path, table: Table, records: Iterable[Record]) -> None:
    """The value of every trial of every row on the tuning splits; with nested tuning, of every split."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record["kind"] == "search":
            found = [
                trial["value"]
                for trial in record["trials"]
                if trial["value"] is not None
            ]
            values.setdefault(record["row"], []).extend(
                table.metric.sign * table.metric.scale * each for each in found
            )
    shown = [row for row in table.rows if values.get(row.name)]
    figure, (axes,) = _panels(9, 1.2 + 0.26 * len(shown))
    for position, row in enumerate(shown):
        axes.plot(
            values[row.name],
            [position] * len(values[row.name]),
            "|",
            color=_COLOURS[0],
            markersize=8,
        )
    _name_rows(axes, [row.title for row in shown])
    axes.set(
        xlabel=f"validation {table.metric.title}, one mark per trial",
        title=f"{table.title}: the search",
    )
    figure.savefig(path)


def _save(path: Path, figure: Figure, title: str, curves: int) -> None:
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=min(3, curves), frameon=False)
    figure.savefig(path)


def draw_states(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """Every measure of the states, layer by layer, at the last value of the sweep of a table."""
    sweep, curves = points(table, lines)
    figure, panels = _panels(4.2 * len(MEASURES) + 1, 4.4, len(MEASURES))
    for (title, curve), look in zip(curves, _looks(), strict=False):
        last = curve.get(len(sweep.values) - 1)
        states = last.states if last is not None else {}
        for panel, name in zip(panels, MEASURES, strict=True):
            if states.get(name):
                label = title if panel is panels[0] else None
                panel.plot(states[name], **{**look, "markersize": 2}, label=label)
    for panel, (name, label) in zip(panels, MEASURES.items(), strict=True):
        panel.set(
            xlabel="layer", ylabel=label, yscale="linear" if name == "rank" else "log"
        )
    _save(
        path,
        figure,
        f"{table.title}: states of the trained models, {sweep.title} {sweep.values[-1]}",
        len(curves),
    )


def draw_curves(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """The metric, and the spread and rank of the last states, along the sweep of a table."""
    sweep, curves = points(table, lines)
    measures = [
        name
        for name in ("spread", "rank")
        if any(line.states.get(name) for line in lines)
    ]
    figure, (first, *others) = _panels(
        4.2 * (1 + len(measures)) + 1, 4.4, 1 + len(measures)
    )
    for (title, curve), look in zip(curves, _looks(), strict=False):
        if curve:
            scores, deviations = zip(
                *(line.score for line in curve.values()), strict=True
            )
            first.errorbar(
                list(curve), scores, yerr=deviations, capsize=2, label=title, **look
            )
        for panel, measure in zip(others, measures, strict=True):
            last = {
                position: line.states[measure][-1]
                for position, line in curve.items()
                if line.states.get(measure)
            }
            panel.plot(list(last), list(last.values()), **look)
    first.set(ylabel=f"{table.metric.title}, ± 1 sd")
    for panel, measure in zip(others, measures, strict=True):
        panel.set(
            ylabel=MEASURES[measure], yscale="log" if measure == "spread" else "linear"
        )
    for panel in (first, *others):
        panel.set_xticks(
            range(len(sweep.values)), [str(value) for value in sweep.values]
        )
        panel.set_xlabel(sweep.title)
    _save(path, figure, table.title, len(curves))


def draw_energies(path: Path, table: Table, lines: Sequence[Line]) -> None:
    figure, (axes,) = _panels(9, 4)
    for line, look in zip(
        (line for line in lines if any(line.states.get("F", []))),
        _looks(),
        strict=False,
    ):
        axes.plot(line.states["F"], **{**look, "markersize": 3}, label=line.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel="steps",
        ylabel="F",
        yscale="log",
        title=f"{table.title}: the energy of the trained networks",
    )
    axes.legend(frameon=False)
    figure.savefig(path)
