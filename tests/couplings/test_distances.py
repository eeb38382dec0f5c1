"""Functions of distances in single precision: values and gradients beside those of differences in double precision.

A gradient is compared relative to its largest entry, which may be small: far rows hardly pull at each other.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.testing import assert_close

from diffusion_mp import (
    EdgeDiffusivity,
    FunctionPenalty,
    Graph,
    SigmoidPenalty,
    SimplePenalty,
)
from diffusion_mp.couplings import Coupling, DistanceCoupling, row_normalized
from diffusion_mp.energies import GaussianPenalty, MixturePenalty, Penalty, ScorePenalty

NODES = 40
CHANNELS = 8
#: Single precision has seven digits, of which sums over the nodes take one.
DIGITS = 2e-6

Function = Callable[[Tensor], Tensor]


def cauchy(z2: Tensor) -> Tensor:
    return 1 / (1 + z2)


def root(z2: Tensor) -> Tensor:
    return (1 + z2).rsqrt()


def rows(norm: float, offset: float, seed: int = 0) -> Tensor:
    """Rows of one norm around a point, exact in single precision."""
    x = torch.randn(NODES, 1, CHANNELS, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=2, keepdim=True) * norm + offset


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    v, weight = (torch.randn(NODES, 1, 3, generator=generator) for _ in range(2))
    return v, weight


def by_differences(function: Function, query: Tensor, key: Tensor) -> Tensor:
    """f(‖q_i − k_j‖²), [1, N, N]."""
    squares = (query.unsqueeze(1) - key.unsqueeze(0)).square().sum(3)
    return function(squares).permute(2, 0, 1)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    _, weight = values()
    return torch.autograd.grad((out * weight.to(out)).sum(), leaves)


def expect_digits(got: Tensor, expected: Tensor, digits: float = DIGITS) -> None:
    difference = (got.double() - expected).detach()
    assert float(difference.abs().max()) < digits * float(expected.detach().abs().max())


def expect_digits_of(
    compute: Callable[[Tensor, Tensor], Tensor],
    state: Tensor,
    digits: float = DIGITS,
    slopes: float | None = None,
) -> None:
    """``compute(state, v)`` and its gradient in single precision have the digits of those in double."""
    v, _ = values()
    single = state.clone().requires_grad_()
    double = state.double().requires_grad_()
    got = compute(single, v)
    expected = compute(double, v.double())
    expect_digits(got, expected, digits)
    slope = gradients(got, single)[0]
    expect_digits(
        slope, gradients(expected, double)[0], digits if slopes is None else slopes
    )


def leaf_pair(query: Tensor, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    first = query.to(dtype, copy=True).requires_grad_()
    second = first if key is query else key.to(dtype, copy=True).requires_grad_()
    return first, second


@pytest.mark.parametrize("function", [cauchy, root])
@pytest.mark.parametrize("mutual", [True, False], ids=["state", "queries-and-keys"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("norm", [1.0, 17.0, 57.0, 1000.0])
def test_distances_of_any_length(function, mutual, offset, norm):
    query = rows(norm, offset)
    key = query if mutual else rows(norm, offset, seed=1)
    v, _ = values()
    q, k = leaf_pair(query, key, torch.float32)
    coupling = DistanceCoupling(function, q, k, mutual=mutual)
    exact_q, exact_k = leaf_pair(query, key, torch.float64)
    entries = by_differences(function, exact_q, exact_k)
    expected = torch.einsum("hij,jhd->ihd", entries, v.double())
    expect_digits(coupling @ v, expected)
    expect_digits(coupling.to_dense(), entries)
    leaves, exact = ((q,), (exact_q,)) if mutual else ((q, k), (exact_q, exact_k))
    for got, right in zip(
        gradients(coupling @ v, *leaves), gradients(expected, *exact), strict=True
    ):
        expect_digits(got, right)


def test_rows_close_to_each_other_and_far_from_the_others():
    """Differences of a thousandth at a norm of a thousand, as rows of clusters have."""
    query = 1000 * rows(1.0, 0.0)[torch.arange(NODES) % 4] + 1e-3 * rows(
        1.0, 0.0, seed=1
    )

    def product(x: Tensor, v: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return DistanceCoupling(cauchy, x, x, mutual=True) @ v
        return torch.einsum("hij,jhd->ihd", by_differences(cauchy, x, x), v)

    expect_digits_of(product, query)


def test_values_in_double_precision_keep_it():
    query = rows(57.0, 0.0)
    v, _ = values()
    exact = query.double()
    expected = torch.einsum(
        "hij,jhd->ihd", by_differences(cauchy, exact, exact), v.double()
    )
    got = DistanceCoupling(cauchy, query, query, mutual=True) @ v.double()
    assert got.dtype == torch.float64
    expect_digits(got, expected, 1e-10)


def test_tiles_know_which_pairs_are_one_node(monkeypatch):
    monkeypatch.setattr("diffusion_mp.couplings.pairwise.TILE_ENTRIES", 64)
    ptr = torch.tensor([0, 13, 13, 14, NODES])
    query = rows(57.0, 0.0).requires_grad_()
    v, _ = values()
    exact = query.detach().double().requires_grad_()
    member = torch.bucketize(torch.arange(NODES), ptr, right=True)
    entries = by_differences(cauchy, exact, exact).masked_fill(
        member[:, None] != member, 0.0
    )
    expected = torch.einsum("hij,jhd->ihd", entries, v.double())
    got = DistanceCoupling(cauchy, query, query, ptr, mutual=True) @ v
    expect_digits(got, expected)
    expect_digits(*gradients(got, query), *gradients(expected, exact))


PENALTIES: dict[str, Penalty] = {
    "function": FunctionPenalty(cauchy),
    "simple": SimplePenalty(),
    "sigmoid": SigmoidPenalty(),
    "gaussian": GaussianPenalty(),
    "mixture": MixturePenalty([0.5, 2.0]),
}


@pytest.mark.parametrize("row_stochastic", [True, False], ids=["rows", "symmetric"])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("norm", [1.0, 8.0, 17.0, 57.0, 1000.0])
def test_edges_between_close_rows(norm, name, row_stochastic):
    """Edges within clusters, and loops: the rows are far from the centre of the graph, and close to their senders."""
    cluster = torch.arange(NODES) % 4
    x = (rows(norm, 0.0)[cluster] + 0.5 * rows(1.0, 0.0, seed=1)).squeeze(1)
    following = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 4) % NODES])
    graph = Graph(
        NODES,
        torch.cat([following, following.flip(0), torch.arange(NODES).expand(2, -1)], 1),
    )
    diffusivity = EdgeDiffusivity(PENALTIES[name], row_stochastic=row_stochastic)
    # Below a norm of eleven five digits are left, as `measured_from` says.
    digits = 5e-5 if norm == 8.0 else DIGITS
    expect_digits_of(lambda at, v: diffusivity(at, graph) @ v, x, digits)


@pytest.mark.parametrize("name", ["function", "sigmoid", "gaussian"])
def test_loops_beside_far_neighbours(name):
    """Any rounding of the distance of a node to itself would be most of the gradient, as f is steepest there."""
    x = rows(8.0, 0.0).squeeze(1)
    everyone = torch.arange(NODES)
    graph = Graph(
        NODES,
        torch.stack([everyone.repeat(2), torch.cat([everyone, everyone.roll(1)])]),
    )
    diffusivity = EdgeDiffusivity(PENALTIES[name], row_stochastic=False)
    expect_digits_of(lambda at, v: diffusivity(at, graph) @ v, x, 5e-5)


class FencePenalty(ScorePenalty):
    """f = σ(2 − z²), with a scale and an offset."""

    g = "sigmoid"
    scale = 2.0
    offset = 1.0

    def delta(self, z2: Tensor) -> Tensor:
        return z2 - softplus(z2 - 2)


COUPLINGS: dict[str, Callable[[Tensor], Coupling]] = {
    "linear": lambda q: SimplePenalty().attention(q),
    "exp-normalized": lambda q: GaussianPenalty().attention(q, normalize=True),
    "sigmoid": lambda q: FencePenalty().attention(q),
    "sigmoid-normalized": lambda q: FencePenalty().attention(q, normalize=True),
    "function-normalized": lambda q: row_normalized(
        DistanceCoupling(cauchy, q, q, nonnegative=True, mutual=True)
    ),
}


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("norm", [1.0, 17.0, 57.0])
def test_rows_of_clusters_in_other_couplings(norm, offset, name):
    query = (
        rows(norm, 0.0)[torch.arange(NODES) % 4] + 0.5 * rows(1.0, 0.0, seed=1) + offset
    )
    expect_digits_of(lambda at, v: COUPLINGS[name](at) @ v, query)


def test_second_derivatives_where_a_query_is_equal_to_its_key():
    """There the derivative of z² is zero and the second one is not: f(z²) has 2f′(0) I."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(5, 1, 3, dtype=torch.float64, generator=generator)
    v = torch.randn(5, 1, 2, dtype=torch.float64, generator=generator)

    def coupled(query: Tensor) -> Tensor:
        return (DistanceCoupling(cauchy, query, key) @ v).square().sum()

    def differences(query: Tensor) -> Tensor:
        return (
            torch.einsum("hij,jhd->ihd", by_differences(cauchy, query, key), v)
            .square()
            .sum()
        )

    for hessian in (
        torch.func.hessian,
        lambda loss: lambda x: torch.autograd.functional.hessian(loss, x),
    ):
        assert_close(
            hessian(coupled)(key), hessian(differences)(key), rtol=1e-9, atol=1e-9
        )
