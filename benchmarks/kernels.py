"""Every operation, compared with the textbook's code, other libraries that do the same work, and a limit.

    python benchmarks/kernels.py --out runs/kernels
    python benchmarks/kernels.py --operation linear_attention --nodes 262144

Every way to compute an operation (see operations.py) runs in a fresh process (see fresh.py), the ways in turn, --rounds
times. Measurements are kept in --out, and a run that was stopped goes on from there.

Times are medians; a step is the forward and the backward pass. Memory is the most that torch allocates at a time in a
step, above the inputs. The limit is what cannot be avoided: the operation's own matrix products, or a copy for an
operation that only moves data. Ratios say how much more the textbook, or else the first way, takes. Slopes are slopes
of log time and log memory over log N, from 10 000 nodes on. runs/kernels/kernels.png draws time and memory over N.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fresh import allocated, in_fresh_process
from operations import OPERATIONS
from tqdm import tqdm

from diffusion_mp.checks import needed_by


class Case(NamedTuple):
    """One measurement, which a process finds by its name."""

    operation: str
    way: str
    nodes: int

    @property
    def name(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def named(cls, name: str) -> Case:
        operation, way, nodes = name.split("/")
        return cls(operation, way, int(nodes))


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Return the seconds of forward pass and step, and the MiB of a step (of a forward pass without training)."""
    operation = OPERATIONS[case.operation]
    way = OPERATIONS[case.operation].ways[case.way]
    inputs = operation.inputs(case.nodes, torch.Generator().manual_seed(0))
    leaves = [
        tensor.requires_grad_(way.backward is None and way.trains)
        for tensor in inputs[: operation.leaves]
    ]

    @torch.no_grad()
    def forward() -> Any:
        return way.forward(*inputs)

    grad = torch.randn(forward().shape, generator=torch.Generator().manual_seed(1))

    def step() -> Any:
        if way.backward is None:
            return torch.autograd.grad(way.forward(*inputs), leaves, grad)
        forward()
        return way.backward(*inputs, grad)

    found = {"forward": median_seconds(forward, repeats)}
    if way.trains:
        found["step"] = median_seconds(step, repeats)
    return found | {"memory": allocated(step if way.trains else forward)}


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median, after one run that does not count; short runs are repeated for a tenth of a second."""
    start = time.perf_counter()
    run()
    often = max(1, round(0.1 / max(time.perf_counter() - start, 1e-6)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(often):
            run()
        times.append((time.perf_counter() - start) / often)
    return statistics.median(times)


def table(results: dict[Case, dict[str, float]]) -> str:
    """Return Markdown: a row per operation, size and way, with ratios to the first way of the size."""
    lines = [
        "| operation | N | way | forward | step | memory | forward × | step × | memory × |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (operation, nodes), group in groupby(
        sorted(results, key=order), key=lambda case: (case.operation, case.nodes)
    ):
        cases = list(group)
        first = results[cases[0]]
        for case in cases:
            found = results[case]
            cells = [operation, f"{nodes:,}", case.way]
            cells += [
                f"{1e3 * found[name]:,.1f} ms" if name in found else "–"
                for name in ("forward", "step")
            ]
            cells += [f"{found['memory']:,.1f} MiB"]
            cells += [
                f"{first[name] / found[name]:.1f}"
                if name in first and found.get(name)
                else "–"
                for name in ("forward", "step", "memory")
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def order(case: Case) -> tuple[int, int, int]:
    """Order cases as operations.py lists them."""
    operations = list(OPERATIONS)
    return (
        operations.index(case.operation),
        case.nodes,
        list(OPERATIONS[case.operation].ways).index(case.way),
    )


def slopes(results: dict[Case, dict[str, float]]) -> str:
    """Return least-squares slopes of log time and log memory over log N, if three or more sizes are large enough."""
    head = [
        "",
        "| operation | way | forward | step | memory |",
        "|---|---|--:|--:|--:|",
    ]
    lines = []
    for operation, way in dict.fromkeys(
        (case.operation, case.way) for case in sorted(results, key=order)
    ):
        cases = [
            case
            for case in results
            if case[:2] == (operation, way) and case.nodes >= 10_000
        ]
        if len(cases) < 3:
            continue
        sizes = np.log([case.nodes for case in cases])
        cells = [
            f"{np.polyfit(sizes, np.log([results[case][name] for case in cases]), 1)[0]:.2f}"
            if all(results[case].get(name) for case in cases)
            else "–"
            for name in ("forward", "step", "memory")
        ]
        lines.append(f"| {operation} | {way} | {' | '.join(cells)} |")
    return "\n".join([*head, *lines, ""]) if lines else ""


def draw(results: dict[Case, dict[str, float]], path: Path) -> None:
    """Draw the time of a step and the memory over N, a column per operation."""
    with needed_by("The picture", "diffusion-mp[plot]"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    operations = list(
        dict.fromkeys(case.operation for case in sorted(results, key=order))
    )
    figure, axes = plt.subplots(
        2,
        len(operations),
        figsize=(4 * len(operations), 7),
        squeeze=False,
        layout="constrained",
        sharex="col",
    )
    for column, operation in enumerate(operations):
        for way in OPERATIONS[operation].ways:
            cases = sorted(
                (case for case in results if case[:2] == (operation, way)), key=order
            )
            for ax, name in zip(axes[:, column], ("step", "memory"), strict=True):
                known = [
                    (case.nodes, results[case][name])
                    for case in cases
                    if results[case].get(name)
                ]
                if known:
                    ax.loglog(
                        *zip(*known, strict=True), marker="o", markersize=3, label=way
                    )
        axes[0, column].set_title(operation.replace("_", " "))
        axes[1, column].set_xlabel("N")
        axes[0, column].legend(fontsize=8)
    axes[0, 0].set_ylabel("seconds of a step")
    axes[1, 0].set_ylabel("MiB above the inputs")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    """Measure the chosen operations and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--operation", nargs="+", choices=OPERATIONS, default=list(OPERATIONS)
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", help="instead of the sizes of operations.py"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="in a process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    parser.add_argument("--run", help="measure one case in this process, print JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run:
        print(json.dumps(measure(Case.named(args.run), args.repeats)))
        return
    cases = [
        Case(operation, way, nodes)
        for operation in args.operation
        for nodes, way in product(
            args.nodes or OPERATIONS[operation].sizes, OPERATIONS[operation].ways
        )
        if nodes <= OPERATIONS[operation].ways[way].largest
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / f"threads-{args.threads}-repeats-{args.repeats}.json"
    known: dict[str, dict[str, float]] = (
        json.loads(kept.read_text()) if kept.exists() else {}
    )
    rounds: list[dict[Case, dict[str, float]]] = []
    for turn in range(args.rounds):
        for case in tqdm(cases, f"round {turn + 1}", leave=False):
            name = f"{case.name}/{turn}"
            if name not in known:
                known[name] = in_fresh_process(__file__, case.name)
                kept.write_text(json.dumps(known, indent=1))
        rounds.append({case: known[f"{case.name}/{turn}"] for case in cases})
    results = {
        case: {
            name: statistics.median(found[case][name] for found in rounds)
            for name in rounds[0][case]
        }
        for case in cases
    }
    draw(results, args.out / "kernels.png")
    print(
        f"float32, {args.threads} threads, torch {torch.__version__}, medians of {args.rounds} rounds\n\n"
        f"{table(results)}\n{slopes(results)}\n{args.out / 'kernels.png'}"
    )


if __name__ == "__main__":
    main()
