"""Theorem T2: one λ, certified at the first state, for all steps of a run; the λ of that state alone fails later."""

from itertools import pairwise

import pytest
import torch
from energy_cases import every_penalty

from diffusion_mp import (
    GaussianPenalty,
    certify,
)
from diffusion_mp.energies import certify_trajectory
from energy_forms import Explicit

pytestmark = pytest.mark.usefixtures("no_typecheck")


def run(penalty, x, tau, steps, ptr=None):
    states = [x]
    for _ in range(steps):
        x = states[-1]
        average = penalty.coupling(x, ptr, normalize=True) @ x.unsqueeze(1)
        states.append(x - tau * (x - average.squeeze(1)))
    return states


def rises(penalty, lam, states, ptr=None):
    """How often E(Z_{k+1}, k) > E(Z_k, k − 1), beyond rounding; the first of them is E(Z_1, 0)."""
    energy = Explicit(penalty, lam, ptr=ptr)
    values = [energy(new, old) for old, new in pairwise(states)]
    # E(Z_k, k) ≤ E(Z_k, k − 1): steps are compared with both.
    rest = [energy(state) for state in states[1:]]
    steps = zip(values, rest, values[1:], strict=False)
    return sum(
        bool(new > min(old, still) + 1e-12 * abs(old) + 1e-13)
        for old, still, new in steps
    )


@every_penalty
def test_one_lambda_holds_at_every_step(penalty, ball, uniform, size):
    for _ in range(10):
        x = ball(size(1, 12), size(1, 4))
        tau = uniform(0.02, 1.0)
        certificate = certify_trajectory(penalty, x, tau)
        assert certificate
        states = run(penalty, x, tau, 15)
        for factor in (1.0, 10.0):
            assert rises(penalty, factor * certificate.lam, states) == 0
        assert all(
            certificate.lam >= certify(penalty, state, tau).lam * (1 - 1e-12)
            for state in states
        )


def test_the_certificate_of_the_first_state_is_none_for_later_ones(ball):
    """Nodes that leave a neighbour behind lower its degree, and then a larger λ is needed than at the start."""
    penalty = GaussianPenalty(0.2)
    outgrown = 0
    risen = 0
    for _ in range(30):
        x = ball(6, 2)
        states = run(penalty, x, 1.0, 12)
        lam = certify_trajectory(penalty, x, 1.0).lam
        later = [certify(penalty, state, 1.0).lam for state in states]
        outgrown += max(later) > 1.01 * later[0]
        assert max(later) <= lam
        risen += rises(penalty, 0.1 * lam, states) > 0
    assert outgrown > 20
    assert risen > 5, "below the bound energies do rise"


def test_every_graph_counts_for_itself(ball):
    penalty = GaussianPenalty(0.4)
    ptr = torch.tensor([0, 3, 3, 12])
    x = torch.cat([ball(3, 2), ball(9, 2) + 50])
    certificate = certify_trajectory(penalty, x, 0.7, ptr=ptr)
    alone = [certify_trajectory(penalty, part, 0.7) for part in (x[:3], x[3:])]
    assert certificate.lam >= max(each.lam for each in alone)
    assert rises(penalty, certificate.lam, run(penalty, x, 0.7, 10, ptr), ptr) == 0
    flipped = certify_trajectory(
        penalty, x.flip(0), 0.7, ptr=torch.tensor([0, 9, 9, 12])
    )
    assert flipped.lam == pytest.approx(certificate.lam, rel=1e-12)
    heads = torch.stack([ball(5, 2), 3 * ball(5, 2)], 1)
    of_heads, of_one = (
        certify_trajectory(penalty, part, 0.7) for part in (heads, heads[:, 1])
    )
    assert of_heads.lam == of_one.lam


def test_the_lambda_is_that_of_the_formula_wherever_the_state_lies(ball):
    penalty = GaussianPenalty(0.5)
    x = (1e3 + ball(5, 2)).float()
    tau = 0.7
    wide = x.double()
    across = 4 * (wide - wide.mean(0)).square().sum(1).max()
    degree = 1 + 4 * float(penalty.f(across))
    expected = tau / (2 * degree * (2 - tau * 2 * (1 - 1 / 5)))
    assert certify_trajectory(penalty, x, tau).lam == pytest.approx(expected, rel=1e-12)
