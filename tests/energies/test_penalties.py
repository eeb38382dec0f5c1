"""δ, f, the conjugate and the coupling of every penalty, against calculus, minimisation and dense matrices."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from energy_cases import DOUBLE, LearnedSlope, every_penalty
from torch.nn import functional
from torch.testing import assert_close

from diffusion_mp import (
    CertifiedDIFFormer,
    FunctionPenalty,
    GaussianPenalty,
    MixturePenalty,
    PenaltyDiffusivity,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    certify,
)
from diffusion_mp.couplings import DistanceCoupling, pairwise
from diffusion_mp.energies import certify_trajectory, get_penalty
from helpers import agree, close, randn, refuses


def grid(penalty, points=401, far=12.0):
    low, high = penalty.domain
    return torch.linspace(low, min(high, far), points, dtype=DOUBLE)


@every_penalty
def test_delta_is_concave_and_nondecreasing_with_slope_f(penalty):
    z2 = grid(penalty).requires_grad_()
    delta = penalty.delta(z2)
    (slope,) = torch.autograd.grad(delta.sum(), z2)
    assert_close(penalty.f(z2), slope, rtol=1e-12, atol=1e-14)
    assert (delta.diff() >= 0).all()
    assert (delta.diff().diff() <= 1e-13).all()
    assert (slope >= 0).all()


@pytest.mark.parametrize(("dtype", "much"), [(torch.float32, 1e-4), (DOUBLE, 1e-12)])
def test_the_domain_ends_where_rounding_does(dtype, much):
    """Opposite unit vectors are 2 apart up to rounding; a pair further apart than that is refused wherever it comes."""
    x = randn(50, 1, 3).to(dtype)
    penalty = SimplePenalty()
    for unit in torch.nn.functional.normalize(x, dim=2):
        pair = torch.stack([unit, -unit])
        assert certify_trajectory(penalty, pair, 0.5)
    apart = (1 + much) * pair
    assert "leaves the domain" in certify_trajectory(penalty, apart, 0.5).reason


def test_published_values():
    """The formulas that Wu, Wipf & Yan print for DIFFormer-s and DIFFormer-a, Eqs. 18 and 20."""
    z2 = torch.linspace(0, 4, 9, dtype=DOUBLE)
    assert_close(SimplePenalty().delta(z2), 2 * z2 - z2**2 / 4)
    assert_close(
        SigmoidPenalty().delta(z2), z2 - 2 * torch.log(torch.exp(z2 / 2 - 1) + 1)
    )
    assert_close(SigmoidPenalty().f(z2), 1 / (1 + torch.exp(z2 / 2 - 1)))


def test_softmax_f_is_attention_on_unit_vectors_and_the_printed_one_is_not():
    """Eq. 21's text prints f = e^{1 − z²/2} e^{1/√d}; exp(q·k/√d) on unit vectors is e^{(1 − z²/2)/√d}."""
    d = 9
    x = torch.nn.functional.normalize(
        torch.randn(30, d, generator=torch.Generator().manual_seed(1)).double(), dim=1
    )
    attention = torch.exp(x @ x.T / math.sqrt(d))
    z2 = torch.cdist(x, x).square()
    assert_close(SoftmaxPenalty(d).f(z2), attention)
    printed = torch.exp(1 - z2 / 2) * math.exp(1 / math.sqrt(d))
    ratio = printed / attention
    assert ratio.max() / ratio.min() > 2, (
        "the printed f is not even proportional to softmax attention"
    )


@every_penalty
def test_delta_lies_below_its_tangents(penalty):
    """δ(s) ≤ ωs − δ̃(ω) with δ̃(ω) = ωt − δ(t) for ω = f(t) (Eqs. 37 and 38), with equality at s = t alone."""
    t = grid(penalty, points=60)
    tangent = penalty.delta(t)[:, None] + penalty.f(t)[:, None] * (t - t[:, None])
    gap = tangent - penalty.delta(t)
    assert gap.min() >= -1e-12
    if not isinstance(penalty, QuadraticPenalty):
        assert gap.max() > 0.05


@every_penalty
def test_log_of_f(penalty):
    z2 = grid(penalty, points=60)
    f = penalty.f(z2)
    if penalty.positive:
        close(penalty.log_f(z2), f.log(), "entries")
        assert penalty.log_f(torch.tensor([1e8])).isfinite()


@every_penalty
@pytest.mark.parametrize("normalize", [False, True])
def test_coupling_is_f_of_the_distances(penalty, normalize, ball):
    x = ball(18, 4).view(9, 2, 4)
    ptr = torch.tensor([0, 4, 4, 9])
    coupling = penalty.coupling(x, ptr, normalize=normalize)
    graph = torch.tensor([0] * 4 + [2] * 5)
    for head in range(2):
        dense = penalty.f(torch.cdist(x[:, head], x[:, head]).square()) * (
            graph[:, None] == graph
        )
        if normalize:
            dense = dense / dense.sum(1, keepdim=True)
        got = coupling.to_dense()[min(head, coupling.heads - 1)]
        close(got, dense, "layer")
    assert coupling.row_stochastic == normalize
    if not isinstance(penalty, QuadraticPenalty):
        assert coupling.symmetric != normalize


def test_a_mixture_is_learned_and_stays_one():
    """All that is a function of it has derivatives in widths and weights; training moves them by factors."""
    penalty = MixturePenalty((0.3, 1.0), (1.0, 0.5))
    x = randn(7, 3)
    coupling = penalty.coupling(x)
    assert coupling.symmetric
    assert coupling.nonnegative
    assert coupling.positive_semidefinite
    product = coupling @ x.unsqueeze(1)
    for value in (
        penalty.total(x),
        product.square().sum(),
        penalty.f(x.square()).sum(),
    ):
        slopes = torch.autograd.grad(value, list(penalty.parameters()))
        assert all(slope.isfinite().all() and (slope != 0).all() for slope in slopes)
    penalty.log_weights.data = torch.tensor([-40.0, 30.0])
    penalty.log_widths.data = torch.tensor([5.0, -5.0])
    z2 = torch.linspace(0, 50, 99, dtype=DOUBLE)
    assert (penalty.delta(z2).diff() >= 0).all()
    assert (penalty.f(z2).diff() <= 0).all()
    assert_close(penalty.log_f(z2), penalty.f(z2).log(), atol=1e-9, rtol=1e-6)
    penalty.reset_parameters()
    assert repr(penalty) == "MixturePenalty(widths=[0.3, 1.0], weights=[1.0, 0.5])"


def test_a_mixture_that_single_precision_does_not_resolve():
    narrow = MixturePenalty((0.01, 1000.0))
    x = randn(7, 3)
    far = torch.cat([30 * x, 30 * x + 0.01 * x.flip(0)]).unsqueeze(1).float()
    expected = narrow.coupling(far.double()).to_dense()
    got = narrow.coupling(far).to_dense().double()
    assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert narrow.delta(torch.tensor([-1e-3])).item() == 0  # rounding of zero


PTR = torch.tensor([0, 4, 4, 11])
Z2 = torch.tensor([0.0, 1e-9, 0.01, 0.3, 1.0, 3.7, 12.0, 1e3, 1e5], dtype=DOUBLE)


def cauchy(z2):
    return 1 / (1 + z2)


@pytest.mark.parametrize(
    ("f", "delta"),
    [
        (cauchy, torch.log1p),
        (lambda z2: (1 + z2).rsqrt(), lambda z2: 2 * z2 / (1 + (1 + z2).sqrt())),
        (lambda z2: (-z2).exp(), lambda z2: -torch.expm1(-z2)),
        (lambda z2: (-z2 / 0.02).exp(), lambda z2: -0.02 * torch.expm1(-z2 / 0.02)),
        (torch.ones_like, lambda z2: z2),
    ],
)
def test_delta_is_the_integral_of_f(f, delta):
    by_f = FunctionPenalty(f)
    assert_close(by_f.delta(Z2), delta(Z2), rtol=2e-9, atol=1e-15)
    assert torch.equal(FunctionPenalty(f, delta).delta(Z2), delta(Z2))
    z2 = Z2.clone().requires_grad_()
    (slope,) = torch.autograd.grad(by_f.delta(z2).sum(), z2)
    assert_close(slope, f(Z2), rtol=1e-7, atol=1e-8)


def test_tiles_do_not_change_values_or_gradients(monkeypatch):
    q, k, v = (randn(11, 2, 3, seed=seed).requires_grad_() for seed in range(3))
    scale = torch.tensor(0.7, dtype=DOUBLE, requires_grad=True)
    products = []
    for entries in (1 << 20, 50):  # one tile a graph, and tiles of three rows
        monkeypatch.setattr(pairwise, "TILE_ENTRIES", entries)
        coupling = DistanceCoupling(lambda z2: 1 / (1 + scale * z2), q, k, PTR)
        products.append(coupling @ v)
    assert len(coupling._tiles()) == 4
    agree(*products, [q, k, v, scale], (1e-11, 1e-12))


test_what_is_no_penalty_is_refused = refuses(
    (lambda: GaussianPenalty(1e30), ValueError, "bandwidth"),
    (lambda: get_penalty("softmax"), TypeError, "'dim'"),
    (lambda: get_penalty("simple", dim=3), TypeError, "'dim'"),
    (lambda: FunctionPenalty(lambda z2: 1 - z2 / 4), ValueError, "is negative"),
    # However small f is.
    (lambda: FunctionPenalty(lambda z2: 1e-8 - 1e-8 * z2), ValueError, "is negative"),
    (
        lambda: FunctionPenalty(lambda z2: 1 + 1e-6 * z2, domain=(0.0, 9.0)),
        ValueError,
        r"f rises from f\(0\) = 1 to f\(9\)",
    ),
    (
        lambda: FunctionPenalty(cauchy, lambda z2: z2),
        ValueError,
        "not the derivative of δ",
    ),
    (lambda: FunctionPenalty(cauchy, domain=(0.0, -2.0)), ValueError, "domain"),
    (lambda: FunctionPenalty(lambda a, b: a), TypeError, "f must take"),
    (
        lambda: PenaltyDiffusivity(MixturePenalty(), measure="inner"),
        ValueError,
        "measure",
    ),
)


def test_it_is_looked_at_within_its_domain_alone():
    penalty = FunctionPenalty(
        lambda z2: 2 - z2 / 2, lambda z2: z2 * (2 - z2 / 4), domain=(0.0, 4.0)
    )
    x = 0.4 * randn(6, 2)
    assert certify(penalty, x, tau=0.1)
    assert "beyond 4" in certify(penalty, 10 * x, tau=0.1).reason
    with pytest.raises(ValueError, match="is for squared distances up to 4"):
        CertifiedDIFFormer(5, 4, 3, penalty=penalty, constraint=None)


def test_a_function_that_training_spoiled_is_certified_no_more():
    f = LearnedSlope()
    model = CertifiedDIFFormer(5, 4, 3, penalty=FunctionPenalty(f))
    x = randn(9, 5).float()
    assert certify(model, x)
    model(x).square().sum().backward()
    assert f.a.grad != 0
    with torch.no_grad():
        f.a.fill_(-0.5)
    certificate = certify(model, x)
    assert not certificate
    assert (
        "is no penalty on (0.0, inf): f rises from" in certificate.reason
        or "negative" in certificate.reason
    )
    # A sentence, in which a module f is named and not drawn as a tree.
    assert "f=LearnedSlope" in certificate.reason
    assert "\n" not in certificate.reason


@pytest.mark.parametrize("key", [None, randn(6, 1, 3, seed=1)])
def test_a_radius_gives_all_vectors_one_norm(key):
    """For penalties of any function, and for mixtures, which are not functions of an inner product."""
    query = randn(6, 1, 3)
    left, right = (
        2 * functional.normalize(x[:, 0], dim=1)
        for x in (query, query if key is None else key)
    )
    squares = torch.cdist(left, right).square()
    for penalty in (
        FunctionPenalty(lambda z2: 1 / (1 + z2)),
        MixturePenalty((0.5, 2.0)).double(),
    ):
        coupling = penalty.attention(query, key, radius=2.0)
        assert coupling.nonnegative
        close(coupling.to_dense()[0], penalty.f(squares).detach())


def test_a_penalty_without_parameters_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        QuadraticPenalty().linear = True
