"""``MomentumStep``: Theorem T4, and that momentum pays."""

import math
from itertools import pairwise

import pytest
import torch
from dense_updates import DOUBLE

from diffusion_mp import (
    GaussianPenalty,
    MixturePenalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
)
from diffusion_mp.testing.problems import path_problem, random_problem
from diffusion_mp.updates import ExplicitEuler, MomentumStep
from energy_forms import Explicit
from helpers import close

PENALTIES = [
    QuadraticPenalty(),
    SimplePenalty(),
    SigmoidPenalty(),
    SoftmaxPenalty(3),
]
PENALTIES += [
    GaussianPenalty(0.3),
    MixturePenalty([0.2, 1.0], [3.0, 0.5]).requires_grad_(False),
]


def dense(problem, tau, momentum, steps, leak, drive):
    z = before = problem.state
    for _ in range(steps):
        slope = torch.einsum("ij,jhd->ihd", problem.laplacian, z) + leak * z - drive
        z, before = z - tau * slope + momentum * (z - before), z
    return z


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_it_is_the_two_step_recursion(form, steps):
    problem = random_problem(form=form)
    h = problem.state.cos()
    update = MomentumStep(0.1, 0.7, steps, problem.form, beta=0.4, leak=0.2)
    expected = dense(problem, 0.1, 0.7, steps, 0.2, 0.4 * h)
    close(update(problem.state, problem.coupling, source=h), expected, "entries")
    from_values = update(
        problem.state.flip(0), problem.coupling, values=problem.state, source=h
    )
    close(from_values, expected, "entries")
    still = MomentumStep(0.1, 0.0, 1, problem.form, beta=0.4, leak=0.2)(
        problem.state, problem.coupling, source=h
    )
    explicit = ExplicitEuler(0.1, problem.form, beta=0.4, leak=0.2)(
        problem.state, problem.coupling, source=h
    )
    close(still, explicit, "entries")


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_the_paper_s_energy_falls_with_couplings_that_follow_the_state(penalty):
    """E(Z_{k+1}, k) ≤ E(Z_k, k − 1) with λ = τ/(2m) up to the largest τ of the theorem; twice that rises."""
    generator = torch.Generator().manual_seed(0)

    def rises(factor):
        count = 0
        for _ in range(8):
            n = int(torch.randint(2, 9, (1,), generator=generator))
            momentum = 0.05 + 0.9 * float(torch.rand(1, generator=generator))
            x = torch.randn(n, 1, 2, generator=generator, dtype=DOUBLE)
            x = previous = 0.5 * x / x.norm(dim=2, keepdim=True)
            top = n * float(penalty.f(torch.zeros((), dtype=DOUBLE)))
            update = MomentumStep(factor * 2 * (1 - momentum) / top, momentum, steps=1)
            energy = Explicit(penalty, update.tau / (2 * momentum))
            last = energy(x, x)
            for _ in range(15):
                x, previous = update(x, penalty.coupling(x), previous=previous), x
                now = energy(x, previous)
                count += bool(now > last + 1e-12 * abs(last) + 1e-13)
                last = now
        return count

    assert rises(1.0) == 0
    assert rises(4.0) > 0


def pair_energy(update, coupling, z, after):
    """½(1 + m)‖z⁺ − z‖² + τ⟨z⁺, (Δ + κ)z⟩."""
    slope = coupling.laplacian(z) + update.leak * z
    return float(
        (1 + update.momentum) / 2 * (after - z).square().sum()
        + update.tau * (after * slope).sum()
    )


@pytest.mark.parametrize("seed", range(0, 10, 3))
def test_one_coupling_allows_longer_steps(seed):
    """Up to 2(1 + m)/λ₁ the energy of two states falls and is positive; beyond it the state explodes."""
    problem = random_problem(seed=seed)
    momentum = 0.1 + 0.085 * seed
    leak = 0.3
    bound = (
        2
        * (1 + momentum)
        / (float(torch.linalg.eigvalsh(problem.laplacian)[-1]) + leak)
    )
    update = MomentumStep(0.999 * bound, momentum, 1, leak=leak)
    z = previous = problem.state
    values = []
    for _ in range(80):
        z, previous = update(z, problem.coupling, previous=previous), z
        values.append(pair_energy(update, problem.coupling, previous, z))
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(values))
    assert values[-1] >= 0
    over = MomentumStep(1.1 * bound, momentum, 200, leak=leak)
    assert (
        over(problem.state, problem.coupling).abs().max()
        > 1e3 * problem.state.abs().max()
    )


def test_a_path_comes_to_rest_twenty_times_sooner():
    """100 nodes, until their differences are a millionth: against the fastest step without momentum, 2/(λ₁ + μ)."""
    problem = path_problem(100)
    rates = torch.linalg.eigvalsh(problem.laplacian)
    mu, top = (float(rates[k]) for k in (1, -1))
    slowest = (top - mu) / (
        top + mu
    )  # what a step without momentum leaves of the slowest mode
    steps = int(math.log(1e-6) / math.log(slowest)) // 20
    root, low = math.sqrt(top), math.sqrt(mu)
    fastest = MomentumStep(
        4 / (root + low) ** 2, ((root - low) / (root + low)) ** 2, steps
    )
    rest = fastest(problem.state, problem.coupling)
    assert (rest - rest.mean(0)).norm() < 1e-6 * problem.state.norm()
