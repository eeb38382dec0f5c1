"""``SGFormer``: one layer of global attention beside a GNN."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn

from diffusion_mp.dropout import dropout
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_positive, check_probability
from diffusion_mp.graph import Graph
from diffusion_mp.layers import SGFormerConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.models.base import GraphModel, Record, recorded
from diffusion_mp.models.gnn import ConvName, DiffusionGNN
from diffusion_mp.models.heads import Task, output_layers


class SGFormer(GraphModel):
    r"""SGFormer (slides, "SGFormer"; Wu et al. 2023b): one attention over all pairs, and a GNN on the same embedding.

    Z⁽⁰⁾ = ReLU(LayerNorm(W_I X + b_I)),  Z = LayerNorm(β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z⁽⁰⁾),
    Z_O = (1 − α) Z + α GN(Z⁽⁰⁾, A),  Ŷ = Z_O W_O + b_O.

    Without observed edges Z_O = Z. Dropout acts on what is propagated and on Z_O, never on what the attention reads.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the embeddings and the logits.
        num_gnn_layers, gnn: GN, a :class:`DiffusionGNN` of this depth and ``conv`` on hidden channels.
        alpha: α in [0, 1], the weight of GN.
        shared_encoder: GN reads Z⁽⁰⁾, as the slides say; ``False``: X through an encoder of its own, as the released
            code does.
        layer_norm: normalise in the encoders and after the attention.
        dropout: rate of the attention's values and of Z_O.
        gnn_dropout: rate inside GN; ``None``: the same.
        task: ``"node"``, ``"graph"`` or ``"link"``.
        options: of the attention, further ones of :class:`SGFormerConv` (``heads``, ``beta``, ``normalize``, …).

    Shapes: see :class:`GraphModel`.

    Raises:
        TypeError, ValueError: an option or the input does not fit.

    Examples:
        >>> SGFormer(4, 16, 3)(x, edge_index).shape
        torch.Size([6, 3])
    """

    references = SGFormerConv.references

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_gnn_layers: int = 2,
        gnn: ConvName = "gcn",
        alpha: float = 0.5,
        shared_encoder: bool = True,
        layer_norm: bool = True,
        dropout: float = 0.0,
        gnn_dropout: float | None = None,
        task: Task = "node",
        **options: Any,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_gnn_layers=num_gnn_layers)
        check_choice(gnn, "gnn", get_args(ConvName))
        check_flags(shared_encoder=shared_encoder, layer_norm=layer_norm)
        gnn_dropout = dropout if gnn_dropout is None else gnn_dropout
        check_probability(gnn_dropout, "gnn_dropout")
        check_positive(alpha, "alpha", allow_zero=True)
        if alpha > 1:
            raise ValueError(f"alpha must lie in [0, 1], the weight of the GNN beside the attention; got {alpha}.")
        self.alpha, self.dropout = alpha, dropout

        def norm() -> nn.Module:
            return nn.LayerNorm(hidden_channels) if layer_norm else nn.Identity()

        def encoder() -> nn.Module:
            return nn.Sequential(FeatureLinear(in_channels, hidden_channels), norm(), nn.ReLU())

        self.encoder = encoder()
        self.gnn_encoder = None if shared_encoder else encoder()
        self.conv = SGFormerConv(hidden_channels, hidden_channels, dropout=dropout, **options)
        self.norm = norm()
        self.gnn = DiffusionGNN(
            hidden_channels, hidden_channels, hidden_channels, num_gnn_layers, conv=gnn, dropout=gnn_dropout
        )
        self.decoder, self.head = output_layers(hidden_channels, out_channels, task)

    def propagate(self, x: Tensor, graph: Graph, record: Record) -> Tensor:
        initial = self.encoder(x)
        z = self.norm(recorded(record, self.conv, initial, graph))
        if graph.edge_index is not None:
            observed = self.gnn(initial if self.gnn_encoder is None else self.gnn_encoder(x), graph)
            z = (1 - self.alpha) * z + self.alpha * observed
        return self.decoder(dropout(z, self.dropout, self.training))
