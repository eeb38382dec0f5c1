"""Passes over the entries until sparse-flow attention is right to 1e-6: Newton against proximal steps.

    python benchmarks/sparse_flow.py --nodes 40 118 500 --alpha 0.1

Rows have scores of unit variance times --spread and λ = λ*/n, as SFi-Former uses them. A pass is one Newton step or one
proximal step, with the fixed step 1/(max r + αn) or with Barzilai and Borwein's. The published fixed step, 1/(1 + α√n),
diverges (ERRATA S1). Newton runs to its end, where it is exact. The others run until no entry is further from the
solution than --tolerance.

The second table compares the library with 200 proximal steps of the fixed step, both in float32, on a batch of --graphs
graphs, whose rows are dense. It gives the time, and the largest error of the attended values as a part of the largest
value.
"""

from __future__ import annotations

import argparse
import statistics
import time

import textbook
import torch
from operations import circuits, sparse_flow
from proximal import proximal
from torch import Tensor

from diffusion_mp.kernels.sparse_flow.rows import newton


def batch(graphs: int, size: int, repeats: int) -> None:
    """Print time and error of the library and of the textbook's steps."""
    inputs = circuits(graphs * size, torch.Generator().manual_seed(0), size)
    exact = sparse_flow(*(x.double() if x.is_floating_point() else x for x in inputs))
    ways = {"200 proximal steps": textbook.sparse_flow, "library": sparse_flow}
    times: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(repeats):
            for name, attend in ways.items():
                start = time.perf_counter()
                out = attend(*inputs)
                times[name].append(time.perf_counter() - start)
                errors[name] = (out - exact).abs().max() / exact.abs().max()
    seconds = {name: statistics.median(found) for name, found in times.items()}
    print(f"\n{graphs} graphs, n = {size}, H = 4, d = 16, λ* = 1, α = 0.1, float32\n")
    print("| | time | error | times faster |\n|---|---:|---:|---:|")
    for name in ways:
        faster = seconds["200 proximal steps"] / seconds[name]
        print(f"| {name} | {seconds[name]:.3f} s | {errors[name]:.0e} | {faster:.0f} |")


def main() -> None:
    """Print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[40, 118, 500])
    parser.add_argument(
        "--rows", type=int, default=4, help="the slowest of them counts"
    )
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--lam", type=float, default=1.0, help="λ*")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument(
        "--steps", type=int, default=50_000, help="give up after so many"
    )
    parser.add_argument(
        "--graphs", type=int, default=32, help="0 leaves the second table out"
    )
    parser.add_argument("--size", type=int, default=512, help="nodes of each of them")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        f"λ* = {args.lam:g}, α = {args.alpha:g}, spread {args.spread:g}, to {args.tolerance:g}, float64\n"
    )
    print(
        "| n | not zero | Newton | fixed step | Barzilai–Borwein | published step |\n|---:|---:|---:|---:|---:|---|"
    )
    for n in args.nodes:
        generator = torch.Generator().manual_seed(n)
        shape = (args.rows, n)
        s, u = (
            args.spread * torch.randn(shape, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )
        log_c = s + (-s).logsumexp(1, keepdim=True)
        theta = args.lam / n * u.softmax(1)
        top = log_c.amax(-1, keepdim=True)  # in units of the largest conductance
        weight, threshold = (log_c - top).exp(), theta * top.exp()
        found = newton(weight, threshold, (-top).exp() / args.alpha)
        exact = weight * (found.root - threshold).clamp_min(0)
        cells = [f"{n:,}", f"{(exact > 0).double().mean():.0%}", str(found.steps)]
        for step_size in ("corrected", "barzilai_borwein", "published"):
            z, steps = proximal(
                (-log_c).exp(),
                theta,
                args.alpha,
                steps=args.steps,
                step_size=step_size,
                tolerance=args.tolerance,
                target=exact,
            )
            error = float((z - exact).abs().max())
            if not error < 1e3:
                cells.append("diverges")
            else:
                cells.append(
                    f"{steps:,}"
                    if error <= args.tolerance
                    else f"> {steps:,} (still {error:.0e} off)"
                )
        print(f"| {' | '.join(cells)} |", flush=True)
    if args.graphs:
        batch(args.graphs, args.size, args.repeats)


if __name__ == "__main__":
    main()
