"""Dropout with few random bits: its law, its gradient, and where torch's own runs."""

import pytest
import torch
from torch.nn import functional

from diffusion_mp.kernels.noise import dropout

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_scaled_and_the_gradient_has_the_same_entries(dtype):
    x = torch.randn(37, 5, dtype=dtype).requires_grad_()
    out = dropout(x, 0.25)
    assert out.dtype == dtype
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0))
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, kept / torch.tensor(0.75, dtype=dtype))


def test_the_seed_decides():
    torch.manual_seed(3)
    first, second = dropout(torch.ones(50), 0.5), dropout(torch.ones(50), 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(50), 0.5), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_without_training_or_rate():
    x = torch.randn(4, 3)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (2, 3, 5)])
def test_any_shape(shape):
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
    compiled = torch.compile(lambda state: dropout(state, 0.5), fullgraph=True, backend="aot_eager")
    assert 0.4 < float((compiled(x) == 0).float().mean()) < 0.6
