"""The sparse-flow coupling against its rows solved by the sort, and the quantities of its circuit."""

import math

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import PairwiseCoupling, SparseFlowCoupling
from flow_rows import solve_rows
from helpers import close, refuses

PTR = torch.tensor([0, 4, 4, 5, 12])
ALPHAS = [0.1, 1.0, math.inf]


def features(
    n: int = 12, heads: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        0.7
        * torch.randn(n, heads, 3, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(4)
    ]


def circuit(
    lam: float, alpha: float, ptr: Tensor | None = PTR
) -> list[tuple[Tensor, ...]]:
    """z, μ, r and f of every graph, [H, n, n] and [H, n]."""
    q, k, friction_q, friction_k = features()
    parts = []
    for rows in (
        [slice(0, 12)] if ptr is None else [slice(0, 4), slice(4, 5), slice(5, 12)]
    ):
        s = torch.einsum("ihf,jhf->hij", q[rows], k[rows])
        u = torch.einsum("ihf,jhf->hij", friction_q[rows], friction_k[rows])
        r = (-s).softmax(2)
        f = u.softmax(2)
        parts.append((*solve_rows(-r.log(), lam * f, alpha), r, f))
    return parts


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("lam", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("ptr", [None, PTR], ids=["one", "ragged"])
def test_entries_potentials_density_and_energy(alpha, lam, ptr):
    coupling = SparseFlowCoupling(*features(), ptr, lam=lam, alpha=alpha)
    parts = circuit(lam, alpha, ptr)
    expected = torch.stack(
        [torch.block_diag(*(part[0][h] for part in parts)) for h in range(2)]
    )
    close(coupling.to_dense(), expected, "entries")
    close(coupling.potentials, torch.cat([mu.t() for _, mu, *_ in parts]), "entries")
    pairs = 144 if ptr is None else 16 + 1 + 49
    close(
        coupling.density(),
        (expected > 0).sum((1, 2)) / torch.tensor(pairs, dtype=torch.float64),
    )
    energy = torch.zeros(2, dtype=torch.float64)
    for z, _, r, f in parts:
        energy += (0.5 * r * z * z + lam * f * z).sum((1, 2))
        if alpha < math.inf:
            energy += (0.5 * alpha * (z.sum(2) - 1).square()).sum(1)
    close(coupling.energy(), energy)


def test_without_friction_it_is_the_softmax_coupling():
    q, k, *friction = features()
    softmax = PairwiseCoupling(q, k, PTR).to_dense()
    close(
        SparseFlowCoupling(q, k, *friction, PTR, lam=0.0).to_dense(), softmax, "entries"
    )
    flow = SparseFlowCoupling(q, k, *friction, PTR, lam=100.0, alpha=1.0)
    close(flow.without_friction().to_dense(), softmax, "entries")


Q, K, FRICTION, _ = features()
test_mistakes_are_answered_in_sentences = refuses(
    (lambda: SparseFlowCoupling(Q, K, FRICTION, lam=0.1), ValueError, "come together"),
    (
        lambda: SparseFlowCoupling(Q, K, *2 * [FRICTION[:, :1]], lam=0.1),
        ValueError,
        "nodes and heads of query",
    ),
    (
        lambda: SparseFlowCoupling(Q, K, lam=torch.ones(12)),
        ValueError,
        r"broadcast to .*= \[12, 2\]",
    ),
)
