"""SGFormer's attention against its formula written out densely, and what ERRATA G1 and G2 say about it."""

from functools import partial

import pytest
import torch

import helpers
from diffusion_mp.couplings import LowRankCoupling
from diffusion_mp.diffusivities import SGFormerDiffusivity
from diffusion_mp.graph import Graph
from helpers import agree, randn

C = 6
HEADS = 3
SIZES = (5, 1, 9)
PTR = torch.tensor([0, 5, 6, 15])
close = partial(helpers.close, operation="parity")


def build(normalize, **options):
    return helpers.built(
        lambda: SGFormerDiffusivity(C, heads=HEADS, normalize=normalize, **options)
    ).double()


def state(num_nodes, dtype=torch.float64, seed=1):
    return randn(num_nodes, C, seed=seed).to(dtype)


def dense_attention(x, query, key, normalize):
    """[H, n, n] of one graph, entry by entry as the slides have it."""
    q, k = (x @ weight.T for weight in (query, key))
    if normalize == "frobenius":
        q, k = (t / torch.linalg.norm(t) for t in (q, k))
    q, k = (torch.stack(t.chunk(HEADS, dim=1)) for t in (q, k))
    if normalize == "row":
        q, k = (t / torch.linalg.vector_norm(t, dim=2, keepdim=True) for t in (q, k))
    pairs = torch.eye(len(x), dtype=x.dtype) + q @ k.mT / len(x)
    return pairs / pairs.sum(2, keepdim=True)


@pytest.mark.parametrize("projection", ["separate", "tied"])
@pytest.mark.parametrize("normalize", ["row", "frobenius"])
def test_dense_oracle(normalize, projection):
    """Products and all gradients, in a batch of three graphs each of which is normalised by itself."""
    diffusivity = build(normalize, projection=projection, head_channels=4)
    key = diffusivity.key if projection == "separate" else diffusivity.query
    x = state(15).requires_grad_()
    v = state(15, seed=2).unsqueeze(1).requires_grad_()

    coupling = diffusivity(x, Graph(15, ptr=PTR))
    blocks = [
        dense_attention(part, diffusivity.query.weight, key.weight, normalize)
        for part in x.split(SIZES)
    ]
    dense = torch.stack(
        [torch.block_diag(*(block[h] for block in blocks)) for h in range(HEADS)]
    )
    close(coupling.to_dense(), dense)
    expected = torch.einsum("hij,jd->ihd", dense, v[:, 0])
    leaves = [x, v, *diffusivity.parameters()]
    agree(coupling @ v, expected, leaves, (1e-10, 1e-10))


@pytest.mark.parametrize("normalize", ["row", "frobenius"])
def test_the_identity_is_part_of_the_exported_attention(normalize):
    """ERRATA G2: without it rows would not sum to one."""
    x = state(15)
    diffusivity = build(normalize)
    graph = Graph(15, ptr=PTR)
    coupling = diffusivity(x, graph)
    close(coupling.degree(), torch.ones(15, HEADS, dtype=torch.float64))
    size = torch.repeat_interleave(PTR.diff(), PTR.diff()).unsqueeze(1)
    identity = size / (
        size + LowRankCoupling(*diffusivity.queries_and_keys(x, graph), PTR).degree()
    )
    released = coupling.to_dense() - torch.diag_embed(identity.T)
    assert (released.sum(2) - 1).abs().min() > 0.1


def test_frobenius_attention_vanishes_with_the_number_of_nodes():
    """ERRATA G1: at most 1/n of the values, which constant vectors attain; the row-wise form keeps its strength."""
    for num_nodes, dtype, change in (
        (1_000, torch.float64, 1e-4),
        (169_000, torch.float32, 1e-6),
    ):
        x = state(num_nodes, dtype)
        v = state(num_nodes, dtype, seed=2).unsqueeze(1)
        with torch.no_grad():
            diffusivity = build("frobenius").to(dtype)
            added = (
                LowRankCoupling(*diffusivity.queries_and_keys(x, Graph(num_nodes)))
                @ v
                / num_nodes
            )
            assert (added.norm(dim=(0, 2)) <= v.norm() / num_nodes).all()
            assert ((diffusivity(x) @ v) - v).norm() < change * v.expand(
                -1, HEADS, -1
            ).norm()
            row = build("row").to(dtype)(x + 1)  # a state with a mean, as after a ReLU
            assert ((row @ v) - v).norm() > 0.01 * v.norm()
    constant = SGFormerDiffusivity(2, projection=None, normalize="frobenius")
    one = torch.ones(1_000, 1, 2).double()
    close(
        LowRankCoupling(*constant.queries_and_keys(one[:, 0], Graph(1_000))) @ one, one
    )


def test_a_node_that_points_away_from_itself():
    """One node with k = −q has D = 0: a zero row with finite gradients, not 0/0."""
    diffusivity = SGFormerDiffusivity(1).double()
    with torch.no_grad():
        diffusivity.query.weight.fill_(1.0)
        diffusivity.key.weight.fill_(-1.0)
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    out = diffusivity(x) @ x.unsqueeze(1)
    assert out.item() == 0
    for gradient in torch.autograd.grad(out.sum(), [x, *diffusivity.parameters()]):
        assert gradient.isfinite().all()
