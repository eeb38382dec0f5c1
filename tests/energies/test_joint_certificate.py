"""``certify_step``, and ``certify`` of models: every premise of Theorem T1 is asked for, and what fails is named."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp import (
    AdjacencyDiffusivity,
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    GaussianDiffusivity,
    Graph,
    NodeFormer,
    SGFormer,
    SimpleDiffusivity,
)
from diffusion_mp.couplings import Coupling, LowRankCoupling, ScaledCoupling, SparseCoupling
from diffusion_mp.energies import (
    Ball,
    GaussianPenalty,
    JointEnergy,
    MixturePenalty,
    Penalty,
    SimplePenalty,
    certify,
    certify_step,
    get_constraint,
)
from diffusion_mp.models import LabelPropagation
from diffusion_mp.updates import CertifiedStep


def ring(n: int) -> SparseCoupling:
    forth = torch.stack([torch.arange(n), torch.arange(1, n + 1) % n])
    graph = Graph(n, torch.cat([forth, forth.flip(0)], 1))
    return SparseCoupling(graph, torch.full((2 * n,), 0.7, dtype=torch.double), nonnegative=True)


def parts(penalty: Penalty | None, name: str | None, x: Tensor) -> tuple[JointEnergy, Coupling, CertifiedStep]:
    """An energy with everything in it, and its coupling made by hand."""
    graph, constraint = ring(len(x)), get_constraint(name)
    energy = JointEnergy(penalty, 0.3, graph_term=graph, mu=2.0, source=x.flip(0), beta=0.5, constraint=constraint)
    coupling: Coupling = 2.0 * graph
    if penalty is not None:
        coupling = coupling + 0.3 * penalty.coupling(x, constraint=constraint)
    return energy, coupling, CertifiedStep(0.5, constraint=constraint)


@pytest.mark.parametrize("name", [None, "nonnegative", "ball", "sphere"])
@pytest.mark.parametrize("penalty", [None, SimplePenalty(), GaussianPenalty(0.4)], ids=repr)
def test_what_is_certified_falls(penalty: Penalty | None, name: str | None, ball) -> None:
    x = get_constraint(name).project(ball(9, 3).unsqueeze(1))
    energy, coupling, step = parts(penalty, name, x)
    certificate = certify_step(energy, coupling, x)
    assert certificate == certify_step(energy, None, x) == certify(energy, x)
    if isinstance(penalty, SimplePenalty) and name in (None, "nonnegative"):
        assert not certificate
        assert "SimplePenalty() is concave up to squared distance 4, and" in certificate.reason
        return
    assert certificate
    assert str(certificate).startswith(f"Theorem T1 covers the step: {energy!r} does not rise. Here W is symmetric")
    for _ in range(5):
        after = step(x, parts(penalty, name, x)[1], source=energy.source)
        assert energy(after) <= energy(x) * (1 + 1e-13)
        x = after


def test_the_penalty_sees_through_a_projection(ball) -> None:
    x = get_constraint("ball").project(ball(9, 4)).unsqueeze(1)
    short = 0.5 * torch.eye(4, dtype=torch.double).view(2, 2, 4)
    for factor, holds in [(1.0, True), (2.0, True), (2.01, False)]:
        assert certify(JointEnergy("simple", projection=factor * short, constraint="ball"), x).holds == holds
    for factor, holds in [(2.0, True), (2.01, False)]:
        on_sphere = JointEnergy("simple", projection=factor * short, constraint="sphere")
        assert certify(on_sphere, x / x.norm(dim=2, keepdim=True)).holds == holds


def test_the_premise_that_fails_is_named(ball) -> None:
    x = ball(9, 3).unsqueeze(1)
    penalty = GaussianPenalty(0.5)
    energy, coupling, _ = parts(penalty, None, x)
    edges = torch.tensor([[0, 1], [1, 2]])
    oneway = SparseCoupling(Graph(9, edges), torch.ones(2, dtype=torch.double), nonnegative=True)
    signed = SparseCoupling(Graph(9, torch.cat([edges, edges.flip(0)], 1)), -torch.ones(4, dtype=torch.double))
    learned = ScaledCoupling(torch.tensor(2.0, dtype=torch.double), ring(9)) + 0.3 * penalty.coupling(x)

    def reason(energy: JointEnergy, coupling: Coupling | None, x: Tensor) -> str:
        certificate = certify_step(energy, coupling, x)
        assert not certificate
        assert certificate.lam == math.inf
        assert str(certificate) == f"Theorem T1 does not cover the step: {certificate.reason}"
        return certificate.reason

    assert "entries that are not finite" in reason(energy, None, x * math.nan)
    assert "the state leaves Nonnegative()" in reason(JointEnergy("gaussian", constraint="nonnegative"), None, x)
    assert "the metric must be positive" in reason(
        JointEnergy("gaussian", source=x, metric=torch.arange(9.0).double()), None, x
    )
    for graph, promise in [(oneway, "symmetric"), (signed, "nonnegative")]:
        found = reason(JointEnergy("gaussian", graph_term=graph), None, x)
        assert found.startswith(f"the energy's own coupling is not promised to be {promise}, for SparseCoupling(")
    assert "the step's coupling is not promised to be symmetric, for PairwiseCoupling(" in reason(
        energy, 2.0 * ring(9) + 0.3 * penalty.coupling(x, normalize=True), x
    )
    assert "the step's coupling is not promised to be nonnegative, for ScaledCoupling(" in reason(energy, learned, x)
    queries = LowRankCoupling(x, x, symmetric=True)
    assert "nonnegative, for LowRankCoupling(" in reason(energy, queries, x)
    others = [
        1.0 * ring(9) + 0.3 * penalty.coupling(x),
        2.0 * ring(9) + 0.31 * penalty.coupling(x),
        2.0 * ring(9) + 0.3 * GaussianPenalty(0.6).coupling(x),
        2.0 * ring(9),
    ]
    for other in others:
        assert "is not that of the energy at this state" in reason(energy, other, x)
    assert "is not that of the energy at this state" in reason(energy, coupling, x + 1e-3 * x.flip(0))
    single = 2.0 * ring(9) + 0.3 * penalty.coupling(x.float())
    assert certify_step(energy, single, x), "single precision rounds, and means the same"


def test_no_nodes_and_no_terms() -> None:
    assert certify(JointEnergy(None), torch.zeros(0, 1, 2))
    assert certify(JointEnergy("gaussian"), torch.zeros(0, 1, 2))
    assert certify(JointEnergy(None), torch.ones(3, 1, 2))


EDGES = torch.tensor([[0, 1, 2], [1, 0, 2]])


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            lambda: DIFFormer(4, 6, 3, layer_norm=True),
            [r"convs.0 \(DIFFormerConv\).*by ExplicitEuler", r"norms.0 \(LayerNorm\)"],
        ),
        (lambda: NodeFormer(4, 6, 3), [r"convs.0 \(NodeFormerConv\).*transforms what it propagates"]),
        (lambda: SGFormer(4, 6, 3, gnn="gcn"), [r"conv \(SGFormerConv\)", r"gnn.convs.0 \(GCNConv\)"]),
        (lambda: DiffusionGNN(4, 6, 3, conv="mlp"), [r"in DiffusionGNN convs.0 \(MLPConv\)"]),
    ],
)
def test_a_model_that_no_theorem_covers_says_which_part(model, parts: list[str]) -> None:
    x = torch.rand(3, 4)
    for data in (None, x, Data(x=x, edge_index=EDGES), Data(x=x, edge_index=EDGES, edge_weight=torch.ones(3))):
        certificate = certify(model(), data)
        assert not certificate
        for part in parts:
            assert re.search(part, certificate.reason)


CERTIFIED = {
    "simple": {},
    "sphere": {"constraint": "sphere", "heads": 2},
    "projected": {"penalty": "gaussian", "heads": 2, "projection": "tied", "constraint": "sphere"},
    "learned": {"penalty": MixturePenalty((0.3, 1.0)), "constraint": "nonnegative"},
    "no attention": {"penalty": None, "constraint": None},
    "inputs": {"inputs": GaussianDiffusivity(row_stochastic=False), "graph": False},
    "at rest": {"num_layers": None, "penalty": None},
}


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_certified_model_is_certified_whatever_it_has_learned(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = CertifiedDIFFormer(4, 6, 3, **{"num_layers": 5, "dropout": 0.5} | CERTIFIED[name])
    data = Data(x=torch.randn(7, 4, generator=generator), edge_index=torch.randint(7, (2, 12), generator=generator))
    for _ in range(5):
        certificate = certify(model, data)
        assert certificate, certificate
        assert certificate.energy == repr(model.energy(data.x, data.edge_index))
        model.eval()
        falls = model.energies(data.x, data.edge_index).diff()
        assert (falls <= 1e-6 * model.energies(data.x, data.edge_index)[:-1].abs()).all()
        model.train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_a_certified_model_with_a_part_that_is_not_is_refused(no_typecheck: None) -> None:
    x, edge_index = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1], [1, 2]])
    model = CertifiedDIFFormer(4, 6, 3, graph=AdjacencyDiffusivity("sum"))
    assert "is not promised to be symmetric, for SparseCoupling(" in certify(model, Data(x, edge_index)).reason
    model = CertifiedDIFFormer(4, 6, 3, inputs=SimpleDiffusivity(normalize=None, row_stochastic=False))
    assert "is not promised to be nonnegative, for LowRankCoupling(" in certify(model, x).reason
    model = CertifiedDIFFormer(4, 6, 3)
    model.conv.update.constraint = Ball(1.5)
    assert "is concave up to squared distance 4, and Ball(radius=1.5)" in certify(model, x).reason
    assert "lets rows be 9 apart" in certify(model).reason


def test_what_is_no_subject() -> None:
    with pytest.raises(
        TypeError, match=r"certify takes a Coupling, .* a JointEnergy, a layer or a model; got a float32"
    ):
        certify(torch.rand(3, 4), torch.rand(3, 4))
    assert "nor is there a layer in it" in certify(LabelPropagation()).reason
    with pytest.raises(ValueError, match="tau must be given"):
        certify(SimplePenalty(), torch.rand(3, 4))
    with pytest.raises(TypeError, match="data must have an attribute x"):
        certify(DIFFormer(4, 6, 3), [1])
    with pytest.raises(ValueError, match="x must have 4 rows, one per node of the coupling"):
        certify_step(JointEnergy("gaussian"), ring(4), torch.rand(3, 4))
    with pytest.raises(ValueError, match="x must have values"):
        certify(JointEnergy("gaussian"), torch.rand(3, 4, device="meta"))
