"""Tables, numbers and two pictures of the main job."""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from diffusion_mp.diagnostics import EnergyTrace
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp_experiments.train.many_runs import versions

FLAGSHIP = "certified, attention"
PUBLISHED = "DIFFormer-s"
STEPS = 30  # of the trained flagship that the picture shows
NUMBERS = ("method", "split", "val_acc", "test_acc", "chosen", "seconds")


@dataclass(frozen=True)
class Inside:
    """Of a trained network: energies of the states on its way (the first is before any step), and the last state."""

    before: list[float]
    after: list[float]
    state: np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Result:
    """One method on one split; `chosen` is what validation decided (an epoch, an alpha, a C)."""

    method: str
    split: int
    val_acc: float
    test_acc: float
    chosen: str
    seconds: float
    inside: Inside | None = field(default=None, repr=False, compare=False)


def summarise(results: list[Result]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation (n − 1) of test accuracy over the splits, per method; one split has deviation nan."""
    methods = list(dict.fromkeys(result.method for result in results))
    summary = {}
    for method in methods:
        scores = [result.test_acc for result in results if result.method == method]
        summary[method] = (statistics.mean(scores), statistics.stdev(scores) if len(scores) > 1 else float("nan"))
    return summary


def behind(results: list[Result]) -> dict[str, tuple[float, float]]:
    """How far every other method is behind the flagship on the same splits: mean of the differences of test accuracy,
    and its standard error (nan for one split)."""
    scores = {(result.method, result.split): result.test_acc for result in results}
    differences = {}
    for method in summarise(results):
        pairs = [scores[FLAGSHIP, split] - score for (name, split), score in scores.items() if name == method]
        error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else float("nan")
        differences[method] = (statistics.mean(pairs), error)
    del differences[FLAGSHIP]
    return differences


def table(results: list[Result]) -> str:
    """The table that is printed and reported, in Markdown."""
    splits, differences = len({result.split for result in results}), behind(results)
    lines = [f"| method | test accuracy | {FLAGSHIP} is ahead by |", "|---|---|---|"]
    for method, (mean, deviation) in summarise(results).items():
        ahead = ""
        if method in differences:
            difference, error = differences[method]
            ahead = f"{100 * difference:+.1f}" + (f" ± {100 * error:.1f}" if splits > 1 else "")
        spread = f" ± {100 * deviation:.1f}" if splits > 1 else ""
        lines.append(f"| {method} | {100 * mean:.1f}{spread} | {ahead} |")
    over = (
        f"± beside an accuracy is one standard deviation over {splits} different random splits, each with its own "
        "initialisation; beside a difference, which is taken split by split, it is its standard error."
        if splits > 1
        else "One split, one initialisation: no ± can be given."
    )
    return "\n".join(lines) + f"\n\n{over}"


def write_report(folder: Path, results: list[Result], data: Data, options: argparse.Namespace, seconds: float) -> Path:
    """Writes metrics.json, metrics.csv, energy.png, embedding.png and report.md; returns the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{name: getattr(result, name) for name in NUMBERS} for result in results]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NUMBERS)
        writer.writeheader()
        writer.writerows(rows)

    inside = {result.method: result.inside for result in results if result.inside}
    _draw_energy(folder / "energy.png", inside)
    _draw_embedding(folder / "embedding.png", inside[FLAGSHIP].state, data.y)

    summary = {method: {"mean": mean, "sd": _number(sd)} for method, (mean, sd) in summarise(results).items()}
    numbers = {
        "test_accuracy": summary,
        "runs": rows,
        "ahead": {method: {"mean": mean, "se": _number(error)} for method, (mean, error) in behind(results).items()},
        "energy_per_layer": {name: {"before": seen.before, "after": seen.after} for name, seen in inside.items()},
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": versions(),
        "seconds": seconds,
    }
    (folder / "metrics.json").write_text(json.dumps(numbers, indent=2) + "\n")
    (folder / "report.md").write_text(_report(results, data, options, seconds))
    return folder / "report.md"


def _report(results: list[Result], data: Data, options: argparse.Namespace, seconds: float) -> str:
    """The text of `digits_report.md` beside this file, filled in."""
    counts = {name: int(data[f"{name}_mask"].sum()) for name in ("train", "val", "test")}
    return (
        files(__package__)
        .joinpath("digits_report.md")
        .read_text("utf-8")
        .format(
            table=table(results),
            nodes=data.num_nodes,
            edges=data.num_edges,
            sizes="{train} training, {val} validation, {test} test".format(**counts),
            last=options.seed + options.splits - 1,
            chosen="\n".join(
                f"| {r.method} | {r.split} | {100 * r.val_acc:.1f} | {100 * r.test_acc:.1f} | {r.chosen} |"
                for r in results
            ),
            versions="\n".join(f"- {name} {version}" for name, version in versions().items()),
            seconds=seconds,
            **vars(options),
        )
    )


def look_inside(method: str, model: nn.Module, data: Data) -> Inside | None:
    """Energies and last state of the flagship and of the published network, in evaluation mode; of others nothing."""
    if method not in (FLAGSHIP, PUBLISHED):
        return None
    if isinstance(model, CertifiedDIFFormer):
        # What was trained is where the steps lead; the picture shows the steps.
        model.num_layers = STEPS
        energies = model.energies(data.x, data.edge_index).tolist()
        model.num_layers = None
        before, after = energies[:-1], energies[1:]
    else:
        with torch.no_grad(), EnergyTrace(model) as trace:
            model(data.x, data.edge_index)
        before, after = [record.before for record in trace.records], trace.energies
    return Inside(before, after, _last_state(model, data).numpy())


def _draw_energy(path: Path, inside: dict[str, Inside]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, (method, label) in zip(
        figure.subplots(1, 2), ((FLAGSHIP, "F"), (PUBLISHED, "Σ_ij‖z_i − z_j‖²")), strict=True
    ):
        seen = inside[method]
        for layer, ends in enumerate(zip(seen.before, seen.after, strict=True)):
            axes.plot([layer, layer + 1], ends, "o-", markersize=3, color="tab:blue")
        axes.set(xlabel="layer", ylabel=label, yscale="log", title=method)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def _last_state(model: nn.Module, data: Data) -> Tensor:
    """The state [N, C] that leaves the last diffusion layer."""
    states: list[Tensor] = []
    layers = [module for module in model.modules() if getattr(module, "is_diffusion_layer", False)]

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handle = layers[-1].register_forward_hook(keep)
    try:
        with torch.no_grad():
            model(data.x, data.edge_index)
    finally:
        handle.remove()
    return states[-1]


def _draw_embedding(path: Path, state: np.ndarray[Any, np.dtype[Any]], y: Tensor) -> None:
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    points = TSNE(init="pca", random_state=0, max_iter=500).fit_transform(state)
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    drawn = axes.scatter(points[:, 0], points[:, 1], c=y.numpy(), cmap="tab10", vmin=-0.5, vmax=9.5, s=6)
    figure.colorbar(drawn, ticks=range(10), label="digit")
    axes.set_xticks([])
    axes.set_yticks([])
    figure.savefig(path, dpi=120)


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value
