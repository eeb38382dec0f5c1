"""Attention against its dense reference in double precision; pairwise attention, tile by tile, where it is hard."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
from kernel_cases import (
    ATTENTION,
    CASES,
    DEVICE,
    DOUBLE,
    assert_equals_reference,
    attention_inputs,
    randn,
)
from torch.testing import assert_close

from diffusion_mp.kernels.linear_attention import blocked
from diffusion_mp.kernels.pairwise import (
    SCORES,
    fused,
    pairwise_attention,
    pairwise_logsumexp,
    pairwise_product,
    tiled,
)
from helpers import close

# Sums whose terms cancel.
ILL_CONDITIONED = {"linear product", "one feature", "one channel"}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (name, case, dtype)
        for dtype in (DOUBLE, torch.float32, torch.bfloat16, torch.float16)
        for name, case in product(ATTENTION, CASES)
        if case != "4097" and (dtype == DOUBLE or not {name, case} & ILL_CONDITIONED)
    ],
)
def test_attention_equals_its_reference_in_values_and_gradients(
    name, case, dtype, generator, monkeypatch
):
    """With blocks of 64 nodes and tiles of 64 × 64 entries, so that graphs are cut, and small ones stacked."""
    monkeypatch.setattr(blocked, "BLOCK", 1024)
    monkeypatch.setattr(tiled, "TILE", 4096)
    monkeypatch.setattr(tiled, "SMALL", 30)
    inputs, ptr = attention_inputs(case, generator)
    assert_equals_reference(
        partial(ATTENTION[name], ptr=ptr), inputs, generator, dtype, backend="cpu"
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("widths", [(5, 5), (5, 3), (66, 64), (1, 9), (2, 12)])
def test_torchs_fused_kernel_takes_widths_that_are_nearly_equal(
    widths, heads, dtype, generator, monkeypatch
):
    """And everything else goes by tiles; both are what the reference is."""
    features, channels = widths
    calls = []
    run = fused.attention
    monkeypatch.setattr(
        fused,
        "attention",
        lambda *inputs: calls.append(1) or run(*inputs),
    )
    inputs = [
        torch.randn(33, heads, width, generator=generator)
        for width in (features, features, channels)
    ]
    inputs[0] = inputs[0] / features**0.5
    assert_equals_reference(pairwise_attention, inputs, generator, dtype, backend="cpu")
    assert bool(calls) == (channels - features <= fused.PADDING)


def test_shapes_that_do_not_fit_never_reach_the_fused_kernel(generator):
    """It would read past the end of them."""
    q, k, v = randn(3, 9, 2, 4, generator=generator).unbind()
    for inputs in ((q, k[:5], v), (q, k, v[:5]), (q, k, v[:, :1]), (q, k[:, :, :3], v)):
        assert not fused.fits(*inputs, None, "exp")
    assert fused.fits(q, k, v, None, "exp")


LAYOUTS = {
    "across": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "apart": lambda x: torch.cat([x, x], 2)[:, :, ::2],
    "one column": lambda x: x[:, :, :1].expand(x.shape),
    "one row": lambda x: x[:1].expand(x.shape),
    "by head": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", range(4))
def test_rows_may_lie_anywhere(place, layout, width, score, generator):
    """Of q, k, v and the gradient."""
    tensors = [x.detach() for x in randn(4, 30, 2, width, generator=generator)]
    tensors[place] = LAYOUTS[layout](tensors[place])
    grad = tensors.pop()
    leaves = [x.requires_grad_() for x in tensors]
    results = []
    for backend in ("cpu", "reference"):
        out = pairwise_attention(*leaves, score=score, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("tile", "backend"),
    [(64, "cpu"), (1 << 18, "cpu"), (1 << 18, "auto"), (64, "triton")],
)
def test_rows_far_from_the_origin_neither_overflow_nor_vanish(
    score, tile, backend, generator, monkeypatch
):
    """e^256, e^−256 and σ(−256) are no float32: rows that have scores about −256 alone, and rows that have both.

    The scores themselves are integers, so that they are exact in float32 as well.
    """
    monkeypatch.setattr(tiled, "TILE", tile)
    node = torch.arange(40)
    q = torch.tensor([[-256.0, 0.0], [0.0, 256.0]])[node % 2].unsqueeze(1)
    k = torch.tensor([[1.0, 1.0], [1.0, -1.0]])[node // 5 % 2].unsqueeze(1)
    k = k + torch.randint(-3, 4, (40, 1, 2), generator=generator) / 256
    v = torch.randn(40, 1, 3, generator=generator)
    inputs = [x.to(DEVICE if backend == "triton" else "cpu") for x in (q, k, v)]
    assert_equals_reference(
        partial(pairwise_attention, score=score), inputs, generator, backend=backend
    )


@pytest.mark.parametrize("score", SCORES)
def test_a_state_far_from_the_origin_that_attends_to_itself(score, generator):
    """σ(−256²) is zero, but no row vanishes, since that of a vector with itself is not."""
    one = torch.eye(2)
    x = 256 * torch.cat([one, -one, -one[:1]]).unsqueeze(1)
    v = torch.randn(5, 1, 3, generator=generator)

    def attention(x, v, backend):
        return pairwise_attention(x, x, v, score=score, backend=backend)

    assert_equals_reference(attention, [x, v], generator, backend="auto")


def test_memory_that_a_thread_keeps_can_be_written_to_in_every_mode(generator):
    """A thread that begins in inference mode may train later, and two threads write to memory of their own."""
    q, k, v = torch.randn(3, 400, 1, 4, generator=generator)

    def attention(number: int, backend: str = "cpu") -> torch.Tensor:
        with torch.inference_mode(number < 4):
            queries = (q * number).requires_grad_(number >= 4)
            out = pairwise_attention(queries, k, v, score="sigmoid", backend=backend)
            return out.detach().clone()

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(attention, range(40)))
    for number, got in enumerate(found):
        assert_close(got, attention(number, "reference"))


def test_without_loops_nothing_cancels_however_heavy_a_node_is_for_itself(generator):
    """The loops weigh e^0, all others between e^−60 and e^−50: a sum over all pairs holds nothing of them in float32.

    Alone in its graph, the last node has no pair at all.
    """
    n = 40
    ptr = torch.tensor([0, 39, 40])
    k = torch.eye(n, dtype=DOUBLE).unsqueeze(1)
    q = -(50 + 10 * torch.rand(n, 1, n, generator=generator, dtype=DOUBLE)) * (1 - k)
    v = torch.randn(n, 1, 3, generator=generator, dtype=DOUBLE)

    def run(q, k, v, backend):
        lse = pairwise_logsumexp(q, k, ptr, loops=False, backend=backend)
        assert lse[-1] == -torch.inf
        shift = -0.5 * lse.masked_fill(lse == -torch.inf, 0.0)
        out = pairwise_product(q, k, v, shift, shift, ptr, loops=False, backend=backend)
        assert not out[-1].any()
        return out

    assert_equals_reference(run, [q, k, v], generator, backend="cpu")


def test_the_sigmoid_keeps_its_slope_where_it_is_flat(generator):
    """At s = 20 one minus σ(s) is zero in float32, and its slope is 2e-9."""
    q = torch.full((5, 1, 1), 20.0)
    v = torch.randn(5, 1, 2, generator=generator)

    def slope(dtype: torch.dtype, backend: str) -> torch.Tensor:
        key = torch.ones(5, 1, 1, dtype=dtype, requires_grad=True)
        values = [q.to(dtype), key, v.to(dtype)]
        out = pairwise_attention(*values, score="sigmoid", backend=backend)
        return torch.autograd.grad(1e8 * out[:, :, 0].sum(), key)[0]

    expected = slope(DOUBLE, "reference").float()
    for backend in ("auto", "cpu"):
        close(slope(torch.float32, backend), expected, "gradient")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="is about torch's kernels for GPUs"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(64, 64), (5, 3), (20, 20), (66, 64)])
def test_torchs_fused_kernel_on_a_gpu(widths, dtype, generator):
    inputs = [
        torch.randn(133, 2, width, generator=generator).to("cuda", dtype)
        for width in (widths[0], widths[0], widths[1])
    ]
    inputs[0] /= widths[0] ** 0.5
    leaves = [x.requires_grad_() for x in inputs]
    assert fused.fits(*leaves, None, "exp")
    with torch.autocast("cuda", torch.float16):  # nothing is converted
        out = pairwise_attention(*leaves)
    grad = torch.randn(out.shape, generator=generator).to(out)
    got = [out, *torch.autograd.grad(out, leaves, grad, create_graph=True)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = pairwise_attention(*exact, backend="reference")
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    for mine, theirs in zip(got, expected, strict=True):
        atol = 0.02 * float(theirs.detach().abs().max())
        assert_close(mine.double(), theirs, rtol=0.02, atol=atol)
    second = torch.autograd.grad(got[1].square().sum(), leaves)
    assert all(x.isfinite().all() for x in second)
