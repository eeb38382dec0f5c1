"""Sparse flow: exact against the optimality conditions and a converged proximal run; the fast path against the sort."""

import importlib
import math
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernel_cases import DOUBLE, assert_same, everything, randn
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_mp.kernels.sparse_flow import (
    Features,
    sparse_flow_potentials,
    sparse_flow_product,
    tiled,
)
from diffusion_mp.kernels.sparse_flow.reference import entries
from diffusion_mp.kernels.sparse_flow.rows import Circuit, RowProblem, newton, solve
from flow_rows import solve_rows
from helpers import close

# Where Python looks when it runs a script there.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
proximal = importlib.import_module("proximal").proximal

LAMBDAS = [10.0**power for power in range(-3, 4)]
ALPHAS = [0.01, 0.1, 1.0, math.inf]


def scores(*shape: int, seed: int = 0, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    s, u = (
        spread * torch.randn(*shape, generator=generator, dtype=DOUBLE)
        for _ in range(2)
    )
    return s, u


def problem(s: Tensor, u: Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """log 1/r and λf of the scores."""
    return s + (-s).logsumexp(-1, keepdim=True), lam * u.softmax(-1)


def newton_rows(
    s: Tensor, u: Tensor, lam: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """z and μ by Newton's method, from the scores."""
    one = torch.ones_like(s[..., :1])
    norms = (-s).logsumexp(-1, keepdim=True), u.logsumexp(-1, keepdim=True)
    rows = solve(RowProblem(s, u, *norms, lam * one, one / alpha))
    z = entries(s, u, rows.terms, torch.arange(s.size(-1)) == rows.best)
    return z, rows.log_mu.exp().squeeze(-1)


def newton_steps(log_c: Tensor, theta: Tensor, alpha: float) -> int:
    """Of the first search, whose unit is the largest conductance."""
    top = log_c.amax(-1, keepdim=True)
    return newton((log_c - top).exp(), theta * top.exp(), (-top).exp() / alpha).steps


def by(
    method: str, s: Tensor, u: Tensor, lam: float, alpha: float
) -> tuple[Tensor, Tensor]:
    if method == "newton":
        return newton_rows(s, u, lam, alpha)
    return solve_rows(*problem(s, u, lam), alpha)


METHODS = ["sort", "newton"]


def kkt_residual(
    z: Tensor, mu: Tensor, r: Tensor, theta: Tensor, alpha: float
) -> float:
    """How far the optimality conditions are from being met: Ohm's law, no push where nothing flows, conservation."""
    mu = mu.unsqueeze(-1)
    assert bool((z >= 0).all())
    ohm = torch.where(z > 0, (r * z + theta - mu).abs(), (mu - theta).clamp_min(0))
    conservation = (z.sum(-1, keepdim=True) + mu / alpha - 1).abs()
    return float(torch.maximum(ohm.amax(-1, keepdim=True), conservation).max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 256, 4096])
def test_the_optimality_conditions_hold(n, method):
    for alpha in ALPHAS:
        for lam in (0.0, *LAMBDAS):  # without friction and leak it is softmax
            s, u = scores(4, n, seed=n)
            z, mu = by(method, s, u, lam / n, alpha)
            log_c, theta = problem(s, u, lam / n)
            assert kkt_residual(z, mu, (-log_c).exp(), theta, alpha) <= 1e-12, (
                alpha,
                lam,
            )


def published_settings(n: int = 40) -> tuple[Tensor, Tensor, float]:
    log_c, theta = problem(*scores(4, n), 1 / n)
    return (-log_c).exp(), theta, 0.1


@pytest.mark.parametrize("step_size", ["corrected", "barzilai_borwein"])
def test_a_converged_proximal_run_agrees(step_size):
    r, theta, alpha = published_settings(8)
    exact, _ = solve_rows(-r.log(), theta, alpha)
    settled, steps = proximal(
        r, theta, alpha, step_size=step_size, steps=100_000, tolerance=1e-16
    )
    assert steps < 100_000
    assert_close(settled, exact, rtol=0, atol=1e-8)


def test_the_published_step_diverges_where_the_corrected_one_approaches():
    """n = 40, α = 0.1, λ = 1/n: t = 1/(1 + α√n) exceeds 2/(αn + r), the last step that does not blow up (S1)."""
    r, theta, alpha = published_settings()
    exact, _ = solve_rows(-r.log(), theta, alpha)
    wild, _ = proximal(r, theta, alpha, step_size="published", steps=500)
    assert not bool((wild.abs() < 1e6).all())
    far, near = (
        (proximal(r, theta, alpha, step_size="corrected", steps=k)[0] - exact).norm()
        for k in (500, 5000)
    )
    assert near < 0.7 * far < 1


def test_newton_needs_few_steps_on_published_settings_and_long_rows():
    r, theta, alpha = published_settings()
    exact, _ = solve_rows(-r.log(), theta, alpha)
    passes = newton_steps(-r.log(), theta, alpha)
    assert passes <= 7
    for step_size in ("corrected", "barzilai_borwein"):
        _, steps = proximal(
            r,
            theta,
            alpha,
            step_size=step_size,
            tolerance=1e-6,
            target=exact,
            steps=100 * passes,
        )
        assert steps == 100 * passes, step_size
    assert all(
        newton_steps(*problem(*scores(20, 1000), lam / 1000), 0.1) <= 15
        for lam in LAMBDAS
    )
    # Of thresholds over many decades every step from the right takes off few: there were 14 to 20.
    log_c, theta = problem(*scores(50, 4096, spread=8.0), 1 / 4096)
    top = log_c.amax(-1, keepdim=True)
    inputs = (log_c - top).exp(), theta * top.exp(), (-top).exp() / 0.1
    found = newton(*inputs)
    assert found.steps <= 11
    slow = newton(
        *(x[:, :500] for x in inputs[:2]), inputs[2]
    )  # too short for a sample
    assert slow.steps > found.steps
    rest = (
        (inputs[0] * (found.root - inputs[1]).clamp_min(0)).sum(-1, keepdim=True)
        + inputs[2] * found.root
        - 1
    )
    assert rest.abs().max() < 1e-12


class Exponents(TorchDispatchMode):
    """The least exponent of all exponentials of tiles of 40 columns."""

    least = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function in (torch.ops.aten.exp_.default, torch.ops.aten.exp.default)
            and args[0].size(-1) == 40
        ):
            self.least = min(self.least, float(args[0].min()))
        return function(*args, **kwargs or {})


def test_no_exponential_of_a_tile_underflows(generator):
    """One that does takes a hundred times as long, and wild scores have many."""
    *features, lam, leak, v = (
        t.detach() for t in inputs(40, generator, dtype=torch.float32)
    )
    q, k, fq, fk = (20 * x for x in features)
    with Exponents() as exponents:
        circuit = Circuit(q, k, fq, fk, lam, leak)
        rows = tiled.potentials(circuit, None)
        tiled.product(Features(q, k, fq, fk), v, rows.terms, None, False)
        tiled.product_backward(v, Features(q, k, fq, fk), v, rows.terms, None, False)
        ones = [torch.ones_like(lam)] * 5
        tiled.potentials_backward(*ones, circuit, rows, None)
    assert -75 < exponents.least < -60


def dense(q, k, fq, fk, lam, leak, ptr) -> tuple[Tensor, Tensor]:
    """z [H, N, N] and μ [N, H] by the sort, graph by graph."""
    bounds = [0, q.size(0)] if ptr is None else ptr.tolist()
    blocks = []
    potentials = []
    for first, last in pairwise(bounds):
        part = slice(first, last)
        s, u = (
            torch.einsum("ihf,jhf->hij", x[part], y[part])
            for x, y in ((q, k), (fq, fk))
        )
        z, mu = solve_rows(
            *problem(s, u, lam[part].t().unsqueeze(2)), 1 / leak[part].t().unsqueeze(2)
        )
        blocks.append(z)
        potentials.append(mu.t())
    return torch.stack(
        [torch.block_diag(*(z[h] for z in blocks)) for h in range(q.size(1))]
    ), torch.cat(potentials)


def everything_by_sort(q, k, fq, fk, lam, leak, v, ptr) -> Tensor:
    z, mu = dense(q, k, fq, fk, lam, leak, ptr)
    there = torch.einsum("hij,jhd->ihd", z, v)
    back = torch.einsum("hij,ihd->jhd", z, v)
    return torch.cat([there, back, mu.log().unsqueeze(2)], dim=2)


def inputs(
    n: int,
    generator: torch.Generator,
    *,
    friction: int = 4,
    dtype: torch.dtype = DOUBLE,
) -> list[Tensor]:
    features = [
        randn(n, 2, channels, generator=generator)
        for channels in (3, 3, friction, friction)
    ]
    features[0] = (
        0.5 * features[0]
    )  # rows whose conductances span many decades are ill-conditioned
    lam = (randn(n, 2, generator=generator).exp() / max(1, n)).detach()
    leak = randn(n, 2, generator=generator).exp().detach()
    return [
        t.detach().to(dtype).requires_grad_()
        for t in (*features, lam, leak, randn(n, 2, 3, generator=generator))
    ]


@pytest.mark.parametrize(
    ("backend", "tile", "friction"),
    [
        *(("cpu", tile, friction) for tile in (4096, 1 << 18) for friction in (0, 4)),
        ("reference", 4096, 4),
    ],
)
def test_every_path_equals_the_sort(
    batch, backend, tile, friction, generator, monkeypatch
):
    monkeypatch.setattr(tiled, "TILE", tile)
    ptr, n = batch
    arguments = inputs(n, generator, friction=friction)
    run = partial(everything, ptr=ptr, backend=backend)
    assert_same(run, partial(everything_by_sort, ptr=ptr), arguments)
    fast, plain = (
        sparse_flow_potentials(*arguments[:6], ptr, backend=name)
        for name in (backend, "reference")
    )
    close(fast, plain)


def test_the_gradient_of_lambda_is_right_at_zero(generator):
    """One-sided, since there is no negative friction; without friction the flow is softmax."""
    q, k, fq, fk, lam, leak, v = (t.detach() for t in inputs(6, generator))
    zero = torch.zeros_like(lam).requires_grad_()
    leak = torch.zeros_like(leak)
    weight = torch.randn(6, 2, 7, generator=generator, dtype=DOUBLE)

    def loss(lam: Tensor) -> Tensor:
        return (everything(q, k, fq, fk, lam, leak, v, None) * weight).sum()

    (got,) = torch.autograd.grad(loss(zero), zero)
    for row, head in ((0, 0), (3, 1)):
        unit = torch.zeros_like(lam)
        unit[row, head] = 1e-6
        expected = (-1.5 * loss(zero) + 2 * loss(unit) - 0.5 * loss(2 * unit)) / 1e-6
        assert got[row, head].item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_formula_without_friction_takes_friction_scores_of_any_size(
    generator,
) -> None:
    """λ = 0: no score of the frictions counts, also beyond the range of the exponential."""
    q, k, fq, fk, lam, leak, v = (t.detach() for t in inputs(6, generator))
    fq = 1000 * fq
    zero = torch.zeros_like(lam)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(backend: str) -> list[Tensor]:
        rows = sparse_flow_potentials(q, k, fq, fk, zero, leak, backend=backend)
        out = sparse_flow_product(q, k, fq, fk, v, rows.terms, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for formula, fast in zip(run("reference"), run("cpu"), strict=True):
        torch.testing.assert_close(formula, fast, rtol=1e-9, atol=1e-9)


def test_rows_differentiate_twice_on_the_support() -> None:
    log_c, theta = (t.detach().requires_grad_() for t in problem(*scores(2, 5), 0.3))
    alpha = torch.tensor(0.4, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(solve_rows, (log_c, theta, alpha))
    assert torch.autograd.gradgradcheck(solve_rows, (log_c, theta, alpha))
