"""Conjugate gradients on their own."""

import pytest
import torch

from diffusion_mp.errors import ConvergenceError
from diffusion_mp.updates.linear_solve import conjugate_gradients, solve


def system(num_nodes: int = 30, condition: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(num_nodes, num_nodes, dtype=torch.float64, generator=generator))
    eigenvalues = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), num_nodes, dtype=torch.float64)
    return basis @ eigenvalues.diag() @ basis.T, torch.randn(num_nodes, 2, 3, dtype=torch.float64, generator=generator)


def apply(matrix: torch.Tensor):  # type: ignore[no-untyped-def]
    return lambda v: torch.einsum("ij,jhd->ihd", matrix, v)


def test_solves_every_column() -> None:
    matrix, b = system()
    exact = torch.linalg.solve(matrix, b.flatten(1)).view_as(b)
    torch.testing.assert_close(conjugate_gradients(apply(matrix), b), exact, rtol=1e-10, atol=1e-12)


def test_columns_of_very_different_size_are_equally_accurate() -> None:
    """Each column has its own tolerance: scaling one scales its answer and touches no other."""
    matrix, b = system()
    scale = torch.tensor([1e-30, 1.0, 1e30], dtype=torch.float64)
    torch.testing.assert_close(
        conjugate_gradients(apply(matrix), b * scale), conjugate_gradients(apply(matrix), b) * scale, rtol=1e-9, atol=0
    )
    single = conjugate_gradients(apply(matrix.float()), (b * 1e-30).float())
    exact = torch.linalg.solve(matrix, b.flatten(1)).view_as(b)
    torch.testing.assert_close(single.double() * 1e30, exact, rtol=1e-4, atol=1e-5)


def test_zero_columns_and_empty_systems() -> None:
    matrix, b = system()
    b[:, 1] = 0.0
    got = conjugate_gradients(apply(matrix), b)
    assert torch.equal(got[:, 1], torch.zeros_like(got[:, 1]))
    assert got[:, 0].abs().min() > 0
    assert conjugate_gradients(lambda v: v, torch.zeros(0, 1, 2)).shape == (0, 1, 2)


def test_the_input_is_left_alone() -> None:
    matrix, b = system()
    before = b.clone()
    conjugate_gradients(apply(matrix), b)
    assert torch.equal(b, before)


def test_too_few_iterations_say_how_far_they_came() -> None:
    matrix, b = system(condition=1e6)
    with pytest.raises(ConvergenceError, match=r"relative residual of .* in max_iter=3 iterations.*Raise max_iter"):
        conjugate_gradients(apply(matrix), b, max_iter=3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_an_error_not_an_answer(bad: float) -> None:
    matrix, b = system()
    b[3, 0, 0] = bad
    with pytest.raises(ConvergenceError, match="NaN or infinity"):
        conjugate_gradients(apply(matrix), b)


def test_indefinite_is_an_error() -> None:
    matrix, b = system()
    with pytest.raises(ConvergenceError, match="not positive definite"):
        conjugate_gradients(apply(matrix - 50 * torch.eye(30, dtype=torch.float64)), b, what="the test system")


def test_implicit_gradient_of_matrix_and_right_hand_side() -> None:
    matrix, b = system(5)

    def function(root: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return solve(apply(root @ root.T), b)

    root = torch.linalg.cholesky(matrix).requires_grad_()
    assert torch.autograd.gradcheck(function, (root, b.requires_grad_()))
    assert not solve(apply(matrix), b.detach()).requires_grad
    with torch.no_grad():
        assert not function(root, b).requires_grad
