"""Rows of sparse flow at every spread of the scores, against rows solved with 150 digits."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import SparseFlowCoupling
from diffusion_mp.kernels.sparse_flow import solve_rows, sparse_flow_edges, sparse_flow_potentials, sparse_flow_product

DOUBLE = torch.float64
DIGITS = 150
SPREADS = [1.0, 3.0, 8.0, 12.0, 20.0, 100.0]


def exact_row(s: list[Decimal], u: list[Decimal], lam: Decimal, leak: Decimal) -> tuple[list[Decimal], Decimal]:
    """z and μ of one row: θ in order, Σ_i c_i max(θ_j − θ_i, 0) + θ_j/α until it reaches one."""
    resistance, friction = sum((-x).exp() for x in s), sum(x.exp() for x in u)
    c, theta = [x.exp() * resistance for x in s], [lam * x.exp() / friction for x in u]
    conducted, dammed = leak, Decimal(0)
    for j in sorted(range(len(s)), key=theta.__getitem__):
        if conducted * theta[j] - dammed >= 1:
            break
        conducted, dammed = conducted + c[j], dammed + c[j] * theta[j]
    mu = (1 + dammed) / conducted
    return [max(x * (mu - t), Decimal(0)) for x, t in zip(c, theta, strict=True)], mu


def decimals(x: Tensor) -> list[Decimal]:
    return [Decimal(value) for value in x.double().tolist()]


def exact(s: Tensor, u: Tensor, lam: float, leak: float, rows: range) -> tuple[Tensor, Tensor]:
    """z and log μ of some rows, in double."""
    with localcontext(prec=DIGITS):
        found = [exact_row(decimals(s[i]), decimals(u[i]), Decimal(lam), Decimal(leak)) for i in rows]
        z = torch.tensor([[float(x) for x in row] for row, _ in found], dtype=DOUBLE)
        return z, torch.tensor([float(mu.ln()) for _, mu in found], dtype=DOUBLE)


def draw(n: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores of resistances and frictions, [n, n]."""
    generator = torch.Generator().manual_seed(int(spread))
    return tuple((spread * torch.randn(n, n, generator=generator, dtype=DOUBLE)).to(dtype) for _ in range(2))


def all_pairs(backend: str):
    """z by the product with the identity, and log μ; the scores are features, beside the identity."""

    def run(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.eye(len(s), dtype=s.dtype).unsqueeze(1)
        features = (s.unsqueeze(1), one, u.unsqueeze(1), one)
        rows = sparse_flow_potentials(*features, lam, leak, backend=backend)
        return sparse_flow_product(*features, one, rows.terms, backend=backend).squeeze(1), rows.log_mu.squeeze(1)

    return run


def edges(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
    """On the complete graph."""
    n = len(s)
    flow = sparse_flow_edges(
        s.reshape(-1, 1), u.reshape(-1, 1), s.new_ones(n * n, 1), lam, leak, torch.arange(n).repeat_interleave(n)
    )
    return flow.flow.view(n, n), flow.potential.log().squeeze(1)


def by_sort(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
    log_c, theta = s + (-s).logsumexp(1, keepdim=True), lam * u.softmax(1)
    z, mu = solve_rows(log_c, theta, 1 / leak)
    return z, mu.log()


SOLVERS = {
    "tiled": (all_pairs("cpu"), (torch.float32, DOUBLE)),
    "reference": (all_pairs("reference"), (DOUBLE,)),
    "edges": (edges, (torch.float32, DOUBLE)),
    "sort": (by_sort, (DOUBLE,)),
    "triton": (all_pairs("triton"), (torch.float32,)),
}
CASES = [(name, dtype) for name, (_, dtypes) in SOLVERS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("spread", SPREADS)
def test_rows_are_right_at_every_spread(name: str, dtype: torch.dtype, alpha: float, spread: float) -> None:
    n = 40 if name == "triton" else 118
    s, u = draw(n, spread, dtype)
    lam, leak = torch.full((n, 1), 1 / n, dtype=dtype), torch.full((n, 1), 1 / alpha, dtype=dtype)
    z, log_mu = SOLVERS[name][0](s, u, lam, leak)
    rows = range(4)
    expected, potential = exact(s, u, float(lam[0]), float(leak[0]), rows)
    eps = torch.finfo(dtype).eps
    lost = log_mu.exp() * leak[0]
    err = (z[:4].double() - expected).abs().max().item()
    rs = (z.sum(1) + lost - 1).abs().max().item()
    le = (log_mu[:4].double() - potential).abs().max().item()
    print(f"E {name:10s} {str(dtype)[-2:]} {alpha} {spread} z {err / eps:.3g} rows {rs / eps:.3g} log {le / eps:.3g}")
