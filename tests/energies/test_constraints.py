"""Constraints: projections are nearest points, keep what is inside, and have finite gradients everywhere."""

import math

import pytest
import torch
from energy_cases import DOUBLE
from torch.testing import assert_close

from diffusion_mp.energies import (
    Ball,
    Nonnegative,
    NonnegativeBall,
    Sphere,
    Unconstrained,
    get_constraint,
)
from helpers import refuses

ALL = [Unconstrained(), Nonnegative(), Ball(), Ball(0.3), NonnegativeBall(0.7)]
ALL += [Sphere(), Sphere(2.5)]


@pytest.fixture
def rows(generator):
    return torch.randn(40, 2, 3, generator=generator, dtype=DOUBLE)


@pytest.mark.parametrize("constraint", ALL, ids=repr)
def test_the_projection_is_inside_nearest_and_final(constraint, rows, generator):
    nearest = constraint.project(rows)
    assert constraint.holds(nearest)
    assert_close(constraint.project(nearest), nearest, rtol=1e-15, atol=1e-15)
    others = constraint.project(
        nearest
        + 0.3 * torch.randn(50, *rows.shape, generator=generator, dtype=rows.dtype)
    )
    assert ((others - rows).norm(dim=-1) >= (nearest - rows).norm(dim=-1) - 1e-14).all()
    assert (others.flatten(0, 2)[:60, None] - nearest.flatten(0, 1)).norm(
        dim=-1
    ).max() <= constraint.diameter + 1e-14


@pytest.mark.parametrize(
    ("dtype", "far"),
    [(DOUBLE, 1.01), (torch.float16, 1.05), (torch.bfloat16, 1.05)],
)
@pytest.mark.parametrize("constraint", ALL[1:], ids=repr)
def test_one_row_outside_is_seen_beyond_rounding(constraint, rows, dtype, far):
    inside = constraint.project(rows.to(dtype))
    assert constraint.holds(inside)
    assert constraint.holds(constraint.project(rows).float().double()), (
        "a state that was once in single precision"
    )
    inside[3, 1] = -far * constraint.project(torch.ones(3, dtype=dtype))
    assert not constraint.holds(inside)
    assert not constraint.holds(torch.full_like(inside, math.nan))


@pytest.mark.parametrize("constraint", ALL, ids=repr)
@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-200, 1.0, 1e200])
def test_gradients_are_finite_for_rows_of_any_length(constraint, size):
    y = (
        size * torch.tensor([[3.0, -4.0, 0.0], [1.0, 0.0, 0.0]], dtype=DOUBLE)
    ).requires_grad_()
    out = constraint.project(y)
    assert constraint.holds(out)
    (gradient,) = torch.autograd.grad(out.sum(), y)
    assert not gradient.isnan().any()


def test_a_row_of_zeros_takes_the_direction_of_its_start_on_a_sphere():
    zero = torch.zeros(2, 3, dtype=DOUBLE, requires_grad=True)
    start = torch.tensor([[0.0, -3.0, 0.0], [0.0, 0.0, 0.0]], dtype=DOUBLE)
    out = Sphere(2.0).project(zero, start)
    assert out.tolist() == [[0.0, -2.0, 0.0], [2.0, 0.0, 0.0]]
    (gradient,) = torch.autograd.grad(out.sum(), zero)
    assert torch.equal(gradient, torch.zeros_like(zero))
    # The least number of float32 is zero in half.
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ):
        assert (
            Sphere().project(torch.zeros(2, 3, dtype=dtype)).tolist()
            == [[1.0, 0.0, 0.0]] * 2
        )


def test_getting_one_by_name():
    assert get_constraint(None) == Unconstrained()
    assert get_constraint("ball", 2.0) == Ball(2.0)
    assert get_constraint(Sphere(3.0), 2.0) == Sphere(3.0)
    assert [c.convex for c in ALL] == [True] * 5 + [False] * 2


test_what_is_none_is_refused = refuses(
    (
        lambda: get_constraint("cone"),
        ValueError,
        "constraint must be one of None, 'nonnegative', 'ball', 'sphere', .*; got 'cone'",
    ),
)
