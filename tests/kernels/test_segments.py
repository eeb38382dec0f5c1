"""Stacks of a batch: rows come back, graphs stay apart, and the plan is kept with its boundaries."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from diffusion_mp.kernels import segments
from diffusion_mp.kernels.linear_attention import linear_attention, linear_product
from diffusion_mp.kernels.log_linear_attention import log_linear_product
from diffusion_mp.kernels.segments import batch_plan, stacks

SIZES = {
    "ragged": [3, 1, 1, 40, 3, 0, 17, 3, 70],
    "empty at both ends": [0, 0, 5, 0, 5, 12, 0],
    "one size": [4, 4, 4],
    "one graph": [0, 7, 0],
    "molecules": [10 + (7 * i) % 19 for i in range(60)],
    "large ones": [150, 2, 300, 5, 149],
}


def boundaries(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


@pytest.mark.parametrize("rows", [1, 10, 64, 10**6])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_row_is_stacked_once_and_comes_back(sizes: list[int], heads: int, rows: int) -> None:
    ptr, (n, width) = boundaries(sizes), (sum(sizes), 5)
    x = torch.arange(1.0, n * heads * width + 1).view(n, heads, width)
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).view(-1, 1, 1).expand(-1, heads, 1)
    out, seen = torch.full_like(x, torch.nan), torch.zeros(())
    for mask, (result,), (block, number) in stacks(ptr, rows, [out], [x, graph.float()]):
        assert (number == number[:, :1]).all()  # also below the end of a graph
        nodes = torch.ones_like(number) if mask is None else mask
        seen = seen + (block * nodes).sum()
        assert mask is None or len(block) == 1 or block.size(1) <= rows
        result.copy_(block)
    assert torch.equal(out, x)
    assert seen == x.sum()


def test_rows_that_are_added_are_few() -> None:
    """A bucket more is cheaper than some 128 rows; so there are few of both."""
    sizes = SIZES["molecules"]
    (chunk,) = batch_plan(boundaries(sizes)).chunks(10**6)
    stacked = sum(graphs * size for graphs, size in chunk.shapes)
    assert len(chunk.shapes) <= 3
    assert sum(sizes) <= stacked <= sum(sizes) + 128 * len(chunk.shapes)


def test_a_plan_is_kept_with_its_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    class Counted(segments.Plan):
        def __init__(self, ptr: Tensor) -> None:
            made.append(ptr)
            super().__init__(ptr)

    monkeypatch.setattr(segments, "Plan", Counted)
    before, ptr = len(segments._PLANS), boundaries([3, 9, 5])
    q = torch.randn(17, 2, 4, requires_grad=True)
    for _ in range(3):
        linear_attention(q, q, q, ptr).sum().backward()
    assert len(made) == 1
    ptr.numpy()[1] = 4  # torch's own count of changes does not see this one
    expected = linear_attention(q, q, q, ptr.clone(), backend="reference")
    torch.testing.assert_close(linear_attention(q, q, q, ptr), expected)
    assert len(made) == 2
    assert copy.deepcopy(ptr).equal(pickle.loads(pickle.dumps(ptr)))
    del ptr, expected
    q.grad = None
    gc.collect()
    assert len(segments._PLANS) == before


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "kind",
    [
        partial(linear_attention, constant=1.0, unit=True),
        partial(linear_attention, own=1.0, unit=True),
        partial(linear_attention, constant=30.0, own=0.5),
        lambda q, k, v, ptr: log_linear_product(q, k, v, None, v[..., :2], ptr),
        linear_product,
    ],
    ids=["difformer", "sgformer", "plain", "log-linear", "product"],
)
def test_a_graph_alone_gives_what_it_gives_in_a_batch(
    kind: Callable[..., Tensor], sizes: list[int], heads: int, generator: torch.Generator
) -> None:
    """To 1e-12, forward and backward, whoever is stacked beside it; and a NaN stays in its graph."""
    ptr = boundaries(sizes)
    shape = (int(ptr[-1]), heads, 6)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    out = kind(*inputs, ptr)
    grads = torch.autograd.grad(out, inputs, weight)
    for first, last in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        alone = kind(*[x[first:last] for x in inputs], None)
        parts = torch.autograd.grad(alone, inputs, weight[first:last])
        for batched, single in zip([out[first:last], *grads], [alone, *parts], strict=True):
            mine = batched if len(batched) == last - first else batched[first:last]
            its = single if len(single) == last - first else single[first:last]
            scale = float(its.detach().abs().max()) if its.numel() else 0.0
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12 * max(1.0, scale))
    largest = int(ptr.diff().argmax())
    rows = slice(int(ptr[largest]), int(ptr[largest + 1]))
    spoiled = [x.detach().clone() for x in inputs]
    for x in spoiled:
        x[rows] = torch.nan
        x.requires_grad_()
    found = kind(*spoiled, ptr)
    for mine, clean in zip([found, *torch.autograd.grad(found, spoiled, weight)], [out, *grads], strict=True):
        assert mine[rows].isnan().any()
        for others in (slice(0, rows.start), slice(rows.stop, None)):
            torch.testing.assert_close(mine[others], clean[others], rtol=1e-9, atol=1e-9)
