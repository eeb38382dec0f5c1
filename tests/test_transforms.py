"""Layers under what torch wraps around them: activation checkpointing and ``torch.func``."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from diffusion_mp import (
    DIFFormerConv,
    GCNConv,
    NodeFormerConv,
    PDEDiffusion1d,
    SFiConv,
    SGFormerConv,
)
from diffusion_mp.kernels.operation import VARIABLE
from diffusion_mp.testing import tolerance
from helpers import built

EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 4]])

# Together they call every operation of kernels/.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "difformer-s": lambda: DIFFormerConv(4, 4, transform=True),
    "difformer-a": lambda: DIFFormerConv(4, 4, kernel="sigmoid", transform=True),
    "sgformer": lambda: SGFormerConv(4, 4),
    "nodeformer": lambda: NodeFormerConv(4, 4, num_samples=0),
    "sfi": lambda: SFiConv(4, 4, 2),
    "gcn": lambda: GCNConv(4, 4),
    "sequence": lambda: PDEDiffusion1d(4),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    return built(LAYERS[request.param]).double()


def inputs(layer: nn.Module) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, () if isinstance(layer, PDEDiffusion1d) else (EDGES,)


def loss(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def test_checkpointing_changes_no_gradient(layer: nn.Module) -> None:
    x, edges = inputs(layer)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(loss(layer(x, *edges)), parameters)
    got = torch.autograd.grad(loss(checkpoint(layer, x, *edges, use_reentrant=False)), parameters)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_noise_is_not_drawn_again_by_checkpoints() -> None:
    x, edges = inputs(layer := built(lambda: NodeFormerConv(4, 4, num_samples=2)).double())
    out = checkpoint(layer, x, *edges, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"would draw other noise .* num_samples=0"):
        loss(out).backward()


def test_forward_mode(layer: nn.Module) -> None:
    """⟨g, J t⟩ = ⟨Jᵀ g, t⟩, with dual numbers and with ``torch.func``."""
    x, edges = inputs(layer)
    leaf = x.clone().requires_grad_()
    tangent = x.flip(0)
    (pulled,) = torch.autograd.grad(loss(layer(leaf, *edges)), leaf)
    with dual_level():
        pushed = unpack_dual(loss(layer(make_dual(x, tangent), *edges))).tangent
    _, by_func = jvp(lambda state: loss(layer(state, *edges)), (x,), (tangent,))
    torch.testing.assert_close(torch.stack([pushed, by_func]), (pulled * tangent).sum().expand(2))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_functional_gradients(
    layer: nn.Module, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.func`` does not look into operations of ``torch.library``, but into functions of autograd."""
    monkeypatch.setenv(VARIABLE, backend)
    x, edges = inputs(layer)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(layer(leaf, *edges)), [leaf, *layer.parameters()])

    def by_parameters(values: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(layer, values, (x, *edges)))

    _, pull = vjp(lambda state: loss(layer(state, *edges)), x)
    got = [*pull(torch.ones((), dtype=x.dtype)), *grad(by_parameters)(parameters).values()]
    rtol, atol = tolerance("gradient", torch.float64)
    torch.testing.assert_close(got, list(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, prune.random_unstructured],
)
def test_weights_that_are_computed_are_copied_and_saved(wrap: Callable[..., nn.Module]) -> None:
    options = {"amount": 0.5} if wrap is prune.random_unstructured else {}
    layer, other = (GCNConv(4, 4).eval() for _ in range(2))
    wrap(layer.value, "weight", **options)
    wrap(other.value, "weight", **options)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 4)
    for same in (
        [other] if options else [other, copy.deepcopy(layer)]
    ):  # torch copies no pruned weight
        torch.testing.assert_close(same(x, EDGES), layer(x, EDGES))
