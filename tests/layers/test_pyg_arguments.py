"""What PyG's layers take, ours take with the same result, or refuse with the way out."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import diffusion_mp as mp
from diffusion_mp.testing import tolerance

# directed, with self-loops at 0 and 3 and a parallel edge; node 8 only receives, 9 is isolated
EDGES = torch.tensor([[0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 1, 2, 1], [0, 1, 2, 0, 3, 4, 5, 6, 4, 1, 8, 8, 2]])
N, C, E = 10, 6, EDGES.size(1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module) -> nn.Module:
    """The module in double precision, every parameter and statistic drawn, also biases that start from zero."""
    module = module.double()
    with torch.no_grad():
        for k, value in enumerate(module.state_dict().values()):
            if value.is_floating_point():
                value.copy_(draw(*value.shape, seed=k).abs() + 0.1 if value.dim() == 1 else draw(*value.shape, seed=k))
    return module


def loaded(ours: nn.Module, theirs: nn.Module) -> nn.Module:
    ours = ours.double()
    ours.load_state_dict(mp.from_pyg(ours, theirs.state_dict()))
    return ours


def assert_same(ours, theirs, *leaves: Tensor) -> None:
    """Equal values and gradients; of leaves that one of the two does not read the gradient is zero."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    got, expected = ours(*leaves), theirs(*leaves)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    weight = draw(*got.shape, seed=9)
    rtol, atol = tolerance("parity", torch.float64)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 5), nn.Tanh(), nn.Linear(5, 3))


# Arguments of the class of this name, ours and PyG's.
WEIGHTED = {
    "GCNConv": ("GCNConv", (C, 4), {}),
    "GCNConv, no bias": ("GCNConv", (C, 4), {"bias": False}),
    "GCNConv, A": ("GCNConv", (C, 4), {"normalize": False}),
    "GCNConv, loops as they are": ("GCNConv", (C, 4), {"add_self_loops": False}),
    "GCNConv, what it does anyway": ("GCNConv", (C, 4), {"improved": False, "flow": "source_to_target", "aggr": "add"}),
    "SGConv": ("SGConv", (C, 4), {}),
    "SGConv, 3 steps": ("SGConv", (C, 4, 3), {}),
    "SGConv, loops as they are": ("SGConv", (C, 4, 2), {"add_self_loops": False}),
}

WITH_FEATURES = {
    "plain": {},
    "heads": {"heads": 3, "negative_slope": 0.1},
    "mean of heads": {"heads": 2, "concat": False, "bias": False},
    "residual": {"heads": 2, "residual": True},
    "residual, mean": {"heads": 2, "concat": False, "residual": True},
    "edge features": {"heads": 2, "edge_dim": 3},
    "edge features, loops as they are": {"heads": 2, "edge_dim": 3, "add_self_loops": False},
    "everything": {"heads": 2, "edge_dim": 3, "concat": False, "residual": True, "fill_value": "mean"},
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("weighted", [True, False])
def test_weights_of_pyg_give_its_outputs(name: str, weighted: bool) -> None:
    kind, arguments, options = WEIGHTED[name]
    theirs = drawn(getattr(pyg, kind)(*arguments, **options))
    ours = loaded(getattr(mp, kind)(*arguments, **options), theirs)
    weight = [draw(E, seed=4).abs()] if weighted else []
    assert_same(lambda x, *w: ours(x, EDGES, *w), lambda x, *w: theirs(x, EDGES, *w), draw(N, C), *weight)


def with_features(layer: nn.Module, edges: Tensor):
    return lambda x, *f: layer(x, edges, **({"edge_attr": f[0]} if f else {}))


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_attention_of_pyg_gives_its_outputs(name: str) -> None:
    options = WITH_FEATURES[name]
    theirs = drawn(pyg.GATConv(C, 4, **options))
    ours = loaded(mp.GATConv(C, 4, **options), theirs)
    features = [draw(E, 3, seed=2)] if "edge_dim" in options else []
    assert_same(with_features(ours, EDGES), with_features(theirs, EDGES), draw(N, C), *features)


def test_features_of_edges_beside_weights_and_in_a_batch() -> None:
    """A weight is a prior: that of 2 counts as the edge twice. Two graphs side by side are two graphs."""
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3, self_loops="keep"))
    x, f = draw(N, C), draw(E, 3, seed=2)
    twice = layer(x, torch.cat([EDGES, EDGES[:, 2:4]], 1), edge_attr=torch.cat([f, f[2:4]]))
    weight = torch.ones(E, dtype=torch.float64)
    weight[2:4] = 2
    torch.testing.assert_close(layer(x, EDGES, weight, edge_attr=f), twice)
    layer = drawn(mp.GATConv(C, 4, 2, edge_dim=3))
    graphs = torch.cat([x, x + 1]), torch.cat([EDGES, EDGES + N], 1)
    both = layer(*graphs, batch=torch.arange(2).repeat_interleave(N), edge_attr=torch.cat([f, -f]))
    alone = torch.cat([layer(x, EDGES, edge_attr=f), layer(x + 1, EDGES, edge_attr=-f)])
    torch.testing.assert_close(both, alone)


@pytest.mark.parametrize("train_eps", [True, False])
def test_a_gin_of_pyg_gives_its_outputs(train_eps: bool) -> None:
    theirs = drawn(pyg.GINConv(mlp(), train_eps=train_eps))
    with torch.no_grad():
        theirs.eps.fill_(0.25)
    ours = loaded(mp.GINConv(C, mlp(), 0.25, train_eps=train_eps), theirs)
    assert_same(lambda x: ours(x, EDGES), lambda x: theirs(x, EDGES), draw(N, C))


@pytest.mark.parametrize("options", [{}, {"theta": 0.5, "layer": 3}, {"normalize": False}, {"add_self_loops": False}])
def test_a_gcn2_of_pyg_gives_its_outputs(options) -> None:
    theirs = drawn(pyg.GCN2Conv(C, 0.2, **options))
    ours = loaded(mp.GCNIIConv(C, 0.2, **options), theirs)
    assert_same(lambda x, h: ours(x, EDGES, source=h), lambda x, h: theirs(x, h, EDGES), draw(N, C), draw(N, C, seed=1))


def test_weights_that_have_no_place_are_refused() -> None:
    theirs = pyg.GATConv((C, C), 4)
    ours = mp.GATConv(C, 4)
    with pytest.raises(
        ValueError,
        match=r"GATConv has one matrix, value.weight, where the state has two that differ: lin_src.weight and lin_dst",
    ):
        mp.from_pyg(ours, theirs.state_dict())
    old = {f"conv.{name}": value for name, value in theirs.state_dict().items()}
    old["conv.lin_dst.weight"] = old["conv.lin_src.weight"]  # as versions before 2.4 wrote what was one matrix
    net = nn.ModuleDict({"conv": ours})
    net.load_state_dict(mp.from_pyg(net, old))
    with pytest.raises(ValueError, match=r"eps is 0.5 in the state and 0 in the layer.*eps=0.5"):
        mp.from_pyg(mp.GINConv(C, mlp()), pyg.GINConv(mlp(), eps=0.5).state_dict())
    theirs, ours = pyg.GCN2Conv(C, 0.1, shared_weights=False), mp.GCNIIConv(C)
    with pytest.raises(ValueError, match=r"GCNIIConv has one matrix, weight, .* weight1 and weight2"):
        mp.from_pyg(ours, theirs.state_dict())
    with torch.no_grad():
        theirs.weight2.copy_(theirs.weight1)
    assert torch.equal(mp.from_pyg(ours, theirs.state_dict())["weight"], theirs.weight1)


@pytest.mark.parametrize(("build", "sentence"), [
    (lambda: mp.GCNConv(C, 4, improved=True), r"GCNConv takes no improved\. For loops of weight 2"),
    (lambda: mp.GCNConv(C, 4, flow="target_to_source"), r"flow\. .*edge_index\.flip\(0\)"),
    (lambda: mp.GCNConv(C, 4, aggr="mean"), r"GCNConv takes no aggr\. .*AdjacencyDiffusivity\('row'\)"),
    (lambda: mp.GCNConv(C, 4, residual=True), r"residual\. Add the state yourself"),
    (lambda: mp.GATConv(C, 4, fill_value=0.0), r"GATConv takes no fill_value"),
    (lambda: mp.APPNPConv(C, add_self_loops=False), r"APPNPConv takes no add_self_loops.*diffusivity="),
    (lambda: mp.GCNIIConv(C, shared_weights=False), r"GCNIIConv takes no shared_weights"),
    (lambda: mp.GINConv(nn=mlp()), r"GINConv takes no nn\. It is called mlp"),
    (lambda: mp.CertifiedConv(C, residual=True), r"CertifiedConv takes no residual"),
    (lambda: mp.DIFFormer(C, 4, 3, jk="cat"), r"DIFFormer takes no jk"),
    (lambda: mp.LabelPropagation(3, 0.9, normalize=True), r"LabelPropagation takes no normalize"),
    (lambda: mp.GCNConv(C, 4, colour="red"), r"GCNConv takes no colour\. It takes in_channels, out_channels, norm"),
    (lambda: mp.GATConv(C, 4, colour="red"), r"GATConv takes no colour\. It takes .* and the options its doc"),
    (lambda: mp.GCNConv(C, 4, add_self_loops="yes"), r"add_self_loops must be True or False"),
    (lambda: mp.GCNConv(C, 4, add_self_loops=True, self_loops="add"), r"say the same thing"),
    (lambda: mp.GINConv(mlp()), r"GINConv needs in_channels before its module"),
    (lambda: mp.GATConv((C, C), 4), r"in_channels must be one integer.*Put a Linear before"),
    (lambda: mp.DiffusionGNN(C, 4, 3, conv="sgc", norm="batch"), r"norm goes with conv='mlp', 'gcn'"),
    (lambda: mp.DiffusionGNN(C, 4, 3, edge_dim=2), r"edge_dim goes with conv='gat'"),
])  # fmt: skip
@pytest.mark.usefixtures("no_typecheck")
def test_options_of_pyg_are_refused_with_the_way_out(build, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        build()
    assert "unexpected keyword" not in str(caught.value)


X = torch.randn(N, C)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: mp.GCNConv(C, 4)(X, EDGES, edge_attr=torch.rand(E, 2)), r"AdjacencyDiffusivity reads none"),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, size=(N, N)), r"GCNConv takes no size\. Pass the states of both ends"),
    (lambda: mp.GCNIIConv(C)(X, EDGES, x_0=X), r"takes no x_0\. It is called source"),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, colour="red"), r"takes no colour\. It takes x, edge_index"),
    (lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, edge_attr=torch.rand(E, 2)), r"takes no edge_attr\. GATConv"),
    (lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, return_attention_weights=True), r"return_coupling=True"),
    (lambda: mp.CertifiedConv(C)(X, EDGES, size=(N, N)), r"CertifiedConv takes no size"),
    (lambda: mp.LabelPropagation()(X, EDGES, post_step=torch.relu), r"post_step\. Labels are clamped"),
    (lambda: mp.GATConv(C, 4)(X, EDGES, edge_attr=torch.rand(E, 2)), r"GATDiffusivity reads none"),
    (lambda: mp.GATConv(C, 4, edge_dim=2)(X, EDGES, edge_attr=torch.rand(E, 3)), r"edge_attr must have 2 channels"),
    (lambda: mp.GATConv(C, 4, edge_dim=2)(X, EDGES, edge_attr=torch.rand(3, 2)), r"one row for each of 13 edges"),
    (lambda: mp.GATConv(C, 4, edge_dim=1)(X, EDGES, torch.rand(E)), r"edge_weight came without edge_attr.*by name"),
    (lambda: mp.GATConv(C, 4, edge_dim=1)(X, edge_attr=torch.rand(E)), r"works on observed edges"),
    (lambda: mp.GATConv(C, 4)(X, EDGES, torch.rand(E, 2)), r"Edge features belong to edge_attr"),
    # the third place
    (lambda: mp.GCNConv(C, 4)(X, EDGES, torch.zeros(N).long()), r"looks like a batch. Pass it by name, batch="),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, torch.ones(N).bool()), r"looks like a mask of nodes.*out\[mask\]"),
    (lambda: mp.DIFFormer(C, 4, 3)(X, EDGES, None, torch.ones(N).bool()), r"batch got .*looks like a mask"),
    (lambda: mp.LabelPropagation()(X, EDGES, torch.ones(N).bool()), r"looks like a mask of nodes. Pass it by name"),
    (lambda: mp.LabelPropagation()(X, EDGES, None, torch.ones(E)), r"order here is \(y, edge_index, edge_weight"),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, torch.ones(E).long()), r"Convert it with edge_weight\.float"),
    (lambda: mp.GCNConv(C, 4)(X, EDGES, [torch.zeros(N).long()]), r"got \[a int64 tensor of shape \[10\]\]"),
])  # fmt: skip
@pytest.mark.usefixtures("no_typecheck")
def test_inputs_of_pyg_are_refused_with_the_way_out(call, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        call()
    assert "unexpected keyword" not in str(caught.value)


def test_inputs_of_pyg_that_are_not_there_are_taken() -> None:
    layer, x = mp.GCNConv(C, 4), X
    assert torch.equal(layer(x, EDGES, size=None, edge_attr=None, return_attention_weights=None), layer(x, EDGES))
    model = mp.DiffusionGNN(C, 4, 3).eval()
    assert torch.equal(model(x, EDGES, edge_attr=None, batch_size=None), model(x, EDGES))


def test_dropout_of_attention_drops_entries() -> None:
    layer = mp.GATConv(C, 4, 2, dropout=0.4).double().train()
    many = torch.randint(40, (2, 4000), generator=torch.Generator().manual_seed(0))
    x = draw(40, C)
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
    x = draw(N, C)
    out, (edges, entries) = layer(x, EDGES, return_attention_weights=True)
    assert torch.equal(out, layer(x, EDGES))
    _, coupling, (again, _) = layer(x, EDGES, return_coupling=True, return_attention_weights=True)
    assert torch.equal(edges, again)
    dense = torch.zeros(N, N, dtype=torch.float64).index_put((edges[1], edges[0]), entries[:, 0], accumulate=True)
    torch.testing.assert_close(dense, coupling.to_dense()[0])


@pytest.mark.parametrize("layer", [mp.DIFFormerConv(C, C), mp.GINConv(C, mlp()), mp.SFiConv(C, C)])
def test_operators_that_are_not_written_down_say_so(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"return_attention_weights needs .* S\.at\(edge_index\)"):
        layer(X, EDGES, return_attention_weights=True)


SENDERS = 7
BETWEEN = torch.stack([EDGES[0] % SENDERS, EDGES[1]])


@pytest.mark.parametrize("options", [{"heads": 2}, {"heads": 2, "concat": False, "residual": True}, {"edge_dim": 3}])
def test_attention_between_nodes_of_two_kinds(options) -> None:
    theirs = drawn(pyg.GATConv(C, 4, add_self_loops=False, **options))
    ours = loaded(mp.GATConv(C, 4, add_self_loops=False, **options), theirs)
    features = [draw(E, 3, seed=5)] if "edge_dim" in options else []
    ours_, theirs_ = (with_features(layer, BETWEEN) for layer in (ours, theirs))
    given = draw(SENDERS, C), draw(N, C, seed=1)
    assert_same(lambda a, b, *f: ours_((a, b), *f), lambda a, b, *f: theirs_((a, b), *f), *given, *features)
    attr = {"edge_attr": features[0]} if features else {}
    out, (edges, entries) = ours(given, BETWEEN, return_attention_weights=True, **attr)
    assert torch.equal(edges, BETWEEN)
    assert out.size(0) == N
    torch.testing.assert_close(
        entries.new_zeros(N, entries.size(1)).index_add(0, edges[1], entries)[:9].clamp(min=0.5),
        entries.new_ones(9, entries.size(1)).where((torch.bincount(edges[1], minlength=9) > 0)[:, None], 0.5),
    )


def test_sums_between_nodes_of_two_kinds() -> None:
    theirs = drawn(pyg.GINConv(mlp(), eps=0.5))
    with torch.no_grad():
        theirs.eps.fill_(0.5)
    ours = loaded(mp.GINConv(C, mlp(), 0.5), theirs)
    assert_same(lambda *x: ours(x, BETWEEN), lambda *x: theirs(x, BETWEEN), draw(SENDERS, C), draw(N, C, seed=1))


@pytest.mark.parametrize(("layer", "sentence"), [
    (mp.GCNConv(C, 4), r"GCNConv divides by the degrees of both ends"),
    (mp.GATConv(C, 4), r"GATConv adds self-loops.*self_loops='keep'"),
    (mp.DIFFormerConv(C, C), r"DIFFormerConv couples all pairs"),
    (mp.MLPConv(C, 4), r""),
], ids=["gcn", "gat", "difformer", "mlp"])  # fmt: skip
def test_layers_that_know_one_kind_of_nodes_say_so(layer: nn.Module, sentence: str) -> None:
    if sentence:
        with pytest.raises(ValueError, match=sentence):
            layer((X, X), EDGES)
    else:
        torch.testing.assert_close(layer((X[:SENDERS], X), BETWEEN), layer(X))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (((X,), BETWEEN), r"the pair \(x_src, x_dst\)"),
    (((X, None), BETWEEN), r"x_dst must be a tensor"),
    (((X, X[:, :2]), BETWEEN), r"x_dst must have 6 channels"),
    (((X[:3], X), BETWEEN), r"edge_index\[0\] must lie in \[0, 2\] for 3 nodes"),
    (((X, X[:3]), BETWEEN), r"edge_index\[1\] must lie in"),
    (((X, X), None), r"edge_index must be a tensor"),
    (((X, X), BETWEEN, None, torch.zeros(N).long()), r"batch goes with nodes of one kind"),
])  # fmt: skip
@pytest.mark.usefixtures("no_typecheck")
def test_what_is_no_pair_is_refused(arguments, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        mp.GINConv(C, mlp())(*arguments)


@pytest.mark.parametrize("build", [
    lambda c: mp.GCNConv(c, 4),
    lambda c: mp.GCNConv(c, 4, bias=False),
    lambda c: mp.SGConv(c, 4),
    lambda c: mp.MLPConv(c, 4),
    lambda c: mp.GATConv(c, 4, 2, residual=True),
    lambda c: mp.GINConv(c, nn.LazyLinear(3)),
    lambda c: mp.DiffusionConv(c, 4, mp.SimpleDiffusivity()),
])  # fmt: skip
def test_channels_of_the_first_call(build) -> None:
    torch.manual_seed(0)
    lazy = build(-1).double()
    out = lazy(draw(N, C), EDGES)
    known = build(C).double()
    known(draw(N, C), EDGES)
    known.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(known(draw(N, C), EDGES), out)
    assert lazy.in_channels == C
    with pytest.raises(ValueError, match=r"x must have 6 channels"):
        lazy(draw(N, C + 1), EDGES)
    if not isinstance(lazy, mp.GINConv):
        again = build(-1).double()
        again.load_state_dict(lazy.state_dict())
        torch.testing.assert_close(again(draw(N, C), EDGES), out)


def test_channels_that_nobody_can_find_out() -> None:
    for build in (lambda: mp.DIFFormerConv(-1, 4), lambda: mp.GCNIIConv(-1)):
        with pytest.raises(ValueError, match=r"channels must be at least 1; got -1"):
            build()
    with pytest.raises(ValueError, match=r"x must have two dimensions"):
        mp.GCNConv(-1, 4)(torch.rand(3), EDGES)
