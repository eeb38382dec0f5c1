"""``CertifiedTransformer``: blocks of certified steps with weights, attention and an MLP, each down an energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.energies import Constraint, JointEnergy
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_probability
from diffusion_mp.graph import Graph
from diffusion_mp.layers.certified_block import CertifiedBlock, RowAttention, TermModule, TiedMLP, WeightedGraph
from diffusion_mp.models.base import Collect, Edges, FeatureEncoder, GraphModel, Task, output_layers


class CertifiedTransformer(GraphModel):
    r"""H_b = Encoder_b(Z_(b−1)),  Z_b = :class:`CertifiedBlock` (H_b) for b = 1 … B,  Ŷ = W_O Z_B + b_O.

    The encoder of a block is Linear, LayerNorm, ReLU and dropout, and from the second on it is added to the state. The K
    steps of block b descend its energy F_b for any parameters (Theorem T11 of docs/certified.md; :meth:`energies`).

    Args:
        in_channels, hidden_channels, out_channels, layer_norm, dropout, task: see :class:`GraphModel`; in_channels may
            be a list with the number of categories of every column of integer features.
        num_blocks, num_layers: B, and the steps K of every block.
        graph, symmetric, gate, hops, edge_dim: normalisation and options of `WeightedGraph`; ``graph=None`` omits it.
            With ``edge_dim`` the calls get ``edge_attr`` [E, edge_dim].
        attention, heads: ``"all"`` pairs or ``"neighbours"``, of `RowAttention`; ``None`` omits it.
        mlp_channels, activation: of `TiedMLP`; 0 omits it.
        constraint, radius: of every row of the state, see `CertifiedStep`.

    Examples:
        >>> model = CertifiedTransformer(4, 16, 3, mlp_channels=32)
        >>> energies = model.energies(x, edge_index)  # by block, before and after each step
        >>> bool((energies.diff(dim=1) <= 1e-5 * energies[:, :1].abs()).all())
        True
    """

    reads = ("edge_attr",)

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_blocks: int = 1,
        num_layers: int = 2,
        *,
        graph: Literal["sum", "sym"] | None = "sum",
        symmetric: bool = True,
        gate: bool = False,
        hops: int = 1,
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
        encoder = FeatureEncoder(in_channels, hidden_channels)
        super().__init__(encoder.channels, hidden_channels, out_channels)
        check_counts(num_blocks=num_blocks, num_layers=num_layers)
        check_flags(layer_norm=layer_norm)
        check_choice(attention, "attention", ["all", "neighbours", None])
        check_probability(dropout, "dropout")
        norm = nn.LayerNorm if layer_norm else nn.Identity

        def encoded(first: nn.Module) -> nn.Sequential:
            return nn.Sequential(first, norm(hidden_channels), nn.ReLU(), nn.Dropout(dropout))

        def block() -> CertifiedBlock:
            terms: list[TermModule] = []
            if graph is not None:
                options = {"edge_dim": edge_dim, "symmetric": symmetric, "gate": gate, "hops": hops}
                terms.append(WeightedGraph(hidden_channels, normalization=graph, **options))
            if attention is not None:
                terms.append(RowAttention(hidden_channels, heads, neighbours=attention == "neighbours"))
            if mlp_channels:
                terms.append(TiedMLP(hidden_channels, mlp_channels, activation=activation))
            return CertifiedBlock(hidden_channels, terms, num_layers, constraint=constraint, radius=radius)

        later = (nn.Linear(hidden_channels, hidden_channels) for _ in range(num_blocks - 1))
        self.encoders = nn.ModuleList(map(encoded, (encoder, *later)))
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.decoder, self.head = output_layers(hidden_channels, out_channels, task)
        self.dropout = nn.Dropout(dropout)

    def propagate(self, x: Tensor, graph: Graph, collect: Collect, edge_attr: Tensor | None = None) -> Tensor:
        state = None
        for encoder, block in zip(self.encoders, self.blocks, strict=True):
            source = encoder(x) if state is None else state + encoder(state)
            state = block(source, graph, edge_attr)
        return self.decoder(self.dropout(state))

    @torch.no_grad()
    def energies(
        self, x: Tensor, edge_index: Edges = None, edge_weight: Tensor | None = None, batch: Tensor | None = None,
        *, edge_attr: Tensor | None = None,
    ) -> Float[Tensor, "blocks states"]:  # fmt: skip
        """Return F_b before the first step and after every step of every block, in float64."""
        graph, found, state = Graph.coerce(x, edge_index, edge_weight, batch), [], None
        for encoder, block in zip(self.encoders, self.blocks, strict=True):
            source = encoder(x) if state is None else state + encoder(state)
            energy: JointEnergy = block.energy(source, graph, edge_attr)
            values = []
            for state in block.states(source, graph, edge_attr):
                values.append(energy(state))
            found.append(torch.stack(values))
        return torch.stack(found)
