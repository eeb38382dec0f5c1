"""Steps along a sequence of any size: exact in the cosine basis, against expm, banded solves and the general path."""

import pytest
import torch
from dense_updates import DOUBLE, both, source_for
from torch.testing import assert_close

from diffusion_mp.couplings import NeumannCoupling, SparseCoupling
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
)
from helpers import agree, close, randn

UPDATES = [
    HeatKernel(0.7),
    *(step(0.8, beta=0.5, leak=0.3) for step in (ImplicitEuler, CrankNicolson)),
]
UPDATES.append(Equilibrium(beta=0.5, leak=0.3))
KINDS = {
    "symmetric": (1, 2, 5, 40),
    "periodic": (1, 3),
    "replicate": (1,),
    "drop": (1, 1),
}


def path(length, alpha, *, heads=1):
    return NeumannCoupling(
        length, torch.full((1, heads), alpha, dtype=DOUBLE), nonnegative=True
    )


def general(coupling):
    """The same operator as stored entries, which knows no eigenvectors: what updates iterate on."""
    n = coupling.num_nodes
    pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    return SparseCoupling(
        Graph(n, pairs), coupling.at(pairs), symmetric=True, nonnegative=True
    )


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("kind", KINDS.items(), ids=KINDS)
@pytest.mark.parametrize("lengths", [[9], [4, 4], [2, 0, 6, 1]], ids=str)
def test_the_exact_step_is_what_the_iteration_converges_to(update, kind, lengths):
    boundary, strides = kind
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    alpha = (randn(len(strides), 2).abs() + 0.1).requires_grad_()
    x = randn(int(ptr[-1]), 2, 3, seed=1).requires_grad_()
    coupling = NeumannCoupling(len(x), alpha, strides, boundary, ptr, nonnegative=True)
    assert coupling.laplacian_function(torch.exp, x) is not None
    assert general(coupling).laplacian_function(torch.exp, x) is None
    outs = [
        update(x, s, source=source_for(update, x))
        for s in (coupling, general(coupling))
    ]
    agree(*outs, [x, alpha], (1e-9, 1e-10), (1e-8, 1e-8))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("t", [0.01, 1.0, 30.0])
def test_the_heat_semigroup_is_expm(length, t):
    """To 1e-10, for several strides that commute, some of them longer than the sequence."""
    alpha = torch.tensor([[1.0], [0.5], [2.0]], dtype=DOUBLE)
    strides = (1, 4, 70)
    coupling = NeumannCoupling(length, alpha, strides, nonnegative=True)
    x = randn(length, 1, 4)
    update = HeatKernel(t)
    got, exact = both(update, coupling, x)
    assert_close(got, exact, rtol=0, atol=1e-10)
    if t < 30:
        assert_close(
            update(got, coupling), HeatKernel(2 * t)(x, coupling), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("update", UPDATES, ids=repr)
def test_low_precision_and_autocast_solve_in_float32(update):
    double = path(30, 0.4)
    coupling = NeumannCoupling(30, torch.full((1, 1), 0.4), nonnegative=True)
    x = randn(30, 1, 4).to(torch.bfloat16)
    wide = x.double()
    expected = update(wide, double, source=wide if update.beta else None)
    for dtype, error in ((torch.bfloat16, 0.01), (torch.float32, 1e-6)):
        state = x.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = update(state, coupling, source=state if update.beta else None)
        assert got.dtype == dtype
        assert_close(got.double(), expected, rtol=error, atol=error)


X = randn(12, 1, 2)
SOLVES = [ImplicitEuler(1.0), CrankNicolson(1.0), Equilibrium(leak=0.1)]


@pytest.mark.parametrize("update", SOLVES, ids=repr)
def test_what_is_not_known_to_be_definite_is_left_to_the_iteration(update):
    """Without the promise α ≥ 0 the multipliers 1/(λ + 1/τ) may have a pole; conjugate gradients see the sign."""
    negative, positive = (
        NeumannCoupling(12, torch.full((1, 1), alpha, dtype=DOUBLE))
        for alpha in (-1.0, 0.3)
    )
    with pytest.raises(ConvergenceError, match="not positive definite"):
        update(X, negative)
    assert_close(update(X, positive), update(X, path(12, 0.3)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("step", [HeatKernel, ImplicitEuler])
def test_dropped_ends_and_the_residual_form_are_left_to_the_iteration(step, form):
    alpha = torch.full((1, 1), 0.2, dtype=DOUBLE)
    dropped = NeumannCoupling(12, alpha, (3,), "drop", nonnegative=True)
    assert dropped.laplacian_function(torch.exp, X) is None
    for coupling in (dropped, path(12, 0.2)):
        got, expected = (step(1.0, form)(X, s) for s in (coupling, general(coupling)))
        close(got, expected, "layer")


@pytest.mark.parametrize("boundary", ["causal", "replicate"])
def test_boundaries_that_are_not_symmetric_are_refused(boundary):
    skewed = NeumannCoupling(12, torch.full((1, 1), 0.2, dtype=DOUBLE), (2,), boundary)
    assert skewed.laplacian_function(torch.exp, X) is None
    with pytest.raises(CouplingMismatchError, match="NeumannCoupling"):
        ImplicitEuler(1.0)(X, skewed)
