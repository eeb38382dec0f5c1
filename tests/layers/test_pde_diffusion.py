"""One diffusion step along a sequence: the equation, padding that never leaks, α under its budget, what it costs."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from diffusion_mp.diffusivities import NeumannDiffusivity
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.updates import CrankNicolson, Equilibrium, HeatKernel, ImplicitEuler
from helpers import close, randn, refuses

OPTIONS = {
    "default": {},
    "strides": {"strides": (1, 2, 4, 9)},
    "heads": {"strides": (1, 3), "heads": 2, "per": "head"},
    "channels": {"strides": (1, 3), "per": "channel", "boundary": "drop"},
    "replicate": {"strides": (1, 3), "boundary": "replicate", "norm": True},
    "periodic": {"strides": (2,), "boundary": "periodic"},
    "causal": {"strides": (1, 5), "boundary": "causal"},
    "heat": {
        "update": HeatKernel(1.0),
        "strides": (1, 4),
        "alpha": 5.0,
        "budget": None,
    },
    "implicit": {"update": ImplicitEuler(1.0), "boundary": "periodic"},
    "implicit-drop": {
        "update": ImplicitEuler(1.0),
        "boundary": "drop",
        "strides": (2,),
    },
    "trapezoidal": {"update": CrankNicolson(1.0), "per": "channel"},
    "equilibrium": {"update": Equilibrium(leak=0.5)},
}


def uneven(layer: PDEDiffusion1d) -> PDEDiffusion1d:
    """Different α for every stride and set, so that none can be taken for another."""
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.add_(0.4 * randn(*parameter.shape, seed=number))
    return layer


def build(name: str, channels: int = 4) -> PDEDiffusion1d:
    return uneven(PDEDiffusion1d(channels, **OPTIONS[name]).double())


LENGTHS = torch.tensor([[10], [7], [1], [7]])
RIGHT = torch.arange(10) < LENGTHS
SCATTERED = torch.rand(4, 10, generator=torch.Generator().manual_seed(3)) < 0.6
MASKS = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "anywhere": SCATTERED,
    "a row without tokens": RIGHT & (torch.arange(4) % 2 == 0).unsqueeze(1),
    "none": torch.zeros(4, 10, dtype=torch.bool),
    "all": torch.ones(4, 10, dtype=torch.bool),
}


def test_the_step_is_the_equation() -> None:
    """x′_i = x_i + Σ_k α_k (x_{i−h} − 2x_i + x_{i+h}), the ends reflected."""
    layer = uneven(PDEDiffusion1d(6, strides=(1, 3), heads=3, per="head").double())
    alpha = layer.alpha.detach().repeat_interleave(2, dim=1)
    x = randn(2, 5, 6)
    extended = torch.cat([x.flip(1), x, x.flip(1)], dim=1)
    expected = x.clone()
    for share, stride in zip(alpha, (1, 3), strict=True):
        left = extended[:, 5 - stride : 10 - stride]
        right = extended[:, 5 + stride : 10 + stride]
        expected += share * (left - 2 * x + right)
    close(layer(x), expected, "entries")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_never_leaks(name: str, mask: Tensor) -> None:
    layer = build(name)
    x = randn(4, 10, 4)
    x[~mask] = math.nan
    got = layer(x, mask)
    for row, tokens, out in zip(x, mask, got, strict=True):
        if tokens.any():
            close(out[tokens], layer(row[tokens]), "rearranged")
    assert got[~mask].isnan().all()
    other = torch.where(mask.unsqueeze(2), x, 3.0)
    kept = layer(other, mask)
    assert torch.equal(kept[mask], got[mask])
    if layer.norm is None:
        assert torch.equal(kept[~mask], other[~mask])


@pytest.mark.parametrize("name", ["strides", "heads", "causal", "heat"])
def test_no_gradient_comes_from_padding(name: str) -> None:
    layer = build(name)
    weight = randn(int(SCATTERED.sum()), 4, seed=2)
    gradients = []
    for padding in (0.0, math.nan):
        x = randn(4, 10, 4).masked_fill(~SCATTERED.unsqueeze(2), padding)
        x.requires_grad_()
        loss = (layer(x, SCATTERED)[SCATTERED] * weight).sum()
        slope, *others = torch.autograd.grad(loss, [x, *layer.parameters()])
        assert not slope[~SCATTERED].any()
        gradients.append([slope[SCATTERED], *others])
    for clean, poisoned in zip(*gradients, strict=True):
        assert torch.equal(clean, poisoned)


def test_the_returned_coupling_is_the_step() -> None:
    x = randn(2, 5, 4)
    mask = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    layer = build("heads")
    out, coupling = layer(x, mask, return_coupling=True)
    # The tokens of a row before its padding.
    first = torch.tensor([0, 2, 3, 1, 4, 5, 6, 7, 8, 9])
    rows = x.flatten(0, 1)[first].unflatten(1, (2, 2))
    moved = rows + coupling @ rows - coupling.degree().unsqueeze(2) * rows
    tokens = mask.flatten()[first]
    close(moved.flatten(1)[tokens], out.flatten(0, 1)[first][tokens])
    assert not coupling.to_dense()[:, :3, 3:].any()
    assert layer(x, return_coupling=True)[1].num_nodes == 10


@pytest.mark.parametrize("budget", [0.5, 0.25, 3.0])
def test_alpha_starts_where_asked_and_stays_under_its_budget(budget: float) -> None:
    diffusivity = NeumannDiffusivity(2, strides=(1, 2, 4), alpha=0.1, budget=budget)
    torch.testing.assert_close(diffusivity.alpha, torch.full((3, 2), 0.1 / 3))
    assert not diffusivity.theta.any()
    theta = randn(3, 2)
    eta = torch.tensor([1.3, -2.0], dtype=theta.dtype)
    diffusivity.double().load_state_dict({"theta": theta, "eta": eta})
    close(diffusivity.alpha, budget * eta.sigmoid() * theta.softmax(0))
    diffusivity.eta.data.fill_(15.0)
    total = diffusivity.alpha.sum(0)
    assert (total < budget).all()
    assert (total > 0.99 * budget).all()


def test_without_a_budget_alpha_is_any_positive_number() -> None:
    diffusivity = NeumannDiffusivity(strides=(1, 2), alpha=100.0, budget=None)
    torch.testing.assert_close(diffusivity.alpha, torch.full((2, 1), 50.0))
    assert [name for name, _ in diffusivity.named_parameters()] == ["theta"]


def test_the_norm_is_that_of_the_step() -> None:
    bare, normed = (
        PDEDiffusion1d(4, strides=(1, 2), norm=norm).double() for norm in (False, True)
    )
    x = randn(4, 10, 4)
    close(normed(x, RIGHT), layer_norm(bare(x, RIGHT), (4,)))


def test_no_guarantee_covers_the_norm() -> None:
    """Eq. 16 behind a step that contracts: the state gets rougher and larger all the same (ERRATA P5)."""
    x = 0.01 * randn(1, 30, 4)
    bare, normed = (PDEDiffusion1d(4, norm=norm).double()(x) for norm in (False, True))
    assert bare.norm() < x.norm()
    assert bare.diff(dim=1).norm() < x.diff(dim=1).norm()
    assert normed.norm() > 10 * x.norm()
    assert normed.diff(dim=1).norm() > 10 * x.diff(dim=1).norm()


def test_it_says_how_many_channels_it_takes_and_returns() -> None:
    assert (STEP.in_channels, STEP.out_channels) == (4, 4)


STEP = PDEDiffusion1d(4)
X = randn(2, 5, 4)
TRUE = torch.ones(2, 5, dtype=torch.bool)
test_bad_input_is_answered_by_a_sentence = refuses(
    (
        lambda: STEP(X[0], TRUE[0]),
        ValueError,
        r"mask goes with sequences.*For its rows pass batch",
    ),
    (
        lambda: STEP(X, batch=torch.zeros(2).long()),
        ValueError,
        r"batch goes with rows.*padding pass mask",
    ),
    (lambda: STEP(X, return_coupling=1), TypeError, "return_coupling must be"),
    (
        lambda: PDEDiffusion1d(4, heads=3),
        ValueError,
        "heads must divide channels; got 3 heads, 4 channels",
    ),
    (
        lambda: PDEDiffusion1d(4, alpha=0.5),
        ValueError,
        r"alpha must be below the budget 0.5",
    ),
)
