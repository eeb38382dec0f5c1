"""Certificates of Theorems 1, 7, T2 and T11 name the premise that fails."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from energy_cases import (
    DOUBLE,
    Huber,
    LongerMLP,
    Negative,
    NotItsSlope,
    Shrinking,
    TooFar,
    from_dense,
)
from torch_geometric.data import Data

from diffusion_mp import (
    AdjacencyDiffusivity,
    CertifiedConv,
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    Graph,
    MixturePenalty,
    NodeFormer,
    SGFormer,
    SigmoidPenalty,
    SimpleDiffusivity,
    SimplePenalty,
    UniformDiffusivity,
    certify,
)
from diffusion_mp.couplings import LowRankCoupling, ScaledCoupling, SparseCoupling
from diffusion_mp.energies import (
    AttentionTerm,
    Ball,
    CouplingTerm,
    EnergyTerm,
    MatrixTerm,
    MLPTerm,
    certify_step,
    certify_trajectory,
    get_constraint,
    theorem1,
    theorem7,
)
from diffusion_mp.models import LabelPropagation
from energy_forms import Joint
from helpers import built, randn, refuses

NODES = 9
X = 0.4 * randn(NODES, 1, 3)
BOTH_WAYS = [
    [0, 1, 2, 3],
    [1, 0, 3, 2],
]
UNIT = torch.nn.functional.normalize(
    torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.3, 0.0]]), dim=1
)
EYE = torch.eye(3, dtype=DOUBLE)
ONE = torch.ones((), dtype=DOUBLE)
GRAPH = Graph(NODES, torch.tensor(BOTH_WAYS))


def edges(weight, index=BOTH_WAYS, **promises):
    return SparseCoupling(
        Graph(NODES, torch.tensor(index)),
        torch.tensor(weight, dtype=DOUBLE),
        **{"nonnegative": True} | promises,
    )


PAIRS = edges([0.7, 0.7, 0.7, 0.7])


def step(*parts, x=X, **options):
    """Of an energy with this penalty, or of one with these terms beside a source."""
    if parts and isinstance(parts[0], EnergyTerm):
        options |= {"terms": parts, "source": X.flip(0), "graph": GRAPH}
        parts = ()
    return certify_step(Joint(*parts, **options), x)


def of_edges(coupling, **options):
    return step(graph_term=coupling, **options)


def symmetric(weight):
    matrix = torch.tensor([[0, weight], [weight, 0]], dtype=DOUBLE)
    return from_dense(matrix, nonnegative=False)


def diffusivity(**attributes):
    default = {"heads": 1, "needs_graph": False, "row_stochastic": True}
    return SimpleNamespace(**(default | attributes))


def spoiled(module, name):
    with torch.no_grad():
        module.get_parameter(name).view(-1)[0] = math.nan
    return module


def without_penalty(**attributes):
    return certify(diffusivity(penalty=None, **attributes), X[:, 0], 0.1)


class Longer(CertifiedConv):
    def forward(self, *inputs, **options):
        return 1.1 * super().forward(*inputs, **options)


def another_constraint(radius, **options):
    model = built(lambda: CertifiedDIFFormer(3, 6, 3, **options)).double()
    model.conv.update.constraint = Ball(radius)
    return model


ONE_WAY = edges([1, 1], [[0, 1], [1, 2]])
NAN = edges([math.nan, math.nan, 1, 1], symmetric=True)
# As a share of the largest entry it is symmetric, and for nodes 2 to 6 it is a one-way street.
NEARLY = edges(
    [1e7, 1e7, 1, 1, 1, 1],
    [
        [0, 1, 5, 5, 5, 6],
        [1, 0, 2, 3, 4, 5],
    ],
)
SWAP = LowRankCoupling(
    edges([1, 1, 1, 1]).to_dense()[0].unsqueeze(1),
    torch.eye(NODES, dtype=DOUBLE).unsqueeze(1),
    symmetric=True,
    nonnegative=True,
)
SWAP.positive_semidefinite = True  # its eigenvalues are 1 and −1
ASKEW = LowRankCoupling(X, X.flip(0))
ON_SPHERE = get_constraint("sphere").project(X)

REFUSED = [
    # Theorems 1 and 7
    (lambda: theorem1(NAN, 0.1), "finite"),
    (lambda: theorem7(NAN, 0.1), "finite"),
    (lambda: certify(ASKEW, None, 0.1), "is not symmetric"),
    (lambda: theorem7(ASKEW, 0.1), ""),
    (lambda: theorem7(PAIRS, 0.5), "a node has degree 0"),
    # The energy has no lower bound.
    (lambda: certify(symmetric(-1.0), None, 0.1), "negative eigenvalue"),
    (lambda: certify(symmetric(1.5), None, 0.1, form="residual"), "negative eigenv"),
    (lambda: certify(SigmoidPenalty(), X[:, 0] * math.nan, 0.5), "are not finite"),
    (lambda: without_penalty(why_no_penalty="W_Q is W_K."), "W_Q is W_K."),
    (lambda: without_penalty(), "declares no penalty"),
    (
        lambda: certify(
            diffusivity(penalty=SigmoidPenalty(), needs_graph=True), X[:, 0], 0.1
        ),
        "edges of a graph only",
    ),
    (
        lambda: certify(
            diffusivity(penalty=SigmoidPenalty(), row_stochastic=False),
            X[:, 0],
            0.1,
            form="residual",
        ),
        "is not row-normalised",
    ),
    # Theorem T2
    (lambda: certify_trajectory(SigmoidPenalty(), X[:, 0], 1.01), "above τ = 1"),
    (lambda: certify_trajectory(Negative(), X, 0.1), "f(5.03216) = -0.0160797 is neg"),
    (
        lambda: certify_trajectory(spoiled(MixturePenalty(), "log_widths"), X, 0.1),
        "f(0) = nan is not finite",
    ),
    *(
        (
            lambda tau=tau: certify_trajectory(SimplePenalty(), 1.01 * UNIT, tau),
            "leaves the domain of SimplePenalty()",
        )
        for tau in (0.5, 1.5)
    ),
    # Theorem T11: states and numbers
    (lambda: step(x=X * math.nan), "the state has entries that are not finite"),
    (lambda: step("gaussian", constraint="nonnegative"), "the state leaves Nonneg"),
    *(
        (
            # A projection is exact to rounding: from 1e-7 outside it moves a state, which may be uphill.
            lambda name=name: step(
                constraint=name, x=(1 + 1e-7) * get_constraint(name).project(9 * X)
            ),
            "the state leaves",
        )
        for name in ("ball", "sphere")
    ),
    (lambda: step(source=X, metric=X[:, 0, 0]), "the metric must be positive"),
    (
        lambda: step("gaussian", projection=torch.full((1, 2, 3), math.nan).double()),
        "the projection has entries that are not",
    ),
    (
        lambda: step(source=X * math.inf),
        "the source has entries that are not finite",
    ),
    (
        lambda: step(source=X, metric=torch.full((NODES,), math.inf)),
        "the metric has entries that are not finite",
    ),
    *(
        (
            lambda name=name, number=number: step(
                "gaussian", source=X, graph_term=PAIRS, **{name: number * ONE}
            ),
            f") must be finite and >= 0; it is {number:g}",
        )
        for name in ("lam", "mu", "beta")
        for number in (-1.0, math.nan, math.inf)
    ),
    (
        lambda: step((lambda: -ONE) * MLPTerm(EYE, EYE[0])),
        "the weight of MLPTerm() must be finite and >= 0; it is -1",
    ),
    (
        lambda: step(MixturePenalty((1.0,), (1e15,)).double(), 1e300 * ONE),
        "is not finite at this state",
    ),
    # penalties
    (
        lambda: step("simple"),
        "SimplePenalty() is concave up to squared distance 4, and",
    ),
    (lambda: step(Negative()), "f(5.03216) = -0.0160797 is negative"),
    (lambda: step(NotItsSlope()), "f is not the derivative of δ"),
    (
        lambda: step(spoiled(MixturePenalty(), "log_widths")),
        "f(0) = nan is not finite",
    ),
    # promises of couplings
    (lambda: of_edges(ONE_WAY), "coupling is not promised to be symmetric, for Spa"),
    (
        lambda: of_edges(edges([1, 1, 1, 1], nonnegative=False)),
        "coupling is not promised to be nonnegative, for",
    ),
    (
        lambda: of_edges(ScaledCoupling(2 * ONE, PAIRS) + PAIRS),
        "nonnegative, for ScaledCoupling(",
    ),
    (
        lambda: of_edges(LowRankCoupling(X, X, symmetric=True)),
        "nonnegative, for LowRankCoupling(",
    ),
    # promises that are false
    (lambda: of_edges(edges([1, 1, -1, -1])), "A has the negative entry -1"),
    (
        lambda: of_edges(edges([1, 1, 1, 2], symmetric=True)),
        "A has two entries a_ij and a_ji that differ by 1",
    ),
    (lambda: of_edges(NEARLY), "that differ by 1"),
    (lambda: of_edges(NAN), "A has entries that are not finite"),
    (
        lambda: of_edges(
            2 * LowRankCoupling(X, X, nonnegative=True, positive_semidefinite=True)
        ),
        "A has the negative entry",
    ),
    (
        lambda: of_edges(
            LowRankCoupling(X.abs(), X.flip(0).abs(), symmetric=True, nonnegative=True)
        ),
        "A has two entries",
    ),
    (
        lambda: of_edges(SWAP, constraint="sphere", x=ON_SPHERE),
        "A has the negative eigenvalue",
    ),
    # parts that are not of the library
    (lambda: step(LongerMLP(EYE, EYE[0])), "exceeds its majorant"),
    (lambda: step(Huber(0.9)), "its bound is too small"),
    (lambda: step(CouplingTerm(TooFar(GRAPH, nonnegative=True))), "exceeds its major"),
    (lambda: of_edges(TooFar(GRAPH, nonnegative=True)), "exceeds its majorant"),
    (
        lambda: step(source=X, constraint=Shrinking(), x=0.9 * ON_SPHERE),
        "the state leaves",
    ),
    (
        lambda: step(
            AttentionTerm(EYE[None], EYE[None], norms=(ONE[None] / 2, ONE[None]))
        ),
        "the query has norm 1",
    ),
    (
        lambda: step(MatrixTerm(SparseCoupling(GRAPH), EYE[None], ONE[None] / 2)),
        "the matrix has norm 1, above the bou",
    ),
    # layers and models
    (
        lambda: certify(spoiled(CertifiedConv(3), "terms.0.weight.raw"), X[:, 0]),
        "the parameter terms.0.weight.raw has entries that are not finite",
    ),
    (
        lambda: certify(spoiled(MixturePenalty(), "log_widths"), X[:, 0], tau=0.1),
        "the parameter log_widths has entries that are not finite",
    ),
    (
        lambda: certify(
            CertifiedDIFFormer(3, 6, 3, graph=AdjacencyDiffusivity("sum")).double(),
            Data(X[:, 0], torch.tensor([[0, 1], [1, 2]])),
        ),
        "is not promised to be symmetric, for SparseCoupling(",
    ),
    (
        lambda: certify(
            CertifiedDIFFormer(
                3,
                6,
                3,
                inputs=SimpleDiffusivity(normalize=None, row_stochastic=False),
            ).double(),
            X[:, 0],
        ),
        "is not promised to be nonnegative, for LowRankCoupling(",
    ),
    (
        lambda: certify(another_constraint(1.5), X[:, 0]),
        "is concave up to squared distance 4, and Ball(radius=1.5)",
    ),
    (lambda: certify(another_constraint(1.5)), "lets rows be 9 apart"),
    # Within a ball the angles of a sphere are no distances.
    (
        lambda: certify(
            another_constraint(1.0, constraint="sphere", lam=9.0, mu=0.1), X[:, 0]
        ),
        "the pairs are those of states in Sphere",
    ),
    (
        lambda: certify(Longer(3).double(), X[:, 0]),
        "Longer does not move the state as the certified step",
    ),
    (lambda: certify(LabelPropagation()), "nor is there a layer in it"),
]


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_the_premise_that_fails_is_named(make, sentence):
    certificate = make()
    assert not certificate
    assert certificate.lam == math.inf
    assert sentence in certificate.reason
    assert certificate.reason in str(certificate)
    assert "does not cover" in str(certificate)


def test_where_no_step_is_covered_the_largest_is_zero():
    assert certify(ASKEW, None, 0.1).tau_max == 0
    for tau in (0.5, 1.5):
        assert certify_trajectory(SimplePenalty(), 1.01 * UNIT, tau).tau_max == 0
    assert certify_trajectory(SigmoidPenalty(), X[:, 0], 1.01).tau_max == 1


EDGES = torch.tensor([[0, 1, 2], [1, 0, 2]])


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            lambda: DIFFormer(2, 6, 3, layer_norm=True),
            [r"convs.0 \(DIFFormerConv\).*by Expl", r"norms.0 \(Layer"],
        ),
        (
            lambda: NodeFormer(2, 6, 3),
            [r"convs.0 \(NodeFormerConv\).*transforms what it propagates"],
        ),
        (
            lambda: SGFormer(2, 6, 3, gnn="gcn"),
            [r"conv \(SGFormerConv\)", r"gnn.convs.0 \(GCNConv\)"],
        ),
        (
            lambda: DiffusionGNN(2, 6, 3, conv="mlp"),
            [r"in DiffusionGNN convs.0 \(MLPConv\)"],
        ),
    ],
)
def test_a_model_that_no_theorem_covers_says_which_part(model, parts):
    for data in (
        None,
        UNIT,
        Data(x=UNIT, edge_index=EDGES),
        Data(x=UNIT, edge_index=EDGES, edge_weight=torch.ones(3)),
    ):
        certificate = certify(model(), data)
        assert not certificate
        for part in parts:
            assert re.search(part, certificate.reason)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_parameter_that_is_not_finite_is_named(number):
    def model():
        options = {
            "heads": 2,
            "projection": "tied",
            "inputs": 2.0 * UniformDiffusivity(),
        }
        return CertifiedDIFFormer(2, 6, 3, penalty=MixturePenalty(), **options)

    for name, _ in model().named_parameters():
        wrong = model()
        with torch.no_grad():
            wrong.get_parameter(name).view(-1)[0] = number
        certificate = certify(wrong, UNIT)
        if name.startswith("decoder"):  # which is behind the block
            assert certificate
        else:
            sentence = f"the parameter {name} has entries that are not finite"
            assert sentence in certificate.reason


PAIR = from_dense(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
GAUSSIAN = Joint("gaussian")
test_what_is_no_state_or_no_step_is_refused = refuses(
    *(
        case
        for theorem in (theorem1, theorem7)
        for case in (
            (lambda t=theorem: t(PAIR, -1.0), "tau must be finite and > 0"),
            (lambda t=theorem: t(PAIR, 0.5, leak=-3.0), "leak must be finite and >= 0"),
        )
    ),
    (lambda: theorem1(PAIR, 0.5, form="Residual"), "form must be one of"),
    (lambda: certify(SigmoidPenalty(), None, 0.5), "x must be given"),
    (lambda: certify(SigmoidPenalty(), UNIT), "tau must be given"),
    (lambda: certify(GAUSSIAN, UNIT.to("meta")), "x must have values"),
    (lambda: certify(DIFFormer(4, 6, 3), [1]), TypeError, "data must have"),
    error=ValueError,
)
