"""Sparse products in single precision, where other kernels of torch run than in double, at every order of the edges."""

import pytest
import torch

from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm import sddmm, spmm


def _pattern(nodes, count, order, generator):
    edge_index = torch.randint(0, nodes, (2, count), generator=generator)
    ends = {"none": None, "by row": 1, "by column": 0}[order]
    return Graph(nodes, edge_index if ends is None else edge_index[:, edge_index[ends].argsort(stable=True)]).pattern


def _compare(function, reference, inputs, generator):
    """Values and gradients in single precision beside those of the reference in double."""
    got = function(*inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(*doubles)
    direction = torch.randn(got.shape, generator=generator)
    grads = torch.autograd.grad(got, inputs, direction)
    truth = torch.autograd.grad(expected, doubles, direction.double())
    for mine, theirs in zip([got, *grads], [expected, *truth], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


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
        _compare(
            lambda w, v: spmm(pattern, w, v),
            lambda w, v: spmm(pattern, w, v, backend="reference"),
            [weight, b],
            generator,
        )
        _compare(
            lambda a, b: sddmm(pattern, a, b), lambda a, b: sddmm(pattern, a, b, backend="reference"), [a, b], generator
        )


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
