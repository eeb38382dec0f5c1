"""Sums over senders, merged from blocks of any size, of logarithms of any range; `check_coupling` merges two blocks."""

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import (
    LinearAttentionCoupling,
    LogLowRankCoupling,
    PooledCoupling,
    merged,
)
from diffusion_mp.kernels import log_linear_attention
from diffusion_mp.kernels.linear_attention import blocked
from helpers import close, draw

NODES = 23


def log_features(q: Tensor, k: Tensor, b: Tensor) -> PooledCoupling:
    return LogLowRankCoupling(q, k, log_weight=b)


def difformer(q: Tensor, k: Tensor, b: Tensor) -> PooledCoupling:
    return LinearAttentionCoupling(q + 0 * b.sum(), k, constant=1.0, unit=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("height", [7, 1 << 21])
@pytest.mark.parametrize("sizes", [[NODES], [4, 0, 12, 7]], ids=["one", "uneven"])
@pytest.mark.parametrize(
    ("make", "scale"), [(difformer, 1.0), (log_features, 1.0), (log_features, 300.0)]
)
def test_merged_sums_give_the_product_and_its_gradients(
    make, scale, sizes, height, backend, generator, monkeypatch
):
    """Features from e^-1000 to e^1000: without shifts that merge, sums over a block overflow or vanish."""
    monkeypatch.setattr(log_linear_attention, "CHUNK", height * 2 * 3 * 5)
    monkeypatch.setattr(blocked, "BLOCK", height * 2 * 5)
    monkeypatch.setenv("DIFFUSION_MP_BACKEND", backend)
    leaves = [
        (scale * draw(generator, NODES, 2, width)).requires_grad_()
        for width in (5, 5, 3, 4)
    ]
    *blocks, values = (leaf.split(sizes) for leaf in leaves)
    couplings = [make(*parts) for parts in zip(*blocks, strict=True)]
    sums = merged(
        [coupling.pool(v) for coupling, v in zip(couplings, values, strict=True)]
    )
    got = torch.cat(
        [coupling.read(sums, v) for coupling, v in zip(couplings, values, strict=True)]
    )
    expected = make(*leaves[:-1]) @ leaves[-1]
    close(got, expected)
    weight = draw(generator, *expected.shape)
    close(
        *(torch.autograd.grad(out, leaves, weight) for out in (got, expected)),
        "gradient",
    )


def test_a_ragged_batch_has_no_sums(generator):
    coupling = log_features(*(draw(generator, NODES, 2, width) for width in (5, 5, 3)))
    coupling.ptr = torch.tensor([0, 4, NODES])
    with pytest.raises(
        ValueError,
        match=r"pool sums over the nodes of one graph; .* a batch of 2\. Take the graphs",
    ):
        coupling.pool(torch.ones(NODES, 2, 4, dtype=torch.float64))
