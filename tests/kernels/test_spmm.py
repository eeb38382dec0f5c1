"""Sparse products at every order of the edges and in every shape, in double and in single precision."""

from functools import partial

import pytest
import torch
from kernel_cases import assert_same, randn

from diffusion_mp.graph import Graph
from diffusion_mp.graph.pattern import Compressed, Pattern
from diffusion_mp.kernels.spmm import sddmm, spmm


def _pattern(nodes, count, order, generator):
    edge_index = torch.randint(0, nodes, (2, count), generator=generator)
    ends = {"none": None, "by row": 1, "by column": 0}[order]
    return Graph(nodes, edge_index if ends is None else edge_index[:, edge_index[ends].argsort(stable=True)]).pattern


@pytest.mark.parametrize("order", ["none", "by row", "by column"])
@pytest.mark.parametrize(("shared", "heads", "channels"), [(True, 1, 1), (True, 3, 7), (False, 3, 7), (False, 8, 16)])
@pytest.mark.parametrize(("nodes", "count"), [(1, 3), (2, 4), (61, 500), (300, 997)])
def test_single_precision_agrees_with_double(nodes, count, shared, heads, channels, order, generator, monkeypatch):
    pattern = _pattern(nodes, count, order, generator)
    weight, a, b = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in [(count, 1 if shared else heads), (nodes, heads, channels), (nodes, heads, channels)]
    )
    for at_once in (1 << 18, 2 * count, 1):  # all heads in one call, some, one by one
        monkeypatch.setattr("diffusion_mp.kernels.spmm.AT_ONCE", at_once)
        for run, inputs in ((spmm, [weight, b]), (sddmm, [a, b])):
            results = []
            for dtype, backend in ((torch.float32, "auto"), (torch.float64, "reference")):
                leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
                out = run(pattern, *leaves, backend=backend)
                direction = torch.arange(out.numel()).cos().view_as(out).to(dtype)
                results.append([out, *torch.autograd.grad(out, leaves, direction)])
            for mine, theirs in zip(*results, strict=True):
                assert mine.dtype == torch.float32
                atol = 1e-5 * float(theirs.detach().abs().max())
                torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(("heads", "channels"), [(1, 5), (3, 5), (3, 1)])
@pytest.mark.parametrize(
    ("rows", "cols", "count"),
    [(5, 12, 30), (12, 5, 30), (5, 3, 0), (1, 9, 4), (1, 1, 0), (1, 1, 2), (63, 63, 200), (500, 500, 2049)],
)
def test_matrices_of_any_shape(rows, cols, count, heads, channels, generator):
    row, col = (torch.randint(0, size, (count,), generator=generator) for size in (rows, cols))
    pattern = Pattern(Compressed(row, col, rows), Compressed(col, row, cols))
    weight = randn(count, heads, generator=generator)
    v, a = randn(cols, 3, channels, generator=generator), randn(rows, 3, channels, generator=generator)
    dense = torch.zeros(rows, cols, heads, dtype=weight.dtype).index_put((row, col), weight, accumulate=True)
    expected = dense.permute(2, 0, 1).expand(3, -1, -1) @ v.transpose(0, 1)
    torch.testing.assert_close(spmm(pattern, weight, v).transpose(0, 1), expected)
    for run, inputs in ((spmm, [weight, v]), (sddmm, [a, v])):
        fast = partial(run, pattern)
        assert_same(fast, partial(fast, backend="reference"), inputs, generator)
        if count:
            assert torch.autograd.gradgradcheck(fast, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_reaches_whom_it_is_sent_to_and_nobody_else(dtype, generator):
    pattern = _pattern(40, 90, "none", generator)
    v = torch.randn(40, 2, 3, generator=generator, dtype=dtype)
    v[int(pattern.col[0]), 1, 2] = torch.nan
    out = spmm(pattern, torch.rand(90, 2, generator=generator, dtype=dtype), v)
    reached = torch.zeros(40, dtype=torch.bool)
    reached[pattern.row[pattern.col == pattern.col[0]]] = True
    assert torch.equal(out.isnan().any(2).any(1), reached)
    assert not out[:, 0].isnan().any()


def test_views_that_are_not_contiguous_are_read_as_they_are(generator):
    pattern = _pattern(30, 100, "none", generator)
    weight = torch.randn(3, 100, generator=generator).t()
    a, b = (torch.randn(5, 3, 30, generator=generator).permute(2, 1, 0) for _ in range(2))
    torch.testing.assert_close(spmm(pattern, weight, b), spmm(pattern, weight, b, backend="reference"))
    torch.testing.assert_close(sddmm(pattern, a, b), sddmm(pattern, a, b, backend="reference"))
