"""What PyG's layers take, ours take with the same result, or refuse with the way out."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import diffusion_mp as mp
from helpers import randn, refuses
from test_parity_pyg import BETWEEN, EDGES, SENDERS, C, N, drawn, mlp

E = EDGES.size(1)
X = torch.randn(N, C)


def test_features_of_edges_beside_weights_and_in_a_batch() -> None:
    """A weight is a prior: that of 2 counts as the edge twice. Two graphs side by side are two graphs."""
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3, self_loops="keep"))
    x = randn(N, C)
    f = randn(E, 3, seed=2)
    twice = layer(x, torch.cat([EDGES, EDGES[:, 2:4]], 1), edge_attr=torch.cat([f, f[2:4]]))
    weight = torch.ones(E, dtype=torch.float64)
    weight[2:4] = 2
    torch.testing.assert_close(layer(x, EDGES, weight, edge_attr=f), twice)
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3))
    graphs = torch.cat([x, x + 1]), torch.cat([EDGES, EDGES + N], 1)
    both = layer(*graphs, batch=torch.arange(2).repeat_interleave(N), edge_attr=torch.cat([f, -f]))
    alone = torch.cat([layer(x, EDGES, edge_attr=f), layer(x + 1, EDGES, edge_attr=-f)])
    torch.testing.assert_close(both, alone)


@pytest.mark.usefixtures("no_typecheck")
def test_weights_that_have_no_place_are_refused() -> None:
    theirs = pyg.GATConv((C, C), 4)
    ours = mp.GATConv(C, 4)
    with pytest.raises(
        ValueError,
        match=r"GATConv has one matrix, value.weight, where the state has two that differ: lin_src.weight and lin_dst",
    ):
        mp.from_pyg(ours, theirs.state_dict())
    old = {f"conv.{name}": value for name, value in theirs.state_dict().items()}
    old["conv.lin_dst.weight"] = old[
        "conv.lin_src.weight"
    ]  # as versions before 2.4 wrote what was one matrix
    net = nn.ModuleDict({"conv": ours})
    net.load_state_dict(mp.from_pyg(net, old))
    with pytest.raises(ValueError, match=r"eps is 0.5 in the state and 0 in the layer.*eps=0.5"):
        mp.from_pyg(mp.GINConv(C, mlp()), pyg.GINConv(mlp(), eps=0.5).state_dict())
    with pytest.raises(ValueError, match="eps is nan in the state"):
        mp.from_pyg(mp.GINConv(C, mlp()), {"eps": torch.tensor(torch.nan)})
    with pytest.raises(TypeError, match="every key of state must be the name of a tensor; got 3"):
        mp.from_pyg(ours, {3: torch.ones(1)})
    theirs = pyg.GCN2Conv(C, 0.1, shared_weights=False)
    ours = mp.GCNIIConv(C)
    with pytest.raises(
        ValueError, match=r"GCNIIConv has one matrix, weight, .* weight1 and weight2"
    ):
        mp.from_pyg(ours, theirs.state_dict())
    with torch.no_grad():
        theirs.weight2.copy_(theirs.weight1)
    assert torch.equal(mp.from_pyg(ours, theirs.state_dict())["weight"], theirs.weight1)


test_options_of_pyg_are_refused_with_the_way_out = refuses(
    (lambda: mp.GCNConv(C, 4, improved=True), r"GCNConv takes no improved\. For loops of weight 2"),
    (lambda: mp.GCNConv(C, 4, flow="target_to_source"), r"flow\. .*edge_index\.flip\(0\)"),
    (
        lambda: mp.GCNConv(C, 4, aggr="mean"),
        r"GCNConv takes no aggr\. .*AdjacencyDiffusivity\('row'\)",
    ),
    (lambda: mp.GCNConv(C, 4, residual=True), r"residual\. Add the state yourself"),
    (lambda: mp.GATConv(C, 4, fill_value=0.0), r"GATConv takes no fill_value"),
    (
        lambda: mp.APPNPConv(C, add_self_loops=False),
        r"APPNPConv takes no add_self_loops.*diffusivity=",
    ),
    (lambda: mp.GCNIIConv(C, shared_weights=False), r"GCNIIConv takes no shared_weights"),
    (lambda: mp.GINConv(nn=mlp()), r"GINConv takes no nn\. It is called mlp"),
    (lambda: mp.CertifiedConv(C, residual=True), r"CertifiedConv takes no residual"),
    (lambda: mp.DIFFormer(C, 4, 3, jk="cat"), r"DIFFormer takes no jk"),
    (lambda: mp.LabelPropagation(3, 0.9, normalize=True), r"LabelPropagation takes no normalize"),
    (
        lambda: mp.GCNConv(C, 4, colour="red"),
        r"GCNConv takes no colour\. It takes in_channels, out_channels, norm",
    ),
    (
        lambda: mp.GATConv(C, 4, colour="red"),
        r"GATConv takes no colour\. It takes .* and the options its doc",
    ),
    (lambda: mp.GCNConv(C, 4, add_self_loops="yes"), r"add_self_loops must be True or False"),
    (lambda: mp.GCNConv(C, 4, add_self_loops=True, self_loops="add"), r"say the same thing"),
    (lambda: mp.GINConv(mlp()), r"GINConv needs in_channels before its module"),
    (lambda: mp.GATConv((C, C), 4), r"in_channels must be one integer.*Put a Linear before"),
    (
        lambda: mp.DiffusionGNN(C, 4, 3, conv="sgc", norm="batch"),
        r"norm goes with conv='mlp', 'gcn'",
    ),
    (lambda: mp.DiffusionGNN(C, 4, 3, edge_dim=2), r"edge_dim goes with conv='gat'"),
    (
        lambda: mp.DiffusionGNN(C, 4, 3, act="threshold"),
        r"act must name an activation .* got 'threshold'",
    ),
)

test_inputs_of_pyg_are_refused_with_the_way_out = refuses(
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, edge_attr=torch.rand(E, 2)),
        r"AdjacencyDiffusivity reads none",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, size=(N, N)),
        r"GCNConv takes no size\. Pass the states of both ends",
    ),
    (lambda: mp.GCNIIConv(C)(X, EDGES, x_0=X), r"takes no x_0\. It is called source"),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, colour="red"), r"takes no colour\. It takes x, edge_index"),
    (
        lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, edge_attr=torch.rand(E, 2)),
        r"takes no edge_attr\. GATConv",
    ),
    (
        lambda: mp.CertifiedTransformer(C, 4, 3)(X, EDGES, edge_type=EDGES[0]),
        r"takes no edge_type\. .*one_hot",
    ),
    (
        lambda: mp.CertifiedTransformer(C, 4, 3)(X, EDGES, edge_attr=X),
        r"built without edge_dim takes no edge_attr\.",
    ),
    (
        lambda: mp.CertifiedTransformer(C, 4, 3)(X.long(), EDGES),
        r"x\.float\(\)\. If these are categories, .*in_channels",
    ),
    (
        lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, return_attention_weights=True),
        r"return_coupling=True",
    ),
    (lambda: mp.CertifiedConv(C)(X, EDGES, size=(N, N)), r"CertifiedConv takes no size"),
    (
        lambda: mp.LabelPropagation()(X, EDGES, post_step=torch.relu),
        r"post_step\. Labels are clamped",
    ),
    (lambda: mp.GATConv(C, 4)(X, EDGES, edge_attr=torch.rand(E, 2)), r"GATDiffusivity reads none"),
    (
        lambda: mp.GATConv(C, 4, edge_dim=2)(X, EDGES, edge_attr=torch.rand(E, 3)),
        r"edge_attr must have 2 channels",
    ),
    (
        lambda: mp.GATConv(C, 4, edge_dim=2)(X, EDGES, edge_attr=torch.rand(3, 2)),
        r"one row for each of 13 edges",
    ),
    (
        lambda: mp.GATConv(C, 4, edge_dim=1)(X, EDGES, torch.rand(E)),
        r"edge_weight came without edge_attr.*by name",
    ),
    (lambda: mp.GATConv(C, 4, edge_dim=1)(X, edge_attr=torch.rand(E)), r"works on observed edges"),
    (lambda: mp.GATConv(C, 4)(X, EDGES, torch.rand(E, 2)), r"Edge features belong to edge_attr"),
    # the third place
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, torch.zeros(N).long()),
        r"looks like a batch. Pass it by name, batch=",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, torch.ones(N).bool()),
        r"looks like a mask of nodes.*out\[mask\]",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, torch.ones(EDGES.size(1)).bool()),
        r"edge_weight must be floating point; got a bool .*edge_weight\.float\(\).*edge_index\[:, mask\]",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES[:, :N], torch.ones(N).bool()),
        r"edge_index\[:, mask\]\. A mask of nodes goes",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES[:, :0], torch.ones(0).bool()),
        r"edge_weight must be floating point",
    ),
    (
        lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, None, torch.ones(N).bool()),
        r"batch got .*looks like a mask",
    ),
    (
        lambda: mp.LabelPropagation()(X, EDGES, torch.ones(N).bool()),
        r"looks like a mask of nodes. Pass it by name",
    ),
    (
        lambda: mp.LabelPropagation()(X, EDGES, None, torch.ones(E)),
        r"order here is \(y, edge_index, edge_weight",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, torch.ones(E).long()),
        r"Convert it with edge_weight\.float",
    ),
    (
        lambda: mp.GCNConv(C, 4)(X, EDGES, [torch.zeros(N).long()]),
        r"got \[an int64 tensor of shape \[10\]\]",
    ),
)


def test_inputs_of_pyg_that_are_not_there_are_taken() -> None:
    layer = mp.GCNConv(C, 4)
    x = X
    assert torch.equal(
        layer(x, EDGES, size=None, edge_attr=None, return_attention_weights=None), layer(x, EDGES)
    )
    model = mp.DiffusionGNN(C, 4, 3).eval()
    assert torch.equal(model(x, EDGES, edge_attr=None, batch_size=None), model(x, EDGES))


def test_dropout_of_attention_drops_entries() -> None:
    layer = mp.GATConv(C, 4, 2, dropout=0.4).double().train()
    many = torch.randint(40, (2, 4000), generator=torch.Generator().manual_seed(0))
    x = randn(40, C)
    _, (edges, dropped) = layer(x, many, return_attention_weights=True)
    _, (same, kept) = layer.eval()(x, many, return_attention_weights=True)
    assert torch.equal(edges, same)
    there = kept > 0  # an observed loop that another one replaced has none
    zero = dropped[there] == 0
    assert abs(zero.double().mean() - 0.4) < 0.02
    torch.testing.assert_close(dropped[there][~zero], kept[there][~zero] / 0.6, rtol=1e-4, atol=0)
    values = mp.GATConv(C, 4, 2, value_dropout=0.4).double()
    values.load_state_dict(layer.state_dict())
    assert torch.equal(values.train()(x, many, return_attention_weights=True)[1][1], kept)


@pytest.mark.parametrize("build", [mp.GATConv, mp.GCNConv], ids=["gat", "gcn"])
def test_attention_weights_are_the_entries(build) -> None:
    layer = build(C, 4).double()
    x = randn(N, C)
    out, (edges, entries) = layer(x, EDGES, return_attention_weights=True)
    assert torch.equal(out, layer(x, EDGES))
    _, coupling, (again, _) = layer(x, EDGES, return_coupling=True, return_attention_weights=True)
    assert torch.equal(edges, again)
    dense = torch.zeros(N, N, dtype=torch.float64).index_put(
        (edges[1], edges[0]), entries[:, 0], accumulate=True
    )
    torch.testing.assert_close(dense, coupling.to_dense()[0])


@pytest.mark.parametrize("layer", [mp.DIFFormerConv(C, C), mp.GINConv(C, mlp()), mp.SFiConv(C, C)])
def test_operators_that_are_not_written_down_say_so(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"return_attention_weights needs .* S\.at\(edge_index\)"):
        layer(X, EDGES, return_attention_weights=True)


def gin(*arguments):
    return lambda: mp.GINConv(C, mlp())(*arguments)


test_two_kinds_of_nodes_are_refused_where_one_is_known_and_what_is_no_pair = refuses(
    (
        lambda: mp.GCNConv(C, 4)((X, X), EDGES),
        ValueError,
        r"GCNConv divides by the degrees of both ends",
    ),
    (
        lambda: mp.GATConv(C, 4)((X, X), EDGES),
        ValueError,
        r"GATConv adds self-loops.*self_loops='keep'",
    ),
    (lambda: mp.DIFFormerConv(C, C)((X, X), EDGES), ValueError, r"DIFFormerConv couples all pairs"),
    (gin((X,), BETWEEN), r"the pair \(x_src, x_dst\)"),
    (gin((X, None), BETWEEN), r"x_dst must be a tensor"),
    (gin((X, X[:, :2]), BETWEEN), r"x_dst must have 6 channels"),
    (gin((X[:3], X), BETWEEN), r"edge_index\[0\] must lie in \[0, 2\] for 3 nodes"),
    (gin((X, X[:3]), BETWEEN), r"edge_index\[1\] must lie in"),
    (gin((X, X), None), r"edge_index must be a tensor"),
    (gin((X, X), BETWEEN, None, torch.zeros(N).long()), r"batch goes with nodes of one kind"),
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
    torch.manual_seed(0)
    lazy = build(-1).double()
    out = lazy(randn(N, C), EDGES)
    known = build(C).double()
    known(randn(N, C), EDGES)
    known.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(known(randn(N, C), EDGES), out)
    assert lazy.in_channels == C
    with pytest.raises(ValueError, match=r"x must have 6 channels"):
        lazy(randn(N, C + 1), EDGES)
    if not isinstance(lazy, mp.GINConv):
        again = build(-1).double()
        again.load_state_dict(lazy.state_dict())
        torch.testing.assert_close(again(randn(N, C), EDGES), out)


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
    seen = []
    assert layer.options == ("add", True, True)
    layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert layer((X[:SENDERS], X), BETWEEN).shape == (N, 4)
    assert seen == [(N, 4)]
