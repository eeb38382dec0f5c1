"""PyG's models and its tool for nodes of several kinds, with layers and weights of both libraries."""

from itertools import product

import pytest
import torch
import torch_geometric.nn
from torch_geometric.nn import GAT, GCN, GIN, MLP, HeteroConv

import diffusion_mp
from diffusion_mp import DiffusionGNN, from_pyg
from helpers import close, randn

KINDS = [
    ("user", "rates", "item"),
    ("item", "rated_by", "user"),
    ("user", "knows", "user"),
]


def test_layers_between_nodes_of_several_kinds() -> None:
    x = {kind: torch.randn(n, 8) for kind, n in (("user", 5), ("item", 7))}
    edges = {
        kind: torch.stack([torch.randint(len(x[end]), (11,)) for end in kind[::2]])
        for kind in KINDS
    }
    theirs, ours = (
        HeteroConv({kind: lib.GATConv(8, 6, 2, add_self_loops=False) for kind in KINDS})
        for lib in (torch_geometric.nn, diffusion_mp)
    )
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    expected = theirs(x, edges)
    for kind, out in ours(x, edges).items():
        torch.testing.assert_close(out, expected[kind])


OF_PYG = [
    ({"gcn": GCN, "gat": GAT}[kind], kind, 4, {"jk": jk, "norm": norm} | special, 8)
    for kind, special in (("gcn", {}), ("gat", {}), ("gat", {"edge_dim": 2}))
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
    special = {"eps": 0.3, "train_eps": True} if kind == "gin" else {}
    theirs = cls(8, 6, 3, out, act="elu", **options, **special).double()
    ours = DiffusionGNN(
        in_channels, 6, out, 3, conv=kind, act="elu", dropout=0.0, **options
    ).double()
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    inputs = {"x": randn(9, 8), "edge_index": torch.randint(9, (2, 20))}
    if "edge_dim" in options:
        inputs["edge_attr"] = randn(20, 2)
    # In training a norm takes the statistics of the call.
    for training in (True, False):
        got, expected = (
            model.train(training)(**inputs).square() for model in (ours, theirs)
        )
        close(got, expected)
    first = ours.convs[0]
    other = theirs.convs[0]
    if kind == "gin":
        weights = first.mlp[0].weight, other.nn.lins[0].weight
    else:
        weights = first.bias, other.bias
    slopes = [
        torch.autograd.grad(y.sum(), weight)[0]
        for y, weight in zip((got, expected), weights, strict=True)
    ]
    close(*slopes, "dirichlet")


def test_a_gin_of_pyg_that_has_no_place() -> None:
    ours = DiffusionGNN(8, 6, 4, 3, conv="gin")
    for theirs in (GIN(8, 6, 3, 4), GIN(8, 6, 3, 4, norm="batch", jk="last")):
        with pytest.raises(RuntimeError, match="mlp"):
            ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
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
