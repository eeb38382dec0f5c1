"""PyG's models and tools for nodes of several kinds, with layers and weights of both libraries."""

from itertools import product

import pytest
import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, MLP, HeteroConv, MessagePassing, to_hetero

import diffusion_mp
from diffusion_mp import DiffusionGNN, from_pyg

KINDS = (
    ["user", "item"],
    [
        ("user", "rates", "item"),
        ("item", "rated_by", "user"),
        ("user", "knows", "user"),
    ],
)


def of_several_kinds() -> tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]:
    x = {kind: torch.randn(n, 8) for kind, n in (("user", 5), ("item", 7))}
    edges = {
        k: torch.stack([torch.randint(len(x[end]), (11,)) for end in k[::2]])
        for k in KINDS[1]
    }
    return x, edges


class Messages(MessagePassing):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index)


class TwoLayers(nn.Module):
    def __init__(self, lib, wrap) -> None:
        super().__init__()
        self.first = wrap(lib.GATConv(8, 6, 2, add_self_loops=False))
        self.second = wrap(lib.GATConv(12, 3, add_self_loops=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("rewritten", [False, True])
def test_layers_and_networks_between_nodes_of_several_kinds(rewritten: bool) -> None:
    x, edges = of_several_kinds()
    if rewritten:
        theirs = to_hetero(TwoLayers(torch_geometric.nn, lambda layer: layer), KINDS)
        ours = to_hetero(TwoLayers(diffusion_mp, Messages), KINDS)
    else:
        theirs, ours = (
            HeteroConv(
                {kind: lib.GATConv(8, 6, 2, add_self_loops=False) for kind in KINDS[1]}
            )
            for lib in (torch_geometric.nn, diffusion_mp)
        )
    state = theirs.state_dict()
    if rewritten:
        state = {
            ".".join([*(p := name.split("."))[:2], "layer", *p[2:]]): value
            for name, value in state.items()
        }
    ours.load_state_dict(from_pyg(ours, state))
    expected = theirs(x, edges)
    for kind, out in ours(x, edges).items():
        torch.testing.assert_close(out, expected[kind])


OF_PYG = [
    ({"gcn": GCN, "gat": GAT}[kind], kind, 4, {"jk": jk, "norm": norm} | own, 8)
    for kind, own in (("gcn", {}), ("gat", {}), ("gat", {"edge_dim": 2}))
    for norm, jk in product(["batch", None], ["last", "cat", "max", None])
] + [
    (GIN, "gin", out, {"jk": jk}, size)
    for (jk, out), size in product([("last", 4), ("cat", 4), (None, 6)], [8, -1])
]


@pytest.mark.parametrize(("cls", "kind", "out", "options", "in_channels"), OF_PYG)
def test_a_model_of_pyg_gives_its_outputs(
    cls, kind, out: int, options, in_channels: int
):
    torch.manual_seed(0)
    own = {"eps": 0.3, "train_eps": True} if kind == "gin" else {}
    theirs = cls(8, 6, 3, out, act="elu", **options, **own).double()
    ours = DiffusionGNN(
        in_channels, 6, out, 3, conv=kind, act="elu", dropout=0.0, **options
    ).double()
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    x = torch.randn(9, 8, dtype=torch.float64)
    edges = torch.randint(9, (2, 20))
    if "edge_dim" in options:
        features = {"edge_attr": torch.randn(20, 2, dtype=torch.float64)}
    else:
        features = {}
    for training in (
        True,
        False,
    ):  # in training a norm takes the statistics of the call
        got, expected = (
            model.train(training)(x, edges, **features) for model in (ours, theirs)
        )
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    first = ours.convs[0]
    other = theirs.convs[0]
    if kind == "gin":
        weights = [first.mlp[0].weight, other.nn.lins[0].weight]
    else:
        weights = [first.bias, other.bias]
    grads = [
        torch.autograd.grad(y.square().sum(), weight)
        for y, weight in zip((got, expected), weights, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_a_gin_of_pyg_that_has_no_place() -> None:
    ours = DiffusionGNN(8, 6, 4, 3, conv="gin")
    with pytest.raises(ValueError, match=r"convs\.2\.nn\.lins\.0\.weight is \[4, 6\]"):
        from_pyg(ours, GIN(8, 6, 3, 4).state_dict())
    with pytest.raises(ValueError, match=r"norms are norms inside the MLP of a layer"):
        from_pyg(ours, GIN(8, 6, 3, 4, norm="batch", jk="last").state_dict())
    keeps = diffusion_mp.GINConv(8, MLP([8, 6, 6]))
    theirs = torch_geometric.nn.GINConv(MLP([8, 6, 6]))
    keeps.load_state_dict(from_pyg(keeps, theirs.state_dict()))


@pytest.mark.parametrize("conv", ["mlp", "gin"])
@pytest.mark.parametrize("jk", ["cat", "lstm", None])
def test_norm_and_jumps_of_every_stack(conv: str, jk: str | None) -> None:
    model = DiffusionGNN(
        8, 6, 3, 3, conv=conv, norm="layer", jk=jk, act="gelu", task="graph"
    )
    edges = torch.tensor([[0, 1, 2, 4, 5, 8], [1, 2, 0, 5, 6, 7]])
    batch = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    model(torch.randn(9, 8), edges, batch=batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
