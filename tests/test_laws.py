"""Every coupling, diffusivity, term, layer and model obeys the laws, and every public class is in a table."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch

from cases import (
    CHANNELS,
    COUPLINGS,
    DIFFUSIVITIES,
    EDGES,
    FROBENIUS,
    LAYERS,
    LEFT_OUT,
    MEMBER,
    NODES,
    PTR,
    TERMS,
    random,
    term_graph,
)
from diffusion_mp import couplings, diffusivities, energies, layers, models, updates
from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import EnergyTerm
from diffusion_mp.graph import Graph
from diffusion_mp.testing import (
    check_coupling,
    check_diffusivity,
    check_energy_term,
    check_layer,
)
from diffusion_mp.updates import StateUpdate
from helpers import built
from model_cases import MODELS

#: Public classes with another interface than that of their kind, which have tests of their own.
OTHERS = {
    energies.ProximalTerm,  # reads the state before a step, which an Energy has
    layers.LaplacianEncoder,  # reads positions
    layers.PDEDiffusion1d,  # reads sequences; listed as AsConv
    layers.WeightedGraph,  # with the next five, a part of a CertifiedBlock
    layers.RowAttention,
    layers.TiedMLP,
    layers.Pairs,
    layers.Neighbours,
    layers.TermModule,
}

SOLVED = {
    "generic-implicit",
    "generic-trapezoidal",
    "generic-equilibrium",
    "appnp-limit",
    "certified-at-rest",
    "certified-block-at-rest",
}


def laws_left_out(name: str) -> dict[str, str]:
    """Laws that a layer of the table does not obey, and why."""
    if name in SOLVED:
        return {
            "poisoned batch mate": "a solve for the whole batch refuses NaN anywhere in it"
        }
    if name == "generic-backtracking":
        return {
            "poisoned batch mate": "no τ lowers the energy of a graph with NaN in it"
        }
    if name == "sfi-conv-published-scale":
        return {
            "batching": "the published λ depends on the largest graph in the batch (ERRATA S5)"
        }
    if name.startswith("pde-diffusion") or name == "generic-positions":
        return {"permutation": "rows are positions, in order"}
    return {}


@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings_obey_the_laws(name):
    check_coupling(COUPLINGS[name], ptr=PTR if "ragged" in name else None)


@pytest.mark.parametrize("name", DIFFUSIVITIES)
@pytest.mark.typechecked
def test_diffusivities_pass_the_shape_checks(name):
    diffusivity = DIFFUSIVITIES[name]()
    edges = torch.cat([EDGES, torch.arange(11).expand(2, 11)], dim=1)
    channels = getattr(diffusivity, "channels", None) or 6
    coupling = diffusivity(torch.rand(11, channels), Graph(11, edges, ptr=PTR))
    coupling @ torch.rand(11, 1, 2)
    coupling.degree()
    coupling.at(EDGES)
    coupling.dirichlet(torch.rand(11, 2))


QUICK = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LEFT_OUT))
    for name in DIFFUSIVITIES
]


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("name", QUICK)
def test_diffusivities_obey_the_laws(name):
    skip = dict(FROBENIUS) if "frobenius" in name else {}
    if getattr(DIFFUSIVITIES[name](), "num_samples", 0):
        skip["same in training"] = "in training it samples Gumbel noise"
    if name == "sparse-flow-batch-max":
        skip["batching"] = (
            "the published λ depends on the largest graph in the batch (ERRATA S5)"
        )
    check_diffusivity(
        DIFFUSIVITIES[name], skip=skip, edges=True if "augmented" in name else None
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.typechecked
def test_layers_pass_the_shape_checks(name):
    build, options = LAYERS[name]
    layer = build()
    x = torch.rand(11, layer.in_channels, requires_grad=True)
    further = options.get("extra", lambda x: {})(x)
    layer(
        x, EDGES if options.get("edges", True) else None, batch=MEMBER, **further
    ).sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_fresh_matrices_are_zero_or_have_both_signs(name):
    build, _ = LAYERS[name]
    for parameter in built(build).parameters():
        if parameter.dim() >= 2 and parameter.numel() >= 8:
            low, high = parameter.detach().aminmax()
            assert low < 0 < high or low == high == 0


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_obey_the_laws(name):
    build, options = LAYERS[name]
    check_layer(build, skip=laws_left_out(name), **options)


@pytest.mark.usefixtures("fixed_seed")
@pytest.mark.parametrize("name", TERMS)
def test_terms_obey_the_laws(name: str) -> None:
    graph = term_graph()
    check_energy_term(TERMS[name](graph), random(NODES, 1, CHANNELS), graph)


BUILDERS: dict[str, list[Callable[[], object]]] = {
    "TERMS": [partial(make, term_graph()) for make in TERMS.values()],
    "COUPLINGS": list(COUPLINGS.values()),
    "DIFFUSIVITIES": list(DIFFUSIVITIES.values()),
    "LAYERS or MODELS": [build for build, _ in LAYERS.values()]
    + [case.build for case in MODELS.values()],
    "LAYERS, in a generic layer": [
        lambda build=build: build().update
        for name, (build, _) in LAYERS.items()
        if name.startswith("generic")
    ],
}


@pytest.mark.parametrize(
    ("table", "packages", "base"),
    [
        ("COUPLINGS", [couplings], Coupling),
        ("DIFFUSIVITIES", [diffusivities], Diffusivity),
        ("TERMS", [energies], EnergyTerm),
        ("LAYERS or MODELS", [layers, models], torch.nn.Module),
        ("LAYERS, in a generic layer", [updates], StateUpdate),
    ],
)
def test_every_public_class_is_in_the_table(table, packages, base):
    exported = {
        getattr(package, name) for package in packages for name in package.__all__
    }
    classes = {
        value
        for value in exported
        if inspect.isclass(value)
        and issubclass(value, base)
        and not inspect.isabstract(value)
    }
    missing = classes - {type(build()) for build in BUILDERS[table]} - OTHERS
    assert not missing, f"add these to {table}: {missing}"
