"""SFiConv against Eq. 11 of SFi-Former, and what it becomes without friction or without adjacency."""

import pytest
import torch

from diffusion_mp.graph import Graph
from diffusion_mp.layers import SFiConv
from helpers import agree, built, close, randn, refuses

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
    looped = torch.eye(5, dtype=torch.float64)
    looped[EDGES[1], EDGES[0]] = 1
    degree = looped.sum(1)
    adjacency = looped / degree.outer(degree).sqrt()
    attention = conv.diffusivity.attention(x).to_dense()
    rate = conv.diffusivity.log_gamma.exp()
    assert rate.item() == pytest.approx(gamma, rel=1e-6)
    moved = (adjacency + rate * attention) / (1 + rate) @ x
    values = torch.stack(conv.value.weight.chunk(2))
    change = conv.mix((moved @ values.mT).transpose(0, 1).flatten(1))
    close(conv(x, EDGES), x + change)
    without = build(4, 4, 2, gamma=gamma, lam=lam, residual=False)
    close(without(x, EDGES), change)


def test_without_friction_and_adjacency_it_is_multi_head_attention() -> None:
    conv = build(4, 4, 2, lam=0.0, adjacency=False, residual=False)
    flow = conv.diffusivity
    x = randn(5, 4, seed=1).requires_grad_()
    weights = [flow.query.weight, flow.key.weight, conv.value.weight]
    expected, _ = torch.nn.functional.multi_head_attention_forward(
        x,
        x,
        x,
        4,
        2,
        torch.cat(weights),
        None,
        None,
        None,
        False,
        0.0,
        conv.mix.weight,
        None,
        need_weights=False,
    )
    slopes = (1e-9, 1e-9)
    agree(conv(x, EDGES), expected, [x, *weights], (1e-10, 1e-10), slopes)


def test_no_edges_leave_the_attention_alone_and_an_empty_list_is_a_graph() -> None:
    conv = build(4, 4, 2)
    x = randn(5, 4, seed=1)
    values = conv.value(x).unflatten(1, (2, -1))
    attended = conv.diffusivity.attention(x).matmul(values)
    close(conv(x), x + conv.mix(attended.flatten(1)))
    halved = (attended + values) / 2
    nothing = torch.zeros(2, 0, dtype=torch.long)
    close(conv(x, nothing), x + conv.mix(halved.flatten(1)))


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
    conv = build(4, 4, hops=1)
    _, near = conv(randn(5, 4, seed=1), EDGES, return_coupling=True)
    far = torch.ones(5, 5).bool()
    far[EDGES[1], EDGES[0]] = False
    assert not near.to_dense()[0][far.fill_diagonal_(False)].any()


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
