"""What Zhang & Zhou prove of I + Σ_k α_k Δ_{h_k}: true with the symmetric extension, false with other boundaries."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.couplings import NeumannCoupling
from diffusion_mp.updates import ExplicitEuler
from helpers import randn

DOUBLE = torch.float64
ROUNDING = 1 + 1e-12


def step_matrix(
    length: int, strides: tuple[int, ...], alpha: list[float], boundary: str
) -> Tensor:
    """S_α = I + Σ_k α_k Δ_{h_k} [L, L], as the library takes the step."""
    coupling = NeumannCoupling(
        length, torch.tensor(alpha, dtype=DOUBLE).unsqueeze(1), strides, boundary
    )  # type: ignore
    identity = torch.eye(length, dtype=DOUBLE).unsqueeze(1)
    return ExplicitEuler(1.0)(identity, coupling).squeeze(1)


def energy(x: Tensor) -> Tensor:
    """𝓔 of Eq. 6."""
    return 0.5 * x.diff(dim=0).square().sum()


def energy_growth(step: Tensor) -> float:
    """max 𝓔(S X)/𝓔(X): constants carry no energy, and every step keeps them."""
    length = step.size(0)
    difference = torch.eye(length, dtype=DOUBLE).diff(dim=0)
    return float(
        torch.linalg.matrix_norm(difference @ step @ torch.linalg.pinv(difference), 2)
        ** 2
    )


def instances(
    longest: int = 24,
) -> st.SearchStrategy[tuple[int, tuple[int, ...], list[float], int]]:
    """Length, strides, α with Σα < ½, and a seed of states."""

    @st.composite
    def draw(draw: st.DrawFn) -> tuple[int, tuple[int, ...], list[float], int]:
        length = draw(st.integers(2, longest))
        strides = draw(st.lists(st.integers(1, 2 * longest), min_size=1, max_size=3))
        shares = [draw(st.floats(0.01, 1.0)) for _ in strides]
        budget = draw(st.floats(0.01, 0.4999))
        return (
            length,
            tuple(strides),
            [budget * share / sum(shares) for share in shares],
            draw(st.integers(0, 999)),
        )

    return draw()


def guarantees(boundary: str) -> None:
    """Theorems 4.2 and 4.4 and Corollary 4.5 on 300 random instances; raises where one of them fails."""

    @settings(max_examples=300, report_multiple_bugs=False, phases=[Phase.generate])
    @given(instances())
    def hold(instance: tuple[int, tuple[int, ...], list[float], int]) -> None:
        length, strides, alpha, seed = instance
        step = step_matrix(length, strides, alpha, boundary)
        assert torch.linalg.matrix_norm(step, 2) <= ROUNDING, "Eq. 4: it expands"
        assert energy_growth(step) <= ROUNDING, "Eq. 7: the energy rises"
        x = randn(length, 3, seed=seed)
        assert (step @ x).norm() <= x.norm() * ROUNDING
        assert energy(step @ x) <= energy(x) * ROUNDING
        if 1 in strides:
            mean = x.mean(0)
            rest = step @ (x - mean)
            assert rest.norm() < (x - mean).norm(), (
                "Eq. 5: no contraction off the constants"
            )
            assert energy(step @ x) < energy(x), "Theorem 4.4: no strict decrease"

    hold()


def test_the_guarantees_hold_with_the_symmetric_extension():
    guarantees("symmetric")


@pytest.mark.parametrize(
    ("boundary", "what"), [("replicate", "it expands"), ("drop", "energy rises")]
)
def test_the_same_body_finds_the_counterexample(boundary, what):
    """Corollary 4.5 is false as printed (docs/errata.md, P1)."""
    with pytest.raises(AssertionError, match=what):
        guarantees(boundary)


def test_the_counterexamples_in_numbers():
    replicated, dropped, extended = (
        step_matrix(24, (4,), [0.49], boundary)
        for boundary in ("replicate", "drop", "symmetric")
    )
    assert float(torch.linalg.matrix_norm(replicated, 2)) == pytest.approx(
        1.244, abs=5e-4
    )
    assert float(torch.linalg.matrix_norm(dropped, 2)) == pytest.approx(1.0, abs=1e-12)
    assert energy_growth(dropped) == pytest.approx(1.575, abs=5e-4)
    # The paper's Σα.
    assert energy_growth(step_matrix(24, (4,), [0.48], "drop")) == pytest.approx(
        1.541, abs=5e-4
    )
    assert float(torch.linalg.matrix_norm(extended, 2)) <= ROUNDING
    assert energy_growth(extended) <= ROUNDING


def test_what_the_other_boundaries_keep_and_lose():
    ring, causal = (
        step_matrix(24, (4,), [0.49], boundary) for boundary in ("periodic", "causal")
    )
    one = torch.ones(24, dtype=DOUBLE)
    assert_close(ring.sum(0), one)
    assert float(torch.linalg.matrix_norm(ring, 2)) <= ROUNDING
    # Of a path; that of the cycle falls:
    assert energy_growth(step_matrix(24, (1,), [0.49], "periodic")) > 1.1
    turn = torch.eye(24, dtype=DOUBLE) - torch.eye(24, dtype=DOUBLE).roll(1, 0)
    x = randn(24, 5)
    assert (turn @ ring @ x).norm() < (turn @ x).norm()
    assert_close(causal.sum(1), one)
    assert not causal.triu(1).any()
    assert (causal >= 0).all()  # convex combinations
    assert (causal.sum(0) - one).abs().max() > 0.4
    assert (step_matrix(24, (4,), [1.01], "causal") < 0).any()


@pytest.mark.parametrize(("alpha", "least"), [(0.25, 0.0), (0.4, -0.6)])
def test_above_a_quarter_high_modes_change_sign(alpha, least):
    """The proof's 0 ≤ 1 − 4α is wrong (docs/errata.md, P2), and so is κ = max(1 + αλ): it lacks the absolute value."""
    spectrum = torch.linalg.eigvalsh(step_matrix(64, (1,), [alpha], "symmetric"))
    assert float(spectrum[0]) == pytest.approx(least, abs=3e-3)
    assert float(spectrum[0]) >= min(1 - 4 * alpha, 0.0)
    high = torch.tensor([(-1.0) ** i for i in range(64)], dtype=DOUBLE)
    after = step_matrix(64, (1,), [alpha], "symmetric") @ high
    assert bool((after[1:-1] * high[1:-1] < -1e-12).all()) == (alpha > 0.25)


@pytest.mark.parametrize("length", [4, 24, 400])
def test_the_roughness_bound_needs_a_factor_of_two(length):
    """‖ΔZ‖ ≤ √(8𝓔): the alternating sequence attains it as it grows, and violates the printed √(2𝓔)."""
    laplacian = step_matrix(length, (1,), [1.0], "symmetric") - torch.eye(
        length, dtype=DOUBLE
    )
    alternating = torch.tensor([(-1.0) ** i for i in range(length)], dtype=DOUBLE)
    got = float((laplacian @ alternating).norm())
    printed = math.sqrt(2 * float(energy(alternating)))
    assert got <= 2 * printed
    assert got > printed * 1.6
    assert got / (2 * printed) == pytest.approx(
        math.sqrt((16 * length - 24) / (16 * length - 16))
    )
    if length == 24:
        assert (round(got, 2), round(printed, 2)) == (18.97, 9.59)
    if length == 400:
        assert got / (2 * printed) > 0.999


@given(length=st.integers(2, 40), seed=st.integers(0, 999))
def test_the_roughness_bound_holds(length, seed):
    laplacian = step_matrix(length, (1,), [1.0], "symmetric") - torch.eye(
        length, dtype=DOUBLE
    )
    x = randn(length, 4, seed=seed)
    assert (laplacian @ x).norm() <= (8 * energy(x)).sqrt() * ROUNDING


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_transfer_function_has_alpha_in_it(stride):
    """H(ω, h) = 1 − 4α sin²(ωh/2); printed without α, it would be another number (docs/errata.md, P4)."""
    alpha = 0.2
    omega = 5 * math.pi / 40
    mode = torch.cos(omega * (torch.arange(40, dtype=DOUBLE) + 0.5))
    after = step_matrix(40, (stride,), [alpha], "symmetric") @ mode
    squared = math.sin(omega * stride / 2) ** 2
    assert_close(after, (1 - 4 * alpha * squared) * mode)
    assert not torch.allclose(after, (1 - 4 * squared) * mode)
