"""``smoothing_floor``: Theorem T6 at steady states, and what is left of it elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling, LowRankCoupling, SparseCoupling
from diffusion_mp.diagnostics import smoothing_floor
from diffusion_mp.energies import (
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    get_constraint,
)
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import path_problem

PENALTIES = [QuadraticPenalty(), SimplePenalty(), SigmoidPenalty(), GaussianPenalty(0.3)]
PTR = torch.tensor([0, 4, 4, 11])


def draw(seed: int) -> Tensor:
    x = torch.randn(11, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / (1 + x.norm(dim=2, keepdim=True))


def steady(omega: Coupling, h: Tensor, beta: float, leak: float) -> Tensor:
    """(I − D̄⁻¹Ω + κ)⁻¹ βH, densely."""
    dense = omega.to_dense()
    system = (1 + leak) * torch.eye(len(h), dtype=h.dtype) - dense / dense.sum(2, keepdim=True)
    return torch.linalg.solve(system, beta * h.transpose(0, 1)).transpose(0, 1)


def projected(omega: Coupling, x: Tensor) -> float:
    """‖Πx‖_D̄, with Π as a matrix."""
    total = 0.0
    for head, weight in enumerate(omega.to_dense().sum(2)[: x.size(1)].expand(x.size(1), -1)):
        for start, stop in [(0, 4), (4, 11)]:
            d, rows = weight[start:stop], x[start:stop, head]
            off = torch.eye(len(d), dtype=x.dtype) - torch.ones(len(d), 1, dtype=x.dtype) * d / d.sum()
            total += float(torch.einsum("i,ic->", d, (off @ rows).square()))
    return total**0.5


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
@pytest.mark.parametrize(("beta", "leak"), [(1.0, 0.01), (-0.3, 0.5), (5.0, 10.0)])
def test_a_steady_state_is_above_its_floor(penalty: Penalty, beta: float, leak: float) -> None:
    for seed in range(5):
        omega = penalty.coupling(draw(seed), PTR, constraint=get_constraint("ball"))
        h = draw(seed + 50)
        z = steady(omega, h, beta, leak)
        found = smoothing_floor(omega, z, h, beta=beta, leak=leak)
        assert found.spread == pytest.approx(projected(omega, z), rel=1e-10)
        assert found.source == pytest.approx(projected(omega, h), rel=1e-10)
        assert found.residual < 1e-10 * found.source * abs(beta)
        assert found.floor == pytest.approx(abs(beta) / (2 + leak) * found.source, rel=1e-9)
        assert found.spread >= found.floor


def test_any_state_is_above_what_its_residual_leaves() -> None:
    omega, h = GaussianPenalty(0.3).coupling(draw(0), PTR), draw(1)
    for leak in (0.0, 0.3):
        near = steady(omega, h, 0.5, 0.3) + 1e-2 * draw(3)
        for state in (near, draw(4), torch.zeros_like(h)):
            found = smoothing_floor(omega, state, h, beta=0.5, leak=leak)
            assert found.spread >= found.floor >= 0
    assert smoothing_floor(omega, torch.zeros_like(h), h).floor == 0


def test_the_roughest_source_reaches_it() -> None:
    """Two nodes that hardly hear themselves: 2 is nearly the eigenvalue of I − Ŝ, so no larger floor would hold."""
    problem = path_problem(2)
    h = torch.tensor([[[1.0]], [[-1.0]]], dtype=torch.float64)
    z = h / (2 + 0.1)
    found = smoothing_floor(problem.coupling, z, h, leak=0.1)
    assert found.spread == pytest.approx(found.floor, rel=1e-12)
    assert found.residual < 1e-12


def test_one_graph_of_rows_and_channels() -> None:
    x = draw(0)[:, 0]
    found = smoothing_floor(SigmoidPenalty().coupling(x), x, x.float())
    assert found.spread == pytest.approx(found.source, rel=1e-6)


def test_a_node_that_nobody_sends_to_weighs_nothing() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    omega = SparseCoupling(Graph(3, edges), torch.ones(2, dtype=torch.float64), symmetric=True, nonnegative=True)
    x = torch.tensor([[1.0], [3.0], [100.0]], dtype=torch.float64)
    assert smoothing_floor(omega, x, x).spread == pytest.approx(2**0.5)
    assert smoothing_floor(0.0 * omega, x, x).spread == 0


def test_refusals(no_typecheck: None) -> None:
    x = draw(0)
    with pytest.raises(ValueError, match=r"source must have the shape \[11, 2, 3\] of the state x"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x[..., :2])
    with pytest.raises(CouplingMismatchError, match="symmetric and nonnegative; got Pairwise"):
        smoothing_floor(SigmoidPenalty().coupling(x, normalize=True), x, x)
    with pytest.raises(CouplingMismatchError, match="got LowRankCoupling"):
        smoothing_floor(LowRankCoupling(x, x, symmetric=True), x, x)
    with pytest.raises(ValueError, match="leak must be finite and >= 0"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x, leak=-1.0)
    with pytest.raises(ValueError, match="source must have 11 rows"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x[:3])
