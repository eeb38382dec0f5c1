"""Sums over senders: in one piece and merged from blocks they give the product and all its gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import (
    LinearAttentionCoupling,
    LogLowRankCoupling,
    LowRankCoupling,
    PooledCoupling,
    UniformCoupling,
    merged,
)
from diffusion_mp.kernels.linear_attention import blocked
from diffusion_mp.kernels.log_linear_attention import blocked as log_blocked
from diffusion_mp.testing import tolerance

Make = Callable[[Tensor, Tensor, Tensor], PooledCoupling]

# From queries [N, H, F], keys [N, H, F] and log weights [N, H, K].
KINDS: dict[str, Make] = {
    "low rank": lambda q, k, b: LowRankCoupling(q, k),
    "DIFFormer-s": lambda q, k, b: LinearAttentionCoupling(q, k, constant=1.0, unit=True),
    "SGFormer": lambda q, k, b: LinearAttentionCoupling(q, k, own=1.0, unit=True),
    "linear attention": lambda q, k, b: LinearAttentionCoupling(q.exp(), k.exp(), constant=0.7, own=0.3),
    "log features": lambda q, k, b: LogLowRankCoupling(q, k, log_weight=b),
    "log features, bare": lambda q, k, b: LogLowRankCoupling(q, k, log_weight=b, normalize=False),
    "log features, transposed": lambda q, k, b: LogLowRankCoupling(q, k, log_weight=b, normalize=False).T,
    "mean": lambda q, k, b: UniformCoupling(q.size(0), dtype=q.dtype),
    "sum": lambda q, k, b: UniformCoupling(q.size(0), normalize=False, dtype=q.dtype),
}
NODES = 23


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def inputs(generator: torch.Generator, scale: float = 1.0) -> list[Tensor]:
    shapes = [(NODES, 2, 5), (NODES, 2, 5), (NODES, 2, 3), (NODES, 2, 4)]
    drawn = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.requires_grad_() for t in drawn]


def by_blocks(make: Make, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """S v from couplings that know a block of nodes each."""
    *blocks, values = (t.split(sizes) for t in tensors)
    couplings = [make(*parts) for parts in zip(*blocks, strict=True)]
    sums = merged([coupling.pool(v) for coupling, v in zip(couplings, values, strict=True)])
    return torch.cat([coupling.read(sums, v) for coupling, v in zip(couplings, values, strict=True)])


def assert_same_product(make: Make, tensors: list[Tensor], sizes: list[int], generator: torch.Generator) -> None:
    """Values and all gradients of S v by blocks are those of the product."""
    expected, got = make(*tensors[:-1]) @ tensors[-1], by_blocks(make, tensors, sizes)
    assert torch.allclose(got, expected, *tolerance("product", torch.float64))
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = (torch.autograd.grad(out, tensors, weight, allow_unused=True) for out in (got, expected))
    for ours, theirs in zip(*gradients, strict=True):
        if ours is None or theirs is None:  # the uniform coupling has no queries; an unnormalised one is constant there
            assert ours is theirs is None
        else:
            assert torch.allclose(ours, theirs, *tolerance("gradient", torch.float64))


@pytest.mark.parametrize("sizes", [[NODES], [4, 0, 12, 7]], ids=["one", "uneven"])
@pytest.mark.parametrize("height", [7, 1 << 21])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_merged_sums_give_the_product_and_its_gradients(make, sizes, height, backend, generator, monkeypatch) -> None:
    monkeypatch.setattr(log_blocked, "BLOCK", height * 2 * 3 * 5)
    monkeypatch.setattr(blocked, "BLOCK", height * 2 * 5)
    monkeypatch.setattr(blocked, "SMALL", height * 2 * 5)
    monkeypatch.setenv("DIFFUSION_MP_BACKEND", backend)
    assert_same_product(make, inputs(generator), sizes, generator)


@pytest.mark.parametrize("sizes", [[NODES], [4, 0, 12, 7]], ids=["one", "uneven"])
def test_logarithms_of_any_range(sizes, generator) -> None:
    """Features from e^-1000 to e^1000: without shifts that merge, sums over a block overflow or vanish."""
    assert_same_product(KINDS["log features"], inputs(generator, scale=300.0), sizes, generator)


def test_a_ragged_batch_has_no_sums(make, generator) -> None:
    coupling = make(*(t.detach() for t in inputs(generator)[:-1]))
    coupling.ptr = torch.tensor([0, 4, NODES])
    with pytest.raises(ValueError, match=r"pool sums over the nodes of one graph; .* a batch of 2\. Take the graphs"):
        coupling.pool(torch.ones(NODES, 2, 4, dtype=torch.float64))
