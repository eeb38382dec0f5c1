"""How much more time other code takes than the library, for common models and layers: one command, all ratios.

    python benchmarks/ratios.py --quick
    python benchmarks/ratios.py --only Cora GCN --threads 2

pairs.py defines the pairs. Before a pair is timed, its results and gradients are compared if both sides do the same
work. Then the two take turns in this process (see alternate.py). A ratio is the other's time over the library's, of low
quantiles and of medians. A ratio below its target (in brackets unless the target is 1) is flagged.

Memory is the most that torch allocates at a time in a step, or in a forward pass if no step is timed, again as a ratio.
Measurements are kept in --out: a run that was stopped goes on from there. ratios.png draws the ratios over N.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alternate import alternating
from fresh import allocated
from pairs import Pair, Side, pairs
from tqdm import tqdm

from diffusion_mp.checks import needed_by

#: Of results in float32 that are the same, relative in the norm.
TOLERANCE = 1e-3


def difference(mine: Side, other: Side) -> float:
    """Return the largest difference of results and gradients, each in the norm, relative to the other's, in evaluation.

    Rounding decides about a few of many activations at zero, whose gradients then differ. Hence the norm of all.
    """
    set_mode(mine, other, train=False)
    results = []
    for side in (mine, other):
        out = side.call()
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        trained = [leaf for leaf in side.leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(out, trained, grad) if trained else ()
        results.append([out.detach(), *gradients])
    return max(
        float((a.flatten() - b.flatten()).norm() / b.norm().clamp_min(1e-30))
        for a, b in zip(*results, strict=True)
    )


def set_mode(*sides: Side, train: bool) -> None:
    for side in sides:
        if side.module is not None:
            side.module.train(train)


def measure(pair: Pair, seconds: float) -> dict[str, Any]:
    """Return times of forward pass and step, and memory, for ``[library, other]``; and how far their results differ."""
    mine, other = pair.sides()
    found: dict[str, Any] = {}
    if pair.same:
        found["difference"] = difference(mine, other)
        if not found["difference"] <= TOLERANCE:
            raise AssertionError(
                f"{pair.name}: the results differ by {found['difference']:.1e} of their norm"
            )
    set_mode(mine, other, train=False)
    with torch.no_grad():
        grad = torch.randn(
            mine.call().shape, generator=torch.Generator().manual_seed(1)
        )
        found["forward"] = alternating(mine.call, other.call, seconds)
    if "step" in pair.targets:
        set_mode(mine, other, train=True)
        found["step"] = alternating(
            lambda: mine.step(grad), lambda: other.step(grad), seconds
        )
    found["memory"] = [
        allocated(partial(side.step, grad) if "step" in found else side.call)
        for side in (mine, other)
    ]
    return found


def ratio(found: dict[str, Any], timed: str, statistic: str) -> float:
    mine, other = found[timed][statistic]
    return other / mine


def table(results: dict[Pair, dict[str, Any]]) -> str:
    """Return Markdown: a row per pair."""
    lines = [
        "| what | where | other | forward | other's | × (median) | step | other's | × (median) | memory × | differ |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for pair, found in results.items():
        cells = [pair.what, pair.where, pair.other]
        for timed in ("forward", "step"):
            if timed not in found:
                cells += ["–"] * 3
                continue
            cells += [f"{1e3 * time:,.2f} ms" for time in found[timed]["low"]]
            low = ratio(found, timed, "low")
            target = pair.targets[timed]
            wanted = "" if target == 1 else f" [{target:.2g}]"
            cell = f"{low:.2f} ({ratio(found, timed, 'median'):.2f}){wanted}"
            cells.append(cell if low >= target else f"**{cell} ⚑**")
        mine, other = found["memory"]
        cells.append(f"{other / mine:.2f}" if mine else "–")
        cells.append(f"{found['difference']:.0e}" if "difference" in found else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def flagged(results: dict[Pair, dict[str, Any]]) -> list[str]:
    """Return a line for every ratio below its target, the worst first."""
    below = [
        (
            ratio(found, timed, "low") / target,
            f"{ratio(found, timed, 'low'):.2f} of {target:.2g}: {timed}, {pair.name}",
        )
        for pair, found in results.items()
        for timed, target in pair.targets.items()
        if ratio(found, timed, "low") < target
    ]
    return [line for _, line in sorted(below)]


def draw(results: dict[Pair, dict[str, Any]], path: Path) -> None:
    """Draw ratios over N, a line per operation."""
    with needed_by("The picture", "diffusion-mp[plot]"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 2, figsize=(12, 5), layout="constrained", sharey=True
    )
    for ax, timed in zip(axes, ("forward", "step"), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for pair, found in results.items():
            if pair.nodes and timed in found:
                lines.setdefault(f"{pair.what}: {pair.other}", []).append(
                    (pair.nodes, ratio(found, timed, "low"))
                )
        for name, points in lines.items():
            ax.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_title(timed)
        ax.set_xlabel("N")
    axes[0].set_ylabel("other's time / the library's")
    axes[1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    """Measure the chosen pairs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="pairs whose name has all of these in it, in any case",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="that a pair is timed, forward and step each",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="0.25 seconds, operations up to 10 000 nodes",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/ratios"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seconds = 0.25 if args.quick else args.seconds
    chosen = [
        pair
        for pair in pairs()
        if all(part.lower() in pair.name.lower() for part in args.only)
        and not (args.quick and pair.nodes > 10_000)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    unfinished = args.out / f"unfinished_{args.threads}_{seconds:g}.json"
    known = json.loads(unfinished.read_text()) if unfinished.exists() else {}
    for pair in (bar := tqdm(chosen, unit="pair")):
        bar.set_postfix_str(pair.name)
        if pair.name not in known:
            known[pair.name] = measure(pair, seconds)
            unfinished.write_text(json.dumps(known, indent=1))
    unfinished.replace(args.out / "ratios.json")
    results = {pair: known[pair.name] for pair in chosen}
    if any(pair.nodes for pair in results):
        draw(results, args.out / "ratios.png")
    below = flagged(results)
    print(
        f"float32, {args.threads} threads, torch {torch.__version__}\n\n{table(results)}\n"
    )
    print(
        "\n".join([f"{len(below)} below their target:", *below])
        if below
        else "No ratio is below its target."
    )


if __name__ == "__main__":
    main()
