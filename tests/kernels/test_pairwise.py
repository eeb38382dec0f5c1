"""Pairwise attention, tile by tile, against its dense reference in double precision."""

import pytest
import torch
from test_kernels import BATCHES, assert_same, randn
from torch import Tensor

from diffusion_mp.kernels.pairwise import (
    SCORES,
    pairwise_attention,
    pairwise_logsumexp,
    pairwise_product,
    reference,
    tiled,
)


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request) -> tuple[Tensor | None, int]:
    sizes, num_nodes = request.param
    return None if sizes is None else torch.tensor([0, *sizes]).cumsum(0), num_nodes


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tile", [4096, 1 << 20])
def test_pairwise_attention_equals_its_reference(batch, score, tile, generator, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", tile)
    ptr, n = batch
    inputs = [randn(n, 2, 5, generator=generator) for _ in range(2)] + [randn(n, 2, 3, generator=generator)]
    assert_same(
        lambda q, k, v: pairwise_attention(q, k, v, ptr, score=score),
        lambda q, k, v: pairwise_attention(q, k, v, ptr, score=score, backend="reference"),
        inputs,
        generator,
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tile", [4096, 1 << 20])
def test_pairwise_product_equals_its_reference(batch, score, tile, generator, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", tile)
    ptr, n = batch
    inputs = [randn(n, 2, 5, generator=generator) for _ in range(2)] + [randn(n, 2, 3, generator=generator)]
    inputs += [randn(n, 2, generator=generator) for _ in range(2)]
    assert_same(
        lambda q, k, v, a, b: pairwise_product(q, k, v, a, b, ptr, score=score),
        lambda q, k, v, a, b: reference.pairwise_product(q, k, v, a, b, ptr, score),
        inputs,
        generator,
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tile", [4096, 1 << 20])
def test_pairwise_logsumexp_equals_its_reference(batch, score, tile, generator, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", tile)
    ptr, n = batch
    inputs = [randn(n, 2, 5, generator=generator) for _ in range(2)]
    assert_same(
        lambda q, k: pairwise_logsumexp(q, k, ptr, score=score),
        lambda q, k: reference.pairwise_logsumexp(q, k, ptr, score),
        inputs,
        generator,
    )
