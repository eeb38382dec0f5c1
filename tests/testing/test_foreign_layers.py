"""`check_layer` takes layers that are not of this library, and names exactly the laws that they break."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from diffusion_mp.layers import GCNConv
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.testing import check_layer


def broken_laws(layer, **options):
    """The names of the laws that a layer on four channels breaks."""
    try:
        check_layer(layer, in_channels=4, **options)
    except AssertionError as error:
        return set(re.findall(r"breaks the law '([\w ]+)'", str(error)))
    return set()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


PYG = {
    "gcn": lambda: pyg.GCNConv(4, 3),
    "gat": lambda: pyg.GATConv(4, 3, heads=2),
    "gin": lambda: pyg.GINConv(mlp()),
    "sage": lambda: pyg.SAGEConv(4, 3, aggr="max"),
    "transformer": lambda: pyg.TransformerConv(4, 3, heads=2),
    "appnp": lambda: pyg.APPNP(4, 0.1),
    "gcn-model": lambda: pyg.GCN(4, 6, 2, 3),
}


@pytest.mark.parametrize("name", PYG)
def test_layers_of_pyg_pass(name):
    # With a loop of a node twice in the graph, as seed 0 draws it, the result of GCNConv
    # would depend on the order of the edges.
    check_layer(PYG[name], in_channels=4)
    check_layer(PYG[name](), in_channels=4, seed=1)


def test_a_layer_that_needs_nodes_is_named():
    assert broken_laws(lambda: pyg.ChebConv(4, 3, K=3)) == {"no nodes"}


class Layer(nn.Module):
    """x_i + Σ_j x_j, the sound one that the broken ones are made of."""

    def forward(self, x, edge_index):
        source, target = edge_index
        return x.index_add(0, target, self.messages(x[source]))

    def messages(self, x: Tensor) -> Tensor:
        return x


class Centred(Layer):
    def forward(self, x, edge_index):
        return super().forward(x - x.mean(0), edge_index)


class InPlace(Layer):
    def forward(self, x, edge_index):
        return x.copy_(super().forward(x, edge_index))


class Mean(Layer):
    def forward(self, x, edge_index):
        degree = torch.bincount(edge_index[1], minlength=len(x)).unsqueeze(1)
        return (super().forward(x, edge_index) - x) / degree


class Positions(Layer):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) + torch.arange(len(x)).unsqueeze(1)


class ByPlace(Layer):
    def messages(self, x):
        return x * torch.arange(len(x)).unsqueeze(1)


class NeverEvaluated(Layer):
    def messages(self, x):
        return nn.functional.dropout(x)


class Triple(torch.autograd.Function):
    """Twice x, with the gradient of three times x."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class WrongGradient(Layer):
    def messages(self, x):
        return Triple.apply(x)


class Unregistered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(())

    def messages(self, x):
        return x * self.scale


class InSinglePrecision(Layer):
    def forward(self, x, edge_index):
        return super().forward(x.float(), edge_index)


class Everywhere(Layer):
    """Fails at its first line."""

    def forward(self, x, edge_index):
        raise RuntimeError("no")


class WeightsOfOneCount(nn.Module):
    def forward(self, x, edge_index, edge_weight=None):
        sent = x[edge_index[0]]
        if edge_weight is not None:
            sent = sent * (1 + edge_weight.unsqueeze(1))
        return x.index_add(0, edge_index[1], sent)


@pytest.mark.parametrize(
    ("kind", "laws"),
    [
        (Layer, set()),
        (Centred, {"batching", "poisoned batch mate"}),
        (InPlace, {"purity", "writable"}),
        (Mean, {"isolated nodes"}),
        (Positions, {"permutation", "batching"}),
        (ByPlace, {"order of edges", "batching"}),
        (WrongGradient, {"first derivatives"}),
        (Unregistered, {"saved"}),
        (WeightsOfOneCount, {"unit weights"}),
    ],
)
def test_exactly_the_broken_laws_are_named(kind, laws):
    assert broken_laws(kind) == laws


def test_a_layer_that_draws_or_rounds_breaks_the_law_that_says_so():
    assert "purity" in broken_laws(NeverEvaluated)
    assert "output" in broken_laws(InSinglePrecision)


def test_one_error_has_all_sentences_and_the_seed():
    with pytest.raises(AssertionError) as raised:
        check_layer(Centred(), in_channels=4, seed=5)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert all("largest difference" in line for line in lines[:2])
    assert "seed=5" in lines[2]


def test_a_layer_that_cannot_be_called_breaks_no_law_by_name():
    with pytest.raises(AssertionError, match=r"^Everywhere cannot be called") as raised:
        check_layer(Everywhere(), in_channels=4)
    assert "RuntimeError: no\n" in str(raised.value)


@pytest.mark.parametrize(
    "layer", [pyg.GINConv(mlp()), pyg.GCNConv(4, 3), GCNConv(4, 3)]
)
def test_a_wrong_number_of_channels_is_said_once(layer):
    with pytest.raises(
        AssertionError, match="C = 5 channels; pass in_channels="
    ) as one:
        check_layer(layer, in_channels=5)
    assert len(str(one.value).splitlines()) == 2


class FailsWithoutNodes(Layer):
    def forward(self, x, edge_index):
        if len(x) < 2:
            raise RuntimeError("no")
        return super().forward(x, edge_index)


def test_laws_that_fail_alike_share_a_sentence():
    with pytest.raises(AssertionError, match=r"and likewise 'no nodes': .*no") as one:
        check_layer(FailsWithoutNodes(), in_channels=4)
    assert str(one.value).count("likewise") == 1


def test_a_wrong_gradient_is_one_sentence_without_matrices():
    with pytest.raises(AssertionError, match=r"input 0 is the state") as raised:
        check_layer(WrongGradient(), in_channels=4)
    assert "tensor(" not in str(raised.value)


class CentredByGraph(nn.Module):
    def forward(self, x, edge_index, batch):
        return x - pyg.global_mean_pool(x, batch)[batch]


class Weighted(nn.Module):
    def forward(self, x, edge_index, edge_weight):
        sent = x[edge_index[0]] * edge_weight.unsqueeze(1)
        return x.index_add(0, edge_index[1], sent)


def test_inputs_that_a_layer_needs_are_always_there():
    check_layer(CentredByGraph(), in_channels=4)
    check_layer(Weighted(), in_channels=4)


class OfOurs(GraphLayer):
    """Takes what any layer takes, and not what those of the library take."""

    in_channels = 4

    def forward(self, x, edge_index):
        return Layer()(x, edge_index)


def test_laws_of_our_interface_are_those_of_our_layers():
    ours = {"graph in place of edges", "returned coupling"}
    assert ours <= broken_laws(OfOurs)
    with pytest.raises(ValueError, match="skip names the laws"):
        check_layer(Layer(), in_channels=4, skip={"returned coupling": "no coupling"})
