"""The GraphGPS block, its two branches with and without edges; and GatedGCN against its equation, node by node."""

import pytest
import torch
from torch.nn.functional import layer_norm, relu

from diffusion_mp.graph import Graph
from diffusion_mp.layers import GatedGCNConv, GPSBlock, MLPConv, SFiConv
from diffusion_mp.testing.laws import seeded
from helpers import built, close, randn, refuses

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 0]])


def build(local: bool = True, attention: bool = True, dropout: float = 0.0) -> GPSBlock:
    with seeded(0):
        first = GatedGCNConv(4) if local else None
        second = SFiConv(4, 4, 2, residual=False) if attention else None
        return GPSBlock(4, first, second, dropout=dropout).double().eval()


X = randn(5, 4, seed=1)
E = randn(5, 4, seed=2)


def test_the_branches_meet_before_the_feed_forward_network() -> None:
    block = build()
    local, edges = block.local(X, EDGES, edge_attr=E)
    attended = block.attention_norm(X + block.attention(X, EDGES))
    total = block.local_norm(local) + attended
    got, got_edges = block(X, EDGES, edge_attr=E)
    close(got, block.norm(total + block.ffn(total)))
    close(got_edges, edges)
    # Without edges the attention is alone.
    total = block.attention_norm(X + block.attention(X))
    close(block(X), block.norm(total + block.ffn(total)))


def test_either_branch_may_be_missing() -> None:
    local = build(attention=False)
    attention = build(local=False)
    total = local.local_norm(local.local(X, EDGES))
    close(local(X, EDGES), local.norm(total + local.ffn(total)))
    _, edges, coupling = attention(X, EDGES, edge_attr=E, return_coupling=True)
    assert torch.equal(edges, E)
    assert coupling.heads == 2
    assert local(X, EDGES, return_coupling=True)[1].heads == 4


test_branches_that_do_not_fit_are_refused = refuses(
    (lambda: build(attention=False)(X), ValueError, "works on observed edges"),
    (lambda: GPSBlock(4), ValueError, "local or attention"),
    (
        lambda: GPSBlock(4, GatedGCNConv(4), MLPConv(4, 3)),
        ValueError,
        "attention must map",
    ),
    (lambda: GPSBlock(4, GatedGCNConv(3)), ValueError, "local must map"),
)


@pytest.mark.parametrize("attention", [True, False])
def test_dropout_acts_on_what_a_branch_adds(attention: bool) -> None:
    branch = MLPConv(4, 4)
    block = GPSBlock(
        4, *((None, branch) if attention else (branch, None)), norm=None, dropout=0.5
    ).double()
    block.ffn = torch.nn.Identity()  # the output is twice the sum of the branches
    change = branch(X)
    with seeded(0):
        added = block(X, EDGES) / 2 - X
    kept = added != 0
    assert 0 < kept.sum() < kept.numel()
    close(added[kept], 2 * change[kept])


# a loop, a pair twice; node 4 is isolated.
MULTI = torch.tensor([[0, 1, 1, 2, 2, 3, 1], [1, 0, 2, 1, 2, 0, 2]])
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.0, 1.0], dtype=torch.float64)


NODES = randn(5, 3)
ATTR = randn(7, 3, seed=1)


def gated(**options: object) -> GatedGCNConv:
    return built(lambda: GatedGCNConv(3, **options)).double().eval()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_edges", [False, True])
def test_the_equation_node_by_node(weighted: bool, with_edges: bool) -> None:
    conv = gated(norm="layer", eps=0.01)
    weight = WEIGHT if weighted else torch.ones(7, dtype=torch.float64)
    senders, receivers = MULTI
    logits = conv.target(NODES[receivers]) + conv.source(NODES[senders])
    if with_edges:
        logits = logits + conv.edge(ATTR)
    gates = weight.unsqueeze(1) * logits.sigmoid()
    rows = []
    for i in range(5):
        to_i = receivers == i
        total = (gates[to_i] * conv.value(NODES[senders[to_i]])).sum(0)
        moved = conv.own(NODES[i]) + total / (gates[to_i].sum(0) + 0.01)
        rows.append(NODES[i] + relu(layer_norm(moved, [3])))
    passed = WEIGHT if weighted else None
    if with_edges:
        got, edges = conv(NODES, MULTI, passed, edge_attr=ATTR)
        close(edges, ATTR + relu(layer_norm(logits, [3])))
    else:
        got = conv(NODES, MULTI, passed)
    close(got, torch.stack(rows))


def test_the_gates_are_a_coupling_with_one_head_per_channel() -> None:
    conv = gated(norm=None, residual=False, eps=1e-9)
    out, edges, gates = conv(NODES, MULTI, edge_attr=ATTR, return_coupling=True)
    dense = gates.to_dense()
    assert gates.heads == 3
    product = torch.einsum("cij,jc->ic", dense, conv.value(NODES))
    close(out, relu(conv.own(NODES) + product))
    received = dense.sum(2)
    assert (received[:, :3] - 1).abs().max() < 1e-7
    assert (received[:, 4] == 0).all()
    assert (edges >= 0).all()


def test_dropout_of_gates_is_drawn_in_training_only() -> None:
    conv = gated(norm=None, dropout=0.5)
    steady = conv(NODES, MULTI, edge_attr=ATTR)
    drawn = built(lambda: conv.train()(NODES, MULTI, edge_attr=ATTR))
    for kept, state, change in zip(steady, drawn, (NODES, ATTR), strict=True):
        dropped = state == change
        assert 0 < (dropped & (kept != change)).sum() < kept.numel()


CONV = gated()
LOOPS = torch.eye(5).double().to_sparse()
test_what_does_not_fit_is_refused = refuses(
    (lambda: CONV(NODES), ValueError, "works on observed edges"),
    (lambda: CONV(NODES, MULTI, edge_attr=ATTR[:6]), ValueError, "edge_attr"),
    (
        lambda: CONV(NODES, Graph(5, MULTI), edge_attr=ATTR[:, :2]),
        ValueError,
        "edge_attr",
    ),
    (lambda: CONV(NODES, LOOPS, edge_attr=ATTR[:5]), ValueError, "have no order"),
)
