"""A penalty of any decreasing f is what the named ones are where f is theirs, and falls where the theorems say so."""

import math
from itertools import product

import pytest
import torch
from energy_cases import LearnedSlope, randn
from torch import Tensor

import diffusion_mp as dm
from diffusion_mp.couplings import pairwise
from diffusion_mp.energies import Penalty, Sphere
from diffusion_mp.testing import assert_energy_descent

PTR = torch.tensor([0, 4, 4, 11])
Z2 = torch.tensor([0.0, 1e-9, 0.01, 0.3, 1.0, 3.7, 12.0, 1e3, 1e5], dtype=torch.float64)


def cauchy(z2: Tensor) -> Tensor:
    return 1 / (1 + z2)


@pytest.mark.parametrize(("f", "delta"), [
    (cauchy, torch.log1p),
    (lambda z2: (1 + z2).rsqrt(), lambda z2: 2 * z2 / (1 + (1 + z2).sqrt())),
    (lambda z2: (-z2).exp(), lambda z2: -torch.expm1(-z2)),
    (lambda z2: (-z2 / 0.02).exp(), lambda z2: -0.02 * torch.expm1(-z2 / 0.02)),
    (torch.ones_like, lambda z2: z2),
])  # fmt: skip
def test_delta_is_the_integral_of_f_and_f_the_derivative_of_delta(f, delta) -> None:
    by_f, by_delta = dm.FunctionPenalty(f), dm.FunctionPenalty(delta=delta)
    torch.testing.assert_close(by_f.delta(Z2), delta(Z2), rtol=2e-9, atol=1e-15)
    torch.testing.assert_close(by_delta.f(Z2), f(Z2), rtol=1e-12, atol=1e-14)
    assert torch.equal(dm.FunctionPenalty(f, delta).delta(Z2), delta(Z2))
    z2 = Z2.clone().requires_grad_()
    (slope,) = torch.autograd.grad(by_f.delta(z2).sum(), z2)
    torch.testing.assert_close(slope, f(Z2), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("given", ["f", "delta"])
@pytest.mark.parametrize("known", [dm.GaussianPenalty(0.8), dm.SoftmaxPenalty(3)])
def test_of_the_f_of_a_named_penalty_it_is_that_penalty(known: Penalty, given: str) -> None:
    own = dm.FunctionPenalty(**{given: getattr(known, given)})
    x = randn(11, 2, 3).requires_grad_()
    v, weight = randn(11, 2, 5, seed=1), randn(11, 2, 5, seed=2)
    omega = torch.linspace(0.001, 1.1, 30, dtype=torch.float64)
    torch.testing.assert_close(own.conjugate(omega), known.conjugate(omega), rtol=1e-8, atol=1e-9)
    assert own.conjugate(torch.tensor([-0.1])).item() == -math.inf
    for constraint, normalize in product((None, Sphere(1.5)), (False, True)):
        couplings = [penalty.coupling(x, PTR, normalize, constraint) for penalty in (own, known)]
        outs = [coupling @ v for coupling in couplings]
        torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-12)
        slopes = [torch.autograd.grad((out * weight).sum(), x)[0] for out in outs]
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-11)
        for promise in ("symmetric", "nonnegative", "row_stochastic"):
            assert getattr(couplings[0], promise) == getattr(couplings[1], promise)
    options = {"source": v[:, :, :3], "constraint": "ball", "radius": 9.0, "ptr": PTR}
    energies = [dm.JointEnergy(penalty, 0.7, **options)(x) for penalty in (own, known)]
    torch.testing.assert_close(*energies, rtol=1e-9, atol=0)
    slopes = [torch.autograd.grad(energy, x)[0] for energy in energies]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)


def test_tiles_do_not_change_values_or_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (randn(11, 2, 3, seed=seed).requires_grad_() for seed in range(3))
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    results = []
    for entries in (1 << 20, 50):  # one tile a graph, and tiles of three rows
        monkeypatch.setattr(pairwise, "TILE_ENTRIES", entries)
        coupling = dm.couplings.DistanceCoupling(lambda z2: 1 / (1 + scale * z2), q, k, PTR)
        out = coupling @ v
        results.append((out, *torch.autograd.grad(out.square().sum(), [q, k, v, scale])))
    assert len(coupling._tiles()) == 4
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    dense = coupling.to_dense()
    torch.testing.assert_close(results[0][0], torch.einsum("hij,jhd->ihd", dense, v), rtol=1e-11, atol=1e-12)
    expected = 1 / (1 + scale * (q[4:, 1, None] - k[4:, 1]).square().sum(2))
    torch.testing.assert_close(dense[1, 4:, 4:], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("more", [{}, {"constraint": "sphere"}, {"constraint": None, "projection": "tied", "heads": 2}])
def test_a_certified_model_goes_down_its_energy(more: dict) -> None:
    torch.manual_seed(0)
    model = dm.CertifiedDIFFormer(5, 4, 3, 6, penalty=dm.FunctionPenalty(cauchy), lam=4.0, **more).double()
    x, edges = randn(9, 5), torch.tensor([[0, 1, 2, 3, 7], [1, 2, 3, 4, 8]])
    energies = model.energies(x, edges)
    assert (energies.diff() < 0).all()
    certificate = dm.certify(model, x)
    assert certificate, str(certificate)


def test_the_explicit_step_of_such_an_attention_descends() -> None:
    diffusivity = dm.PenaltyDiffusivity(dm.FunctionPenalty(cauchy))
    conv = dm.DiffusionConv(4, 4, diffusivity, dm.ExplicitEuler(0.9), transform=False, bias=False)
    assert_energy_descent(conv, instances=3, steps=3)
    x = 3 * randn(9, 2)
    certificate = dm.certify(diffusivity, x, tau=0.5)
    assert certificate
    moved = dm.ExplicitEuler(0.5)(x, diffusivity(x))
    energy = dm.Energy(diffusivity.penalty, certificate.lam)
    assert energy(moved, x) < energy(x, x)


@pytest.mark.parametrize(("make", "error", "sentence"), [
    (lambda: dm.FunctionPenalty(), ValueError, "f or delta must be given"),
    (lambda: dm.FunctionPenalty(lambda z2: z2), ValueError, "f rises from f"),
    (lambda: dm.FunctionPenalty(lambda z2: 1 - z2 / 4), ValueError, r"f\(.*\) = -.* is negative"),
    (lambda: dm.FunctionPenalty(delta=lambda z2: -z2), ValueError, "is negative"),
    (lambda: dm.FunctionPenalty(delta=lambda z2: z2.square()), ValueError, "f rises"),
    (lambda: dm.FunctionPenalty(lambda z2: 1 / z2), ValueError, r"f\(0\) = inf is not finite"),
    (lambda: dm.FunctionPenalty(lambda z2: 1 + 1e-6 * z2, domain=(0.0, 9.0)), ValueError, r"f\(0\) = 1 to f\(9\)"),
    (lambda: dm.FunctionPenalty(cauchy, lambda z2: z2), ValueError, "f is not the derivative of δ"),
    (lambda: dm.FunctionPenalty(lambda z2: z2.sum()), ValueError, "f must give a tensor of the shape of z²"),
    (lambda: dm.FunctionPenalty(cauchy, domain=(1.0, 2.0)), ValueError, r"domain must be \(0, the largest"),
    (lambda: dm.FunctionPenalty(cauchy, domain=(0.0, -2.0)), ValueError, r"domain must be \(0, the largest"),
    (lambda: dm.FunctionPenalty(3), TypeError, r"f must be a function, of a tensor of .*; got 3 \(int\)"),
    (lambda: dm.FunctionPenalty(lambda a, b: a), TypeError, "f must take a tensor of .*it raised TypeError"),
    (lambda: dm.PenaltyDiffusivity(cauchy), TypeError, "penalty must be a Penalty"),
])  # fmt: skip
def test_what_is_no_penalty_is_refused_in_words(make, error, sentence: str, no_typecheck: None) -> None:
    with pytest.raises(error, match=sentence):
        make()


def test_it_is_looked_at_within_its_domain_alone() -> None:
    penalty = dm.FunctionPenalty(lambda z2: 2 - z2 / 2, lambda z2: z2 * (2 - z2 / 4), domain=(0.0, 4.0))
    x = 0.4 * randn(6, 2)
    assert dm.certify(penalty, x, tau=0.1)
    assert "beyond 4" in dm.certify(penalty, 10 * x, tau=0.1).reason
    with pytest.raises(ValueError, match="is for squared distances up to 4"):
        dm.CertifiedDIFFormer(5, 4, 3, penalty=penalty, constraint=None)


def test_a_function_that_training_spoiled_is_certified_no_more() -> None:
    f = LearnedSlope()
    model = dm.CertifiedDIFFormer(5, 4, 3, penalty=dm.FunctionPenalty(f))
    x = randn(9, 5).float()
    assert dm.certify(model, x)
    model(x).square().sum().backward()
    assert f.a.grad != 0
    with torch.no_grad():
        f.a.fill_(-0.5)
    certificate = dm.certify(model, x)
    assert not certificate
    assert "is no penalty on (0.0, inf): f rises from" in certificate.reason or "negative" in certificate.reason
