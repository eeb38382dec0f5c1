"""SFiConv against Eq. 11 of SFi-Former, and what it becomes without friction or without adjacency."""

import pytest
import torch

from diffusion_mp.graph import Graph
from diffusion_mp.layers import SFiConv
from helpers import built, close, randn, refuses

EDGES = torch.tensor(
    [[0, 1, 1, 2, 3, 0], [1, 0, 2, 1, 0, 3]]
)  # undirected; node 4 is isolated


def build(*sizes: int, **options) -> SFiConv:
    return built(lambda: SFiConv(*sizes, **options)).double().eval()


@pytest.mark.parametrize("gamma", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_equation_11(gamma: float, lam: float) -> None:
    conv = build(4, 4, 2, gamma=gamma, lam=lam)
    x = randn(5, 4, seed=1)
    looped = torch.eye(5, dtype=torch.float64).index_put(
        (EDGES[1], EDGES[0]), torch.ones(6, dtype=torch.float64)
    )
    degree = looped.sum(1)
    adjacency = looped / (degree[:, None] * degree[None, :]).sqrt()
    attention = conv.diffusivity.attention(x).to_dense()
    total = torch.zeros(5, 4, dtype=torch.float64)
    rate = conv.diffusivity.log_gamma.exp()
    assert rate.item() == pytest.approx(gamma, rel=1e-6)
    for h in range(2):
        value = conv.value.weight[2 * h : 2 * h + 2]
        mix = conv.mix.weight[:, 2 * h : 2 * h + 2]
        total += (adjacency + rate * attention[h]) @ x @ value.t() @ mix.t()
    close(conv(x, EDGES), x + total / (1 + rate))
    change = build(4, 4, 2, gamma=gamma, lam=lam, residual=False)(x, EDGES)
    close(change, conv(x, EDGES) - x)


def test_without_friction_and_adjacency_it_is_multi_head_attention() -> None:
    conv = build(4, 4, 2, lam=0.0, adjacency=False, residual=False)
    theirs = torch.nn.MultiheadAttention(4, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        flow = conv.diffusivity
        theirs.in_proj_weight.copy_(
            torch.cat([flow.query.weight, flow.key.weight, conv.value.weight])
        )
        theirs.out_proj.weight.copy_(conv.mix.weight)
    ours = randn(5, 4, seed=1).requires_grad_()
    other = randn(5, 4, seed=1).requires_grad_()
    out = conv(ours, EDGES)
    expected = theirs(other, other, other, need_weights=False)[0]
    close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    close(ours.grad, other.grad)
    torch.testing.assert_close(
        conv.diffusivity.query.weight.grad,
        theirs.in_proj_weight.grad[:4],
        rtol=1e-9,
        atol=1e-9,
    )


def test_without_edges_the_attention_is_alone_and_an_empty_edge_list_is_a_graph() -> (
    None
):
    conv = build(4, 4, 2)
    x = randn(5, 4, seed=1)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    values = conv.value(x).unflatten(1, (2, -1))
    alone = conv.mix(conv.diffusivity.attention(x).matmul(values).flatten(1))
    close(conv(x), x + alone)
    halved = conv.mix(
        (0.5 * conv.diffusivity.attention(x).matmul(values) + 0.5 * values).flatten(1)
    )
    close(conv(x, nothing), x + halved)


def test_gamma_learns_and_stays_positive() -> None:
    conv = build(4, 4, gamma=0.5)
    x = randn(5, 4, seed=1)
    conv(x, EDGES).square().sum().backward()
    gamma = conv.diffusivity.log_gamma
    assert gamma.grad.abs() > 0
    for logarithm in (-1e4, 1e4):
        with torch.no_grad():
            gamma.fill_(logarithm)
        coupling = conv(x, EDGES, return_coupling=True)[1]
        if logarithm > 0:
            alone = coupling.attention
        else:
            alone = conv.diffusivity.graph_term(x, Graph(5, EDGES))
        close(coupling.to_dense(), alone.to_dense())


def test_the_flow_can_stay_near() -> None:
    """With one hop nothing reaches a node but from its neighbours and itself."""
    near = build(4, 4, hops=1)(randn(5, 4, seed=1), EDGES, return_coupling=True)[
        1
    ].to_dense()[0]
    allowed = torch.eye(5, dtype=torch.bool).index_put(
        (EDGES[1], EDGES[0]), torch.tensor(True)
    )
    assert (near[~allowed] == 0).all()


test_options_that_do_not_fit = refuses(
    (
        lambda: SFiConv(4, 6, 4, residual=False),
        ValueError,
        "heads must divide out_channels; got 4 heads, 6 channels",
    ),
    (
        lambda: SFiConv(4, 6),
        ValueError,
        "residual adds x to the output, so both must have the same.*; got 4 and 6",
    ),
    (
        lambda: build(4, 4, hops=1)(randn(5, 4, seed=1)),
        ValueError,
        "works on observed edges",
    ),
)
