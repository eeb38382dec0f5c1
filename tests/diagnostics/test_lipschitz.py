"""``lipschitz``: the largest singular value of a Jacobian, without the Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp import ConvergenceError, SigmoidDiffusivity
from diffusion_mp.diagnostics import lipschitz
from diffusion_mp.layers.sequences import TransformerBlock
from diffusion_mp.testing.laws import seeded


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 9), (9, 3), (1, 5), (5, 1)])
def test_the_norm_of_a_matrix(generator: torch.Generator, rows: int, columns: int) -> None:
    matrix, x = draw(generator, rows, columns), draw(generator, columns)
    expected = torch.linalg.matrix_norm(matrix, 2).item()
    assert lipschitz(lambda x: matrix @ x, x, tol=1e-12, max_iter=5000) == pytest.approx(expected, rel=1e-9)


def test_the_jacobian_of_an_mlp(generator: torch.Generator) -> None:
    with seeded(0):
        f = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    for _ in range(5):
        x = draw(generator, 6)
        expected = torch.linalg.matrix_norm(jacrev(f)(x), 2).item()
        assert lipschitz(f, x, tol=1e-10) == pytest.approx(expected, rel=1e-8)
        assert 0.98 * expected < lipschitz(f, x) <= expected * (1 + 1e-12), "from below"
    assert all(parameter.grad is None for parameter in f.parameters())


def test_the_jacobian_of_a_transformer_block(generator: torch.Generator) -> None:
    """Fused attention has no second derivative; it is replaced while this runs."""
    with seeded(0):
        block = TransformerBlock(4, 2, mlp_channels=8).double().eval()
    x, mask = draw(generator, 2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda x: block(x, mask)[mask].flatten())(x).flatten(1)
    expected = torch.linalg.matrix_norm(jacobian, 2).item()
    assert lipschitz(lambda x: block(x, mask)[mask], x, tol=1e-10) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize(("size", "dtype"), [(100, torch.float64), (100_000, torch.float64), (100_000, torch.float32)])
def test_a_direction_that_the_start_hardly_has_is_found(size: int, dtype: torch.dtype, tol: float) -> None:
    """One entry of many is steeper. Nearly all of the start lies in the plateau below it, which looks like an end."""
    for steepest in (1.5, 1.05):
        scale = torch.ones(size, dtype=dtype)
        scale[size // 3] = steepest
        found = lipschitz(lambda x, scale=scale: scale * x, torch.zeros(size, dtype=dtype), tol=tol)
        assert found == pytest.approx(steepest, rel=max(tol, 1e-6))


@pytest.mark.parametrize("seed", range(20))
def test_many_nearly_equal_singular_values(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = draw(generator, 120, 150)
    expected = torch.linalg.matrix_norm(matrix, 2).item()
    found = lipschitz(lambda x: matrix @ x, draw(generator, 150), generator=generator)
    assert expected * (1 - 1e-4) <= found <= expected * (1 + 1e-12)


def test_what_does_not_depend_on_x_is_constant(generator: torch.Generator) -> None:
    x = draw(generator, 3)
    assert lipschitz(lambda x: x.detach(), x) == 0
    assert lipschitz(lambda x: x * 0, x) == 0
    assert lipschitz(lambda x: x[:0], x) == 0
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert lipschitz(lambda x: weight * 2, x) == 0


def test_it_leaves_the_point_and_the_random_state_alone(generator: torch.Generator) -> None:
    x, before = draw(generator, 3).requires_grad_(), torch.get_rng_state()
    with torch.no_grad():
        assert lipschitz(torch.sin, x) == pytest.approx(float(x.cos().abs().max()), rel=1e-3)
    assert x.grad is None
    assert torch.equal(before, torch.get_rng_state())
    start = torch.Generator().manual_seed(5)
    assert lipschitz(torch.sin, x, tol=0.5, generator=start) != lipschitz(torch.sin, x, tol=0.5)


def test_it_says_when_it_fails(generator: torch.Generator) -> None:
    scale = torch.linspace(0.99, 1, 50, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match=r"residual .* above tol=1e-06 .* after 3 iterations, at ‖J‖ = 0.99"):
        lipschitz(lambda x: scale * x, draw(generator, 50), tol=1e-6, max_iter=3)
    diffusivity, v = SigmoidDiffusivity(), draw(generator, 5, 1, 2)
    with pytest.raises(RuntimeError, match="once"):
        lipschitz(lambda x: diffusivity(x).matmul(v), draw(generator, 5, 2))
    with pytest.raises(ValueError, match="tol must be finite and > 0"):
        lipschitz(torch.sin, v, tol=0.0)
    with pytest.raises(ValueError, match="x must be finite; 10 of its 10 entries"):
        lipschitz(torch.sin, v / 0)
    with pytest.raises(ValueError, match="f must have a finite derivative at x, below 1e150; its norm there is inf"):
        lipschitz(torch.sqrt, 0 * v)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("f", "sentence"),
    [
        (lambda x: "x", r"f\(x\) must be a tensor; got 'x'"),
        (lambda x: (x, x), r"f\(x\) must be a tensor; got \(a float32"),
        (lambda x: x + 1j, r"f\(x\) must be real; got a complex64"),
    ],
)
def test_it_says_what_f_must_give(f: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        lipschitz(f, torch.rand(3))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_squares_may_leave_the_range_of_single_precision(scale: float, generator: torch.Generator) -> None:
    matrix = torch.randn(4, 3, generator=generator)
    found = lipschitz(lambda x: scale * (matrix @ x), torch.rand(3, generator=generator))
    assert found / scale == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4)


def test_nothing_to_move_in_stretches_nothing() -> None:
    assert lipschitz(lambda x: torch.ones(2) + x.sum(), torch.rand(0)) == 0.0
