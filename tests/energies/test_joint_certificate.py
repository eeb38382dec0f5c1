"""``certify_step``, and ``certify`` of models: every premise of Theorem T1 is asked for, and what fails is named."""

import math
import re

import pytest
import torch
from energy_cases import Negative, NotItsSlope
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp import (
    AdjacencyDiffusivity,
    CertifiedConv,
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    GaussianPenalty,
    Graph,
    MixturePenalty,
    NodeFormer,
    Penalty,
    SGFormer,
    SimpleDiffusivity,
    SimplePenalty,
    UniformDiffusivity,
    certify,
)
from diffusion_mp.couplings import LowRankCoupling, ScaledCoupling, SparseCoupling
from diffusion_mp.energies import Ball, certify_step, certify_trajectory, get_constraint
from diffusion_mp.models import LabelPropagation
from energy_forms import Joint
from helpers import refuses

BOTH = [[0, 1, 2, 3], [1, 0, 3, 2]]


def edges_of(
    weight: list[float], index: list[list[int]] = BOTH, n: int = 9, **promises: bool
) -> SparseCoupling:
    given = torch.tensor(weight, dtype=torch.double)
    return SparseCoupling(
        Graph(n, torch.tensor(index)), given, **{"nonnegative": True} | promises
    )


def ring(n: int) -> SparseCoupling:
    nodes = list(range(n))
    forth = [nodes, [*nodes[1:], 0]]
    return edges_of(2 * n * [0.7], [forth[0] + forth[1], forth[1] + forth[0]], n)


def energy_of(penalty: Penalty | None, name: str | None, x: Tensor) -> Joint:
    options = {"graph_term": ring(len(x)), "mu": 2.0, "source": x.flip(0), "beta": 0.5}
    return Joint(penalty, 0.3, constraint=get_constraint(name), **options)


def reason(energy: Joint, x: Tensor) -> str:
    certificate = certify_step(energy, x)
    assert not certificate
    assert certificate.lam == math.inf
    assert (
        str(certificate) == f"Theorem T11 does not cover the step: {certificate.reason}"
    )
    return certificate.reason


@pytest.mark.parametrize("name", [None, "nonnegative", "ball", "sphere"])
@pytest.mark.parametrize(
    "penalty", [None, SimplePenalty(), GaussianPenalty(0.4)], ids=repr
)
def test_what_is_certified_falls(
    penalty: Penalty | None, name: str | None, ball
) -> None:
    x = get_constraint(name).project(ball(9, 3).unsqueeze(1))
    energy = energy_of(penalty, name, x)
    if isinstance(penalty, SimplePenalty) and name in (None, "nonnegative"):
        assert "SimplePenalty() is concave up to squared distance 4, and" in reason(
            energy, x
        )
        return
    certificate = certify(energy, x)
    assert str(certificate).startswith(
        f"Theorem T11 covers the step: {energy!r} does not rise. Every term has the majorant"
    )
    for _ in range(5):
        after = energy.step(x)
        assert energy(after) <= energy(x) * (1 + 1e-13)
        x = after


ONE_WAY = edges_of([1, 1], [[0, 1], [1, 2]])
SIGNED = SparseCoupling(
    Graph(9, torch.tensor(BOTH)), -torch.ones(4, dtype=torch.double)
)
BROKEN = {
    "entries that are not finite": lambda x: (energy_of(None, None, x), x * math.nan),
    "the state leaves Nonnegative()": lambda x: (
        Joint("gaussian", constraint="nonnegative"),
        x,
    ),
    "the metric must be positive": lambda x: (
        Joint("gaussian", source=x, metric=torch.arange(9.0).double()),
        x,
    ),
    "coupling is not promised to be symmetric, for Spa": lambda x: (
        Joint(graph_term=ONE_WAY),
        x,
    ),
    "coupling is not promised to be nonnegative, for": lambda x: (
        Joint(graph_term=SIGNED),
        x,
    ),
    "nonnegative, for ScaledCoupling(": lambda x: (
        Joint(graph_term=ScaledCoupling(torch.tensor(2.0).double(), ring(9)) + ring(9)),
        x,
    ),
    "nonnegative, for LowRankCoupling(": lambda x: (
        Joint(graph_term=LowRankCoupling(x, x, symmetric=True)),
        x,
    ),
    "the projection has entries that are not": lambda x: (
        Joint("gaussian", projection=torch.full((1, 2, 3), math.nan).double()),
        x,
    ),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_the_premise_that_fails_is_named(sentence: str, ball) -> None:
    assert sentence in reason(*BROKEN[sentence](ball(9, 3).unsqueeze(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_penalty_sees_through_a_projection_of_norm_one_up_to_rounding(
    dtype: torch.dtype, ball
) -> None:
    x = get_constraint("ball").project(ball(9, 4)).unsqueeze(1)
    on_sphere = x / x.norm(dim=2, keepdim=True)
    for factor, holds in [(0.5, True), (1.0, True), (1.005, False)]:
        projection = factor * torch.eye(4, dtype=torch.double).view(2, 2, 4)
        for name, state in (("ball", x), ("sphere", on_sphere)):
            assert (
                certify(
                    Joint("simple", projection=projection, constraint=name), state
                ).holds
                == holds
            )
    weight = torch.randn(40, 3, 2, 4, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )
    for projection in weight / torch.linalg.matrix_norm(weight, 2, keepdim=True):
        assert certify(
            Joint("simple", projection=projection, constraint="sphere"), on_sphere
        )
        assert not certify(
            Joint("simple", projection=1.00001 * projection, constraint="sphere"),
            on_sphere,
        )
    nothing = Joint("simple", projection=0 * projection, constraint=None)
    assert certify(nothing, 9 * x), "it sees all rows at one place"


def test_a_parameter_that_is_not_finite_is_named() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def built() -> CertifiedDIFFormer:
        options = {
            "heads": 2,
            "projection": "tied",
            "inputs": 2.0 * UniformDiffusivity(),
        }
        return CertifiedDIFFormer(4, 6, 3, penalty=MixturePenalty(), **options)

    def spoil(module: torch.nn.Module, name: str, number: float = math.nan):
        with torch.no_grad():
            module.get_parameter(name).view(-1)[0] = number
        return module

    for number in (math.nan, math.inf):
        for name, _ in built().named_parameters():
            certificate = certify(spoil(built(), name, number), x)
            assert certificate.holds == name.startswith("decoder"), (
                "which is behind the block"
            )
            assert (
                certificate
                or f"the parameter {name} has entries that are not finite"
                in certificate.reason
            )
    conv = spoil(CertifiedConv(4), "terms.0.weight.raw")
    assert "the parameter terms.0.weight.raw has" in certify(conv, x).reason
    penalty = spoil(MixturePenalty(), "log_widths")
    assert "the parameter log_widths has" in certify(penalty, x, tau=0.1).reason
    assert "f(0) = nan is not finite" in certify(Joint(penalty), x).reason
    assert "f(0) = nan is not finite" in certify_trajectory(penalty, x, tau=0.1).reason


@pytest.mark.parametrize("logarithm", [-90.0, -30.0, 30.0, 90.0])
@pytest.mark.parametrize("which", ["log_widths", "log_weights"])
def test_a_mixture_may_learn_any_logarithms(which: str, logarithm: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4)
    edges = torch.randint(9, (2, 20))
    for dtype in (torch.float64, torch.float32):
        penalty = MixturePenalty((0.3, 1.0))
        with torch.no_grad():
            penalty.get_parameter(which)[0] = logarithm
        model = CertifiedDIFFormer(4, 6, 3, num_layers=6, penalty=penalty).to(dtype)
        energies = model.energies(x.to(dtype), edges)
        assert (energies.diff() <= 1e-6 * energies[:-1].abs()).all()
        assert certify(model, Data(x=x.to(dtype), edge_index=edges))
        model(x.to(dtype), edges).sum().backward()
        assert all(
            parameter.grad.isfinite().all()
            for parameter in model.parameters()
            if parameter.grad is not None
        )


def test_promises_are_looked_at(ball) -> None:
    x = ball(7, 3).unsqueeze(1)
    q = x - x.mean(0)
    # As a share of the largest entry the third is symmetric, and for nodes 2 to 6 it is a one-way street.
    for graph, sentence in [
        (edges_of([1, 1, -1, -1], n=7), "A has the negative entry -1"),
        (
            edges_of([1, 1, 1, 2], n=7, symmetric=True),
            "A has two entries a_ij and a_ji that differ by 1",
        ),
        (
            edges_of(
                [1e7, 1e7, 1, 1, 1, 1], [[0, 1, 5, 5, 5, 6], [1, 0, 2, 3, 4, 5]], n=7
            ),
            "that differ by 1",
        ),
        (
            edges_of([math.inf, math.inf, 1, 1], n=7, symmetric=True),
            "A has entries that are not finite",
        ),
        (
            2.0 * LowRankCoupling(q, q, nonnegative=True, positive_semidefinite=True),
            "A has the negative entry",
        ),
        (
            LowRankCoupling(x.abs(), x.flip(0).abs(), symmetric=True, nonnegative=True),
            "A has two entries",
        ),
    ]:
        assert sentence in reason(Joint(None, graph_term=graph), x)
    definite = LowRankCoupling(
        x.abs(), x.abs(), nonnegative=True, positive_semidefinite=True
    )
    swap = (
        edges_of([1, 1, 1, 1], n=7).to_dense()[0].unsqueeze(1)
    )  # its eigenvalues are 1 and −1
    broken = LowRankCoupling(
        swap,
        torch.eye(7, dtype=torch.double).unsqueeze(1),
        symmetric=True,
        nonnegative=True,
    )
    broken.positive_semidefinite = True
    for constraint, holds in [(None, True), ("sphere", False)]:
        z = get_constraint(constraint).project(x)
        assert certify(Joint(None, graph_term=definite, constraint=constraint), z)
        assert (
            certify(Joint(None, graph_term=broken, constraint=constraint), z).holds
            == holds
        )
    assert "f(5.03216) = -0.0160797 is negative" in reason(Joint(Negative()), x)
    assert (
        "f(5.03216) = -0.0160797 is negative"
        in certify_trajectory(Negative(), x, tau=0.1).reason
    )
    assert "f is not the derivative of δ" in reason(Joint(NotItsSlope()), x)


def test_numbers_that_changed_are_looked_at(ball) -> None:
    x = ball(9, 3).unsqueeze(1)
    for name in ("lam", "mu", "beta"):
        weight = torch.tensor(1.0)
        energy = Joint("gaussian", source=x, graph_term=ring(9), **{name: weight})
        assert certify(energy, x)
        for number in (-1.0, math.nan, math.inf):
            weight.fill_(number)
            assert f") must be finite and >= 0; it is {number:g}" in reason(energy, x)
    for name in ("source", "metric"):
        value = torch.ones_like(x if name == "source" else x[:, 0, 0])
        energy = Joint("gaussian", **{"source": x, name: value})
        value.view(-1)[0] = math.inf
        assert f"the {name} has entries that are not finite" in reason(energy, x)
    huge = Joint(
        MixturePenalty((1.0,), (1e15,)).double(),
        torch.tensor(1e300, dtype=torch.double),
    )
    assert "is not finite at this state" in reason(huge, x)


@pytest.mark.parametrize("name", ["ball", "sphere"])
def test_a_state_is_in_the_constraint_as_exactly_as_a_projection_is(
    name: str, ball
) -> None:
    """1e-7 outside, a projection moves it by 1e-7, and that may be uphill."""
    constraint = get_constraint(name)
    energy = Joint("gaussian", constraint=constraint)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert certify(
            energy, constraint.project(9 * ball(7, 300).unsqueeze(1).to(dtype))
        )
    out = (1 + 1e-7) * constraint.project(9 * ball(7, 3).unsqueeze(1))
    assert constraint.holds(out)
    assert "the state leaves" in reason(energy, out)


EDGES = torch.tensor([[0, 1, 2], [1, 0, 2]])


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            lambda: DIFFormer(4, 6, 3, layer_norm=True),
            [r"convs.0 \(DIFFormerConv\).*by Expl", r"norms.0 \(Layer"],
        ),
        (
            lambda: NodeFormer(4, 6, 3),
            [r"convs.0 \(NodeFormerConv\).*transforms what it propagates"],
        ),
        (
            lambda: SGFormer(4, 6, 3, gnn="gcn"),
            [r"conv \(SGFormerConv\)", r"gnn.convs.0 \(GCNConv\)"],
        ),
        (
            lambda: DiffusionGNN(4, 6, 3, conv="mlp"),
            [r"in DiffusionGNN convs.0 \(MLPConv\)"],
        ),
    ],
)
def test_a_model_that_no_theorem_covers_says_which_part(
    model, parts: list[str]
) -> None:
    x = torch.rand(3, 4)
    for data in (
        None,
        x,
        Data(x=x, edge_index=EDGES),
        Data(x=x, edge_index=EDGES, edge_weight=torch.ones(3)),
    ):
        certificate = certify(model(), data)
        assert not certificate
        for part in parts:
            assert re.search(part, certificate.reason)


def test_a_certified_model_with_a_part_that_is_not_is_refused(
    no_typecheck: None,
) -> None:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    edge_index = torch.tensor([[0, 1], [1, 2]])
    model = CertifiedDIFFormer(4, 6, 3, graph=AdjacencyDiffusivity("sum"))
    assert (
        "is not promised to be symmetric, for SparseCoupling("
        in certify(model, Data(x, edge_index)).reason
    )
    model = CertifiedDIFFormer(
        4, 6, 3, inputs=SimpleDiffusivity(normalize=None, row_stochastic=False)
    )
    assert (
        "is not promised to be nonnegative, for LowRankCoupling("
        in certify(model, x).reason
    )
    model = CertifiedDIFFormer(4, 6, 3)
    model.conv.update.constraint = Ball(1.5)
    assert (
        "is concave up to squared distance 4, and Ball(radius=1.5)"
        in certify(model, x).reason
    )
    assert "lets rows be 9 apart" in certify(model).reason


def test_a_layer_that_does_not_take_the_step_is_refused() -> None:
    class Longer(CertifiedConv):
        def forward(self, *inputs, **options):
            return 1.1 * super().forward(*inputs, **options)

    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    assert certify(CertifiedConv(4), x)
    # Seen within a ball.
    assert certify(CertifiedConv(4, heads=2, projection="tied", constraint="sphere"), x)
    assert (
        "Longer does not move the state as the certified step"
        in certify(Longer(4), x).reason
    )


def test_a_constraint_that_is_replaced_is_not_that_of_the_pairs() -> None:
    """Within a ball the angles of a sphere are no distances."""
    model = CertifiedDIFFormer(4, 6, 3, constraint="sphere", lam=9.0, mu=0.1).double()
    model.conv.update.constraint = Ball(1.0)
    x = 0.3 * torch.randn(7, 4, dtype=torch.double)
    assert "the pairs are those of states in Sphere" in certify(model, x).reason


def test_nothing_to_certify() -> None:
    for energy, x in (
        ("gaussian", torch.zeros(0, 1, 2)),
        (None, torch.zeros(0, 1, 2)),
        (None, torch.ones(3, 1, 2)),
    ):
        assert certify(Joint(energy), x)
    assert "nor is there a layer in it" in certify(LabelPropagation()).reason


X = torch.rand(3, 4)
GAUSSIAN = GaussianPenalty()
JOINT = Joint("gaussian")
test_what_is_no_subject_or_no_state_of_it = refuses(
    (
        lambda: certify(X, X),
        TypeError,
        r"subject must be a Coupling, .* a layer or a model; got a float32",
    ),
    (lambda: certify(GAUSSIAN, None, 0.5), ValueError, "x must be given"),
    (lambda: certify(GAUSSIAN, X), ValueError, "tau must be given"),
    (
        lambda: certify(DIFFormer(4, 6, 3), [1]),
        TypeError,
        "data must have an attribute x",
    ),
    (lambda: certify(JOINT, X.to("meta")), ValueError, "x must have values"),
)
