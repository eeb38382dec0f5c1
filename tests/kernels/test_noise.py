"""Dropout with few random bits, and Gumbel noise of which a part of the nodes has its part."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional
from torch.testing import assert_close

from diffusion_mp.runtime.noise import RUN, STRIDE, dropout, gumbel, take_step


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1e-3])
def test_each_entry_is_dropped_with_the_rate_and_apart_from_the_others(rate):
    """Any 0 … 3 entries on either side share a random word; products of centred entries would see it."""
    n = 1_000_001
    dropped = dropout(torch.ones(n, dtype=torch.float64), rate) == 0
    deviation = (rate * (1 - rate) / n) ** 0.5
    assert abs(float(dropped.double().mean()) - rate) < 5 * deviation + 2**-17
    centred = dropped.double() - rate
    for lag in (1, 2, 3, 4, 64):
        product = float((centred[lag:] * centred[:-lag]).mean())
        assert abs(product) < 5 * rate * (1 - rate) / n**0.5
    thirds = float((centred[2:] * centred[1:-1] * centred[:-2]).mean())
    assert abs(thirds) < 5 * (rate * (1 - rate)) ** 1.5 / n**0.5


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_what_is_kept_is_scaled_and_the_gradient_has_the_same_entries(dtype):
    # No zero, which would look like a dropped entry.
    x = (0.1 + torch.rand(37, 5)).to(dtype).requires_grad_()
    out = dropout(x, 0.25)
    assert out.dtype == dtype
    kept = out != 0
    assert_close(out, torch.where(kept, x / 0.75, 0))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_close(grad, kept / torch.tensor(0.75, dtype=dtype))


def test_the_seed_decides_and_nothing_is_dropped_without_training_or_rate():
    torch.manual_seed(3)
    first = dropout(torch.ones(50), 0.5)
    second = dropout(torch.ones(50), 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(50), 0.5), first)
    assert not torch.equal(first, second)
    x = torch.randn(4, 3)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    for shape in ((0,), (1,), (3, 0), (2, 3, 5)):
        assert dropout(torch.ones(shape), 0.5).shape == shape


@pytest.mark.parametrize("rate", [1e-7, 1 - 1e-7])
def test_a_rate_that_has_no_multiple_near_is_torchs(rate):
    torch.manual_seed(1)
    found = dropout(torch.ones(1_000), rate)
    torch.manual_seed(1)
    assert torch.equal(found, functional.dropout(torch.ones(1_000), rate))


def test_torchs_own_runs_where_torch_transforms():
    x = torch.ones(8, 400)
    rows = torch.func.vmap(lambda row: dropout(row, 0.5), randomness="different")(x)
    assert 0.4 < float((rows == 0).float().mean()) < 0.6
    compiled = torch.compile(
        lambda state: dropout(state, 0.5), fullgraph=True, backend="aot_eager"
    )
    assert 0.4 < float((compiled(x) == 0).float().mean()) < 0.6


STATE = torch.tensor([7, 3])
LIKE = torch.empty(3 * RUN + 5, 2, 0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 10), (10, RUN), (RUN, RUN + 1), (RUN - 3, 3 * RUN + 5), (9, 9)],
)
def test_a_part_of_the_nodes_has_its_part_of_the_noise(first, last):
    full = gumbel(STATE, LIKE, 4)
    assert torch.equal(gumbel(STATE, LIKE[first:last], 4, first), full[first:last])


def test_every_node_sample_and_step_has_noise_of_its_own():
    full = gumbel(STATE, LIKE, 4)
    later = gumbel(STATE + torch.tensor([0, 1]), LIKE, 4)
    assert torch.equal(gumbel(STATE, LIKE, 4), full)
    assert torch.cat([full, later]).unique().numel() == 2 * full.numel()
    # The CPU's generator takes 32 bits of seed + step + STRIDE · run; 10⁵ runs are so many steps apart.
    distance = torch.arange(1, 100_000) * STRIDE % 2**32
    assert torch.minimum(distance, 2**32 - distance).min() == 11_703


def test_the_distribution():
    """Mean γ, variance π²/6, and P(g < 0) = 1/e, each within four standard errors of the estimate."""
    noise = gumbel(STATE, LIKE, 4).flatten()
    error = 4 / math.sqrt(noise.numel())
    assert abs(noise.mean() - 0.5772156649) < error * math.pi / math.sqrt(6)
    # Excess kurtosis 12/5.
    assert abs(noise.var() - math.pi**2 / 6) < error * math.sqrt(4.4) * math.pi**2 / 6
    assert abs((noise < 0).double().mean() - math.exp(-1)) < error * 0.5


def test_every_step_is_taken_once():
    state = STATE.clone()
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: take_step(state).tolist(), range(400)))
    assert sorted(taken) == [[7, 3 + k] for k in range(400)]
    assert state.tolist() == [7, 403]
    opcheck(take_step, (state,))
