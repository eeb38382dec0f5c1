"""Values and gradients of PyG's layers: of ours with the same arguments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import diffusion_mp as mp
from diffusion_mp.testing import tolerance
from helpers import agree, close, randn

# directed, with self-loops at 0 and 3 and parallel edges; node 7 only sends, 8 only receives, 9 is isolated
EDGES = torch.tensor(
    [[0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 1, 2, 1], [0, 1, 2, 0, 3, 4, 5, 6, 4, 1, 8, 8, 2]]
)
UNDIRECTED = torch.cat([EDGES, EDGES[:, EDGES[0] != EDGES[1]].flip(0)], dim=1).unique(
    dim=1
)
GRAPHS = {"directed": EDGES, "undirected": UNDIRECTED, "no-edges": EDGES[:, :0]}
N = 10
C = 6
SENDERS = 7
BETWEEN = torch.stack([EDGES[0] % SENDERS, EDGES[1]])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def given(*args: Any, **options: Any) -> Arguments:
    return args, options


def drawn(module: nn.Module) -> nn.Module:
    """The module in double precision, every parameter and statistic but ε drawn, also biases that start from zero."""
    module = module.double()
    with torch.no_grad():
        for k, (name, value) in enumerate(module.state_dict().items()):
            if name != "eps":
                number = randn(*value.shape, seed=k)
                value.copy_(number.abs() + 0.1 if value.dim() == 1 else number)
    return module


def assert_same(
    ours: nn.Module,
    theirs: nn.Module,
    inputs: list[Tensor],
    mine: Callable[..., Arguments],
    other: Callable[..., Arguments] | None = None,
) -> None:
    """Equal values, and gradients of inputs and PyG's parameters, which are drawn.

    ``mine`` and ``other`` make the arguments of the inputs. What one of the two does not read has gradient zero.
    """
    ours = ours.double()
    learned = dict(drawn(theirs).named_parameters())
    leaves = [leaf.clone().requires_grad_() for leaf in inputs]
    state = mp.from_pyg(ours, theirs.state_dict() | learned)
    assert state.keys() == ours.state_dict().keys()
    args, options = (other or mine)(*leaves)
    got = functional_call(ours, state, *mine(*leaves))
    expected = theirs(*args, **options)
    agree(
        got,
        expected,
        [*leaves, *learned.values()],
        tolerance("parity", torch.float64),
        unused=True,
    )


@pytest.fixture(params=GRAPHS.values(), ids=GRAPHS)
def edges(request: pytest.FixtureRequest) -> Tensor:
    return request.param


@pytest.fixture(params=[True, False], ids=["weighted", "unweighted"])
def weight(request: pytest.FixtureRequest, edges: Tensor) -> list[Tensor]:
    """None or one."""
    return [randn(edges.size(1), seed=7).abs() + 0.1] if request.param else []


Build = Callable[[], nn.Module]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "GCNConv": [
        {},
        {"bias": False},
        {"normalize": False},
        {"add_self_loops": False},
        {"improved": False, "flow": "source_to_target", "aggr": "add"},
    ],
    "SGConv": [{}, {"K": 3}, {"K": 2, "add_self_loops": False}],
}
# Ours and theirs.
WEIGHTED: dict[str, tuple[Build, Build]] = {
    **{
        f"{kind}-{options}": tuple(
            partial(getattr(lib, kind), C, 4, **options) for lib in (mp, pyg)
        )
        for kind, several in OPTIONS.items()
        for options in several
    },
    "APPNP": (lambda: mp.APPNPConv(C, K=5, alpha=0.15), lambda: pyg.APPNP(5, 0.15)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_layers_of_weighted_edges(name, edges, weight):
    ours, theirs = (build() for build in WEIGHTED[name])
    assert_same(ours, theirs, [randn(N, C), *weight], lambda x, *w: given(x, edges, *w))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"theta": 0.5, "layer": k} for k in (1, 4)),
        {"normalize": False},
        {"add_self_loops": False},
    ],
)
def test_gcnii(options, edges, weight):
    assert_same(
        mp.GCNIIConv(C, 0.2, **options),
        pyg.GCN2Conv(C, 0.2, **options),
        [randn(N, C), randn(N, C, seed=1), *weight],
        lambda x, h, *w: given(x, edges, *w, source=h),
        lambda x, h, *w: given(x, h, edges, *w),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("train_eps", [True, False], ids=["learned-eps", "fixed-eps"])
def test_gin(edges, train_eps):
    ours = mp.GINConv(C, mlp(), 0.25, train_eps=train_eps)
    theirs = pyg.GINConv(mlp(), 0.25, train_eps=train_eps)
    assert_same(ours, theirs, [randn(N, C)], lambda x: given(x, edges))
    pair = [randn(SENDERS, C), randn(N, C, seed=1)]
    assert_same(ours, theirs, pair, lambda *x: given(x, BETWEEN))


GAT: list[dict[str, Any]] = [
    {},
    {"heads": 3, "negative_slope": 0.1},
    {"heads": 2, "concat": False, "bias": False},
    {"heads": 2, "residual": True},
    {"heads": 2, "concat": False, "residual": True},
    {"heads": 2, "edge_dim": 3},
    {"heads": 2, "edge_dim": 3, "add_self_loops": False},
    {
        "heads": 2,
        "edge_dim": 3,
        "concat": False,
        "residual": True,
        "fill_value": "mean",
    },
]


def with_features(edges: Tensor) -> Callable[..., Arguments]:
    return lambda x, *f: given(x, edges, **({"edge_attr": f[0]} if f else {}))


@pytest.mark.parametrize("options", GAT, ids=str)
def test_gat(edges, options):
    features = [randn(edges.size(1), 3, seed=2)] if "edge_dim" in options else []
    ours = mp.GATConv(C, 4, **options)
    theirs = pyg.GATConv(C, 4, **options)
    assert_same(ours, theirs, [randn(N, C), *features], with_features(edges))


@pytest.mark.parametrize(
    "options",
    [{"heads": 2}, {"heads": 2, "concat": False, "residual": True}, {"edge_dim": 3}],
)
def test_attention_between_nodes_of_two_kinds(options):
    ours, theirs = (
        lib.GATConv(C, 4, add_self_loops=False, **options) for lib in (mp, pyg)
    )
    features = [randn(EDGES.size(1), 3, seed=5)] if "edge_dim" in options else []
    pair = [randn(SENDERS, C), randn(N, C, seed=1)]
    args = with_features(BETWEEN)
    assert_same(ours, theirs, [*pair, *features], lambda a, b, *f: args((a, b), *f))


def test_gat_attention_weights(edges):
    ours = mp.GATConv(C, 4, 2).double()
    theirs = drawn(pyg.GATConv(C, 4, 2))
    ours.load_state_dict(mp.from_pyg(ours, theirs.state_dict()))
    _, coupling = ours(randn(N, C), edges, return_coupling=True)
    _, (pairs, attention) = theirs(randn(N, C), edges, return_attention_weights=True)
    once, index = pairs.unique(
        dim=1, return_inverse=True
    )  # parallel edges add up in a coupling
    close(
        coupling.at(once),
        attention.new_zeros(once.shape[1], 2).index_add(0, index, attention),
        "parity",
    )


def test_label_propagation(edges, weight):
    y = torch.arange(N) % 3
    mask = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0, 0, 0]).bool()
    known = weight[0].float() if weight else None
    got = mp.LabelPropagation(20, 0.8)(y, edges, known, mask)
    # PyG takes weights that come as they are, and normalises only where none do.
    if known is not None:
        known = gcn_norm(edges, known, N, add_self_loops=False)[1]
    expected = pyg.LabelPropagation(20, 0.8)(y, edges, mask=mask, edge_weight=known)
    rtol, atol = tolerance("parity", torch.float32)
    assert_close(got, expected.to(got.dtype), rtol=rtol, atol=atol)


# Every layer with a normalised adjacency.
ADJACENCIES: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: mp.GCNConv(C, C).diffusivity,
    "difformer": lambda: mp.DIFFormerConv(C, C).diffusivity.graph_term,
    "sfi": lambda: mp.SFiConv(C, C).diffusivity.graph_term,
    "nodeformer": lambda: mp.NodeFormerConv(C, C).diffusivity.graph_term.adjacency,
    "label-propagation": lambda: mp.LabelPropagation().diffusivity,
}


@pytest.mark.parametrize("name", ADJACENCIES)
def test_the_adjacency_of_every_layer_is_by_default_that_of_pyg(name, edges, weight):
    adjacency = ADJACENCIES[name]()
    x = randn(N, C)
    known = weight[0] if weight else None
    got = adjacency(x, mp.Graph(N, edges, known)) @ x.unsqueeze(1)
    loops = adjacency.self_loops == "remaining"
    listed, normalized = gcn_norm(
        edges, known, N, add_self_loops=loops, dtype=torch.float64
    )
    sent = normalized.unsqueeze(1) * x[listed[0]]
    expected = torch.zeros_like(x).index_add(0, listed[1], sent)
    close(got.squeeze(1), expected)


def test_the_graph_of_difformer_is_a_gcn(edges, weight):
    x = randn(N, C)
    difformer = mp.DIFFormerConv(C, C, tau=1.0).double()
    gcn = pyg.GCNConv(C, C, bias=False).double()
    gcn.lin.weight.data = torch.eye(C).double()
    close(difformer(x, edges, *weight) - difformer(x), gcn(x, edges, *weight))
