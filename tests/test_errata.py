"""Entries of docs/errata.md in numbers: what was printed fails, what stands there instead holds."""

# ruff: noqa: F403, F405 (everything public)
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.couplings import NeumannCoupling, row_normalized
from diffusion_mp.diffusivities.kernelized_softmax import attention_features
from energy_forms import Explicit, Joint

DOUBLE = torch.float64
PENALTY = SigmoidPenalty()


def two_herds(members: int, near: float, far: float) -> tuple[Tensor, Graph]:
    """Two herds of nodes at ±far on a line; one more node of each stands at ±near, and these two share an edge.

    Attention pulls the two back to their herds, the edge pulls them to each other, and harder.
    """
    x = torch.tensor(
        [-near, *[-far] * members, near, *[far] * members], dtype=DOUBLE
    ).unsqueeze(1)
    one = 0
    other = members + 1
    return x, Graph(len(x), torch.tensor([[one, other], [other, one]]))


def adjacency(x: Tensor, graph: Graph) -> Coupling:
    return AdjacencyDiffusivity("sym")(x, graph)


@pytest.mark.parametrize("tau", [1e-3, 0.1, 1.0])
def test_equation_24_raises_equation_25(tau):
    """D24: whatever λ is, the term that λ multiplies rises, and so does the first. One denominator repairs it."""
    x, graph = two_herds(7, 1.6, 2.9)
    edges = adjacency(x, graph)
    attention = SigmoidDiffusivity(normalize=None, measure="distance")(x)
    printed = ExplicitEuler(tau)(x, 0.5 * attention + 0.5 * edges)
    for lam in (1e-6, 1.0, 1e6):
        energy = Explicit(PENALTY, lam, graph_term=edges)
        assert energy(printed, x) > energy(x, x) + lam / 2 * 11 * tau

    joint = Joint(PENALTY, 1.0, graph_term=edges)
    assert 2 * float(joint(printed.unsqueeze(1)) - joint(x)) > 11 * tau
    repaired = CertifiedStep(0.0)(x.unsqueeze(1), PENALTY.coupling(x) + edges)
    assert joint(repaired) < joint(x) - 3


@pytest.mark.parametrize(
    ("weight", "form"),
    [(None, "residual"), ("joint", "residual"), (0.5, "conservative")],
)
def test_no_layer_with_a_normalised_attention_descends_equation_25(weight, form):
    """D24, for Eqs. 61–63, their sum divided by its own rows, and Eq. 24: at τ = 0.1 the energy rises."""
    x, graph = two_herds(7, 1.6, 2.6)
    attention = SigmoidDiffusivity(normalize=None, measure="distance")
    edges = AdjacencyDiffusivity("sym")
    if weight == "joint":
        coupling = row_normalized((attention + edges)(x, graph))
    else:
        coupling = GraphAugmentedDiffusivity(attention, edges, weight)(x, graph)
    joint = Joint(PENALTY, 1.0, graph_term=adjacency(x, graph))
    assert joint(ExplicitEuler(0.1, form=form)(x, coupling)) > joint(x) + 0.15


def slopes(members: int, near: float, far: float) -> tuple[float, float]:
    """(a, b): along the direction of Eq. 24 the slope of Σδ + c Σ ã_ij‖z_i − z_j‖² is −2(a + cb), for any c."""
    x, graph = two_herds(members, near, far)
    omega = PENALTY.coupling(x)
    edges = adjacency(x, graph)
    pairs, links = (
        coupling.laplacian(x.unsqueeze(1)).squeeze(1) for coupling in (omega, edges)
    )
    direction = pairs / omega.degree() + links
    return float((pairs * direction).sum()), float((links * direction).sum())


def test_no_rescaling_of_the_adjacency_saves_equation_24():
    """D24: one wide pair of herds and 35 narrow ones, all out of each other's sight: both slopes rise."""
    wide = slopes(30, 0.8, 2.3)
    narrow = slopes(30, 0.2, 3.3)
    assert wide[0] + 35 * narrow[0] < -6
    assert wide[1] + 35 * narrow[1] < -1


def test_the_gradient_flow_has_a_half():
    """D25: −½∇E of Corollaries 2 and 8 is Σ ω_ij(z_j − z_i) at λ = ½; at λ = 1 twice that (Eq. 46: −¼ of ∂Ẽ/∂z)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(12, generator=generator, dtype=DOUBLE)
    ends = torch.randint(6, (2, 12), generator=generator)
    graph = Graph(6, torch.cat([ends, ends.flip(0)], 1), weight.repeat(2))
    x = (torch.rand(6, 2, generator=generator, dtype=DOUBLE) - 0.5).requires_grad_()
    fixed = AdjacencyDiffusivity("sum")(x, graph)
    for coupling, build in (
        (fixed, lambda lam: Explicit("quadratic", lam, coupling=fixed)),
        (SimplePenalty().coupling(x), lambda lam: Explicit(SimplePenalty(), lam)),
    ):
        flow = -coupling.laplacian(x.unsqueeze(1)).squeeze(1)
        for lam in (0.5, 1.0):
            (gradient,) = torch.autograd.grad(build(lam)(x, x.detach()), x)
            assert_close(-gradient / 2, 2 * lam * flow)


def test_the_steady_state_of_equation_11_has_a_half():
    """D25: 0 = ∂E/∂Z at Z = Z_k = η/(2λ) (D̄ − S)⁻¹H, for a source that the kernel of D̄ − S has no part in."""
    laplacian = torch.tensor(
        [[1.0, -1.0, 0.0], [-1.0, 3.0, -2.0], [0.0, -2.0, 2.0]], dtype=DOUBLE
    )
    source = torch.tensor([[1.0], [2.0], [-3.0]], dtype=DOUBLE)
    eta = 0.6
    lam = 0.8

    def gradient(share: float) -> Tensor:
        z = (share * eta / lam * torch.linalg.pinv(laplacian) @ source).requires_grad_()
        pairs = 2 * (z * (laplacian @ z)).sum()  # Σ_ij s_ij (z_i − z_j)²
        energy = (z - (z.detach() + eta * source)).square().sum() + lam * pairs
        return torch.autograd.grad(energy, z)[0]

    assert_close(gradient(0.5), torch.zeros_like(source))
    assert gradient(1.0).abs().max() > 1


def test_the_variational_bound_is_from_above():
    """D25: Eq. 37 with its inequality turned: ρ(s) ≤ ωs − ρ̃(ω), with equality at ω = ρ′(s) and nowhere below."""
    s = torch.tensor(1.5, dtype=DOUBLE)
    touching = torch.linspace(0, 6, 13).double()
    omega = PENALTY.f(touching)
    conjugate = omega * touching - PENALTY.delta(touching)
    gap = (omega * s - conjugate - PENALTY.delta(s)).tolist()
    assert min(gap) == pytest.approx(0, abs=1e-12)
    assert gap.index(min(gap)) == 3
    assert max(gap) > 0.5


@pytest.mark.parametrize(("radius", "tau"), [(4.0, 64.0), (0.25, 0.25)])
def test_the_variance_of_random_features(radius, tau):
    """N10: m·Var = e^{6r²/τ} − e^{2r²/τ} where q = k has norm r; Theorem 1 of the slides has e^{6r/τ}, no bound."""
    x = torch.zeros(1, 1, 2, dtype=DOUBLE)
    x[0, 0, 0] = radius / math.sqrt(tau)
    directions = torch.randn(
        1_000_000, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE
    )
    log_query, log_key, _ = attention_features(x, x, directions)
    half_norm = float(x.square().sum()) / 2
    samples = (log_query + log_key - 2 * half_norm).exp()  # one feature each
    exponent = radius**2 / tau
    assert float(samples.mean()) == pytest.approx(math.exp(exponent), rel=0.01)
    assert float(samples.var()) == pytest.approx(
        math.exp(6 * exponent) - math.exp(2 * exponent), rel=0.05
    )
    assert (float(samples.var()) > math.exp(6 * radius / tau)) == (radius > 1)


def test_a_row_stochastic_matrix_can_have_the_norm_root_n():
    """S8: ‖R‖₂ ≤ 1 (SFi-Former, A.1) fails where all nodes attend to one; its largest entry stays below one."""
    scores = torch.zeros(9, 9, dtype=DOUBLE)
    scores[:, 0] = 50.0
    assert float(torch.linalg.matrix_norm(scores.softmax(1), 2)) == pytest.approx(3.0)
    assert scores.softmax(1).max() <= 1


def test_a_stride_beyond_one_is_no_low_pass():
    """P8: gains at h = 4, α = 0.48, L = 24: fast modes pass, slower ones do not; at stride 1 gains fall."""
    position = torch.arange(24, dtype=DOUBLE) + 0.5
    modes = torch.cos(
        math.pi
        / 24
        * torch.arange(24, dtype=DOUBLE).unsqueeze(0)
        * position.unsqueeze(1)
    )

    def gains(stride: int, alpha: float) -> Tensor:
        coupling = NeumannCoupling(
            24, torch.full((1, 1), alpha, dtype=DOUBLE), (stride,)
        )
        after = ExplicitEuler(1.0)(modes.unsqueeze(1), coupling).squeeze(1)
        return (after * modes).sum(0) / modes.square().sum(0)

    wide = gains(4, 0.48)
    assert float(wide[12]) == pytest.approx(1.0)
    assert float(wide[23]) == pytest.approx(0.87, abs=5e-3)
    assert float(wide[6]) == pytest.approx(
        1 - 4 * 0.48
    )  # a slower mode is damped, and turned
    assert bool((gains(1, 0.25).diff() < 0).all())
