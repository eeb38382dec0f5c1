"""GatedGCN against its equation, node by node."""

import pytest
import torch
from torch.nn.functional import layer_norm, relu

from diffusion_mp.graph import Graph
from diffusion_mp.layers import GatedGCNConv
from helpers import built, randn, refuses

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 1], [1, 0, 2, 1, 2, 0, 2]])  # a loop, a pair twice; node 4 is isolated
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.0, 1.0], dtype=torch.float64)


def build(**options: object) -> GatedGCNConv:
    return built(lambda: GatedGCNConv(3, **options)).double().eval()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_edges", [False, True])
def test_the_equation_node_by_node(weighted: bool, with_edges: bool) -> None:
    conv = build(norm="layer", eps=0.01)
    x, e = randn(5, 3), randn(7, 3, seed=1)
    weight = WEIGHT if weighted else torch.ones(7, dtype=torch.float64)
    logits = []
    for k, (j, i) in enumerate(EDGES.t().tolist()):
        logits.append(conv.target(x[i]) + conv.source(x[j]) + (conv.edge(e[k]) if with_edges else 0))
    rows = []
    for i in range(5):
        total, norm = torch.zeros(3, dtype=torch.float64), torch.full((3,), 0.01, dtype=torch.float64)
        for k, (j, target) in enumerate(EDGES.t().tolist()):
            if target == i:
                total = total + weight[k] * logits[k].sigmoid() * conv.value(x[j])
                norm = norm + weight[k] * logits[k].sigmoid()
        rows.append(x[i] + relu(layer_norm(conv.own(x[i]) + total / norm, [3])))
    given = {"edge_attr": e} if with_edges else {}
    got = conv(x, EDGES, WEIGHT if weighted else None, **given)
    if with_edges:
        got, edges = got
        torch.testing.assert_close(edges, e + relu(layer_norm(torch.stack(logits), [3])), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-10, atol=1e-10)


def test_the_gates_are_a_coupling_with_one_head_per_channel() -> None:
    conv = build(norm=None, residual=False, eps=1e-9)
    x, e = randn(5, 3), randn(7, 3, seed=1)
    out, edges, gates = conv(x, EDGES, edge_attr=e, return_coupling=True)
    assert gates.heads == 3
    product = torch.einsum("cij,jc->ic", gates.to_dense(), conv.value(x))
    torch.testing.assert_close(out, relu(conv.own(x) + product), rtol=1e-10, atol=1e-10)
    received = gates.to_dense().sum(2)
    torch.testing.assert_close(received[:, :3], torch.ones(3, 3, dtype=torch.float64), rtol=0, atol=1e-7)
    assert (received[:, 4] == 0).all()
    assert (edges >= 0).all()


def test_dropout_is_drawn_in_training_only() -> None:
    conv = build(norm=None, dropout=0.5)
    x, e = randn(5, 3), randn(7, 3, seed=1)
    steady = conv(x, EDGES, edge_attr=e)
    drawn = built(lambda: conv.train()(x, EDGES, edge_attr=e))
    for kept, state, change in zip(steady, drawn, (x, e), strict=True):
        dropped = state == change
        assert 0 < (dropped & (kept != change)).sum() < kept.numel()


CONV, X, ATTR = build(), torch.ones(5, 3, dtype=torch.float64), torch.ones(7, 3, dtype=torch.float64)
test_what_does_not_fit_is_answered_in_words = refuses(
    (lambda: CONV(X), ValueError, "works on observed edges; got none"),
    (
        lambda: CONV(X, EDGES, edge_attr=ATTR[:6]),
        ValueError,
        "one row for each of 7 edges; got a float64 tensor of",
    ),
    (lambda: CONV(X, Graph(5, EDGES), edge_attr=ATTR[:, :2]), ValueError, "edge_attr must have 3 channels"),
    (lambda: CONV(X, EDGES, edge_attr=ATTR.long()), TypeError, "edge_attr must be floating point"),
    (lambda: GatedGCNConv(3, norm="graph"), ValueError, "norm must be one of 'batch', 'layer', None; got 'graph'"),
)
