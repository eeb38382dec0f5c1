"""`assert_energy_descent` accepts what theory covers, and can fail."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MessagePassing

import diffusion_mp as dm
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
)
from diffusion_mp.energies import QuadraticPenalty
from diffusion_mp.layers import DiffusionConv
from diffusion_mp.testing import assert_energy_descent
from diffusion_mp.updates import (
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
    StateUpdate,
)
from energy_forms import Explicit
from helpers import built

UPDATES: dict[str, StateUpdate] = {
    "euler": ExplicitEuler(0.5),
    "euler-long": ExplicitEuler(0.99),
    "euler-residual": ExplicitEuler(0.5, form="residual"),
    "euler-leak": ExplicitEuler(0.4, leak=0.2),
    "euler-source": ExplicitEuler(0.4, beta=0.7, leak=0.2),
    "implicit": ImplicitEuler(3.0),
    "implicit-residual": ImplicitEuler(3.0, form="residual"),
    "heat": HeatKernel(2.0),
    "equilibrium": Equilibrium(beta=0.5, leak=0.3),
    "certified": dm.CertifiedStep(dm.diffusivities.Positive(5.0)),
    "certified-sphere": dm.CertifiedStep(0.1, constraint="sphere"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_descend(name: str) -> None:
    assert_energy_descent(UPDATES[name])


def test_a_lambda_below_the_certified_one_is_caught() -> None:
    def small(coupling, x):
        return Explicit(QuadraticPenalty(), 0.2 * 0.5 / 2, coupling=coupling)

    with pytest.raises(
        AssertionError, match=r"ExplicitEuler, step .*the energy rose from"
    ):
        assert_energy_descent(ExplicitEuler(0.5), small)


class Rising(dm.CertifiedConv):
    """Reports its energies in the opposite order."""

    def energies(self, *inputs: Any, **named: Any) -> Tensor:
        return super().energies(*inputs, **named).flip(-1)


def test_energies_that_a_layer_reports_and_that_rise_are_caught() -> None:
    with pytest.raises(AssertionError, match="its energies rise: "):
        assert_energy_descent(Rising(4))


def test_an_energy_of_the_users_own() -> None:
    assert_energy_descent(
        ExplicitEuler(0.5),
        lambda coupling, x: Explicit("quadratic", 1.0, coupling=coupling),
    )


def layer(diffusivity: Diffusivity, update: StateUpdate) -> DiffusionConv:
    return DiffusionConv(4, 4, diffusivity, update, transform=False, bias=False)


LAYERS = {
    "simple": layer(
        SimpleDiffusivity(4, normalize=None, measure="distance"), ExplicitEuler(0.5)
    ),
    "simple-leak": layer(
        SimpleDiffusivity(4, normalize=None, measure="distance"),
        ExplicitEuler(0.5, leak=0.3),
    ),
    "sigmoid": layer(
        SigmoidDiffusivity(4, normalize=None, measure="distance"), ExplicitEuler(1.0)
    ),
    "sigmoid-unnormalised": layer(
        SigmoidDiffusivity(4, normalize=None, measure="distance", row_stochastic=False),
        ExplicitEuler(0.05),
    ),
    "gcn": layer(
        AdjacencyDiffusivity("sym", direction="undirected"),
        ExplicitEuler(0.5, "residual"),
    ),
    "sum": layer(
        AdjacencyDiffusivity("sum", direction="undirected"), ExplicitEuler(0.05)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_descend_the_energy_that_theory_gives_them(name: str) -> None:
    assert_energy_descent(LAYERS[name])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (layer(SimpleDiffusivity(4), ExplicitEuler(0.5)), "not symmetric"),
        (
            layer(SimpleDiffusivity(4, projection="separate"), ExplicitEuler(0.5)),
            "not symmetric",
        ),
        (
            layer(
                SimpleDiffusivity(4, heads=2, normalize=None, measure="distance"),
                ExplicitEuler(0.5),
            ),
            "several heads",
        ),
        (
            layer(
                AdjacencyDiffusivity("sym", direction="undirected"), ImplicitEuler(0.5)
            ),
            "pass assert_energy_descent",
        ),
        (layer(AdjacencyDiffusivity("row"), ExplicitEuler(0.5)), "not symmetric"),
        (ExplicitEuler(5.0), "τ must be below τ_max"),
        (ExplicitEuler(1.5, leak=1.0), "no energy is known to descend"),
    ],
)
def test_what_no_theorem_covers_is_refused_with_the_reason(
    module: nn.Module, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert_energy_descent(module)


def test_a_given_energy_asks_for_no_certificate() -> None:
    """No theorem covers a step this long, as the test above says."""
    with pytest.raises(AssertionError, match="the energy rose"):
        assert_energy_descent(ExplicitEuler(1.5, leak=1.0), Explicit("quadratic"))


class Smoothing(MessagePassing):
    """x_i + τ Σ_j (x_j − x_i) over the neighbours j of i."""

    def __init__(self, tau: float) -> None:
        super().__init__(aggr="add")
        self.tau = tau

    def forward(self, x, edge_index):
        return x + self.tau * self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return x_j - x_i


class Uneven(Smoothing):
    """Every other channel moves with the wrong sign."""

    def __init__(self) -> None:
        super().__init__(0.1)

    def forward(self, x, edge_index):
        sign = torch.ones(x.size(1), dtype=x.dtype)
        sign[::2] = -1
        return x + sign * (super().forward(x, edge_index) - x)


def dirichlet(x, edge_index):
    source, target = edge_index
    return (x[target] - x[source]).square().sum() / 4


def test_a_layer_of_pyg_descends_an_energy_of_the_user():
    assert_energy_descent(Smoothing(0.1), dirichlet)
    assert_energy_descent(lambda x, edges: x.relu(), lambda x, edges: x.norm())


@pytest.mark.parametrize(
    "module",
    [
        dm.CertifiedConv(4, num_layers=2),
        dm.CertifiedDIFFormer(4, 8, 3),
        dm.CertifiedTransformer(4, 8, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_certified_modules_bring_their_energies(module):
    assert_energy_descent(module, instances=2)


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (Smoothing(0.6), r"The step is too long: 0\.25 of it"),
        (built(lambda: GCNConv(4, 4)), r"The state is multiplied by lin\.weight"),
        (dm.DIFFormerConv(4, 4), "A constant state moves"),
        (built(lambda: dm.GATConv(4, 4)), "transform=False"),
        (Smoothing(-0.1), "The move has the wrong sign"),
        (Uneven(), "No part of this move"),
    ],
    ids=["long", "weights", "sum", "transform", "uphill", "uneven"],
)
def test_a_rise_is_reported_with_its_cause(module, cause):
    with pytest.raises(AssertionError, match=cause) as raised:
        assert_energy_descent(module, dirichlet, seed=3)
    message = str(raised.value)
    assert "seed 3: the energy rose from" in message
    assert re.search(
        r"12 nodes and \d+ edges, edge_index: \[\[0, 1, 2, …\], \[", message
    )


class OfEight(nn.Module):
    """A plain module, which does not say how many channels it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, edge_index):
        return x - 0.1 * x / (1 + self.lin(x).square())


def size(x, edge_index):
    return x.square().sum()


def test_the_number_of_channels_of_a_plain_module_is_passed():
    assert_energy_descent(OfEight(), size, in_channels=8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        assert_energy_descent(OfEight(), size)
    assert raised.value.__notes__ == [
        "The layer was called with C = 4 channels; pass in_channels= if it takes another number."
    ]
    # What is passed counts more than what the layer says.
    layer = OfEight()
    layer.in_channels = 3
    assert_energy_descent(layer, size, in_channels=8)
    with pytest.raises(ValueError, match="x must have") as raised:
        assert_energy_descent(dm.CertifiedDIFFormer(8, 4, 2), in_channels=5)
    assert "C = 5 channels" in raised.value.__notes__[0]


def test_a_class_in_place_of_a_layer_is_refused():
    with pytest.raises(TypeError, match=r"an instance, Smoothing\(\.\.\.\)"):
        assert_energy_descent(Smoothing, dirichlet)


def test_parts_of_an_energy_are_reported():
    def parts(x, edge_index):
        return {"neighbours": dirichlet(x, edge_index), "size": x.square().sum()}

    with pytest.raises(AssertionError, match=r"neighbours: .* -> .*\n  size: "):
        assert_energy_descent(Smoothing(0.6), parts)


def test_graphs_and_first_states_of_the_user():
    ring = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
    states = []

    def layer(x, edge_index):
        assert torch.equal(edge_index, ring)
        states.append(x)
        return x

    data = Data(x=torch.eye(4), edge_index=ring)
    assert_energy_descent(layer, dirichlet, graphs=[data], steps=1)
    assert torch.equal(states[0], torch.eye(4).double())
    assert_energy_descent(layer, dirichlet, graphs=lambda generator: ring, instances=2)


def test_only_a_state_along_the_gradient_of_the_rise_is_worse():
    """A step that overshoots in a small part of the ball, which no state that is drawn lies in."""

    def layer(x, edge_index):
        inside = (x - torch.tensor([0.9, 0.0, 0.0, 0.0])).norm(dim=1, keepdim=True)
        return x * (0.9 + 0.8 * torch.exp(-50 * inside.square()))

    with pytest.raises(AssertionError, match="the energy rose"):
        assert_energy_descent(layer, lambda x, edge_index: x.square().sum())


@pytest.mark.parametrize(
    ("layer", "energy", "error", "match"),
    [
        (3, dirichlet, TypeError, "layer must be a function"),
        (Smoothing(0.1), 3, TypeError, "energy must be a function"),
        (Smoothing(0.1), None, AssertionError, "pass one"),
        (GCNConv(4, 3), dirichlet, AssertionError, "one of the same shape"),
        (Smoothing(0.1), lambda x, e: x, TypeError, "energy must give a number"),
    ],
)
def test_what_cannot_be_compared_is_refused(layer, energy, error, match, no_typecheck):
    with pytest.raises(error, match=match):
        assert_energy_descent(layer, energy)
