"""What a certificate says, and that it covers what it should; `test_refusals.py` has what it does not cover."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from energy_cases import DOUBLE, from_dense
from torch import nn
from torch_geometric.data import Data

from diffusion_mp import (
    CertifiedConv,
    CertifiedDIFFormer,
    GaussianPenalty,
    Graph,
    MixturePenalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimpleDiffusivity,
    SimplePenalty,
    certify,
)
from diffusion_mp.couplings import LowRankCoupling, SparseCoupling
from diffusion_mp.energies import certify_trajectory, get_constraint, spectrum, theorem1
from energy_forms import Joint
from helpers import randn


def test_a_certificate_is_a_sentence_and_a_truth_value(symmetric_graph):
    certificate = certify(symmetric_graph(8), None, 0.1)
    assert bool(certificate) is certificate.holds is True
    assert str(certificate).startswith(
        "Theorem 1 covers τ = 0.1: descent for every λ ≥ "
    )
    assert certificate.tau_max == pytest.approx(2 / certificate.eigenvalue)
    assert certificate.lam == pytest.approx(
        0.1 / (2 * (2 - 0.1 * certificate.eigenvalue))
    )


def test_step_too_long(symmetric_graph, ball):
    for subject, x in [(symmetric_graph(8), None), (SimplePenalty(), ball(8, 3))]:
        tau_max = certify(subject, x, 1e-3).tau_max
        assert certify(subject, x, 0.999 * tau_max)
        certificate = certify(subject, x, tau_max)
        assert not certificate
        assert certificate.lam == math.inf
        assert certificate.tau_max == pytest.approx(tau_max)
        assert "τ must be below τ_max" in str(certificate)


def test_without_edges_or_nodes_every_step_is_covered():
    empty = SparseCoupling(Graph(3), symmetric=True, nonnegative=True)
    assert certify(empty, None, 100.0).tau_max == math.inf
    assert certify(QuadraticPenalty(), torch.zeros(0, 2), 100.0)
    assert certify(QuadraticPenalty(), torch.zeros(1, 2), 1.0)
    assert certify_trajectory(QuadraticPenalty(), torch.zeros(0, 2), 1.0)
    for penalty, nodes in (("gaussian", 0), (None, 0), (None, 3)):
        assert certify(Joint(penalty), torch.ones(nodes, 1, 2))


def test_not_the_signs_of_entries_count_but_those_of_eigenvalues():
    signed = [[0.0, 2.0, -0.5], [2.0, 0.0, 2.0], [-0.5, 2.0, 0.0]]
    coupling = from_dense(torch.tensor(signed, dtype=DOUBLE), nonnegative=False)
    assert certify(coupling, None, 0.1)


def test_a_residual_step_with_row_sums_above_one_has_no_lower_bound():
    coupling = from_dense(torch.full((3, 3), 0.5, dtype=DOUBLE), nonnegative=True)
    assert theorem1(coupling, 0.1)
    certificate = theorem1(coupling, 0.1, form="residual")
    assert "I − S has the negative eigenvalue -0.5" in certificate.reason


@pytest.mark.parametrize("dense_nodes", [0, 256], ids=["lanczos", "dense"])
def test_heavy_self_weights_hide_no_eigenvalue(dense_nodes, monkeypatch):
    """Two nodes far apart for their kernel: 1 − ω_ii/d̄_i is the weight of the other one, which 1 − 1 would lose."""
    monkeypatch.setattr(spectrum, "DENSE_NODES", dense_nodes)
    penalty = GaussianPenalty(0.15)
    x = torch.tensor([[0.0], [1.3]], dtype=DOUBLE)
    weight = math.exp(-(1.3**2) / (2 * 0.15**2))
    for certificate, truth in [
        (certify(penalty, x, 0.5), 2 * weight / (1 + weight)),
        (theorem1(penalty.coupling(x), 0.5), 2 * weight),
    ]:
        if dense_nodes:
            assert certificate.eigenvalue == pytest.approx(truth, rel=1e-9, abs=0)
        else:  # a product cannot leave its own diagonal out: the answer is safe, not sharp
            assert truth <= certificate.eigenvalue < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_lanczos_agrees_with_the_dense_solver(
    dtype, symmetric_graph, ball, monkeypatch
):
    s = symmetric_graph(60, 0.1)
    s = SparseCoupling(s.graph, s.weight.to(dtype), symmetric=True, nonnegative=True)
    x = ball(60, 3)

    def certificates():
        return [
            theorem1(s, 0.01),
            theorem1(s, 0.01, form="residual"),
            certify(GaussianPenalty(0.5), x, 0.5),
        ]

    dense = certificates()
    monkeypatch.setattr(spectrum, "DENSE_NODES", 10)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    rel = 1e-9 if dtype == DOUBLE else 1e-5
    for a, b in zip(dense, certificates(), strict=True):
        assert a.holds == b.holds
        assert b.eigenvalue == pytest.approx(a.eigenvalue, rel=rel, nan_ok=True)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_domain_is_one_of_distances_and_holds_opposite_unit_vectors(dtype, ball):
    rows = [[1.0, 2.0], [-1.0, -2.0], [0.3, 0.0]]
    x = nn.functional.normalize(torch.tensor(rows, dtype=dtype), dim=1)
    assert certify(SimplePenalty(), x, 0.5)
    assert not certify(SimplePenalty(), 1.01 * x, 0.5)
    # δ of DIFFormer-a has no upper end.
    assert certify(SigmoidPenalty(), 1.01 * x, 0.5)
    x = ball(10, 3)
    assert certify(SimplePenalty(), x + 100, 0.5)
    apart = torch.cat([x, x + 100])
    assert not certify(SimplePenalty(), apart, 0.5)
    assert certify(SimplePenalty(), apart, 0.5, ptr=torch.tensor([0, 10, 20]))


def test_diffusivity_is_certified_through_its_penalty(ball):
    x = ball(8, 4)
    penalty = SimplePenalty()
    options = {"normalize": None, "measure": "distance"}
    of_rows = SimpleDiffusivity(**options)
    assert certify(of_rows, x, 0.5) == certify(penalty, x, 0.5)
    of_heads = SimpleDiffusivity(heads=2, **options)
    assert certify(of_heads, x, 0.5) == certify(penalty, x.view(8, 2, 2), 0.5)
    bare = SimpleDiffusivity(row_stochastic=False, **options)
    assert certify(bare, x, 0.01) == theorem1(penalty.coupling(x), 0.01)


def ring(n):
    node = torch.arange(n)
    forth = torch.stack([node, node.roll(-1)])
    graph = Graph(n, torch.cat([forth, forth.flip(0)], 1))
    return SparseCoupling(graph, torch.full((2 * n,), 0.7).double(), nonnegative=True)


def test_a_covered_step_is_named_with_its_energy():
    """That what is certified falls is for `test_certify_search.py` to find out."""
    x = randn(9, 1, 3)
    energy = Joint("gaussian", 0.3, graph_term=ring(9), mu=2.0, source=x)
    assert str(certify(energy, x)).startswith(
        f"Theorem T11 covers the step: {energy!r} does not rise. Every term has the majorant"
    )


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("constraint", ["ball", "sphere"])
def test_the_penalty_sees_through_a_projection_of_norm_one_up_to_rounding(
    constraint, dtype
):
    x = get_constraint(constraint).project(randn(9, 1, 4))

    def holds(projection, z=x, inside=constraint):
        return certify(Joint("simple", projection=projection, constraint=inside), z)

    eye = torch.eye(4, dtype=DOUBLE).view(2, 2, 4)
    assert holds(0.5 * eye)
    assert holds(eye)
    assert not holds(1.005 * eye)
    weight = randn(40, 3, 2, 4).to(dtype)
    for projection in weight / torch.linalg.matrix_norm(weight, 2, keepdim=True):
        assert holds(projection)
        assert not holds(1.00001 * projection)
    # It sees all rows at one place.
    assert holds(0 * projection, 9 * x, None)


@pytest.mark.parametrize("constraint", ["ball", "sphere"])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_a_state_is_in_the_constraint_as_exactly_as_a_projection_is(constraint, dtype):
    x = get_constraint(constraint).project(9 * randn(7, 1, 300).to(dtype))
    assert certify(Joint("gaussian", constraint=constraint), x)


@pytest.mark.parametrize("constraint", [None, "sphere"])
def test_a_promise_to_be_definite_counts_on_a_sphere_alone(constraint):
    x = get_constraint(constraint).project(randn(7, 1, 3))
    promises = {"nonnegative": True, "positive_semidefinite": True}
    definite = LowRankCoupling(x.abs(), x.abs(), **promises)
    assert certify(Joint(graph_term=definite, constraint=constraint), x)
    swap = torch.eye(2, dtype=DOUBLE).flip(0)  # its eigenvalues are 1 and −1
    broken = LowRankCoupling(
        swap.unsqueeze(1), torch.eye(2, dtype=DOUBLE).unsqueeze(1), symmetric=True
    )
    broken.nonnegative = broken.positive_semidefinite = True
    certificate = certify(Joint(graph_term=broken, constraint=constraint), x[:2])
    assert certificate.holds == (constraint is None)


@pytest.mark.parametrize("logarithm", [-90.0, -30.0, 30.0, 90.0])
@pytest.mark.parametrize("which", ["log_widths", "log_weights"])
def test_a_mixture_may_learn_any_logarithms(which, logarithm):
    torch.manual_seed(0)
    x = torch.randn(9, 4)
    edges = torch.randint(9, (2, 20))
    for dtype in (DOUBLE, torch.float32):
        penalty = MixturePenalty((0.3, 1.0))
        with torch.no_grad():
            penalty.get_parameter(which)[0] = logarithm
        model = CertifiedDIFFormer(4, 6, 3, num_layers=6, penalty=penalty).to(dtype)
        energies = model.energies(x.to(dtype), edges)
        assert (energies.diff() <= 1e-6 * energies[:-1].abs()).all()
        assert certify(model, Data(x=x.to(dtype), edge_index=edges))
        model(x.to(dtype), edges).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize(
    "options", [{}, {"heads": 2, "projection": "tied", "constraint": "sphere"}]
)
def test_a_layer_that_takes_the_step_is_covered(options):
    assert certify(CertifiedConv(4, **options), randn(7, 4).float())


def test_what_has_a_penalty_alone_counts_as_row_normalised() -> None:
    """A residual step of a penalty is that of its row-normalised diffusivity, as `certify` says."""
    x = torch.rand(5, 3, dtype=DOUBLE) / 4
    owner = SimpleNamespace(penalty=QuadraticPenalty())
    certificates = [
        certify(subject, x, 0.5, form="residual")
        for subject in (owner, QuadraticPenalty())
    ]
    assert certificates[0]
    assert certificates[0].tau_max == certificates[1].tau_max
