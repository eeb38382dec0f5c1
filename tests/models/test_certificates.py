"""``certify`` answers for every model: what is certified of it and of its layers, and why the rest is not."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import diffusion_mp as dm
from helpers import randn

EDGES = torch.tensor([[0, 1, 1, 2, 4], [1, 0, 2, 1, 3]])
BARE = {"transform": False, "bias": False}


def test_a_stack_of_explicit_steps_is_known_layer_by_layer() -> None:
    torch.manual_seed(0)
    model = (
        dm.DIFFormer(4, 6, 3, 2, layer_norm=False, graph=None, tau=0.9).double().train()
    )
    for conv in model.convs:
        conv.diffusivity = dm.GaussianDiffusivity(measure="distance", normalize=None)
    x = randn(5, 4)
    certificate = dm.certify(model, Data(x=x, edge_index=EDGES))
    assert not certificate
    assert model.training
    assert list(certificate.layers) == ["convs.0", "convs.1"]
    state = model.encoder(x).relu().detach()
    for conv, layer in zip(model.convs, certificate.layers.values(), strict=True):
        penalty = conv.diffusivity.penalty
        expected = dm.energies.theorem7(penalty.coupling(state), 0.9)
        assert layer.holds
        assert layer.lam == pytest.approx(expected.lam)
        state = conv(state).detach()
    assert "\n  convs.1: Theorem 7 covers τ = 0.9" in str(certificate)
    without = dm.certify(model)
    assert not any(without.layers.values())
    assert "pass them, certify(model, data)" in str(without)


def test_a_module_of_ones_own_is_run_and_its_layer_certified_on_its_edges() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            step = dm.ExplicitEuler(0.1)
            self.conv = dm.DiffusionConv(
                4, 4, dm.AdjacencyDiffusivity("sum"), step, **BARE
            )

        def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
            return self.conv(x=x, edge_index=edges, edge_weight=weight)

    model = Keywords().double()
    pair = torch.tensor([[0, 1], [1, 0]])
    weight = torch.full((2,), 3.0).double()
    data = Data(x=randn(5, 4), edge_index=pair, edge_weight=weight)
    certificate = dm.certify(model, data)
    assert not certificate
    (found,) = certificate.layers.values()
    assert found
    assert found.tau_max == pytest.approx(1 / 3)  # λ₁ = 6
    assert dm.certify(model.conv, data).tau_max == pytest.approx(1 / 3)
    assert "nor is there a layer in it" in dm.certify(nn.Linear(3, 4)).reason


@pytest.mark.parametrize(
    ("diffusivity", "options", "why"),
    [
        ({}, {"bias": False}, "transforms what it propagates"),
        ({}, {"transform": False}, "adds a bias"),
        ({}, {"update": dm.ImplicitEuler(1.0), **BARE}, "by ImplicitEuler"),
        ({}, BARE, "SimpleDiffusivity: f does not read the state"),
        ({"heads": 2}, {"heads": 1, **BARE}, "takes the mean of 2 heads"),
    ],
)
def test_why_a_layer_is_not_known_is_said_without_data(diffusivity, options, why: str):
    layer = dm.DiffusionConv(4, 4, dm.SimpleDiffusivity(**diffusivity), **options)
    certificate = dm.certify(nn.Sequential(layer))
    assert not certificate
    assert why in certificate.layers["0"].reason
    assert why in dm.certify(layer).reason
    assert why in dm.certify(layer, randn(5, 4).float()).reason


def test_a_layer_is_certified_by_its_coupling_or_its_penalty() -> None:
    x = randn(5, 4)
    data = Data(x=x, edge_index=EDGES)
    adjacency = dm.AdjacencyDiffusivity("sym", direction="undirected")
    conv = dm.DiffusionConv(4, 4, adjacency, dm.ExplicitEuler(0.5, leak=0.1), **BARE)
    got = dm.certify(conv, data)
    expected = dm.energies.theorem1(adjacency(x, dm.Graph(5, EDGES)), 0.5, leak=0.1)
    assert got
    assert got.lam == pytest.approx(expected.lam)
    directed = dm.DiffusionConv(4, 4, dm.AdjacencyDiffusivity("row"), **BARE)
    assert not dm.certify(directed, data)
    step = dm.CertifiedConv(4).double()
    assert dm.certify(step)
    assert dm.certify(step, data)
    within = dm.certify(nn.ModuleDict({"a": step}))
    assert "1 * CouplingTerm" in within.layers["a"].energy


def test_a_layer_that_is_called_again_is_certified_at_every_state() -> None:
    """Theorem 7 asks where a step starts; the largest λ serves all of them, and one refusal is one too many."""

    class Mine(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            attention = dm.SimpleDiffusivity(normalize=None, measure="distance")
            self.step = dm.DiffusionConv(4, 4, attention, **BARE)
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.step(self.factor * self.step(x))

    x = 0.1 * randn(5, 4)
    once, twice = (dm.certify(Mine(factor), x).layers["step"] for factor in (0.1, 4.0))
    assert once
    assert twice
    assert twice.lam > once.lam
    assert "leaves the domain" in dm.certify(Mine(100.0), x).layers["step"].reason


def test_a_layer_without_a_penalty_is_judged_by_its_symmetric_coupling() -> None:
    kernel = dm.GaussianDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    )
    both = [
        dm.DiffusionConv(
            4, 4, diffusivity, dm.ExplicitEuler(0.1), transform=False, bias=False
        )
        for diffusivity in (
            dm.SymmetricDiffusivity(kernel),
            dm.SymmetricDiffusivity(kernel) + dm.SigmoidDiffusivity(),
        )
    ]
    symmetric, other = (dm.certify(nn.Sequential(layer)).layers["0"] for layer in both)
    assert "depends on the state and the graph: pass them" in symmetric.reason
    assert "SumDiffusivity: a sum of diffusivities" in other.reason
