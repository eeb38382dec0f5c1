"""Rows of sparse flow at every spread of the scores, against rows solved with 150 digits."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.kernels.sparse_flow import (
    sparse_flow_edges,
    sparse_flow_potentials,
    sparse_flow_product,
)
from flow_rows import solve_rows
from helpers import close

DOUBLE = torch.float64
DIGITS = 150
SPREADS = [1.0, 3.0, 8.0, 12.0, 20.0, 100.0]


def exact_row(
    s: list[Decimal], u: list[Decimal], lam: Decimal, leak: Decimal
) -> tuple[list[Decimal], Decimal]:
    """z and μ of one row: θ in order, Σ_i c_i max(θ_j − θ_i, 0) + θ_j/α until it reaches one."""
    resistance = sum((-x).exp() for x in s)
    friction = sum(x.exp() for x in u)
    c = [x.exp() * resistance for x in s]
    theta = [lam * x.exp() / friction for x in u]
    conducted = leak
    dammed = Decimal(0)
    for j in sorted(range(len(s)), key=theta.__getitem__):
        if conducted * theta[j] - dammed >= 1:
            break
        conducted = conducted + c[j]
        dammed = dammed + c[j] * theta[j]
    mu = (1 + dammed) / conducted
    return [max(x * (mu - t), Decimal(0)) for x, t in zip(c, theta, strict=True)], mu


def decimals(x: Tensor) -> list[Decimal]:
    return [Decimal(value) for value in x.double().tolist()]


def exact(s: Tensor, u: Tensor, lam: float, leak: float) -> tuple[Tensor, float]:
    """z and log μ of a row, in double."""
    with localcontext(prec=DIGITS):
        flow, mu = exact_row(decimals(s), decimals(u), Decimal(lam), Decimal(leak))
        return torch.tensor([float(x) for x in flow], dtype=DOUBLE), float(mu.ln())


def draw(n: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores of resistances and frictions, [n, n]."""
    generator = torch.Generator().manual_seed(int(spread))
    return tuple(
        (spread * torch.randn(n, n, generator=generator, dtype=DOUBLE)).to(dtype)
        for _ in range(2)
    )


def all_pairs(backend: str):
    """z by the product with the identity, and log μ; the scores are features, with those of the identity."""

    def run(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.eye(len(s), dtype=s.dtype).unsqueeze(1)
        features = (s.unsqueeze(1), one, u.unsqueeze(1), one)
        rows = sparse_flow_potentials(*features, lam, leak, backend=backend)
        return sparse_flow_product(*features, one, rows.terms, backend=backend).squeeze(
            1
        ), rows.log_mu.squeeze(1)

    return run


def edges(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
    """On the complete graph."""
    n = len(s)
    target = torch.arange(len(s)).repeat_interleave(len(s))
    flow = sparse_flow_edges(
        s.reshape(-1, 1), u.reshape(-1, 1), s.new_ones(n * n, 1), lam, leak, target
    )
    return flow.flow.view(n, n), flow.potential.log().squeeze(1)


def by_sort(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> tuple[Tensor, Tensor]:
    log_c = s + (-s).logsumexp(1, keepdim=True)
    theta = lam * u.softmax(1)
    z, mu = solve_rows(log_c, theta, 1 / leak)
    return z, mu.log()


BOTH = torch.float32, DOUBLE
SOLVERS = {
    "tiled": (all_pairs("cpu"), BOTH),
    "reference": (all_pairs("reference"), BOTH),
    "edges": (edges, BOTH),
    "sort": (by_sort, (DOUBLE,)),
}
NAMES = ["tiled", "edges", "reference"]
CASES = [(name, dtype) for name, (_, dtypes) in SOLVERS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("spread", SPREADS)
def test_rows_are_right_at_every_spread(name, dtype, spread):
    """And sum to one: scores of hundreds cost digits of the entries as they do in softmax, and none of the sum."""
    n = 118
    alpha = torch.tensor([[0.1], [math.inf]], dtype=dtype)[torch.arange(n) % 2]
    s, u = draw(n, spread, dtype)
    lam = torch.full((n, 1), 1 / n, dtype=dtype)
    z, log_mu = SOLVERS[name][0](s, u, lam, 1 / alpha)
    eps = torch.finfo(dtype).eps
    rounding = 20 * (1 + spread) * eps
    assert (z.sum(1) + log_mu.exp() / alpha[:, 0] - 1).abs().max() < (
        rounding if name == "reference" else 20 * eps
    )
    for row in range(2):
        expected, potential = exact(
            s[row], u[row], float(lam[0]), float(1 / alpha[row])
        )
        assert (z[row].double() - expected).abs().max() < rounding
        if log_mu[row] > -math.inf:  # a potential below the smallest number
            assert abs(float(log_mu[row]) - potential) < rounding


@pytest.mark.parametrize("name", ["tiled", "edges", "reference"])
@pytest.mark.parametrize("spread", [3.0, 8.0, 20.0])
def test_gradients_are_right_at_every_spread(name, spread):
    """Of random sums of a row's entries and its log μ, against differences of exact rows with steps of 10⁻⁴⁰."""
    n = 8
    step = Decimal("1e-40")
    s, u = draw(n, spread, DOUBLE)
    lam = torch.full((n, 1), 1 / n, dtype=DOUBLE)
    leak = torch.full((n, 1), 2.0, dtype=DOUBLE)
    leaves = [x.requires_grad_() for x in (s, u, lam, leak)]
    z, log_mu = SOLVERS[name][0](*leaves)
    weight = torch.randn(
        n + 1, generator=torch.Generator().manual_seed(1), dtype=DOUBLE
    )
    for row in range(2):
        loss = z[row] @ weight[:n] + log_mu[row] * weight[n]
        got = torch.cat(
            [x[row] for x in torch.autograd.grad(loss, leaves, retain_graph=True)]
        )
        expected = differences([x[row] for x in leaves], decimals(weight), step)
        close(got, expected, "gradient")


def differences(row: list[Tensor], weight: list[Decimal], step: Decimal) -> Tensor:
    """Central ones of Σ_j weight_j z_j + weight_n log μ, by everything that the row has."""
    n = len(row[0])
    with localcontext(prec=DIGITS):
        point = [number for x in row for number in decimals(x.detach())]

        def value(place: int, change: Decimal) -> Decimal:
            moved = [x + change * (j == place) for j, x in enumerate(point)]
            flow, mu = exact_row(moved[:n], moved[n : 2 * n], *moved[2 * n :])
            return sum(
                (f * x for f, x in zip(weight, [*flow, mu.ln()], strict=True)),
                Decimal(0),
            )

        found = [
            (value(j, step) - value(j, -step)) / (2 * step) for j in range(len(point))
        ]
    return torch.tensor([float(x) for x in found], dtype=DOUBLE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [1e3, 1e6, 1e12])
def test_scores_without_a_digit_still_make_rows_that_sum_to_one(name, spread):
    n = 20
    s, u = draw(n, spread, torch.float32)
    z, _ = SOLVERS[name][0](s, u, torch.full((n, 1), 1 / n), torch.zeros(n, 1))
    assert z.ge(0).all()
    assert_close(z.sum(1), torch.ones(n))


# Scores of a row, those of its frictions, and λ.
CLOSED: dict[str, tuple[list[float], list[float], float]] = {
    # However far the best conductor is from the rest, constant friction is softmax.
    "equal frictions": ([97.0, 38.0, -61.0, 97.5, 12.0], [0.0] * 5, 0.05),
    # A best conductor that its friction closes: by one unit of rounding, or by so much that the others conduct nothing
    # in comparison; and one that rounding alone closes.
    **{
        f"friction {u:g}": ([90.0, 0.0, -3.0], [u, 0.0, 0.0], 1 / 3)
        for u in (0.0, 1e-6, 1.0, 200.0)
    },
    "a tiny friction": ([20.0, -20.0, 19.0], [1.75, 0.5, -0.25], 1.88e-17),
    "rounding alone": ([-6.4, 3.2, 12.4, -5.5], [0.02, 0.79, 0.79, 1.05], 4.9777765),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("s", "u", "lam"), CLOSED.values(), ids=CLOSED)
def test_the_best_conductor_flows_or_is_closed(name, s, u, lam):
    n = len(s)
    s = torch.tensor([s] * n)
    u = torch.tensor([u] * n)
    lam = torch.full((n, 1), lam)
    expected, _ = exact(s[0], u[0], float(lam[0]), 0.0)
    z, _ = SOLVERS[name][0](s, u, lam, torch.zeros(n, 1))
    assert_close(z.double(), expected.expand(n, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("s", "u"),
    [
        ((-6.8e9, 3.6e9, -6.8e9), (-2.7e9, 1.0e9, -2.7e9)),
        ((1.4e9, 3.2e11, 1.4e9), (-2.4e11, -5e10, -2.4e11)),
    ],
)
def test_a_threshold_that_the_rounding_of_the_scores_hides(name, s, u):
    """The best conductor has all the friction, and the two others flow below a potential of 1/4."""
    s, u = (torch.tensor([x] * 3, requires_grad=True) for x in (s, u))
    z, _ = SOLVERS[name][0](s, u, torch.ones(3, 1), torch.zeros(3, 1))
    assert_close(z, torch.tensor([[0.5, 0.0, 0.5]] * 3))
    grads = torch.autograd.grad(
        z @ torch.tensor([1.0, 1.0, 3.0]), (s, u), torch.ones(3)
    )
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("score", [100.0, -300.0, 1e8, 1e16])
def test_a_node_to_which_nothing_flows_has_finite_gradients(name, score):
    """Alone in its graph its friction is 1, more than α; where it is less all flows."""
    for lam, flow in ((1.0, 0.0), (0.01, 0.9)):
        leaves = [
            torch.full((1, 1), value, requires_grad=True)
            for value in (score, -score, lam, 10.0)
        ]
        z, log_mu = SOLVERS[name][0](*leaves)
        expected = (1 - lam * 10) / 11 if flow else 0.0
        assert_close(z, torch.full((1, 1), expected))
        grads = torch.autograd.grad((z + log_mu).sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads)
        assert grads[0].abs().max() < 1e-6  # a softmax of one
