"""What PyG does to any model: it explains it by a mask of the edges, and lists its modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GAT, GCN, GIN, MLP, HeteroConv, MessagePassing, summary, to_hetero

import diffusion_mp
from diffusion_mp import DiffusionGNN, SGFormer, from_pyg
from model_cases import MODELS

READ_EDGES = [name for name, case in MODELS.items() if {"x", "edge_index"} <= set(case.names) and name != "mlp"]


@pytest.mark.parametrize("name", READ_EDGES)
def test_the_edges_of_a_model_are_explained(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.model().eval(), case.inputs(12)
    before = model(**inputs)
    explainer = Explainer(
        model,
        GNNExplainer(epochs=2),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "graph", "return_type": "raw"},
    )
    mask = explainer(**inputs).edge_mask
    assert mask.shape == inputs["edge_index"].shape[1:]
    assert mask.unique().numel() > 2
    assert torch.equal(model(**inputs), before)


@pytest.mark.parametrize("name", ["gcn", "gps", "certified-options"])
def test_a_mask_is_a_weight_of_the_edges(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.model().eval(), case.inputs(12)
    mask = torch.rand(inputs["edge_index"].size(1), generator=torch.Generator().manual_seed(0))
    expected = model(**inputs, edge_weight=mask)
    assert not torch.allclose(model(**inputs), expected)
    set_masks(model, mask, inputs["edge_index"], apply_sigmoid=False)
    torch.testing.assert_close(model(**inputs), expected)
    clear_masks(model)
    set_masks(model, mask.logit(), inputs["edge_index"])
    torch.testing.assert_close(model(**inputs), expected)


@pytest.mark.parametrize("name", READ_EDGES)
def test_attention_explains_a_model(name: str) -> None:
    """What it takes for attention are the entries of every layer's coupling at the observed edges."""
    case = MODELS[name]
    model, inputs = case.model().eval(), case.inputs(12)
    mask = explained(model, "max", **inputs)
    _, couplings = model(**inputs, return_coupling=True)
    if isinstance(model, SGFormer):  # whose couplings are those of its attention; it listens to its GNN too
        initial = (model.gnn_encoder or model.encoder)(inputs["x"])
        couplings += model.gnn(initial, inputs["edge_index"], return_coupling=True)[1]
    entries = [coupling.at(inputs["edge_index"]).amax(1) for coupling in couplings]
    torch.testing.assert_close(mask, torch.stack(entries).amax(0))
    assert not model.edge_mask._message_forward_hooks


def explained(model: nn.Module, reduce: str, **inputs: Tensor) -> Tensor:
    config = {"mode": "regression", "task_level": "graph", "return_type": "raw"}
    options = {"explanation_type": "model", "edge_mask_type": "object", "model_config": config}
    return Explainer(model, AttentionExplainer(reduce), **options)(**inputs).edge_mask


def test_attention_of_a_gat_is_that_of_pyg() -> None:
    theirs = GAT(8, 6, 2, 3).eval()
    ours = DiffusionGNN(8, 6, 3, conv="gat").eval()
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    edges = torch.randint(9, (2, 20))
    inputs = {"x": torch.randn(9, 8), "edge_index": edges[:, edges[0] != edges[1]].unique(dim=1)}
    torch.testing.assert_close(explained(ours, "mean", **inputs), explained(theirs, "mean", **inputs))


KINDS = (["user", "item"], [("user", "rates", "item"), ("item", "rated_by", "user"), ("user", "knows", "user")])


def of_several_kinds() -> tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]:
    """Users and items, and edges among them."""
    x = {kind: torch.randn(n, 8) for kind, n in (("user", 5), ("item", 7))}
    edges = {
        kind: torch.stack([torch.randint(len(x[kind[0]]), (11,)), torch.randint(len(x[kind[2]]), (11,))])
        for kind in KINDS[1]
    }
    return x, edges


def test_layers_between_nodes_of_several_kinds() -> None:
    x, edges = of_several_kinds()

    def build(lib: Any) -> nn.Module:
        return HeteroConv({kind: lib.GATConv(8, 6, 2, add_self_loops=False) for kind in KINDS[1]})

    theirs, ours = build(torch_geometric.nn), build(diffusion_mp)
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    expected = theirs(x, edges)
    for kind, out in ours(x, edges).items():
        torch.testing.assert_close(out, expected[kind])


class Messages(MessagePassing):
    """A layer of ours by the class that PyG's to_hetero knows layers by."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index)


class TwoLayers(nn.Module):
    def __init__(self, lib: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = wrap(lib.GATConv(8, 6, 2, add_self_loops=False))
        self.second = wrap(lib.GATConv(12, 3, add_self_loops=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def test_a_network_of_layers_is_rewritten_for_nodes_of_several_kinds() -> None:
    x, edges = of_several_kinds()
    theirs = to_hetero(TwoLayers(torch_geometric.nn, lambda layer: layer), KINDS)
    ours = to_hetero(TwoLayers(diffusion_mp, Messages), KINDS)
    deeper = {
        ".".join([*(parts := name.split("."))[:2], "layer", *parts[2:]]): value
        for name, value in theirs.state_dict().items()
    }
    ours.load_state_dict(from_pyg(ours, deeper))
    expected = theirs(x, edges)
    for kind, out in ours(x, edges).items():
        torch.testing.assert_close(out, expected[kind])


@pytest.mark.parametrize("jk", ["last", "cat", "max", None])
@pytest.mark.parametrize("norm", ["batch", None])
@pytest.mark.parametrize(("kind", "edge_dim"), [("gcn", None), ("gat", None), ("gat", 2)])
def test_a_model_of_pyg_gives_its_outputs(kind: str, norm: str | None, jk: str | None, edge_dim: int | None) -> None:
    torch.manual_seed(0)
    own = {} if edge_dim is None else {"edge_dim": edge_dim}
    theirs = {"gcn": GCN, "gat": GAT}[kind](8, 6, 3, 4, act="elu", norm=norm, jk=jk, **own).double()
    ours = DiffusionGNN(8, 6, 4, 3, conv=kind, act="elu", norm=norm, jk=jk, dropout=0.0, **own).double()
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    x, edges = torch.randn(9, 8, dtype=torch.float64), torch.randint(9, (2, 20))
    features = {} if edge_dim is None else {"edge_attr": torch.randn(20, edge_dim, dtype=torch.float64)}
    for training in (True, False):  # in training a norm takes the statistics of the call
        got, expected = (model.train(training)(x, edges, **features) for model in (ours, theirs))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(out.square().sum(), model.convs[0].bias) for out, model in ((got, ours), (expected, theirs))
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("in_channels", [8, -1])
@pytest.mark.parametrize(("jk", "out"), [("last", 4), ("cat", 4), (None, 6)])
def test_a_gin_of_pyg_gives_its_outputs(jk: str | None, out: int, in_channels: int) -> None:
    theirs = GIN(8, 6, 3, out, jk=jk, act="elu", eps=0.3, train_eps=True).double()
    ours = DiffusionGNN(in_channels, 6, out, 3, conv="gin", jk=jk, act="elu", dropout=0.0).double()
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    x, edges = torch.randn(9, 8, dtype=torch.float64), torch.randint(9, (2, 20))
    outputs = ours(x, edges), theirs(x, edges)
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(output.square().sum(), weight)
        for output, weight in zip(
            outputs, (ours.convs[0].mlp[0].weight, theirs.convs[0].nn.lins[0].weight), strict=True
        )
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_a_gin_of_pyg_that_has_no_place() -> None:
    ours = DiffusionGNN(8, 6, 4, 3, conv="gin")
    with pytest.raises(ValueError, match=r"convs\.2\.nn\.lins\.0\.weight is \[4, 6\], and in the layer here \[6, 6\]"):
        from_pyg(ours, GIN(8, 6, 3, 4).state_dict())
    with pytest.raises(ValueError, match=r"norms are norms inside the MLP of a layer"):
        from_pyg(ours, GIN(8, 6, 3, 4, norm="batch", jk="last").state_dict())
    keeps = diffusion_mp.GINConv(8, MLP([8, 6, 6]))
    theirs = torch_geometric.nn.GINConv(MLP([8, 6, 6]))
    keeps.load_state_dict(from_pyg(keeps, theirs.state_dict()))


@pytest.mark.parametrize("conv", ["mlp", "gin"])
@pytest.mark.parametrize("jk", ["cat", "lstm", None])
@pytest.mark.parametrize("task", ["node", "graph"])
def test_norm_and_jumps_of_every_stack(conv: str, jk: str | None, task: str) -> None:
    model = DiffusionGNN(8, 6, 3, 3, conv=conv, norm="layer", jk=jk, act="gelu", task=task)
    x, edges = torch.randn(9, 8), torch.tensor([[0, 1, 2, 4, 5, 8], [1, 2, 0, 5, 6, 7]])
    model(x, edges, batch=torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]) if task == "graph" else None).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_summarised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG draws the table with another package, which need not be there."""
    monkeypatch.setitem(sys.modules, "tabulate", SimpleNamespace(tabulate=lambda rows, **_: str(rows)))
    case = MODELS[name]
    model = case.model().eval()
    assert type(model).__name__ in summary(model, **case.inputs(12))
