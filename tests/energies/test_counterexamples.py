"""A certificate for what is not of the library is a search: it says so, and it finds what is wrong."""

import functools

import pytest
import torch
from energy_cases import DOUBLE, Huber, LearnedSlope, LongerMLP, Shrinking, TooFar

from cases import COUPLINGS
from diffusion_mp import FunctionPenalty, Graph, MixturePenalty, QuadraticPenalty
from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import (
    CouplingTerm,
    MatrixTerm,
    PairTerm,
    SourceTerm,
    Sphere,
    counterexamples,
)
from diffusion_mp.energies.counterexamples import (
    foreign_parts,
    overflows,
    projection_flaw,
)
from diffusion_mp.layers import CertifiedBlock, CertifiedConv
from diffusion_mp.layers.certified_block import RowAttention, TiedMLP, WeightedGraph
from diffusion_mp.testing import check_energy_term
from helpers import built, randn

N = 12
C = 3
RING = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
GRAPH = Graph(N, torch.cat([RING, RING.flip(0)], 1))
EYE = torch.eye(C, dtype=DOUBLE)


@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0, 0.3, 0.03, 0.003])
def test_a_bound_that_is_too_small_is_found_at_every_scale(scale):
    """Far apart, a Huber function is nearly linear, and any bound seems enough."""
    for seed in range(8):
        z = scale * randn(N, 1, C, seed=seed)
        with pytest.raises(AssertionError, match="its bound is too small"):
            check_energy_term(Huber(0.9), z, GRAPH)
    check_energy_term(Huber(), scale * randn(N, 1, C), GRAPH)


@pytest.mark.parametrize("num_layers", [1, 8, None])
def test_a_certificate_of_ones_own_term_is_a_search_and_says_so(num_layers):
    x = 3 * randn(N, C)
    wrong = CertifiedBlock(C, [3 * Huber(0.45)], num_layers, constraint=None).double()
    assert not wrong.certificate(x, GRAPH)
    certificate = (
        CertifiedBlock(C, [3 * Huber()], num_layers, constraint=None)
        .double()
        .certificate(x, GRAPH)
    )
    assert certificate
    assert certificate.searched > 25 + (num_layers or 16)
    assert str(certificate).startswith(
        f"No counterexample found in {certificate.searched} states"
    )
    assert "tested and not proved: Huber" in str(certificate)
    assert "cover" not in str(certificate)


def test_what_is_of_the_library_is_covered():
    for terms in ([WeightedGraph(C)], [RowAttention(C), TiedMLP(C, 4)], []):
        certificate = CertifiedBlock(C, terms).certificate(randn(N, C).float(), GRAPH)
        assert certificate
        assert certificate.searched == 0
        assert "covers the step" in str(certificate)


def too_far():
    return TooFar(GRAPH, nonnegative=True)


def weight():
    return torch.ones((), dtype=DOUBLE)


@pytest.mark.parametrize(
    "part",
    [
        Huber(),
        2.0 * Huber(),
        weight * SourceTerm(randn(N, C)),
        LongerMLP(EYE, EYE[0]),
        PairTerm(FunctionPenalty(LearnedSlope())),
        PairTerm(FunctionPenalty(torch.ones_like)),
        Shrinking(),
        CouplingTerm(too_far()),
        CouplingTerm(2.0 * (too_far() + SparseCoupling(GRAPH))),
        MatrixTerm(too_far(), None),
        functools.partial(weight) * SourceTerm(randn(N, C)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_is_not_of_the_library_is_seen_through_what_is(part):
    assert foreign_parts(part)


def test_what_is_of_the_library_is_not_taken_for_ones_own():
    for name, make in COUPLINGS.items():
        assert [part.__name__ for part in foreign_parts(make())] == [
            "cauchy"
        ] * name.startswith("distance"), name
    for penalty in (
        "simple",
        "sigmoid",
        "gaussian",
        MixturePenalty(),
        QuadraticPenalty(),
    ):
        layer = CertifiedConv(C, penalty=penalty, heads=3, projection="tied")
        energy = layer.energy(randn(N, C).float(), GRAPH)
        assert not foreign_parts(energy.terms, energy.constraint), penalty
    block = CertifiedBlock(
        C,
        [WeightedGraph(C, gate=True), RowAttention(C, neighbours=True), TiedMLP(C, 3)],
    )
    energy = block.energy(randn(N, C).float(), GRAPH)
    assert not foreign_parts(energy.terms, energy.constraint)


class Sum(Huber):
    """All rows of a batch, whatever their graph."""

    def value(self, z, graph):
        return z.double().sum(0).square().sum()

    def half_gradient(self, z, graph):
        return z.sum(0, keepdim=True).expand_as(z)

    def bound(self, z, graph):
        return torch.full_like(z[:, :, :1], len(z) / 2)


def test_a_term_that_couples_the_graphs_of_a_batch_is_refused():
    block = CertifiedBlock(C, [Sum()], constraint=None).double()
    assert block.certificate(randn(N, C))
    batch = torch.arange(3).repeat_interleave(4)
    assert (
        "is no sum over the graphs of the batch"
        in block.certificate(randn(N, C), None, None, batch).reason
    )


class Rising(Huber):
    """−‖z‖² for graph 1, with a gradient of the wrong sign; and for graph 0 much that falls."""

    def signs(self, z):
        return torch.where(torch.arange(len(z)) < 9, 50.0, -1.0).to(z)[:, None, None]

    def value(self, z, graph):
        return (self.signs(z) * z.square()).double().sum()

    def half_gradient(self, z, graph):
        return self.signs(z).abs() * z

    def bound(self, z, graph):
        return self.signs(z).abs() / 2


def test_a_rise_in_one_graph_is_not_hidden_by_the_fall_of_another(monkeypatch):
    monkeypatch.setattr(counterexamples, "term_flaw", lambda *_: None)
    block = built(lambda: CertifiedBlock(C, [Rising()], 3, constraint=None)).double()
    batch = torch.tensor([0] * 9 + [1] * 3)
    energies = block.energies(randn(N, C), None, None, batch)
    assert (energies.diff() < 0).all()
    certificate = block.certificate(randn(N, C), None, None, batch)
    assert not certificate
    assert "F of graph 1 goes from" in certificate.reason


def test_a_rise_of_the_only_graph_names_no_graph(monkeypatch):
    monkeypatch.setattr(counterexamples, "term_flaw", lambda *_: None)
    downhill = {"signs": lambda self, z: -torch.ones_like(z[:, :, :1])}
    term = type("AlwaysRising", (Rising,), downhill)()
    block = built(lambda: CertifiedBlock(C, [term], 3, constraint=None)).double()
    assert "a step raises F: F goes from" in block.certificate(randn(N, C)).reason


@pytest.mark.parametrize("convex", [False, True])
def test_only_of_a_set_that_says_so_a_projection_onto_a_convex_one_is_asked(convex):
    sphere = type("MySphere", (Sphere,), {"convex": convex})()
    flaw = projection_flaw(sphere, randn(N, 1, C) / 9, GRAPH)
    assert (flaw is not None) == convex
    assert not convex or "says that it is convex" in flaw


def test_only_large_states_overflow():
    small, large = (scale * randn(N, 1, C) for scale in (1.0, 1e200))
    infinite = torch.tensor(torch.inf)
    assert overflows(large, infinite)
    assert not overflows(large, torch.tensor(1.0))
    # A term that is not finite at a small state is wrong.
    assert not overflows(small, infinite)
