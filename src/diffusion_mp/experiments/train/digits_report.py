"""Tables, numbers and two pictures of the main job."""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from diffusion_mp.diagnostics import EnergyTrace

NUMBERS = ("method", "split", "val_acc", "test_acc", "chosen", "seconds")


@dataclass(frozen=True)
class Result:
    """One method on one split; `chosen` is what validation decided (an epoch, an alpha, a C)."""

    method: str
    split: int
    val_acc: float
    test_acc: float
    chosen: str
    seconds: float
    model: nn.Module | None = field(default=None, repr=False, compare=False)


def summarise(results: list[Result]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation (n − 1) of test accuracy over the splits, per method; one split has deviation nan."""
    methods = list(dict.fromkeys(result.method for result in results))
    summary = {}
    for method in methods:
        scores = [result.test_acc for result in results if result.method == method]
        summary[method] = (statistics.mean(scores), statistics.stdev(scores) if len(scores) > 1 else float("nan"))
    return summary


def table(results: list[Result]) -> str:
    """The table that is printed and reported, in Markdown."""
    summary = summarise(results)
    splits = sorted({result.split for result in results})
    lines = [
        "| method | test accuracy | " + " | ".join(f"split {s}" for s in splits) + " |",
        "|---|---|" + "---|" * len(splits),
    ]
    for method, (mean, deviation) in summary.items():
        each = {result.split: result.test_acc for result in results if result.method == method}
        cells = " | ".join(f"{100 * each[s]:.1f}" for s in splits)
        spread = f" ± {100 * deviation:.1f}" if len(splits) > 1 else ""
        lines.append(f"| {method} | {100 * mean:.1f}{spread} | {cells} |")
    over = (
        f"± is one standard deviation over {len(splits)} different random splits, each with its own initialisation."
        if len(splits) > 1
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

    model = next(result.model for result in reversed(results) if result.method == "DIFFormer-s" and result.model)
    energies = _draw_energy(folder / "energy.png", model, data)
    _draw_embedding(folder / "embedding.png", _last_state(model, data), data.y)

    summary = {
        method: {"mean": mean, "sd": None if mean != mean or sd != sd else sd}
        for method, (mean, sd) in summarise(results).items()
    }
    numbers = {
        "test_accuracy": summary,
        "runs": rows,
        "energy_per_layer": energies,
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": _versions(),
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
            chosen="\n".join(f"| {r.method} | {r.split} | {100 * r.val_acc:.1f} | {r.chosen} |" for r in results),
            versions="\n".join(f"- {name} {version}" for name, version in _versions().items()),
            seconds=seconds,
            **vars(options),
        )
    )


def _draw_energy(path: Path, model: nn.Module, data: Data) -> dict[str, Any]:
    from matplotlib.figure import Figure

    with torch.no_grad(), EnergyTrace(model) as trace:
        model(data.x, data.edge_index)
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for layer, record in enumerate(trace.records, start=1):
        axes.plot([layer - 1, layer], [record.before, record.after], "o-", color="tab:blue")
    axes.set_xticks(range(len(trace.records) + 1))
    axes.set(xlabel="layer", ylabel="Σ_ij‖z_i − z_j‖²", yscale="log", title="DIFFormer-s on digits")
    figure.savefig(path, dpi=120)
    energies: dict[str, Any] = trace.to_dict()
    return energies


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


def _draw_embedding(path: Path, state: Tensor, y: Tensor) -> None:
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    points = TSNE(init="pca", random_state=0, max_iter=500).fit_transform(state.numpy())
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    drawn = axes.scatter(points[:, 0], points[:, 1], c=y.numpy(), cmap="tab10", vmin=-0.5, vmax=9.5, s=6)
    figure.colorbar(drawn, ticks=range(10), label="digit")
    axes.set_xticks([])
    axes.set_yticks([])
    figure.savefig(path, dpi=120)


def _versions() -> dict[str, str]:
    names = ("diffusion-mp", "torch", "torch-geometric", "pytorch-lightning", "scikit-learn", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
