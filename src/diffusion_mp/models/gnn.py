"""``DiffusionGNN``: the fixed-diffusivity GNNs as one model (Wu, Wipf & Yan 2025, Table 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_choice, check_counts, check_positive, check_probability
from diffusion_mp.graph import Graph
from diffusion_mp.layers import APPNPConv, DiffusionConv, GATConv, GCNConv, GCNIIConv, GINConv, MLPConv, SGConv
from diffusion_mp.models.base import GraphModel
from diffusion_mp.updates import teleport

ConvName = Literal["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]


@dataclass(frozen=True)
class _Plan:
    """What the constructor of :class:`DiffusionGNN` was told."""

    channels: list[int]
    hidden: int
    heads: int
    dropout: float
    alpha: float
    theta: float

    @property
    def depth(self) -> int:
        return len(self.channels) - 1


def _mlp(plan: _Plan) -> Iterator[DiffusionConv]:
    return (MLPConv(a, b) for a, b in pairwise(plan.channels))


def _gcn(plan: _Plan) -> Iterator[DiffusionConv]:
    return (GCNConv(a, b) for a, b in pairwise(plan.channels))


def _sgc(plan: _Plan) -> Iterator[DiffusionConv]:
    yield SGConv(plan.channels[0], plan.channels[-1], plan.depth)


def _gin(plan: _Plan) -> Iterator[DiffusionConv]:
    for a, b in pairwise(plan.channels):
        mlp = nn.Sequential(nn.Linear(a, plan.hidden), nn.ReLU(), nn.Linear(plan.hidden, b))
        yield GINConv(a, mlp, train_eps=True)


def _gat(plan: _Plan) -> Iterator[DiffusionConv]:
    *hidden, last = pairwise(plan.channels)
    yield from (GATConv(a, b // plan.heads, plan.heads, dropout=plan.dropout) for a, b in hidden)
    yield GATConv(*last, dropout=plan.dropout)


def _appnp(plan: _Plan) -> Iterator[DiffusionConv]:
    yield MLPConv(plan.channels[0], plan.hidden)
    yield MLPConv(plan.hidden, plan.channels[-1])
    yield APPNPConv(plan.channels[-1], plan.depth, plan.alpha)


def _gcnii(plan: _Plan) -> Iterator[DiffusionConv]:
    yield MLPConv(plan.channels[0], plan.hidden)
    yield from (GCNIIConv(plan.hidden, plan.alpha, plan.theta, k + 1) for k in range(plan.depth))
    yield MLPConv(plan.hidden, plan.channels[-1])


CONVS: dict[str, Callable[[_Plan], Iterator[DiffusionConv]]] = {
    "mlp": _mlp,
    "gcn": _gcn,
    "sgc": _sgc,
    "gin": _gin,
    "gat": _gat,
    "appnp": _appnp,
    "gcnii": _gcnii,
}


class DiffusionGNN(GraphModel):
    r"""MLP, GCN, SGC, GIN, GAT, APPNP or GCNII: a chain of diffusion steps that differ in diffusivity and update only.

    ReLU and dropout stand before every layer that has weights (dropout also on the features).

    Args:
        in_channels, hidden_channels, out_channels: of the features, the hidden states and the logits.
        num_layers: layers of the stack (MLP, GCN, GIN, GAT, GCNII), or propagation steps (SGC, APPNP).
        conv: which one.
        heads: of GAT's hidden layers; its last layer has one.
        dropout: rate.
        alpha: teleport of APPNP and GCNII.
        theta: of GCNII.

    Shapes: see :class:`GraphModel`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        conv: ConvName = "gcn",
        heads: int = 1,
        dropout: float = 0.5,
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_layers=num_layers, heads=heads)
        check_choice(conv, "conv", CONVS)
        check_probability(dropout, "dropout")
        teleport(alpha)
        check_positive(theta, "theta")
        if hidden_channels % heads:
            raise ValueError(f"heads must divide hidden_channels; got {heads} heads, {hidden_channels} channels.")
        self.dropout = dropout
        channels = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(CONVS[conv](_Plan(channels, hidden_channels, heads, dropout, alpha, theta)))

    def propagate(self, x: Tensor, graph: Graph) -> tuple[Tensor, list[Coupling]]:
        couplings, initial = [], None
        for k, conv in enumerate(cast("Iterable[DiffusionConv]", self.convs)):
            has_weights = any(True for _ in conv.parameters())
            has_source = conv.update.beta != 0
            x = relu(x) if has_weights and k else x
            # The first state that a source is asked for is the initial embedding of Eq. 10.
            initial = x if has_source and initial is None else initial
            x = dropout(x, self.dropout, self.training) if has_weights else x
            x, coupling = conv(x, graph, source=initial if has_source else None, return_coupling=True)
            couplings.append(coupling)
        return x, couplings
