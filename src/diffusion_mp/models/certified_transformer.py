"""``CertifiedTransformer``: blocks of certified steps with weights, attention and an MLP, each down an energy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.energies import Certificate, Constraint, JointEnergy, certify_step
from diffusion_mp.energies.certification import CERTIFIED_STEPS, broken_parameter, random_input
from diffusion_mp.energies.matrix_terms import ACTIVATIONS
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_flags,
    check_positive,
    check_probability,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    RowAttention,
    TermModule,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.models.base import (
    Collect,
    Edges,
    FeatureEncoder,
    GraphModel,
    Task,
    feature_columns,
    output_layers,
    run_layer,
)


class CertifiedTransformer(GraphModel):
    r"""A network of certified blocks, with matrices between neighbours, attention and MLPs.

    H_b = H_(b−1) + f_b(Z_(b−1)),  Z_b = :class:`CertifiedBlock` (H_b) for b = 1 … B,  Ŷ = W_O Z_B + b_O.

    H_1 = f_1(X); every f_b is Linear, LayerNorm, ReLU and dropout. The sources keep what a node knows of itself. The K
    steps of block b descend its energy F_b for any parameters (Theorem T11 of docs/certified.md).

    Args:
        in_channels, hidden_channels, out_channels, layer_norm, dropout, task: see :class:`GraphModel`; in_channels may
            be a list with the number of categories of every column of integer features.
        num_blocks, num_layers: B, and the steps K of every block.
        graph, symmetric, gate, hops, matrix, mu, edge_dim: normalisation, options and initial weight of
            `WeightedGraph`; ``graph=None`` omits it. With ``edge_dim`` the calls get ``edge_attr`` [E, edge_dim].
        attention, heads: ``"all"`` pairs or ``"neighbours"``, of `RowAttention`; ``None`` omits it.
        mlp_channels, activation: of `TiedMLP`; 0 omits it.
        constraint, radius: of every row of the state, see `CertifiedStep`.

    Examples:
        >>> model = CertifiedTransformer(4, 16, 3, mlp_channels=32)
        >>> energies = model.energies(x, edge_index)  # by block, before and after each step
        >>> bool((energies.diff(dim=1) <= 1e-5 * energies[:, :1].abs()).all())
        True
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_blocks: int = 1,
        num_layers: int | None = 2,
        *,
        graph: Literal["sum", "sym"] | None = "sum",
        symmetric: bool = True,
        gate: bool = False,
        hops: int = 1,
        matrix: Literal["full", "diagonal", "identity"] = "full",
        mu: float = 1.0,
        edge_dim: int | None = None,
        attention: Literal["all", "neighbours"] | None = None,
        heads: int = 1,
        mlp_channels: int = 0,
        activation: str = "relu",
        constraint: Constraint | str | None = "nonnegative",
        radius: float = 1.0,
        layer_norm: bool = False,
        dropout: float = 0.0,
        task: Task = "node",
    ) -> None:
        super().__init__(feature_columns(in_channels, "in_channels"), hidden_channels, out_channels)
        encoder = FeatureEncoder(in_channels, hidden_channels)
        check_counts(num_blocks=num_blocks, heads=heads)
        check_counts(0, mlp_channels=mlp_channels)
        check_flags(layer_norm=layer_norm)
        check_choice(graph, "graph", ["sum", "sym", None])
        check_choice(activation, "activation", ACTIVATIONS)
        check_choice(attention, "attention", ["all", "neighbours", None])
        check_probability(dropout, "dropout")
        check_positive(mu, "mu")
        norm = nn.LayerNorm if layer_norm else nn.Identity

        def block() -> CertifiedBlock:
            terms: list[TermModule] = []
            if graph is not None:
                options: dict[str, Any] = {
                    "symmetric": symmetric,
                    "gate": gate,
                    "hops": hops,
                    "matrix": matrix,
                }
                options |= {"edge_dim": edge_dim, "normalization": graph}
                terms.append(WeightedGraph(hidden_channels, mu, **options))
            if attention is not None:
                terms.append(
                    RowAttention(hidden_channels, heads, neighbours=attention == "neighbours")
                )
            if mlp_channels:
                terms.append(TiedMLP(hidden_channels, mlp_channels, activation=activation))
            return CertifiedBlock(
                hidden_channels, terms, num_layers, constraint=constraint, radius=radius
            )

        later = (nn.Linear(hidden_channels, hidden_channels) for _ in range(num_blocks - 1))
        self.encoders = nn.ModuleList(
            nn.Sequential(first, norm(hidden_channels), nn.ReLU(), nn.Dropout(dropout))
            for first in (encoder, *later)
        )
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.dropout = nn.Dropout(dropout)
        self.edge_dim = edge_dim
        self.categories = encoder.sizes
        if edge_dim is None or graph is None:
            self.reads = ()
        else:
            self.reads = ("edge_attr",)
        self.decoder, self.head = output_layers(hidden_channels, out_channels, task)

    def propagate(
        self, x: Tensor, graph: Graph, collect: Collect, edge_attr: Tensor | None = None
    ) -> Tensor:
        source = state = x
        for number, block in enumerate(self.blocks):
            source = self._source(number, source, state)
            state = run_layer(collect, block, source, graph, edge_attr=edge_attr)
        return self.decoder(self.dropout(state))

    def _source(self, number: int, source: Tensor, state: Tensor) -> Tensor:
        """Return H of a block, from H and the last state of the block before it; of the first, from the features."""
        encoded = self.encoders[number](state)
        return source + encoded if number else encoded

    def _runs(
        self,
        x: Tensor,
        edge_index: Edges,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Iterator[tuple[JointEnergy, list[Tensor]]]:
        """Yield the energy of every block, and its states before the first step and after every step."""
        if self.reads or edge_attr is None:
            others = {}
        else:
            others = {"edge_attr": edge_attr}
        graph = self.inputs_to_graph(x, edge_index, edge_weight, batch, False, others, edge_attr)
        source = state = x
        for number, module in enumerate(self.blocks):
            block = cast("CertifiedBlock", module)
            source = self._source(number, source, state)
            states = [*block.states(source, graph, edge_attr=edge_attr)]
            yield block.energy(source, graph, edge_attr), states
            state = states[-1]

    @torch.no_grad()
    def energies(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        by_graph: bool = False,
    ) -> Float[Tensor, "blocks states"] | Float[Tensor, "blocks states B"]:
        """Return F_b before the first step and after every step of every block, in float64.

        With ``by_graph``, F_b of every graph of a batch: [blocks, states, B].
        """
        check_flags(by_graph=by_graph)
        blocks = []
        for energy, states in self._runs(x, edge_index, edge_weight, batch, edge_attr):
            values = [energy.by_graph(state) if by_graph else energy(state) for state in states]
            blocks.append(torch.stack(values))
        return torch.stack(blocks)

    @torch.no_grad()
    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
    ) -> Certificate:
        """Return the certificate that no step of a block raises its energy at these inputs, by default random ones.

        ``layers`` holds the certificate of every block, from its first state on (`certify_step`).
        """
        if x is None:
            x, edge_index, edge_attr = random_input(
                self.in_channels, next(self.blocks.parameters()), self.edge_dim
            )
            if self.categories is not None:
                x = torch.stack(
                    [torch.arange(8, device=x.device) % size for size in self.categories], 1
                )
        broken = broken_parameter(self, "encoders.", "blocks.")
        if broken is not None:
            return Certificate.refused("Theorem T11", math.nan, broken)
        blocks: dict[str, Certificate] = {}
        for number, (energy, states) in enumerate(
            self._runs(x, edge_index, edge_weight, batch, edge_attr)
        ):
            steps = cast("CertifiedBlock", self.blocks[number]).num_layers or CERTIFIED_STEPS
            blocks[f"blocks.{number}"] = certify_step(energy, None, states[0], steps=steps)
        holds = all(blocks.values())
        if holds:
            reason = "Every block descends an energy of its own."
        else:
            reason = "Not every block descends its energy."
        return Certificate(
            theorem="Theorem T11",
            holds=holds,
            tau_max=math.inf if holds else 0.0,
            reason=reason,
            layers=blocks,
            energy="the energy of every block",
            searched=sum(block.searched for block in blocks.values()),
        )
