"""What a model is without options: its state survives any depth, its losses have the task's size, it scores well."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch_geometric.data import Data

from diffusion_mp import Graph, UniformDiffusivity, auxiliary_loss
from diffusion_mp.diffusivities import edge_loss
from diffusion_mp.layers import DIFFormerConv, GATConv
from diffusion_mp.models import (
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    NodeFormer,
    SGFormer,
)
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments.graphs import load_planetoid
from helpers import built, close


def communities(num_nodes: int = 120, channels: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(num_nodes) % 4
    x = torch.randn(4, channels, generator=generator)[group] + torch.randn(
        num_nodes, channels, generator=generator
    )
    pairs = torch.randint(num_nodes, (2, 12 * num_nodes), generator=generator)
    stay = torch.rand(pairs.size(1), generator=generator) < 0.05
    pairs = pairs[:, (group[pairs[0]] == group[pairs[1]]) | stay]
    return x, torch.cat([pairs, pairs.flip(0)], 1)


def spread(model: nn.Module, x: Tensor, edges: Tensor | None) -> tuple[float, float]:
    """Of the state that the decoder reads: how much of ‖Z‖² is not one vector times a number per node, and its norm."""
    states: list[Tensor] = []
    model.decoder.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        model.eval()(x, edges)
    energy = torch.linalg.svdvals(states[0].double()).square()
    return float(1 - energy[0] / energy.sum()), float(energy.sum().sqrt())


@pytest.mark.parametrize("dropout_on", ["values", "state"])
def test_dropout_changes_what_is_read_if_it_is_asked_to(dropout_on: str) -> None:
    x, edges = communities()
    model = built(
        lambda: DIFFormer(24, 8, 2, num_layers=1, dropout=0.5, dropout_on=dropout_on)
    )
    read: list[Tensor] = []
    model.convs[0].register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        model.eval()(x, edges)
        model.train()(x, edges)
    assert torch.equal(*read) == (dropout_on == "values")


@pytest.mark.parametrize(
    ("layers", "tau"), [(1, 0.75), (2, 0.75), (4, 4**0.25 - 1), (8, 4**0.125 - 1)]
)
def test_steps_grow_the_shared_component_fourfold_at_most(layers: int, tau: float):
    assert DIFFormer(3, 4, 2, layers).convs[0].update.tau == pytest.approx(tau)


@pytest.mark.parametrize("edges", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("kind", [DIFFormer, CertifiedDIFFormer, NodeFormer])
def test_depth_leaves_the_state_alone(kind: type[nn.Module], edges: bool) -> None:
    x, edge_index = communities()

    def measured(num_layers: int, **options: object) -> tuple[float, float]:
        model = built(lambda: kind(24, 32, 4, num_layers, **options))
        return spread(model, x, edge_index if edges else None)

    shares, norms = zip(*map(measured, (2, 4, 8, 16)), strict=True)
    assert min(shares) > 0.003
    assert max(shares) < 20 * min(shares)
    assert max(norms) < 3 * min(norms)
    if kind is DIFFormer:  # a step of the same size in every layer leaves nothing
        for layer_norm in (False, True):
            assert measured(16, tau=0.5, layer_norm=layer_norm)[0] < 1e-5
    if kind is NodeFormer:
        assert measured(16, step=1.0)[0] < 0.2 * shares[-1]


def test_the_layer_alone_is_the_layer_of_the_model() -> None:
    x, edge_index = communities()
    inside = DIFFormer(24, 24, 4, 4).convs[0]
    alone = DIFFormerConv(24, 24)
    alone.update.tau = inside.update.tau  # which depends on how many layers there are
    assert repr([*inside.children()]) == repr([*alone.children()])
    torch.testing.assert_close(
        inside(x, edge_index), alone(x, edge_index), rtol=0, atol=0
    )
    assert not list(alone.parameters())
    other = DIFFormerConv(24, 8)  # other channels: a map has to make them
    assert {name for name, _ in other.named_parameters()} == {"value.weight", "bias"}
    assert DIFFormerConv(24, 12, 2, concat=True)(x, edge_index).shape == (120, 24)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DIFFormer, {}),
        (NodeFormer, {}),
        (SGFormer, {}),
        (CertifiedDIFFormer, {}),
        (DiffusionGNN, {}),
        (DIFFormer, {"num_layers": 16}),
        (DIFFormer, {"num_layers": 8, "tau": 0.5, "layer_norm": True}),
    ],
)
def test_link_prediction_by_an_mlp_starts_at_log_two(
    kind: type[nn.Module], options
) -> None:
    x, edge_index = communities()
    random = torch.randint(120, (2, 200), generator=torch.Generator().manual_seed(1))
    pairs = torch.cat([edge_index[:, :200], random], 1)
    target = (torch.arange(400) < 200).float()
    model = built(lambda: kind(24, 64, 64, task="link", head="mlp", **options)).eval()
    scores = model(x, edge_index, edge_label_index=pairs)
    loss = binary_cross_entropy_with_logits(scores, target)
    assert abs(float(loss.detach()) - math.log(2)) < 0.12


@pytest.mark.parametrize("sizes", [[120], [7, 1, 30, 82]], ids=["one graph", "batch"])
def test_the_relative_edge_loss_of_uniform_attention_is_one(sizes: list[int]) -> None:
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    node = torch.arange(120)
    following = node + 1
    following[ptr[1:] - 1] = ptr[:-1]
    # A node alone in its graph has no edge.
    rings = torch.stack([node, following])[:, node != following]
    graph = Graph(120, rings, ptr=ptr if len(sizes) > 1 else None)
    attention = UniformDiffusivity()(torch.zeros(120, 3, dtype=torch.float64), graph)
    expected = torch.tensor(graph.num_edges / 120, dtype=torch.float64)
    close(edge_loss(attention, graph, relative=True), expected, "entries")


@pytest.mark.parametrize("num_nodes", [40, 400])
def test_the_edge_loss_of_nodeformer_is_small_beside_that_of_the_task(
    num_nodes: int,
) -> None:
    x, edge_index = communities(num_nodes)
    model = built(lambda: NodeFormer(24, 64, 4)).train()
    task = cross_entropy(model(x, edge_index), torch.arange(num_nodes) % 4)
    assert 0 < auxiliary_loss(model) < 0.2 * task


def score(build, data: Data, seed: int) -> float:
    """The test accuracy in the epoch with the best validation accuracy."""
    with seeded(seed):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        accuracies = []
        for _ in range(200):
            optimizer.zero_grad()
            logits = model.train()(data.x, data.edge_index)
            loss = cross_entropy(logits[data.train_mask], data.y[data.train_mask])
            (loss + auxiliary_loss(model)).backward()
            optimizer.step()
            with torch.no_grad():
                predicted = model.eval()(data.x, data.edge_index).argmax(1)
            right = 100 * (predicted == data.y).double()
            masks = (data.val_mask, data.test_mask)
            accuracies.append([float(right[mask].mean()) for mask in masks])
    return max(accuracies, key=lambda pair: pair[0])[1]


KINDS = {
    kind.__name__: kind
    for kind in (DIFFormer, NodeFormer, SGFormer, CertifiedDIFFormer)
}


def mean_score(kind: str, data: Data, **depth: int) -> float:
    sizes = data.x.size(1), 64, int(data.y.max()) + 1
    scores = [
        score(lambda: KINDS[kind](*sizes, dropout=0.5, **depth), data, seed)
        for seed in range(5)
    ]
    return sum(scores) / 5


@pytest.fixture(scope="module")
def cora(data_root) -> Data:
    data = load_planetoid(data_root / "Planetoid", "Cora", normalize_features=False)
    data.x = data.x.to_sparse_csr()
    return data


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("DIFFormer", 80),
        ("NodeFormer", 78),
        ("SGFormer", 80),
        ("CertifiedDIFFormer", 81),
    ],
)
def test_the_defaults_on_cora(kind: str, least: float, cora: Data) -> None:
    assert mean_score(kind, cora) >= least


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("kind", "layers"),
    [(kind, "num_layers") for kind in ("DIFFormer", "NodeFormer", "CertifiedDIFFormer")]
    + [("SGFormer", layers) for layers in ("trans_num_layers", "num_gnn_layers")],
)
def test_two_to_sixteen_layers_are_alike_on_cora(
    kind: str, layers: str, cora: Data
) -> None:
    scores = [mean_score(kind, cora, **{layers: number}) for number in (2, 4, 8, 16)]
    assert max(scores) - min(scores) <= 3, scores


def test_the_last_attention_layer_of_a_gat_has_one_head() -> None:
    model = DiffusionGNN(4, 8, 3, num_layers=3, conv="gat", heads=2)
    heads = [module.heads for module in model.modules() if isinstance(module, GATConv)]
    assert heads == [2, 2, 1]
