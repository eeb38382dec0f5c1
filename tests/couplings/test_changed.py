"""A coupling in another dtype, on another device or without gradient is the same operator, and keeps nothing alive."""

# ruff: noqa: F403, F405 (everything public)
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cases import COUPLINGS, PTR, leaf
from diffusion_mp import *
from diffusion_mp.couplings import *
from diffusion_mp.couplings.base import PROMISES
from helpers import refuses


@pytest.mark.parametrize("name", COUPLINGS)
def test_in_single_precision_it_is_the_same_operator(name):
    coupling = COUPLINGS[name]()
    single = coupling.to(torch.float32)
    assert type(single) is type(coupling)
    assert single.shape == coupling.shape
    assert (single.ptr is None) == (coupling.ptr is None)
    assert single.to(torch.float32) is single
    dense = coupling.to_dense()
    assert dense.dtype == torch.float64
    scale = float(dense.detach().abs().max()) if dense.numel() else 0.0
    assert_close(single.to_dense(), dense.float(), rtol=1e-4, atol=2e-5 * scale)
    v = leaf(coupling.num_nodes, coupling.heads, 2)
    expected = (coupling @ v).float()
    assert_close(single @ v.float(), expected, rtol=1e-4, atol=1e-4 * max(scale, 1.0))
    for promise in PROMISES:
        if promise != "symmetric":  # which values decide, and they were rounded
            assert getattr(single, promise) == getattr(coupling, promise)
    metric = coupling.metric  # computed in double, and kept so
    if metric is not None:
        again = coupling.to(torch.float32).metric
        assert again is None or torch.equal(again, metric)


@pytest.mark.parametrize("name", COUPLINGS)
def test_detached_it_has_the_same_entries_and_no_gradient(name):
    coupling = COUPLINGS[name]()
    plain = coupling.detach()
    v = leaf(coupling.num_nodes, coupling.heads, 2).detach()
    for result in (plain.to_dense(), plain.degree(), plain.T @ v):
        assert not result.requires_grad
    assert torch.equal(plain.to_dense(), coupling.to_dense())
    assert (plain.metric is None) == (coupling.metric is None)


@pytest.mark.parametrize("name", COUPLINGS)
def test_on_another_device_are_all_tensors_but_the_row_boundaries(name):
    coupling = COUPLINGS[name]()
    boundaries = coupling.ptr
    moved = coupling.to("meta")
    assert moved.device.type == "meta"
    assert moved.ptr is boundaries
    for name, tensor in tensors(moved):
        assert tensor.device.type == ("cpu" if name == "ptr" else "meta")


def tensors(value: object, name: str = "") -> list[tuple[str, Tensor]]:
    """Those that a coupling holds, and its parts, with their names."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Coupling):
        return [
            tensor
            for name, part in vars(value).items()
            for tensor in tensors(part, name)
        ]
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", [""] * len(value))
        parts = zip(names, value, strict=True)
        return [tensor for name, part in parts for tensor in tensors(part, name)]
    return []


def test_gradients_learned_scores_and_shared_tensors_survive_a_change_of_dtype():
    query = leaf(11, 2, 3)
    PairwiseCoupling(query, query, PTR, mutual=True).to(
        torch.float32
    ).to_dense().square().sum().backward()
    (expected,) = torch.autograd.grad(
        PairwiseCoupling(query, query, PTR, mutual=True).to_dense().square().sum(),
        query,
    )
    assert_close(query.grad, expected, rtol=1e-4, atol=1e-5)
    penalty = FunctionPenalty(Cauchy(1, 1, bias=False, dtype=torch.float64))
    coupling = penalty.coupling(leaf(11, 1, 3))
    assert coupling.to(torch.float32).to_dense().dtype == torch.float32
    assert not coupling.detach().to_dense().requires_grad
    assert all(
        p.requires_grad and p.dtype == torch.float64 for p in penalty.parameters()
    )
    query = leaf(11, 2, 3)
    single = LowRankCoupling(query, query, PTR, positive_semidefinite=True).to(
        torch.float32
    )
    assert single.query is single.key  # type: ignore[attr-defined]
    assert single.positive_semidefinite


def test_functions_of_distances_in_a_batch_under_torch_func():
    def energy(x: Tensor) -> Tensor:
        return (
            (DistanceCoupling(lambda z2: 1 / (1 + z2), x, x, PTR, mutual=True) @ x)
            .square()
            .sum()
        )

    x = leaf(11, 1, 3)
    assert_close(
        torch.func.grad(energy)(x.detach()), torch.autograd.grad(energy(x), x)[0]
    )


class Cauchy(torch.nn.Linear):
    def forward(self, z2: Tensor) -> Tensor:
        return 1 / (1 + self.weight.square().sum() * z2)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: PairwiseCoupling(
            x, x, mutual=True
        ),  # whose metric is computed on first access
        lambda x: (
            0.5 * PairwiseCoupling(x, x, mutual=True)
            + IdentityCoupling(len(x), dtype=x.dtype)
        ),
        lambda x: SparseCoupling(
            Graph(len(x), torch.tensor([[0, 1], [1, 0]]), x[:2, 0, 0].abs())
        ),
        lambda x: DenseCoupling(x[:, 0] @ x[:, 0].T),
    ],
)
def test_a_detached_coupling_does_not_keep_its_inputs_alive(make):  # type: ignore[no-untyped-def]
    x = 2 * leaf(11, 1, 3)
    made_of = weakref.ref(x)
    plain = make(x).detach()
    del x
    gc.collect()
    assert made_of() is None
    assert plain.degree().size(0) == 11
    assert plain.metric is None or plain.metric.size(0) == 11


test_other_arguments_of_to_are_refused = refuses(
    (
        lambda: DenseCoupling(torch.eye(3)).to(torch.int64),
        TypeError,
        r"dtype must be a floating torch.dtype",
    ),
    (lambda: DenseCoupling(torch.eye(3)).to("nowhere"), TypeError, "nowhere"),
)
