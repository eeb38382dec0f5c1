"""What a certificate says, and that it refuses with the reason when a premise fails."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from energy_cases import from_dense

from diffusion_mp import (
    GaussianPenalty,
    Graph,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    certify,
)
from diffusion_mp.couplings import LowRankCoupling, SparseCoupling
from diffusion_mp.energies import Certificate, spectrum, theorem1, theorem7
from helpers import refuses


def test_a_certificate_is_a_sentence_and_a_truth_value(symmetric_graph) -> None:
    s = symmetric_graph(8)
    certificate = certify(s, None, 0.1)
    assert bool(certificate) is certificate.holds is True
    assert str(certificate).startswith(
        "Theorem 1 covers τ = 0.1: descent for every λ ≥ "
    )
    assert certificate.tau_max == pytest.approx(2 / certificate.eigenvalue)
    assert certificate.lam == pytest.approx(
        0.1 / (2 * (2 - 0.1 * certificate.eigenvalue))
    )


def test_couplings_that_are_refused_with_the_reason_and_some_that_are_not(
    generator: torch.Generator,
) -> None:
    edges, q, k = (
        torch.tensor([[0, 1, 2], [1, 0, 2]]),
        *(torch.rand(5, 1, 3, generator=generator) for _ in range(2)),
    )
    broken = SparseCoupling(
        Graph(3, edges), torch.tensor([math.nan, math.nan, 1.0]), symmetric=True
    )
    lonely = SparseCoupling(Graph(3, edges[:, :2]), nonnegative=True)
    certificates = [
        *((theorem(broken, 0.1), "finite") for theorem in (theorem1, theorem7)),
        (certify(LowRankCoupling(q, k), None, 0.1), "is not symmetric"),
        (theorem7(LowRankCoupling(q, k), 0.1), ""),
        (theorem7(lonely, 0.5), "a node has degree 0"),
    ]
    # A negative weight, or for I − S a row sum above one: the energy has no lower bound.
    for form, weight in (("conservative", -1.0), ("residual", 1.5)):
        s = from_dense(
            torch.tensor([[0, weight], [weight, 0]], dtype=torch.double),
            nonnegative=False,
        )
        certificates.append((certify(s, None, 0.1, form=form), "negative eigenvalue"))
    for certificate, reason in certificates:
        assert not certificate
        assert reason in certificate.reason
    assert certificates[2][0].tau_max == 0
    # Where there are no edges or no nodes every step is covered.
    empty = SparseCoupling(Graph(3, edges[:, :0]), symmetric=True, nonnegative=True)
    assert certify(empty, None, 100.0).tau_max == math.inf
    assert certify(QuadraticPenalty(), torch.zeros(0, 2), 100.0)
    assert certify(QuadraticPenalty(), torch.zeros(1, 2), 1.0)
    # Not the signs of the entries count but those of the eigenvalues.
    signed = torch.tensor(
        [[0.0, 2.0, -0.5], [2.0, 0.0, 2.0], [-0.5, 2.0, 0.0]], dtype=torch.double
    )
    assert certify(from_dense(signed, nonnegative=False), None, 0.1)


PAIR = from_dense(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
test_what_is_no_step_is_refused = refuses(
    *(
        (
            lambda t=t: t("S", 0.5),
            TypeError,
            "(coupling|omega) must be a Coupling; got 'S'",
        )
        for t in (theorem1, theorem7)
    ),
    *(
        (lambda t=t: t(PAIR, -1.0), "tau must be finite and > 0; got -1.0")
        for t in (theorem1, theorem7)
    ),
    *(
        (lambda t=t: t(PAIR, 0.5, leak=-3.0), "leak must be finite and >= 0")
        for t in (theorem1, theorem7)
    ),
    (
        lambda: theorem1(PAIR, 0.5, form="Residual"),
        "form must be one of 'conservative', 'residual'",
    ),
    error=ValueError,
)


def test_step_too_long(symmetric_graph, ball) -> None:
    for subject, x in [(symmetric_graph(8), None), (SimplePenalty(), ball(8, 3))]:
        tau_max = certify(subject, x, 1e-3).tau_max
        assert certify(subject, x, 0.999 * tau_max)
        certificate = certify(subject, x, tau_max)
        assert not certificate
        assert certificate.lam == math.inf
        assert certificate.tau_max == pytest.approx(tau_max)
        assert "τ must be below τ_max" in str(certificate)


@pytest.mark.parametrize("dense_nodes", [0, 256], ids=["lanczos", "dense"])
def test_heavy_self_weights_hide_no_eigenvalue(
    dense_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes far apart for their kernel: 1 − ω_ii/d̄_i is the weight of the other one, which 1 − 1 would lose."""
    monkeypatch.setattr(spectrum, "DENSE_NODES", dense_nodes)
    penalty = GaussianPenalty(0.15)
    x = torch.tensor([[0.0], [1.3]], dtype=torch.double)
    weight = math.exp(-(1.3**2) / (2 * 0.15**2))
    for certificate, truth in [
        (certify(penalty, x, 0.5), 2 * weight / (1 + weight)),
        (theorem1(penalty.coupling(x), 0.5), 2 * weight),
    ]:
        if dense_nodes:
            assert certificate.eigenvalue == pytest.approx(truth, rel=1e-9, abs=0)
        else:  # a product cannot leave its own diagonal out: the answer is safe, not sharp
            assert truth <= certificate.eigenvalue < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_outside_the_domain_is_refused(dtype: torch.dtype) -> None:
    """Antipodal unit vectors are the last that DIFFormer-s covers."""
    x = torch.nn.functional.normalize(
        torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.3, 0.0]], dtype=dtype), dim=1
    )
    assert certify(SimplePenalty(), x, 0.5)
    certificate = certify(SimplePenalty(), 1.01 * x, 0.5)
    assert not certificate
    assert "leaves the domain of SimplePenalty()" in certificate.reason
    assert certify(SigmoidPenalty(), 1.01 * x, 0.5), "δ of DIFFormer-a has no upper end"
    assert (
        certify(SigmoidPenalty(), x * math.nan, 0.5).reason
        == "the state has entries that are not finite."
    )


def test_the_domain_counts_distances_not_norms(ball) -> None:
    x = ball(10, 3)
    assert certify(SimplePenalty(), x + 100, 0.5)
    apart = torch.cat([x, x + 100])
    assert not certify(SimplePenalty(), apart, 0.5)
    assert certify(SimplePenalty(), apart, 0.5, ptr=torch.tensor([0, 10, 20]))


def diffusivity(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(
        **({"heads": 1, "needs_graph": False, "row_stochastic": True} | attributes)
    )


def test_diffusivity_is_certified_through_its_penalty(ball) -> None:
    x = ball(8, 4)
    assert certify(diffusivity(penalty=SimplePenalty()), x, 0.5) == certify(
        SimplePenalty(), x, 0.5
    )
    per_head = certify(SimplePenalty(), x.view(8, 2, 2), 0.5)
    assert certify(diffusivity(penalty=SimplePenalty(), heads=2), x, 0.5) == per_head
    bare = certify(diffusivity(penalty=SimplePenalty(), row_stochastic=False), x, 0.01)
    assert bare == theorem1(SimplePenalty().coupling(x), 0.01)


@pytest.mark.parametrize(
    ("attributes", "form", "reason"),
    [
        (
            {"penalty": None, "why_no_penalty": "W_Q and W_K are separate."},
            "conservative",
            "W_Q and W_K are separate.",
        ),
        ({"penalty": None}, "conservative", "declares no penalty"),
        (
            {"penalty": SigmoidPenalty(), "needs_graph": True},
            "conservative",
            "edges of a graph only",
        ),
        (
            {"penalty": SigmoidPenalty(), "row_stochastic": False},
            "residual",
            "is not row-normalised",
        ),
    ],
)
def test_diffusivity_without_a_theorem_is_refused(
    attributes: dict, form: str, reason: str, ball
) -> None:
    certificate = certify(diffusivity(**attributes), ball(6, 2), 0.1, form=form)
    assert not certificate
    assert reason in certificate.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanczos_agrees_with_the_dense_solver(
    dtype: torch.dtype, symmetric_graph, ball, monkeypatch
) -> None:
    s = symmetric_graph(60, 0.1)
    s = SparseCoupling(s.graph, s.weight.to(dtype), symmetric=True, nonnegative=True)
    x = ball(60, 3)
    rel = 1e-9 if dtype == torch.float64 else 1e-5

    def found() -> list[Certificate]:
        return [
            theorem1(s, 0.01),
            theorem1(s, 0.01, form="residual"),
            certify(GaussianPenalty(0.5), x, 0.5),
        ]

    dense = found()
    monkeypatch.setattr(spectrum, "DENSE_NODES", 10)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    for a, b in zip(dense, found(), strict=True):
        assert a.holds == b.holds
        assert b.eigenvalue == pytest.approx(a.eigenvalue, rel=rel, nan_ok=True)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
