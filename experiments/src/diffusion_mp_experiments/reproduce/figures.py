"""Pictures of tables."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from diffusion_mp_experiments.reproduce.report import Line, last_measures, points
from diffusion_mp_experiments.reproduce.table import Record, Table
from diffusion_mp_experiments.reproduce.training import MEASURES

# The palette of Okabe and Ito, which colour-blind readers can tell apart; beyond its length the line style differs.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LOOKS = cycler(markersize=[4], linewidth=[1.2]) * (
    cycler(linestyle=["-", "--"]) * cycler(color=_COLOURS, marker=_MARKERS)
)


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
    """Draw how far each row is ahead of the baselines, with twice the standard error."""
    baselines = [
        name
        for name in table.baselines
        if any(name in line.differences for line in lines)
    ]
    figure, (axes,) = _panels(9, 1.5 + 0.32 * len(lines))
    for k, name in enumerate(baselines):
        shown = {
            position: line.differences[name]
            for position, line in enumerate(lines)
            if name in line.differences
        }
        means, errors = np.transpose(list(shown.values()))
        # Baselines lie above each other around the line of their row.
        shift = 0.18 * (k - (len(baselines) - 1) / 2)
        axes.errorbar(
            means,
            np.array(list(shown)) + shift,
            # A single run has no standard error, so it gets no bar; matplotlib 3.7 stops where all of them are NaN.
            xerr=np.where(np.isnan(errors), 0, 2 * errors),
            label=f"ahead of {table.row(name).title}",
            fmt=_MARKERS[k],
            color=_COLOURS[k],
            markersize=4,
            capsize=2,
            linewidth=1,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    # A constant is far behind, and others close together.
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
    """Draw how far every kind of model is ahead of the GCN: its best row on validation, with the standard error."""
    figure, panels = _panels(10, 1.4 + 0.25 * len(tables), len(_KINDS))
    for position, (table, lines) in enumerate(tables):
        unit = 1.0
        if table.metric.mode == "min":
            # Errors have no common scale, so they are in percent of the GCN's error.
            unit = next(line for line in lines if line.row == "gcn").score[0] / 100
        best: dict[str, Line] = {}
        # The last of a kind stays, and that is the best one.
        for line in sorted(lines, key=lambda line: table.metric.sign * line.validation):
            kinds = (
                kind
                for kind, begins in _KINDS.items()
                if f"{line.title},".startswith(begins)
            )
            if "gcn" in line.differences:
                best[next(kinds, "")] = line
        for panel, kind in zip(panels, _KINDS, strict=True):
            if kind in best:
                mean, error = (each / unit for each in best[kind].differences["gcn"])
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
    # The common part of the titles would not fit beside the panels.
    titles = [
        table.title.partition(" on ")[0].replace(" labels per", " per")
        for table, _ in tables
    ]
    for panel, kind in zip(panels, _KINDS, strict=True):
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=5)
        panel.set(xlim=(-80, 80), ylim=(len(tables) - 0.5, -0.5))
        panel.set_xticks([-20, -5, 0, 5, 20], ["−20", "", "0", "", "20"], fontsize=8)
        panel.set_yticks(range(len(tables)), titles, fontsize=9)
        # Titles stand once, on the left.
        panel.tick_params(length=0, labelleft=panel is panels[0])
        panel.set_title(kind, fontsize=9)
    label = "ahead of the tuned GCN by −20, −5, 0, 5, 20 points (of errors, % of the GCN's), ± 1 standard error"
    figure.supxlabel(label, fontsize=9)
    figure.savefig(path)


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
    shown = [row for row in table.rows if values[row.name]]
    figure, (axes,) = _panels(9, 1.2 + 0.26 * len(shown))
    marks = [values[row.name] for row in shown]
    axes.eventplot(marks, color=_COLOURS[0], linelengths=0.4, linewidths=1)
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
    """Draw every measure of the states, layer by layer, at the last value of the sweep of a table."""
    sweep, curves = points(table, lines)
    figure, panels = _panels(4.2 * len(MEASURES) + 1, 4.4, len(MEASURES))
    scales = {"rank": "linear"}
    for panel, (name, label) in zip(panels, MEASURES.items(), strict=True):
        panel.set(xlabel="layer", ylabel=label, yscale=scales.get(name, "log"))
        for (title, curve), look in zip(curves, _LOOKS, strict=False):
            last = curve.get(len(sweep.values) - 1)
            if last is not None and last.states.get(name):
                # A name in each panel would be in the legend of the figure as often.
                named = title if panel is panels[0] else None
                panel.plot(last.states[name], **{**look, "markersize": 2}, label=named)
    _save(
        path,
        figure,
        f"{table.title}: states of the trained models, {sweep.title} {sweep.values[-1]}",
        len(curves),
    )


def draw_curves(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """Draw the metric, and the spread and rank of the last states, along the sweep of a table."""
    sweep, curves = points(table, lines)
    measures = last_measures(lines)
    count = 1 + len(measures)
    figure, panels = _panels(max(9, 4.2 * count + 1), 4.4, count)
    for (title, curve), look in zip(curves, _LOOKS, strict=False):
        if curve:
            scores, deviations = np.transpose([line.score for line in curve.values()])
            panels[0].errorbar(
                list(curve), scores, yerr=deviations, capsize=2, label=title, **look
            )
        for panel, measure in zip(panels[1:], measures, strict=True):
            last = {
                position: line.states[measure][-1]
                for position, line in curve.items()
                if line.states.get(measure)
            }
            panel.plot(list(last), list(last.values()), **look)
    panels[0].set(ylabel=f"{table.metric.title}, ± 1 sd")
    scales = {"spread": "log"}
    for panel, measure in zip(panels[1:], measures, strict=True):
        panel.set(ylabel=MEASURES[measure], yscale=scales.get(measure, "linear"))
    names = [str(value) for value in sweep.values]
    # Long names in a line would cover each other.
    long = sum(map(len, names)) > 60
    style: dict[str, Any] = {"rotation": 30, "ha": "right"} if long else {}
    for panel in panels:
        panel.set_xticks(range(len(names)), names, **style)
        panel.set_xlabel(sweep.title)
    _save(path, figure, table.title, len(curves))


def draw_energies(path: Path, table: Table, lines: Sequence[Line]) -> None:
    figure, (axes,) = _panels(9, 4)
    certified = [line for line in lines if any(line.states.get("F", []))]
    for line, look in zip(certified, _LOOKS, strict=False):
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


def draw_scores(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """Draw the test score of every row with its standard deviation over splits."""
    figure, (axes,) = _panels(8, 1.5 + 0.32 * len(lines))
    means, deviations = np.transpose([line.score for line in lines])
    axes.errorbar(
        means,
        range(len(lines)),
        xerr=np.where(np.isnan(deviations), 0, deviations),
        fmt="o",
        color=_COLOURS[0],
        capsize=3,
    )
    _name_rows(axes, [line.title for line in lines])
    axes.set_xlabel(table.metric.title)
    figure.savefig(path)


def draw_learning(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw the validation score of every row by epoch."""
    figure, (axes,) = _panels(8, 4.5)
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=_COLOURS))
    for title, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=title)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation score")
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path)


def draw_steps(path: Path, energies: Mapping[str, Sequence[float]]) -> None:
    """Draw the energy of the blocks of a trained network at every step."""
    figure, panels = _panels(3.2 * len(energies), 3.0, len(energies))
    for axes, (title, values) in zip(panels, energies.items(), strict=True):
        axes.plot(
            range(len(values)), values, marker="o", markersize=3, color=_COLOURS[2]
        )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("energy F")
    figure.savefig(path)
