"""``CertifiedTransformer``: blocks of certified steps with matrices, attention and an MLP; each descends an energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from torch import nn

from diffusion_mp.checks import (
    Count,
    CountOrZero,
    PositiveNumber,
    Probability,
    check_choice,
)
from diffusion_mp.energies import Constraint
from diffusion_mp.energies.matrix_terms import ACTIVATIONS
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    RowAttention,
    TermModule,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.models.base import (
    FeatureEncoder,
    Head,
    Task,
    feature_columns,
    output_layers,
)
from diffusion_mp.models.certified_network import CertifiedNetwork, Stage


class CertifiedTransformer(CertifiedNetwork):
    r"""A network of certified blocks, with matrices between neighbours, attention and MLPs.

        H_b = H_{b−1} + f_b(Z_{b−1}),   Z_b = CertifiedBlock(H_b),   Ŷ = W_O Z_B + b_O

    for b = 1 … B, with H_1 = f_1(X). Every f_b is Linear, LayerNorm, ReLU and dropout. The sources H_b keep what a node
    knows of itself. The K steps of block b descend its energy F_b for any parameters (Theorem T11 of
    docs/certified.md).

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every column of integer features.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_blocks: Number of blocks B.
        num_layers: Number of steps K of every block. ``None`` iterates to the limit; see :class:`CertifiedBlock`.
        graph: Normalisation of the graph of `WeightedGraph`, ``"sum"`` or ``"sym"``; ``None`` leaves `WeightedGraph`
            out.
        mu: Initial weight of `WeightedGraph`.
        edge_dim: Number of relations R of `WeightedGraph`; calls then need ``edge_attr``. ``None`` is one relation.
        attention: Pairs of `RowAttention`, ``"all"`` or ``"neighbours"``; ``None`` leaves `RowAttention` out.
        heads: Number of heads H of `RowAttention`.
        mlp_channels: Number of hidden channels of `TiedMLP`; 0 leaves `TiedMLP` out.
        activation: Activation of `TiedMLP`, ``"relu"``, ``"tanh"`` or ``"sigmoid"``.
        constraint: The set C of every row of the state: ``None``, ``"nonnegative"``, ``"ball"``, ``"sphere"``,
            ``"nonnegative_ball"`` or a `Constraint`. The projection onto the default is a ReLU.
        radius: Radius of a ball or sphere that is given by its name.
        layer_norm: LayerNorm in every f_b. Norms act between blocks, since no energy accounts for a norm within a
            block.
        dropout: Dropout rate in every f_b and before the output layer.
        task: ``"node"``: predict for every node; ``"graph"``: an MLP reads the mean over the nodes of each graph;
            ``"link"``: score pairs of nodes.
        head: Score of a pair in link tasks: ``"dot"``, ⟨z_u, z_v⟩ with states of ``out_channels``, as in PyG's ``GAE``;
            or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Options:
        symmetric (bool): Symmetric matrices B_r of `WeightedGraph`; ``True`` by default.
        gate (bool): Multiply the edges of `WeightedGraph` by a sign and a strength read from the source; ``False`` by
            default.
        hops (int): Number of edges of a walk between interacting nodes of `WeightedGraph`; 1 by default.
        matrix (str): Matrices of `WeightedGraph`, ``"full"`` (default), ``"diagonal"`` or ``"identity"``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim].
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

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
        num_blocks: Count = 1,
        num_layers: int | None = 2,
        *,
        graph: Literal["sum", "sym"] | None = "sum",
        mu: PositiveNumber = 1.0,
        edge_dim: int | None = None,
        attention: Literal["all", "neighbours"] | None = None,
        heads: Count = 1,
        mlp_channels: CountOrZero = 0,
        activation: str = "relu",
        constraint: Constraint | str | None = "nonnegative",
        radius: float = 1.0,
        layer_norm: bool = False,
        dropout: Probability = 0.0,
        task: Task = "node",
        head: Head = "dot",
        **options: Any,
    ) -> None:
        super().__init__(
            feature_columns(in_channels, "in_channels"), hidden_channels, out_channels
        )
        encoder = FeatureEncoder(in_channels, hidden_channels)
        # Here too, since without mlp_channels nothing is made of it.
        check_choice(activation, "activation", ACTIVATIONS)
        if graph is None and options:
            raise TypeError(
                f"graph=None leaves out the graph term, and with it {', '.join(options)}."
            )
        # Norms act on sources, between blocks: within one they would move the state, and no energy accounts for that.
        norm = nn.LayerNorm if layer_norm else nn.Identity

        def block() -> CertifiedBlock:
            # Every block gets terms, and so an energy, of its own.
            terms: list[TermModule] = []
            if graph is not None:
                neighbours = WeightedGraph(
                    hidden_channels,
                    mu,
                    edge_dim=edge_dim,
                    normalization=graph,
                    **options,
                )
                terms.append(neighbours)
            if attention is not None:
                near = attention == "neighbours"
                terms.append(RowAttention(hidden_channels, heads, neighbours=near))
            if mlp_channels:
                mlp = TiedMLP(hidden_channels, mlp_channels, activation=activation)
                terms.append(mlp)
            return CertifiedBlock(
                hidden_channels, terms, num_layers, constraint=constraint, radius=radius
            )

        # The first encoder reads X, perhaps by tables; the later ones read states.
        later = (
            nn.Linear(hidden_channels, hidden_channels) for _ in range(num_blocks - 1)
        )
        self.encoders = nn.ModuleList(
            nn.Sequential(first, norm(hidden_channels), nn.ReLU(), nn.Dropout(dropout))
            for first in (encoder, *later)
        )
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.dropout = nn.Dropout(dropout)
        self.edge_dim = edge_dim
        self.categories = encoder.sizes
        # Without the graph term no term reads the features of edges.
        if edge_dim is not None and graph is not None:
            self.reads = ("edge_attr",)
        self.decoder, self.head = output_layers(
            hidden_channels, out_channels, task, head
        )

    def stages(self) -> list[Stage]:
        return [
            (f"blocks.{number}", encoder, cast("CertifiedBlock", self.blocks[number]))
            for number, encoder in enumerate(self.encoders)
        ]
