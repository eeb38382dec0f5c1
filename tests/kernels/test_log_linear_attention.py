"""Attention through log features against its dense reference in double precision, and where float32 is hard."""

import math
from functools import partial

import pytest
import torch
from kernel_cases import DOUBLE, assert_same, randn
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.kernels import log_linear_attention
from diffusion_mp.kernels.log_linear_attention import (
    log_linear_entries,
    log_linear_logsumexp,
    log_linear_product,
)
from diffusion_mp.testing import tolerance
from helpers import close

FEATURES = 5
CHANNELS = 3
SAMPLES = 4


def draw(
    n: int,
    generator: torch.Generator,
    *,
    heads: int = 2,
    samples: int = SAMPLES,
    dtype=DOUBLE,
) -> list[Tensor]:
    """log_q, log_k, v, row_shift, col_shift."""
    widths = (FEATURES, FEATURES, CHANNELS, samples, samples)
    return [
        randn(n, heads, width, generator=generator, dtype=dtype) for width in widths
    ]


@pytest.mark.parametrize("given", [False, True])
def test_the_reference_is_what_is_written_out(given, generator):
    """Every pair's log score by itself: no sums over senders, and no shift."""
    log_q, log_k, v, row_shift, col_shift = draw(20, generator)
    scores = (log_q[:, None] + log_k[None]).logsumexp(3).unsqueeze(
        3
    ) + col_shift  # [N, N, H, K]
    log_sum = scores.logsumexp(1)
    shifts = row_shift if given else -log_sum - math.log(SAMPLES)
    out = torch.einsum("ijhs,jhd->ihd", (scores + shifts[:, None]).exp(), v)
    got = log_linear_product(
        log_q, log_k, v, row_shift if given else None, col_shift, backend="reference"
    )
    close(got, out)
    assert_close(
        log_linear_logsumexp(log_q, log_k, col_shift, backend="reference"), log_sum
    )


@pytest.mark.parametrize("samples", [1, SAMPLES])
@pytest.mark.parametrize("chunk", [1, 1 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize("what", ["normalised", "product", "logsumexp"])
def test_values_and_gradients(batch, what, chunk, samples, generator, monkeypatch):
    monkeypatch.setattr(log_linear_attention, "CHUNK", chunk)
    ptr, n = batch
    log_q, log_k, v, row_shift, col_shift = draw(n, generator, samples=samples)

    def normalised(log_q, log_k, v, col_shift, **options):
        return log_linear_product(log_q, log_k, v, None, col_shift, **options)

    run, inputs = {
        "normalised": (normalised, [log_q, log_k, v, col_shift]),
        "product": (log_linear_product, [log_q, log_k, v, row_shift, col_shift]),
        "logsumexp": (log_linear_logsumexp, [log_q, log_k, col_shift]),
    }[what]
    assert_same(
        partial(run, ptr=ptr), partial(run, ptr=ptr, backend="reference"), inputs
    )


@pytest.mark.parametrize("chunk", [1, 1 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 2), (63, 200)])
def test_entries(nodes, edges, chunk, generator, monkeypatch):
    monkeypatch.setattr(log_linear_attention, "CHUNK", chunk)
    source, target = torch.randint(0, nodes, (2, edges), generator=generator)
    pair = draw(nodes, generator)[:2]

    def written_out(log_q: Tensor, log_k: Tensor) -> Tensor:
        return (log_q[target] + log_k[source]).exp().sum(2).log()

    entries = partial(log_linear_entries, torch.stack([source, target]))
    assert_same(entries, written_out, pair)


def far_apart(scale: float, generator: torch.Generator) -> list[Tensor]:
    """log_q and log_k around ±3·scale, many ``scale`` apart between features, samples and nodes; v and col_shift.

    All are multiples of 1/8 below 2¹⁶, so that their sums are exact in float32 as well.
    """
    log_q, log_k, v, _, col_shift = (t.detach() for t in draw(40, generator))
    log_q, log_k = (scale * (3 * t.sign() + t) for t in (log_q, log_k))
    return [torch.round(8 * t) / 8 for t in (log_q, log_k, v, scale * col_shift)]


# Differences that float32 resolves, those that it does not, and exponents of ±10⁴.
SCALES = [1.0, 3.0, 7.0, 14.0, 3500.0]


def run(
    function, inputs: list[Tensor], weight: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The value and all gradients, in double."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    out = function(*leaves, backend="reference" if dtype == DOUBLE else "auto")
    return [
        t.double()
        for t in (out, *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves))
    ]


@pytest.mark.parametrize("scale", SCALES)
def test_exponents_far_apart_cost_no_accuracy_in_float32(scale, generator):
    log_q, log_k, v, col_shift = far_apart(scale, generator)
    row_shift = (
        -torch.round(
            8 * log_linear_logsumexp(log_q, log_k, col_shift, backend="reference")
        )
        / 8
    )
    inputs = [log_q, log_k, v, row_shift, col_shift]
    weight = torch.randn(v.shape, generator=generator, dtype=DOUBLE)
    got, expected = (
        run(log_linear_product, inputs, weight, dtype)
        for dtype in (torch.float32, DOUBLE)
    )
    # Rows weigh about one: nothing is compared with an underflow.
    assert expected[0].abs().max() > 1
    assert_close(got, expected, **tolerance("product", torch.float32)._asdict())
    inputs = [log_q, log_k, col_shift]
    weight = torch.randn(col_shift.shape, generator=generator, dtype=DOUBLE)
    got, expected = (
        run(log_linear_logsumexp, inputs, weight, dtype)
        for dtype in (torch.float32, DOUBLE)
    )
    assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    # float32 rounds L by 2⁻²⁴ of itself, twice; the weights exp(· − L) inherit that as a relative error.
    rounding = (
        2**-23 * expected[0].abs().max().item()
        + tolerance("product", torch.float32).rtol
    )
    assert_close(
        got[1:], expected[1:], rtol=rounding, atol=rounding * weight.abs().max().item()
    )


@pytest.mark.parametrize("samples", [1, 2])
def test_the_shift_is_the_maximum_of_a_product_of_weight_and_feature(samples):
    """Node 0 has the largest weight, node 1 the larger product: maxima taken apart would be 200 nats above it."""
    log_k = torch.tensor([-200.0, 0.0]).view(2, 1, 1)
    # The second sample has no such weight.
    col_shift = torch.tensor([[150.0, 0.0], [0.0, 0.0]]).view(2, 1, 2)[:, :, :samples]
    lse = log_linear_logsumexp(torch.zeros(2, 1, 1), log_k, col_shift)
    assert torch.equal(lse, torch.zeros(2, 1, samples))
    v = torch.tensor([5.0, 7.0]).view(2, 1, 1)
    out = log_linear_product(torch.zeros(2, 1, 1), log_k, v, -lse, col_shift)
    assert torch.equal(out, torch.full((2, 1, 1), 7.0 * samples))


def test_what_is_kept_for_the_backward_pass_is_a_few_times_the_inputs(
    generator, monkeypatch
):
    """Features of all samples, receivers and senders, would add more than twice the inputs."""
    monkeypatch.setattr(log_linear_attention, "CHUNK", 1000)
    log_q, log_k, v, row_shift, col_shift = draw(100, generator, samples=8)
    inputs = [log_q, log_k, v, row_shift, col_shift]
    size = sum(t.numel() for t in inputs)
    assert 2 * log_q.numel() * 8 > 2 * size
    for shift in (None, row_shift):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.setdefault(t.data_ptr(), t), lambda t: t
        ):
            log_linear_product(log_q, log_k, v, shift, col_shift)
        assert sum(t.numel() for t in kept.values()) < 3 * size
