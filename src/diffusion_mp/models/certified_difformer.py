"""``CertifiedDIFFormer``: a graph Transformer in which every layer descends one energy, for any parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, TypedDict, Unpack

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.checks import (
    Count,
    Probability,
)
from diffusion_mp.diffusivities import Diffusivity, UniformDiffusivity
from diffusion_mp.energies import Certificate, Constraint, Energy, Penalty
from diffusion_mp.graph import Graph
from diffusion_mp.layers import CertifiedBlock, CertifiedConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.layers.options import split
from diffusion_mp.models.base import Edges, Task, output_layers
from diffusion_mp.models.certified_network import CertifiedNetwork


class ReadoutOptions(TypedDict, total=False):
    """Of the layers around the steps."""

    dropout: Probability
    task: Task


class CertifiedDIFFormerOptions(ReadoutOptions, total=False):
    """Of `CertifiedDIFFormer`: beside those of its parts, of `CertifiedConv`."""

    penalty: Penalty | str | None
    heads: Count
    projection: Literal["tied"] | None
    constraint: Constraint | str | None
    radius: float
    beta: float
    lam: float
    mu: float
    graph: bool | Diffusivity


class CertifiedDIFFormer(CertifiedNetwork):
    r"""A graph Transformer whose every layer lowers one energy, whatever has been learned.

    H = MLP(X),  Z^K = K steps of :class:`CertifiedConv` from Proj_C(H) with source H,  Ŷ = Z^K W_O + b_O.

    All K steps share β, λ, μ and the projections, so they descend one energy F (:meth:`energy`) for any parameters:
    F(Z⁰) ≥ F(Z¹) ≥ … ≥ F(Z^K) (Theorem T1 of docs/certified.md). `certify` checks the premises. ``num_layers=None``
    iterates to a stationary point of F (see `fixed_point`). `CertifiedTransformer` has several blocks, with weights.

    Args:
        in_channels, hidden_channels, out_channels: see :class:`GraphModel`.
        num_layers: K, or ``None``.
        inputs: a symmetric and nonnegative diffusivity that reads the features X, a fixed term of μA beside the graph.
        encoder_layers, encoder_channels: number of linear layers of the encoder of H, each followed by ReLU and
            dropout, and the width between them, by default ``hidden_channels``.
        centre: subtract from H its mean over the nodes of each graph, which a large μ would leave alone.

    Options:
        penalty, heads, projection, constraint, radius, beta, lam, mu, graph: of the steps, see :class:`CertifiedConv`;
            ``lam=0.3`` and ``mu=20`` by default. ``penalty=None`` is the model without attention.
        dropout, task: rate in the encoder, 0 by default; ``"node"``, ``"graph"`` or ``"link"``.

    Raises:
        ConvergenceError: with ``num_layers=None``, the iteration did not converge.

    Examples:
        >>> energies = CertifiedDIFFormer(4, 16, 3, num_layers=8).energies(x, edge_index)  # before and after each step
        >>> bool((energies.diff() <= 1e-5 * energies[0].abs()).all())
        True
    """

    references = ("wu2025transformers",)

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int | None = 16,
        *,
        inputs: Diffusivity | None = None,
        encoder_layers: Count = 1,
        encoder_channels: Count | None = None,
        centre: bool = False,
        **options: Unpack[CertifiedDIFFormerOptions],
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        readout, steps = split(options, ReadoutOptions)
        rate = readout.get("dropout", 0.0)
        width = encoder_channels or hidden_channels
        layers: list[nn.Module] = []
        for a, b in pairwise(
            [in_channels, *[width] * (encoder_layers - 1), hidden_channels]
        ):
            layers += [FeatureLinear(a, b), nn.ReLU(), nn.Dropout(rate)]
        self.encoder = nn.Sequential(*layers)
        # Dropout acts in the encoder alone; the base class has a place for it in front of the decoder.
        self.dropout = nn.Identity()
        self.mean = UniformDiffusivity() if centre else None
        self.inputs = inputs
        weights: dict[str, Any] = {"lam": 0.3, "mu": 20.0}
        self.conv = CertifiedConv(
            hidden_channels, num_layers=num_layers, **weights | steps
        )
        self.decoder, self.head = output_layers(
            hidden_channels, out_channels, readout.get("task", "node")
        )

    def stages(self) -> list[tuple[str, nn.Module, CertifiedBlock]]:
        return [("conv", self.encoder, self.conv)]

    def encode(self, encoder: nn.Module, state: Tensor, graph: Graph) -> Tensor:
        # Under autocast an encoder answers in half precision, which is too coarse for an energy.
        source = encoder(state).to(self.conv.mu.raw.dtype)
        if self.mean is None:
            return source
        # A coupling, so that ranks that hold some of the nodes take the mean of all.
        mean = self.mean(source, graph).matmul(source.unsqueeze(1)).squeeze(1)
        return source - mean

    def block_inputs(
        self, x: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> dict[str, Any]:
        if self.inputs is None:
            return {}
        return {"beside": self.inputs(x, graph)}

    def energy(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Energy:
        """Return the energy F at these inputs, a function of states [N, heads, channels / heads]."""
        graph = self.inputs_to_graph(x, edge_index, edge_weight, batch)
        source = self.encode(self.encoder, x, graph)
        return self.conv.energy(source, graph, **self.block_inputs(x, graph, None))

    def energies(self, *inputs: Any, **options: Any) -> Float[Tensor, "*states"]:
        """Return F before the first step and after every step, in float64; with ``num_layers=None`` of Z⁰ and Z*.

        With ``by_graph``, F of every graph of a batch: [states, B]. See :meth:`CertifiedNetwork.energies`.
        """
        return super().energies(*inputs, **options)[0]

    def summary(self, blocks: dict[str, Certificate]) -> Certificate:
        # With one block its certificate is that of the network, and names the premise.
        return blocks["conv"]
