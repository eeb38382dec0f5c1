"""Gumbel noise: its distribution, and the noise of a part of the nodes is a part of the noise."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.library import opcheck

from diffusion_mp.kernels.noise import RUN, STRIDE, gumbel, take_step

STATE, LIKE = torch.tensor([7, 3]), torch.empty(3 * RUN + 5, 2, 0, dtype=torch.float64)


@pytest.mark.parametrize(("first", "last"), [(0, 10), (10, RUN), (RUN, RUN + 1), (RUN - 3, 3 * RUN + 5), (9, 9)])
def test_a_part_of_the_nodes_has_its_part_of_the_noise(first: int, last: int) -> None:
    whole = gumbel(STATE, LIKE, 4)
    assert torch.equal(gumbel(STATE, LIKE[first:last], 4, first), whole[first:last])


def test_every_node_sample_and_step_has_noise_of_its_own() -> None:
    whole, later = gumbel(STATE, LIKE, 4), gumbel(STATE + torch.tensor([0, 1]), LIKE, 4)
    assert torch.equal(gumbel(STATE, LIKE, 4), whole)
    assert torch.cat([whole, later]).unique().numel() == 2 * whole.numel()


def test_runs_meet_the_seeds_of_each_other_as_late_as_the_comment_says() -> None:
    """The CPU's generator takes 32 bits of seed + step + STRIDE · run; 10⁵ runs are so many steps apart."""
    distance = torch.arange(1, 100_000) * STRIDE % 2**32
    assert torch.minimum(distance, 2**32 - distance).min() == 11_703


def test_the_distribution() -> None:
    """Mean γ, variance π²/6, and P(g < 0) = 1/e, each within four standard errors of the estimate."""
    noise = gumbel(STATE, LIKE, 4).flatten()
    error = 4 / math.sqrt(noise.numel())
    assert abs(noise.mean() - 0.5772156649) < error * math.pi / math.sqrt(6)
    assert abs(noise.var() - math.pi**2 / 6) < error * math.sqrt(4.4) * math.pi**2 / 6  # excess kurtosis 12/5
    assert abs((noise < 0).double().mean() - math.exp(-1)) < error * 0.5


def test_a_step_is_taken_once_by_whoever_comes() -> None:
    """Every step is handed out exactly once, whatever the threads."""
    state = STATE.clone()
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: take_step(state).tolist(), range(400)))
    assert sorted(taken) == [[7, 3 + k] for k in range(400)]
    assert state.tolist() == [7, 403]
    opcheck(take_step, (state,))
