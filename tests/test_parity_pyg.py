"""Values and gradients of PyG's layers, by choosing a diffusivity and an update only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from diffusion_mp.diffusivities import AdjacencyDiffusivity, GATDiffusivity, IdentityDiffusivity
from diffusion_mp.layers import APPNPConv, DiffusionConv, GATConv, GCNConv, GCNIIConv, GINConv, SGConv
from diffusion_mp.models import DiffusionGNN, LabelPropagation
from diffusion_mp.testing import tolerance
from diffusion_mp.updates import ExplicitEuler

# directed, with self-loops at 0 and 3; node 7 only sends, 8 only receives, 9 is isolated
EDGES = torch.tensor([[0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 1, 2], [0, 1, 2, 0, 3, 4, 5, 6, 4, 1, 8, 8]])
REPEATED = torch.cat([EDGES, EDGES[:, 1:3]], dim=1)
UNDIRECTED = torch.cat([EDGES, EDGES[:, EDGES[0] != EDGES[1]].flip(0)], dim=1).unique(dim=1)
GRAPHS = {"directed": EDGES, "repeated": REPEATED, "undirected": UNDIRECTED, "no-edges": EDGES[:, :0]}
N, C = 10, 6


def state(seed: int = 0, channels: int = C) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, channels, generator=generator, dtype=torch.float64).requires_grad_()


def edge_weights(edge_index: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(edge_index.shape[1], generator=generator, dtype=torch.float64) + 0.1).requires_grad_()


def assert_same(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    leaves: list[tuple[Tensor, Tensor]],
    shared: list[Tensor],
) -> None:
    """Equal outputs, equal gradients to shared inputs and to matching parameters (ours, theirs)."""
    rtol, atol = tolerance("parity", torch.float64)
    got, expected = ours(), theirs()
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=got.dtype)
    mine = torch.autograd.grad((got * weight).sum(), [*shared, *(a for a, _ in leaves)], allow_unused=True)
    other = torch.autograd.grad((expected * weight).sum(), [*shared, *(b for _, b in leaves)], allow_unused=True)
    for a, b, leaf in zip(mine, other, [*shared, *(b for _, b in leaves)], strict=True):
        # PyG keeps singleton axes that we may not, and a graph without edges leaves some inputs unused
        a, b = (torch.zeros_like(leaf) if g is None else g.reshape(leaf.shape) for g in (a, b))
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def copy_weights(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(torch.randn(theirs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
            ours.copy_(theirs.reshape(ours.shape))


@pytest.fixture(params=GRAPHS)
def edge_index(request: pytest.FixtureRequest) -> Tensor:
    return GRAPHS[request.param]


@pytest.fixture(params=["weighted", "unweighted"])
def weight(request: pytest.FixtureRequest, edge_index: Tensor) -> Tensor | None:
    return edge_weights(edge_index) if request.param == "weighted" else None


def inputs(x: Tensor, weight: Tensor | None) -> list[Tensor]:
    return [x] if weight is None else [x, weight]


def gcn_like(steps: int = 1) -> DiffusionConv:
    diffusivity = AdjacencyDiffusivity("sym", self_loops="remaining", direction="pyg")
    return DiffusionConv(C, 4, diffusivity, ExplicitEuler(1.0, "residual"), steps=steps).double()


GCN_LIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gcn": (lambda: GCNConv(C, 4), lambda: pyg.GCNConv(C, 4)),
    "gcn-parts": (gcn_like, lambda: pyg.GCNConv(C, 4)),
    "gcn-no-loops": (lambda: GCNConv(C, 4, self_loops="keep"), lambda: pyg.GCNConv(C, 4, add_self_loops=False)),
    "sgc": (lambda: SGConv(C, 4, K=3), lambda: pyg.SGConv(C, 4, K=3)),
    "sgc-parts": (lambda: gcn_like(steps=3), lambda: pyg.SGConv(C, 4, K=3)),
}


@pytest.mark.parametrize("name", GCN_LIKE)
def test_gcn_and_sgc(edge_index: Tensor, weight: Tensor | None, name: str) -> None:
    ours, theirs = (build().double() for build in GCN_LIKE[name])
    pairs = [(ours.value.weight, theirs.lin.weight), (ours.bias, theirs.lin.bias if "sgc" in name else theirs.bias)]
    copy_weights(pairs)
    x = state()
    assert_same(lambda: ours(x, edge_index, weight), lambda: theirs(x, edge_index, weight), pairs, inputs(x, weight))


@pytest.mark.parametrize("own_class", [True, False], ids=["class", "parts"])
def test_appnp(edge_index: Tensor, weight: Tensor | None, own_class: bool) -> None:
    alpha, steps = 0.15, 5
    ours: nn.Module = APPNPConv(C, K=steps, alpha=alpha)
    if not own_class:
        rate = alpha / (1 - alpha)
        diffusivity = AdjacencyDiffusivity("sym", self_loops="remaining", direction="pyg")
        update = ExplicitEuler(1 - alpha, "residual", beta=rate, leak=rate)
        ours = DiffusionConv(C, C, diffusivity, update, transform=False, bias=False, steps=steps)
    theirs = pyg.APPNP(K=steps, alpha=alpha)
    x = state()
    assert_same(lambda: ours(x, edge_index, weight), lambda: theirs(x, edge_index, weight), [], inputs(x, weight))


@pytest.mark.parametrize("train_eps", [True, False], ids=["learned-eps", "fixed-eps"])
def test_gin(edge_index: Tensor, train_eps: bool) -> None:
    mlp, twin = (nn.Sequential(nn.Linear(C, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2))
    ours = GINConv(C, mlp, eps=0.3, train_eps=train_eps).double()
    theirs = pyg.GINConv(twin, eps=0.3, train_eps=train_eps).double()
    pairs = list(zip(mlp.parameters(), twin.parameters(), strict=True))
    if train_eps:
        rest = [parameter for name, parameter in ours.named_parameters() if not name.startswith("mlp")]
        assert len(rest) == 1
        with torch.no_grad():  # PyG learns ε, we may learn 1 + ε: equal coefficients, equal gradients
            theirs.eps.copy_(rest[0].reshape(theirs.eps.shape) - 1)
        eps = [(rest[0], theirs.eps)]
    else:
        eps = []
        theirs.eps = torch.tensor([0.3], dtype=torch.float64)
    copy_weights(pairs)
    x = state()
    assert_same(lambda: ours(x, edge_index), lambda: theirs(x, edge_index), pairs + eps, [x])


def test_gin_from_parts(edge_index: Tensor) -> None:
    mlp = nn.Linear(C, 3).double()
    diffusivity = 1.5 * IdentityDiffusivity() + AdjacencyDiffusivity("sum")
    conv = DiffusionConv(C, C, diffusivity, ExplicitEuler(1.0, "residual"), transform=False, bias=False)
    theirs = pyg.GINConv(mlp, eps=0.5).double()
    theirs.eps = torch.tensor([0.5], dtype=torch.float64)
    x = state()
    pairs = [(p, p) for p in mlp.parameters()]
    assert_same(lambda: mlp(conv(x, edge_index)), lambda: theirs(x, edge_index), pairs, [x])


@pytest.mark.parametrize("own_class", [True, False], ids=["class", "parts"])
@pytest.mark.parametrize("concat", [True, False], ids=["concat", "mean"])
@pytest.mark.parametrize("heads", [1, 3])
def test_gat(edge_index: Tensor, heads: int, concat: bool, own_class: bool) -> None:
    slope = 0.1
    if own_class:
        ours: Any = GATConv(C, 4, heads, concat=concat, negative_slope=slope).double()
    else:
        diffusivity = GATDiffusivity(heads * 4, heads, negative_slope=slope)
        update = ExplicitEuler(1.0, "residual")
        ours = DiffusionConv(C, 4, diffusivity, update, heads, concat=concat, reads="values").double()
    theirs = pyg.GATConv(C, 4, heads, concat=concat, negative_slope=slope).double()
    pairs = [
        (ours.value.weight, theirs.lin.weight),
        (ours.bias, theirs.bias),
        (ours.diffusivity.att_src, theirs.att_src),
        (ours.diffusivity.att_dst, theirs.att_dst),
    ]
    copy_weights(pairs)
    x = state()
    # PyG replaces the self-loops it finds, so that each node has exactly one; so do repeated loops here
    assert_same(lambda: ours(x, edge_index), lambda: theirs(x, edge_index), pairs, [x])


def test_gat_attention_weights(edge_index: Tensor) -> None:
    ours, theirs = GATConv(C, 4, 2).double(), pyg.GATConv(C, 4, 2).double()
    att = ours.diffusivity
    copy_weights([(ours.value.weight, theirs.lin.weight), (att.att_src, theirs.att_src), (att.att_dst, theirs.att_dst)])
    x = state()
    _, coupling = ours(x, edge_index, return_coupling=True)
    _, (pairs, attention) = theirs(x, edge_index, return_attention_weights=True)
    once, index = pairs.unique(dim=1, return_inverse=True)  # parallel edges add up in a coupling
    total = attention.new_zeros(once.shape[1], 2).index_add(0, index, attention)
    rtol, atol = tolerance("parity", torch.float64)
    torch.testing.assert_close(coupling.at(once), total, rtol=rtol, atol=atol)


@pytest.mark.parametrize("layer", [1, 4, None])
def test_gcnii(edge_index: Tensor, weight: Tensor | None, layer: int | None) -> None:
    theta = None if layer is None else 0.5
    ours = GCNIIConv(C, 0.2, theta=theta, layer=layer).double()
    theirs = pyg.GCN2Conv(C, 0.2, theta=theta, layer=layer).double()
    pairs = [(ours.weight, theirs.weight1)]
    copy_weights(pairs)
    x, initial = state(), state(seed=1)
    assert_same(
        lambda: ours(x, edge_index, weight, source=initial),
        lambda: theirs(x, initial, edge_index, weight),
        pairs,
        [*inputs(x, weight), initial],
    )


def test_label_propagation(edge_index: Tensor, weight: Tensor | None) -> None:
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    mask = torch.tensor([True, True, True, False, True, False, False, False, False, False])
    ours, theirs = LabelPropagation(20, 0.8), pyg.LabelPropagation(20, 0.8)
    weight = None if weight is None else weight.detach().float()
    got = ours(y, edge_index, weight, mask)
    if weight is not None:  # PyG takes weights that come as they are, and normalises only where none do
        weight = gcn_norm(edge_index, weight, N, add_self_loops=False)[1]
    expected = theirs(y, edge_index, mask=mask, edge_weight=weight)
    rtol, atol = tolerance("parity", torch.float32)
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=rtol, atol=atol)


def test_a_two_layer_gcn_of_the_zoo(edge_index: Tensor) -> None:
    ours = DiffusionGNN(C, 8, 3, 2, conv="gcn", dropout=0.0).double().eval()
    first, second = pyg.GCNConv(C, 8).double(), pyg.GCNConv(8, 3).double()
    pairs = []
    for conv, twin in zip(ours.convs, (first, second), strict=True):
        pairs += [(conv.value.weight, twin.lin.weight), (conv.bias, twin.bias)]
    copy_weights(pairs)
    x = state()
    assert_same(lambda: ours(x, edge_index), lambda: second(first(x, edge_index).relu(), edge_index), pairs, [x])
