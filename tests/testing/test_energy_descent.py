"""`assert_energy_descent` accepts what theory covers, and can fail."""

import pytest
from torch import nn

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
        AssertionError, match=r"ExplicitEuler, instance .*the energy rose from"
    ):
        assert_energy_descent(ExplicitEuler(0.5), small)


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
