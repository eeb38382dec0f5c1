"""Stacks of a batch: rows come back, graphs stay apart, and chunks are cached with their boundaries."""

import copy
import gc
import pickle

import pytest
import torch
from kernel_cases import SIZES
from torch import Tensor

from diffusion_mp.kernels import segments
from diffusion_mp.kernels.linear_attention import linear_attention, linear_product
from diffusion_mp.kernels.segments import chunks, stacks


@pytest.mark.parametrize("rows", [1, 10, 64, 10**6])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_row_is_stacked_once_and_comes_back(sizes: list[int], heads: int, rows: int) -> None:
    ptr, (n, width) = torch.tensor([0, *sizes]).cumsum(0), (sum(sizes), 5)
    x = torch.arange(1.0, n * heads * width + 1).view(n, heads, width)
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).view(-1, 1, 1).expand(-1, heads, 1)
    out, seen = torch.full_like(x, torch.nan), torch.zeros(())
    for mask, (result,), (block, number) in stacks(ptr, rows, [out], [x, graph.float()]):
        assert (number == number[:, :1]).all()  # also in padding
        nodes = torch.ones_like(number) if mask is None else mask
        seen = seen + (block * nodes).sum()
        assert mask is None or len(block) == 1 or block.size(1) <= rows
        result.copy_(block)
    assert torch.equal(out, x)
    assert seen == x.sum()


def test_rows_that_are_added_are_few() -> None:
    """A bucket more is cheaper than some 128 rows; so there are few of both."""
    sizes = SIZES["molecules"]
    (chunk,) = chunks(torch.tensor([0, *sizes]).cumsum(0), 10**6)
    stacked = sum(graphs * size for graphs, size in chunk.shapes)
    assert len(chunk.shapes) <= 3
    assert sum(sizes) <= stacked <= sum(sizes) + 128 * len(chunk.shapes)


def test_chunks_are_cached_with_their_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    find = segments._chunks
    monkeypatch.setattr(segments, "_chunks", lambda ptr, rows: made.append(ptr.clone()) or find(ptr, rows))
    before, ptr = len(segments._CACHES), torch.tensor([0, *[3, 9, 5]]).cumsum(0)
    q = torch.randn(17, 2, 4, requires_grad=True)
    for dtype in (torch.float64, torch.float32):  # its masks by dtype
        linear_product(*3 * [q.detach().to(dtype)], ptr)
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
    assert len(segments._CACHES) == before
