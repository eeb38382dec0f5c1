"""What PyG's layers take, ours take with the same result, or refuse with the way out."""

from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import diffusion_mp as mp
from helpers import close, randn, refuses
from test_parity_pyg import BETWEEN, EDGES, SENDERS, C, N, drawn, mlp

E = EDGES.size(1)
X = torch.randn(N, C)


def test_features_of_edges_beside_weights() -> None:
    """A weight is a prior: that of 2 counts as the edge twice."""
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3, self_loops="keep"))
    x = randn(N, C)
    f = randn(E, 3, seed=2)
    twice = torch.cat([torch.arange(E), torch.tensor([2, 3])])
    weight = torch.ones(E, dtype=torch.float64)
    weight[2:4] = 2
    expected = layer(x, EDGES[:, twice], edge_attr=f[twice])
    close(layer(x, EDGES, weight, edge_attr=f), expected)


def test_without_normalisation_loops_are_added_on_request() -> None:
    x = randn(N, C)
    layer = drawn(mp.GCNConv(C, 4, normalize=False, self_loops="add"))
    expected = drawn(mp.GCNConv(C, 4, normalize=False))
    expected.load_state_dict(layer.state_dict())
    loops = torch.arange(N).expand(2, N)
    close(layer(x, EDGES), expected(x, torch.cat([EDGES, loops], 1)))


def test_features_of_edges_in_a_batch() -> None:
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3))
    x = randn(N, C)
    f = randn(E, 3, seed=2)
    both = layer(
        torch.cat([x, x + 1]),
        torch.cat([EDGES, EDGES + N], 1),
        batch=torch.arange(2).repeat_interleave(N),
        edge_attr=torch.cat([f, -f]),
    )
    alone = [layer(x, EDGES, edge_attr=f), layer(x + 1, EDGES, edge_attr=-f)]
    close(both, torch.cat(alone))


def test_weights_of_gat_that_have_no_place_are_refused() -> None:
    theirs = pyg.GATConv((C, C), 4).state_dict()
    ours = mp.GATConv(C, 4)
    with pytest.raises(ValueError, match=r"one matrix, value.weight.*lin_src.weight"):
        mp.from_pyg(ours, theirs)
    # Versions before 2.4 wrote twice what was one matrix.
    theirs["lin_dst.weight"] = theirs["lin_src.weight"]
    ours.load_state_dict(mp.from_pyg(ours, theirs))


def test_weights_of_gcn2_that_have_no_place_are_refused() -> None:
    theirs = pyg.GCN2Conv(C, 0.1, shared_weights=False).state_dict()
    ours = mp.GCNIIConv(C)
    with pytest.raises(ValueError, match=r"one matrix, weight, .* weight1 and weight2"):
        mp.from_pyg(ours, theirs)
    theirs["weight2"] = theirs["weight1"]
    assert torch.equal(mp.from_pyg(ours, theirs)["weight"], theirs["weight1"])


test_options_of_pyg_are_refused_with_the_way_out = refuses(
    (
        lambda: mp.GCNConv(C, 4, improved=True),
        "takes no improved. For loops of weight 2",
    ),
    (lambda: mp.GCNConv(C, 4, flow="target_to_source"), "edge_index.flip"),
    (lambda: mp.GCNConv(C, 4, aggr="mean"), "takes no aggr. .*AdjacencyDiffusivity"),
    (lambda: mp.GATConv(C, 4, fill_value=0.0), "takes no fill_value"),
    (
        lambda: mp.APPNPConv(C, add_self_loops=False),
        "takes no self_loops.*diffusivity=",
    ),
    (lambda: mp.GCNIIConv(C, shared_weights=False), "takes no shared_weights"),
    (lambda: mp.GINConv(nn=mlp()), "takes no nn. It is called mlp"),
    (lambda: mp.LabelPropagation(3, 0.9, normalize=True), "takes no normalize"),
    (
        lambda: mp.GATConv(C, 4, colour="red"),
        "takes no colour. It takes in_channels.* and the options its documentation",
    ),
    (lambda: mp.SGConv(C, 4, colour="red"), r"It takes in_channels[a-zK_, ]*\.$"),
    (
        lambda: mp.GCNConv(C, 4, add_self_loops=True, self_loops="add"),
        "say the same thing",
    ),
    (lambda: mp.GINConv(mlp()), "mlp"),
    (
        lambda: mp.from_pyg(GIN, {"nn.0.weight": [0.5]}),
        TypeError,
        r"state\['nn.0.weight'\] must be a tensor",
    ),
    (
        lambda: mp.from_pyg(GIN, pyg.GINConv(mlp(), eps=0.5).state_dict()),
        r"eps is 0.5 in the state and 0 in the layer.*eps=0.5",
    ),
    (lambda: mp.from_pyg(GIN, {"eps": torch.tensor(torch.nan)}), "eps is nan"),
    (lambda: mp.GATConv((C, C), 4), "in_channels must be an integer"),
)


def call(layer: nn.Module, *args: object, **options: object) -> Callable[[], object]:
    return lambda: layer(X, *args, **options)


GCN = mp.GCNConv(C, 4)
GAT = mp.GATConv(C, 4, edge_dim=2)
TRANSFORMER = mp.CertifiedTransformer(C, 4, 3)
ATTR = torch.rand(E, 2)
test_inputs_of_pyg_are_refused_with_the_way_out = refuses(
    (call(GCN, EDGES, edge_attr=ATTR), "edge_attr"),
    (call(GCN, EDGES, size=(N, N)), "takes no size. Pass the states of both ends"),
    (call(GCN, EDGES, colour="red"), "takes no colour. It takes x, edge_index"),
    (call(mp.GCNIIConv(C), EDGES, x_0=X), "takes no x_0. It is called source"),
    (call(mp.DIFFormer(C, 4, 3), EDGES, edge_attr=ATTR), "takes no edge_attr. GATConv"),
    (call(mp.DIFFormerConv(C, C), EDGES, return_attention_weights=True), "S.at"),
    (call(mp.GINConv(C, mlp()), EDGES, return_attention_weights=True), "S.at"),
    (call(TRANSFORMER, EDGES, edge_type=EDGES[0]), "takes no edge_type. .*one_hot"),
    (
        call(TRANSFORMER, EDGES, edge_attr=X),
        "built without edge_dim takes no edge_attr",
    ),
    (call(mp.LabelPropagation(), EDGES, post_step=torch.relu), "takes no post_step"),
    (call(GAT, EDGES, edge_attr=ATTR[:3]), "one row for each of 13 edges"),
    (call(GAT, EDGES, torch.rand(E)), "edge_weight came without edge_attr"),
    (call(GAT, edge_attr=ATTR), "works on observed edges"),
    (call(mp.LabelPropagation(), EDGES, torch.ones(N).bool()), "mask=…"),
)


def test_inputs_of_pyg_that_are_not_there_are_taken() -> None:
    absent = {"size": None, "edge_attr": None, "return_attention_weights": None}
    assert torch.equal(GCN(X, EDGES, **absent), GCN(X, EDGES))
    model = mp.DiffusionGNN(C, 4, 3).eval()
    absent = {"edge_attr": None, "batch_size": None}
    assert torch.equal(model(X, EDGES, **absent), model(X, EDGES))


def test_dropout_of_attention_drops_entries() -> None:
    layer = mp.GATConv(C, 4, 2, dropout=0.4).double().train()
    many = torch.randint(40, (2, 4000), generator=torch.Generator().manual_seed(0))
    x = randn(40, C)

    def entries(layer: nn.Module) -> torch.Tensor:
        _, coupling = layer(x, many, return_coupling=True)
        return coupling.weight

    dropped = entries(layer)
    kept = entries(layer.eval())
    there = kept > 0  # an observed loop that another one replaced has none
    zero = dropped == 0
    assert abs(zero[there].double().mean() - 0.4) < 0.02
    torch.testing.assert_close(
        0.6 * dropped[there & ~zero], kept[there & ~zero], rtol=1e-4, atol=0
    )
    values = mp.GATConv(C, 4, 2, value_dropout=0.4).double()
    values.load_state_dict(layer.state_dict())
    assert torch.equal(entries(values.train()), kept)


GIN = mp.GINConv(C, mlp())
test_pairs_of_states_that_do_not_fit_are_refused = refuses(
    (lambda: GCN((X, X), EDGES), "degrees of both ends"),
    (
        lambda: mp.DiffusionConv(C, 4, mp.UniformDiffusivity())((X, X), EDGES),
        "couples more than",
    ),
    (lambda: mp.GATConv(C, 4)((X, X), EDGES), "self_loops='keep'"),
    (lambda: mp.DIFFormerConv(C, C)((X, X), EDGES), "couples more than"),
    (lambda: GIN((X,), BETWEEN), r"the pair \(x_src, x_dst\)"),
    (lambda: GIN((X, None), BETWEEN), "x_dst"),
    (lambda: GIN((X, X[:, :2]), BETWEEN), "x_dst must have 6 channels"),
    (lambda: GIN((X[:3], X), BETWEEN), r"edge_index\[0\] must lie in"),
    (lambda: GIN((X, X[:3]), BETWEEN), r"edge_index\[1\] must lie in"),
    (lambda: GIN((X, X), None), "edge_index"),
    (lambda: GIN((X, X), BETWEEN, None, torch.zeros(N).long()), "batch goes with"),
)


def test_a_layer_that_moves_nothing_takes_two_kinds_of_nodes() -> None:
    layer = mp.MLPConv(C, 4)
    torch.testing.assert_close(layer((X[:SENDERS], X), BETWEEN), layer(X))


@pytest.mark.parametrize(
    "build",
    [
        lambda c: mp.GCNConv(c, 4),
        lambda c: mp.GCNConv(c, 4, bias=False),
        lambda c: mp.SGConv(c, 4),
        lambda c: mp.MLPConv(c, 4),
        lambda c: mp.GATConv(c, 4, 2, residual=True),
        lambda c: mp.GINConv(c, nn.LazyLinear(3)),
        lambda c: mp.DiffusionConv(c, 4, mp.SimpleDiffusivity()),
    ],
)
def test_channels_of_the_first_call(build) -> None:
    x = randn(N, C)
    lazy, again, eager = (build(channels).double() for channels in (-1, -1, C))
    out = lazy(x, EDGES)
    assert lazy.in_channels == C
    with pytest.raises(ValueError, match=r"x must have 6 channels"):
        lazy(randn(N, C + 1), EDGES)
    # Of the network of a GIN, which is the user's, the weights are loaded after a call.
    loaded = [eager] if isinstance(lazy, mp.GINConv) else [eager, again]
    eager(x, EDGES)
    for layer in loaded:
        layer.load_state_dict(lazy.state_dict())
        close(layer(x, EDGES), out)


def test_channels_that_nobody_can_find_out() -> None:
    for build in (lambda: mp.DIFFormerConv(-1, 4), lambda: mp.GCNIIConv(-1)):
        with pytest.raises(ValueError, match=r"channels must be at least 1; got -1"):
            build()
    with pytest.raises(ValueError, match=r"x must have two dimensions"):
        mp.GCNConv(-1, 4)(torch.rand(3), EDGES)


class Averaging(mp.DiffusionConv):
    def __init__(
        self, aggr: str = "mean", *, cached: bool = False, add_self_loops: bool = False
    ) -> None:
        super().__init__(C, 4, mp.AdjacencyDiffusivity("row"))
        self.options = aggr, cached, add_self_loops

    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


@pytest.mark.usefixtures("no_typecheck")
def test_subclasses_with_options_and_a_call_of_their_own() -> None:
    layer = Averaging(aggr="add", cached=True, add_self_loops=True)
    shapes = []
    assert layer.options == ("add", True, True)
    layer.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    assert layer((X[:SENDERS], X), BETWEEN).shape == (N, 4)
    assert shapes == [(N, 4)]


def test_a_graph_that_came_with_loops_has_features_of_them() -> None:
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3, self_loops="keep"))
    x = randn(N, C)
    graph = mp.Graph(N, EDGES).with_self_loops("add")
    f = randn(graph.num_edges, 3, seed=2)
    close(layer(x, graph, edge_attr=f), layer(x, graph.edges, edge_attr=f))
