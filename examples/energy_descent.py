"""Energy descent without training: the certificate of a step, and what happens above and below its λ and beyond its τ.

    python examples/energy_descent.py            # prints two tables, writes runs/energy_descent.png

The script takes a random graph and a random state in the unit ball. Theorem 1 certifies the step of a fixed coupling.
Theorem 7 certifies the step of DIFFormer-s, whose coupling follows the state (Wu, Wipf & Yan, 2025). Each step is
checked for E(Z_{k+1}, k) ≤ E(Z_k, k).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from runs import needs, options
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import (
    CouplingTerm,
    Energy,
    PairTerm,
    ProximalTerm,
    SimplePenalty,
    certify,
)
from diffusion_mp.graph import Graph
from diffusion_mp.updates import ExplicitEuler


def random_graph(nodes: int, generator: torch.Generator) -> SparseCoupling:
    """Return a symmetric coupling: a ring with random chords."""
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    chords = torch.randint(nodes, (2, nodes), generator=generator)
    edges = torch.cat([ring, chords], 1)
    graph = Graph(nodes, torch.cat([edges, edges.flip(0)], 1))
    return SparseCoupling(
        graph,
        torch.ones(graph.num_edges, dtype=torch.double),
        symmetric=True,
        nonnegative=True,
    )


def run(
    x: Tensor,
    coupling_at: Callable[[Tensor], Coupling],
    energy: Energy,
    tau: float,
    steps: int,
) -> tuple[list, int]:
    """Return the energies E(Z_{k+1}, k) of explicit Euler steps, and how many of them rose from E(Z_k, k)."""
    step = ExplicitEuler(tau)
    energies = []
    violations = 0
    for _ in range(steps):
        following = step(x, coupling_at(x))
        before = float(energy(x, x))
        after = float(energy(following, x))
        violations += after > before + 1e-12 * abs(before)
        energies.append(after)
        x = following
    return energies, violations


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/energy_descent.png"))
    args = options(parser, argv, nodes=20, steps=5)
    with needs("diffusion-mp[plot]"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    generator = torch.Generator().manual_seed(args.seed)
    x = torch.nn.functional.normalize(
        torch.randn(args.nodes, 8, generator=generator, dtype=torch.double), dim=1
    )
    graph = random_graph(args.nodes, generator)
    penalty = SimplePenalty()

    # What to certify, the energy it descends, and the coupling of the step at a state.
    cases = {
        "fixed graph (Theorem 1)": (
            graph,
            lambda lam: Energy([ProximalTerm(), 2 * lam * CouplingTerm(graph)]),
            lambda x: graph,
        ),
        "DIFFormer-s (Theorem 7)": (
            penalty,
            lambda lam: Energy([ProximalTerm(), 2 * lam * PairTerm(penalty)]),
            lambda x: penalty.coupling(x, normalize=True),
        ),
    }

    figure, axes = plt.subplots(1, len(cases), figsize=(11, 4), layout="constrained")
    for ax, (name, (subject, energy, coupling_at)) in zip(
        axes, cases.items(), strict=True
    ):
        tau_max = certify(subject, x, 1e-3).tau_max
        tau = 0.75 * tau_max
        certificate = certify(subject, x, tau)
        print(f"\n{name}\n{certificate}\n{certify(subject, x, 1.05 * tau_max)}")
        print(f"{'step':<24}{'E first':>12}{'E last':>12}{'steps up':>10}")
        for label, length, lam in [
            ("certified λ, τ", tau, certificate.lam),
            ("λ/10, same τ", tau, certificate.lam / 10),
            ("λ, τ = 1.05 τ_max", 1.05 * tau_max, certificate.lam),
        ]:
            energies, violations = run(x, coupling_at, energy(lam), length, args.steps)
            print(
                f"{label:<24}{energies[0]:>12.4g}{energies[-1]:>12.4g}{violations:>7}/{args.steps}"
            )
            ax.semilogy(
                range(1, args.steps + 1),
                energies,
                marker=".",
                label=f"{label}: {violations} up",
            )
        ax.set(title=name, xlabel="layer k", ylabel="E(Z_{k+1}, k)")
        ax.legend()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
