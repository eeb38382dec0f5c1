"""Sums over all pairs: the O(N d²) polynomials and the tiles against plain N × N matrices."""

import json
import math

import pytest
import torch
from energy_cases import DOUBLE, every_penalty, squares
from torch.testing import assert_close

from diffusion_mp.energies import SimplePenalty, pairs
from helpers import randn
from subrun import run_program


def dense_total(penalty, x):
    return penalty.delta(squares(x)).sum()


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(pairs, "TILE_ENTRIES", 50)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_simple_total_at_three_thousand_nodes(offset, ball):
    """The O(N d²) value is the O(N²) one to 1e-9, far away from the origin too, where raw powers would cancel."""
    x = ball(3000, 16) + offset
    total = SimplePenalty().total(x)
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    square = SimplePenalty().delta(distances.square()).sum()
    assert_close(total, square, rtol=1e-9, atol=0)


def test_float32_input_keeps_float64_sums(ball):
    """The sums are those of the float32 numbers in exact arithmetic; float32 sums would be off by 1e-6 or more."""
    x = (ball(500, 8, 0.01) + 5).float()
    total = SimplePenalty().total(x)
    assert total.dtype == DOUBLE
    assert_close(total, dense_total(SimplePenalty(), x.double()), rtol=1e-9, atol=0)


@every_penalty
def test_the_total_is_the_dense_one_of_every_graph_and_head(penalty, small_tiles):
    x = randn(17, 2, 3) / 4
    ptr = torch.tensor([0, 5, 5, 6, 17])
    alone = sum(
        dense_total(penalty, x[a:b, head])
        for a, b in [(0, 5), (5, 6), (6, 17)]
        for head in range(2)
    )
    assert_close(penalty.total(x, ptr), alone, rtol=1e-11, atol=1e-12)
    assert float(penalty.total(x[:0], torch.tensor([0]))) == 0.0


@every_penalty
def test_gradients_of_both_orders(penalty, ball, small_tiles):
    x = ball(9, 2).requires_grad_()
    assert torch.autograd.gradcheck(penalty.total, (x,))
    assert torch.autograd.gradgradcheck(penalty.total, (x,))


@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_find_distance_above(shift, ball, small_tiles):
    """A witness if and only if there is a pair beyond the limit, wherever the state lies and however the tiles fall."""
    x = ball(60, 3) + shift
    ptr = torch.tensor([0, 25, 60])
    largest = max(
        float(torch.cdist(x[a:b], x[a:b]).square().max())
        for a, b in [(0, 25), (25, 60)]
    )
    assert pairs.find_distance_above(largest * 1.0001, x, ptr) is None
    witness = pairs.find_distance_above(largest * 0.9999, x, ptr)
    assert witness == pytest.approx(largest)


def test_find_distance_above_ignores_pairs_of_different_graphs_and_reports_nan():
    x = torch.tensor([[0.0], [0.1], [9.0], [9.1]])
    assert pairs.find_distance_above(4.0, x, torch.tensor([0, 2, 4])) is None
    assert pairs.find_distance_above(4.0, x) == pytest.approx(9.1**2)
    assert math.isnan(pairs.find_distance_above(4.0, torch.tensor([[0.0], [math.nan]])))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_find_distance_above_needs_the_tiles(n, small_tiles):
    """The farthest node from the mean need not be an end of the longest pair: a regular polygon with a spike inside."""
    angles = torch.arange(n, dtype=DOUBLE) * 2 * torch.pi / n
    x = torch.stack([angles.cos(), angles.sin()], 1)
    longest = float(torch.cdist(x, x).square().max())
    assert pairs.find_distance_above(longest * 0.999, x) == pytest.approx(longest)
    assert pairs.find_distance_above(longest * 1.001, x) is None


MEASURE = """
import json, resource, time, torch
from diffusion_mp.energies import SimplePenalty
x = torch.nn.functional.normalize(torch.randn(1_000_000, 64, generator=torch.Generator().manual_seed(0)), dim=1)
SimplePenalty().total(x[:100])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
total = float(SimplePenalty().total(x))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": seconds, "extra_mib": peak / 1024, "total": total}))
"""


@pytest.mark.slow
def test_a_million_nodes():
    """N = 1 000 000, d = 64, float32: under 10 s and 2 GB beyond the state."""
    measured = json.loads(run_program("-c", MEASURE))
    print(measured)
    assert measured["seconds"] < 10
    assert measured["extra_mib"] < 2000
    # Unit vectors in random directions: E z² = 2, E z⁴ = 4 + 4/d, so the mean of δ is 3 − 1/d.
    assert measured["total"] / 1e12 == pytest.approx(3 - 1 / 64, rel=1e-3)
