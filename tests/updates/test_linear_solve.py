"""Conjugate gradients on their own."""

import pytest
import torch
from dense_updates import DOUBLE, random
from torch import Tensor

from diffusion_mp.errors import ConvergenceError
from diffusion_mp.updates.linear_solve import conjugate_gradients


def system(num_nodes: int = 30, condition: float = 100.0) -> tuple[Tensor, Tensor, Tensor]:
    basis, _ = torch.linalg.qr(random(num_nodes, num_nodes))
    eigenvalues = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), num_nodes, dtype=DOUBLE)
    matrix, b = basis @ eigenvalues.diag() @ basis.T, random(num_nodes, 2, 3, seed=1)
    return matrix, b, torch.linalg.solve(matrix, b.flatten(1)).view_as(b)


def apply(matrix: Tensor):
    return lambda v: torch.einsum("ij,jhd->ihd", matrix, v)


def test_columns_of_any_size_are_solved_and_the_input_is_left_alone() -> None:
    """Each column has its own tolerance: scaling one scales its answer and touches no other."""
    matrix, b, exact = system()
    before = b.clone()
    got = conjugate_gradients(apply(matrix), b)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    assert torch.equal(b, before)
    scale = torch.tensor([1e-30, 1.0, 1e30], dtype=DOUBLE)
    torch.testing.assert_close(conjugate_gradients(apply(matrix), b * scale), got * scale, rtol=1e-9, atol=0)
    single = conjugate_gradients(apply(matrix.float()), (b * 1e-30).float())
    torch.testing.assert_close(single.double() * 1e30, exact, rtol=1e-4, atol=1e-5)
    b[:, 1] = 0.0
    got = conjugate_gradients(apply(matrix), b)
    assert torch.equal(got[:, 1], torch.zeros_like(got[:, 1]))
    assert got[:, 0].abs().min() > 0
    assert conjugate_gradients(lambda v: v, torch.zeros(0, 1, 2)).shape == (0, 1, 2)


def test_what_has_no_answer_is_an_error() -> None:
    matrix, b, _ = system(condition=1e6)
    with pytest.raises(ConvergenceError, match=r"relative residual of .* in max_iter=3 iterations.*Raise max_iter"):
        conjugate_gradients(apply(matrix), b, max_iter=3)
    matrix, b, _ = system()
    with pytest.raises(ConvergenceError, match="not positive definite"):
        conjugate_gradients(apply(matrix - 50 * torch.eye(30, dtype=DOUBLE)), b, what="the test system")
    for bad in (float("nan"), float("inf")):
        b[3, 0, 0] = bad
        with pytest.raises(ConvergenceError, match="NaN or infinity"):
            conjugate_gradients(apply(matrix), b)


def test_a_metric_over_four_decades() -> None:
    root, b = random(25, 25), random(25, 2, 3, seed=1)
    metric = torch.logspace(-2, 2, 25, dtype=DOUBLE).unsqueeze(1)
    matrix = (root @ root.T + torch.eye(25, dtype=DOUBLE)) / metric
    exact = apply(torch.linalg.inv(matrix))
    got = conjugate_gradients(apply(matrix), b, metric=metric)
    assert ((apply(matrix)(got) - b).norm(dim=0) <= 1e-10 * b.norm(dim=0)).all()
    with pytest.raises(ConvergenceError):
        conjugate_gradients(apply(matrix), b)
    got = conjugate_gradients(apply(matrix), b, metric=metric, preconditioner=exact, max_iter=3)
    torch.testing.assert_close(got, exact(b), rtol=1e-8, atol=1e-8)
