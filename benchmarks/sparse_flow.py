"""Passes over the entries until sparse-flow attention is right to 1e-6: Newton against proximal steps.

    python benchmarks/sparse_flow.py --nodes 40 118 500 --alpha 0.1

Rows have scores of unit variance times --spread and λ = λ*/n, as SFi-Former uses them. A pass is one Newton step, or
one proximal step: with the fixed step 1/(max r + αn), or with Barzilai and Borwein's. The published fixed step,
1/(1 + α√n), diverges (ERRATA S1). Newton is run to its end, where it is exact; the others until no entry is further
from the solution than --tolerance.
"""

from __future__ import annotations

import argparse

import torch

from diffusion_mp.kernels.sparse_flow import proximal, solve_rows
from diffusion_mp.kernels.sparse_flow.newton import newton
from diffusion_mp.kernels.sparse_flow.reference import scaled_rows


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[40, 118, 500])
    parser.add_argument("--rows", type=int, default=4, help="the slowest of them counts")
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--lam", type=float, default=1.0, help="λ*")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=50_000, help="give up after so many")
    args = parser.parse_args()
    print(f"λ* = {args.lam:g}, α = {args.alpha:g}, spread {args.spread:g}, to {args.tolerance:g}, float64\n")
    print("| n | not zero | Newton | fixed step | Barzilai–Borwein | published step |\n|---:|---:|---:|---:|---:|---|")
    for n in args.nodes:
        generator = torch.Generator().manual_seed(n)
        shape = (args.rows, n)
        s, u = (args.spread * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        log_c, theta = s + (-s).logsumexp(1, keepdim=True), args.lam / n * u.softmax(1)
        exact, _ = solve_rows(log_c, theta, args.alpha)
        _, passes = newton(*scaled_rows(log_c, theta, args.alpha)[:4])
        cells = [f"{n:,}", f"{(exact > 0).double().mean():.0%}", str(passes)]
        for step_size in ("corrected", "barzilai_borwein", "published"):
            z, steps = proximal(
                (-log_c).exp(), theta, args.alpha,
                steps=args.steps, step_size=step_size, tolerance=args.tolerance, target=exact,
            )  # fmt: skip
            error = float((z - exact).abs().max())
            if not error < 1e3:
                cells.append("diverges")
            else:
                cells.append(f"{steps:,}" if error <= args.tolerance else f"> {steps:,} (still {error:.0e} off)")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
