"""``GatedGCN``, ``GPS``, ``DFiFormer`` and ``SFiFormer``: stacks of blocks with message passing and attention."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from diffusion_mp.checks import (
    Count,
    CountOrZero,
    Probability,
    check_edge_rows,
    check_kind,
    checked,
    describe,
)
from diffusion_mp.couplings import Coupling
from diffusion_mp.graph import Graph
from diffusion_mp.layers import GatedGCNConv, GPSBlock, LaplacianEncoder, SFiConv
from diffusion_mp.layers.options import split
from diffusion_mp.models.base import (
    Collect,
    Edges,
    FeatureEncoder,
    GraphModel,
    Head,
    Readout,
    Task,
    feature_columns,
    output_layers,
    run_layer,
    two_layers,
)
from diffusion_mp.modules import Norm

Encodings = Tensor | tuple[Tensor, ...]


class BlockStack(GraphModel):
    r"""Base of models with states of nodes and edges.

        x⁰ = [W x ‖ PE],   e⁰ = W_e e,   (x^(k+1), e^(k+1)) = block(x^(k), e^(k), A)

    A head reads the last x.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every integer column.
        hidden_channels: Number of channels C of the states of nodes and edges.
        out_channels: Number of logits.
        blocks: The blocks, such as :class:`GPSBlock`. They are taken, and may be made, after the encoders.
        edge_dim: Number of channels of edge features, or a list with the number of categories of every integer column.
            ``None``: no edge features; e⁰ is one learned vector.
        pe_channels: Number of channels of the positional encoding, a part of ``hidden_channels``, which a
            :class:`LaplacianEncoder` computes from ``pe``; 0 for none.
        task: ``"node"``: predict for every node; ``"graph"``: an MLP reads the mean over the nodes of each graph;
            ``"link"``: score pairs of nodes.
        head: Score of a pair in link tasks: ``"dot"``, ⟨z_u, z_v⟩ with states of ``out_channels``, as in PyG's ``GAE``;
            or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], in the order of ``edge_index``; or [E, F] of integers.
        pe: A tensor or a tuple of tensors with one row per node: (``laplacian_eigenvectors``,
            ``laplacian_eigenvalues``, ``laplacian_mask``) of `AddLaplacianPE`.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.
    """

    reads = ("edge_attr", "pe")

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        blocks: Iterable[nn.Module],
        *,
        edge_dim: int | Sequence[int] | None = None,
        pe_channels: CountOrZero = 0,
        task: Task = "node",
        head: Head = "dot",
    ) -> None:
        super().__init__(
            feature_columns(in_channels, "in_channels"), hidden_channels, out_channels
        )
        # At least one channel is left for the features themselves.
        if pe_channels >= hidden_channels:
            raise ValueError(
                f"pe_channels must lie in 0..{hidden_channels - 1}, a part of hidden_channels; got {pe_channels}."
            )
        self.pe_channels = pe_channels
        # The encoding is a part of the state instead of an addition to it, so that neither can drown the other.
        self.encoder = FeatureEncoder(in_channels, hidden_channels - pe_channels)
        self.categories = self.encoder.sizes
        self.pe_encoder: LaplacianEncoder | None = None
        if pe_channels:
            self.pe_encoder = LaplacianEncoder(pe_channels)
        # GatedGCN needs a state for every edge. Without features of edges all begin with one learned vector, and layers
        # tell them apart by their ends.
        self.edge_encoder = None
        self.edge_start = None
        if edge_dim is None:
            self.edge_start = nn.Embedding(1, hidden_channels)
        else:
            self.edge_encoder = FeatureEncoder(edge_dim, hidden_channels, "edge_dim")
        self.blocks = nn.ModuleList(blocks)
        self.decoder: nn.Module = nn.Identity()
        # Nodes are read by an MLP too, as in the code of GPS.
        if task == "node":
            self.head = Readout(mlp=two_layers(hidden_channels, out_channels))
        else:
            self.decoder, self.head = output_layers(
                hidden_channels, out_channels, task, head
            )

    def forward(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Return predictions; with ``return_coupling`` also the coupling of every block.

        Args:
            x: Features of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            edge_attr: Features of the edges, for models with ``edge_dim``.
            pe: Positional encodings, for models with ``pe_channels``.
            others: ``edge_label_index`` and ``return_coupling``, as in :class:`GraphModel`.
        """
        # A parameter and not only a key of others, for torch.export reads the signature.
        if pe is not None:
            others["pe"] = pe
        return super().forward(
            x, edge_index, edge_weight, batch, edge_attr=edge_attr, **others
        )

    def propagate(
        self,
        x: Tensor,
        graph: Graph,
        collect: Collect,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
    ) -> Tensor:
        x = self._placed(self.encoder(x), pe)
        edges = self._edges(graph, edge_attr)
        for block in self.blocks:
            # Without observed edges only the attention acts.
            if edges is None:
                x = run_layer(collect, block, x, graph)
            else:
                x, edges = run_layer(collect, block, x, graph, edge_attr=edges)
        return self.decoder(x)

    def _placed(self, x: Tensor, pe: Encodings | None) -> Tensor:
        if (self.pe_encoder is None) != (pe is None):
            raise ValueError(
                f"pe must be passed to a model with pe_channels, and only to one; got {describe(pe)} with "
                f"pe_channels={self.pe_channels}."
            )
        if self.pe_encoder is None or pe is None:
            return x
        # The encoder takes eigenvectors, and optionally eigenvalues and a mask.
        parts = pe if isinstance(pe, tuple) else (pe,)
        for part in parts:
            check_kind(part, "pe", Tensor, "one tensor or a tuple, a row per node")
            if part.shape[:1] != x.shape[:1]:
                raise ValueError(
                    f"pe must have {x.size(0)} rows, one per node; got {describe(part)}."
                )
        return torch.cat([x, self.pe_encoder(*parts)], 1)

    def _edges(self, graph: Graph, edge_attr: Tensor | None) -> Tensor | None:
        """Return the initial edge states; ``None`` without observed edges."""
        if graph.edge_index is None:
            if edge_attr is not None:
                raise ValueError("edge_attr needs edge_index; got edge_attr alone.")
            return None
        if (self.edge_encoder is None) != (edge_attr is None):
            raise ValueError(
                f"edge_attr must be passed to a model with edge_dim, and only to one; got {describe(edge_attr)}."
            )
        if edge_attr is None:
            return cast("nn.Embedding", self.edge_start).weight.expand(
                graph.num_edges, -1
            )
        check_edge_rows(edge_attr, graph.num_edges)
        return cast("nn.Module", self.edge_encoder)(edge_attr, "edge_attr")


class GatedGCN(BlockStack):
    """Gated message passing with edge features: :class:`GatedGCNConv` (Bresson & Laurent 2017; Dwivedi et al. 2023).

        x⁰ = [W x ‖ PE],   e⁰ = W_e e,   (x^(k+1), e^(k+1)) = GatedGCNConv(x^(k), e^(k), A)

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every integer column.
        hidden_channels: Number of channels C of the states of nodes and edges.
        out_channels: Number of logits.
        num_layers: Number of layers K.
        norm: Norm of every layer, ``"batch"``, ``"layer"`` or ``None``.
        dropout: Dropout rate of every layer.

    Options:
        edge_dim (int, list of int or None): Number of channels of edge features, or a list with the number of
            categories of every integer column; ``None`` (default): no edge features.
        pe_channels (int): Number of channels of the positional encoding, a part of ``hidden_channels``; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``; required.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], in the order of ``edge_index``; or [E, F] of integers.
        pe: A tensor or a tuple of tensors with one row per node, as `AddLaplacianPE` stores them.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> GatedGCN(4, 16, 3, num_layers=2)(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: Count = 4,
        *,
        norm: Norm = "batch",
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        blocks = (
            GatedGCNConv(hidden_channels, norm=norm, dropout=dropout)
            for _ in range(num_layers)
        )
        super().__init__(in_channels, hidden_channels, out_channels, blocks, **options)


class FrameOptions(TypedDict, total=False):
    """Options of `GatedGCNConv` and `GPSBlock`."""

    norm: Norm
    dropout: float


class AttentionOptions(TypedDict, total=False):
    """Options of the attention of `GPS`."""

    attention: dict[str, Any] | None
    attention_dropout: Probability


class GPSOptions(FrameOptions, AttentionOptions, total=False):
    """Options of `GPS`: the options of its parts and of `BlockStack`."""

    edge_dim: int | Sequence[int] | None
    pe_channels: CountOrZero
    task: Task
    head: Head


class GPS(BlockStack):
    r"""Message passing and attention over all pairs of nodes in every :class:`GPSBlock` (Rampášek et al. 2022).

        x⁰ = [W x ‖ PE],   e⁰ = W_e e,   (x^(k+1), e^(k+1)) = GPSBlock(x^(k), e^(k), A)

    The attention is a :class:`SFiConv`. By default it is softmax attention, without friction (λ* = 0) and adjacency.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every integer column.
        hidden_channels: Number of channels C of the states of nodes and edges.
        out_channels: Number of logits.
        num_layers: Number of blocks K.
        heads: Number of heads H of the attention.
        lam: λ*, the weight of friction in the attention; 0 is softmax attention.
        adjacency: Include the term Ã of the attention (:class:`SFiConv`).
        local: Include message passing by :class:`GatedGCNConv`; ``False`` leaves attention as the only layer of a
            block.

    Options:
        norm (str or None): Norm of the blocks, ``"batch"`` (default), ``"layer"`` or ``None``.
        dropout (float): Dropout rate of the blocks; 0 by default.
        attention (dict or None): Further options of :class:`SFiConv`, such as ``alpha``, ``friction``, ``gamma`` and
            ``hops``; ``None`` (default) for none.
        attention_dropout (float): Dropout rate on the values of the attention; 0 by default.
        edge_dim (int, list of int or None): Number of channels of edge features, or a list with the number of
            categories of every integer column; ``None`` (default): no edge features.
        pe_channels (int): Number of channels of the positional encoding, a part of ``hidden_channels``; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], in the order of ``edge_index``; or [E, F] of integers.
        pe: A tensor or a tuple of tensors with one row per node, as `AddLaplacianPE` stores them.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> GPS(4, 16, 3, num_layers=2)(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: Count,
        out_channels: int,
        num_layers: Count = 4,
        *,
        heads: Count = 4,
        lam: float = 0.0,
        adjacency: bool = False,
        local: bool = True,
        **options: Unpack[GPSOptions],
    ) -> None:
        frame, attention, stack = split(options, FrameOptions, AttentionOptions)

        def block() -> nn.Module:
            passing = None
            if local:
                passing = GatedGCNConv(hidden_channels, **frame)
            everywhere = SFiConv(
                hidden_channels,
                hidden_channels,
                heads,
                lam=lam,
                adjacency=adjacency,
                residual=False,  # the block adds the state
                dropout=attention.get("attention_dropout", 0.0),
                # Blocks share no module that is an option.
                **copy.deepcopy(attention.get("attention") or {}),
            )
            return GPSBlock(hidden_channels, passing, everywhere, **frame)

        blocks = (block() for _ in range(num_layers))
        super().__init__(in_channels, hidden_channels, out_channels, blocks, **stack)


class DFiFormer(GPS):
    """Softmax attention over all pairs of nodes plus message passing: :class:`SFiFormer` without friction (§ 4.2).

    The attention of every block adds

        (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h

    to its state (SFi-Former, Eq. 11), with softmax attention S (:class:`SFiConv`).

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every integer column.
        hidden_channels: Number of channels C of the states of nodes and edges.
        out_channels: Number of logits.
        num_layers: Number of blocks K.
        adjacency: Include the term Ã of the attention.

    Options:
        heads (int): Number of heads H of the attention; 4 by default.
        local (bool): Include message passing by :class:`GatedGCNConv`; ``True`` by default.
        norm (str or None): Norm of the blocks, ``"batch"`` (default), ``"layer"`` or ``None``.
        dropout (float): Dropout rate of the blocks; 0 by default.
        attention (dict or None): Further options of :class:`SFiConv`; ``None`` (default) for none.
        attention_dropout (float): Dropout rate on the values of the attention; 0 by default.
        edge_dim (int, list of int or None): Number of channels of edge features, or a list with the number of
            categories of every integer column; ``None`` (default): no edge features.
        pe_channels (int): Number of channels of the positional encoding, a part of ``hidden_channels``; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], in the order of ``edge_index``; or [E, F] of integers.
        pe: A tensor or a tuple of tensors with one row per node, as `AddLaplacianPE` stores them.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> DFiFormer(4, 16, 3, num_layers=2, task="graph")(x, edge_index).shape  # one row for the one graph
        torch.Size([1, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        adjacency: bool = True,
        **options: Any,
    ) -> None:
        sizes = (in_channels, hidden_channels, out_channels, num_layers)
        # Without friction the flow is the softmax, dense flow.
        super().__init__(*sizes, lam=0.0, adjacency=adjacency, **options)
        # For SFiFormer.from_dfi, which changes one of them and builds the rest alike.
        self.arguments = (sizes, {"adjacency": adjacency, **options})


class SFiFormer(GPS):
    r"""Sparse attention over all pairs of nodes plus message passing: :class:`GPS` with Eq. 11 (SFi-Former, § 4).

    The attention of every block adds

        (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h

    to its state, with the sparse flow S (:class:`SFiConv`).

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call; or a list with the number of
            categories of every integer column.
        hidden_channels: Number of channels C of the states of nodes and edges.
        out_channels: Number of logits.
        num_layers: Number of blocks K.
        lam: λ*, the weight of friction in the attention (compared in Table 3).
        adjacency: Include the term Ã of the attention (compared in Table 3).

    Options:
        heads (int): Number of heads H of the attention; 4 by default.
        local (bool): Include message passing by :class:`GatedGCNConv`; ``True`` by default.
        norm (str or None): Norm of the blocks, ``"batch"`` (default), ``"layer"`` or ``None``.
        dropout (float): Dropout rate of the blocks; 0 by default.
        attention (dict or None): Further options of :class:`SFiConv`, such as ``alpha`` for α; ``None`` (default) for
            none.
        attention_dropout (float): Dropout rate on the values of the attention; 0 by default.
        edge_dim (int, list of int or None): Number of channels of edge features, or a list with the number of
            categories of every integer column; ``None`` (default): no edge features.
        pe_channels (int): Number of channels of the positional encoding, a part of ``hidden_channels``; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse; or [N, F] of integers.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], in the order of ``edge_index``; or [E, F] of integers.
        pe: A tensor or a tuple of tensors with one row per node, as `AddLaplacianPE` stores them.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> SFiFormer(4, 16, 3, num_layers=2)(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        lam: float = 1.0,
        adjacency: bool = True,
        **options: Any,
    ) -> None:
        sizes = (in_channels, hidden_channels, out_channels, num_layers)
        super().__init__(*sizes, lam=lam, adjacency=adjacency, **options)

    @classmethod
    @checked
    def from_dfi(
        cls,
        dfi: DFiFormer,
        *,
        lam: float = 1.0,
        attention: dict[str, Any] | None = None,
    ) -> SFiFormer:
        """Return an SFi-Former+ with the parameters of a trained DFi-Former, which is not modified (Section 4.2).

        The projections of the frictions, which DFi-Former lacks, are drawn at random.

        Args:
            dfi: The trained model.
            lam: λ* > 0, the weight of friction.
            attention: Options of the attention that override those of ``dfi``, such as ``alpha`` and ``friction``.
        """
        sizes, options = copy.deepcopy(dfi.arguments)
        options["attention"] = {**(options.get("attention") or {}), **(attention or {})}
        model = cls(*sizes, lam=lam, **options)
        # A new model is on the CPU in float32; the trained one may be elsewhere.
        like = next(dfi.parameters())
        model.to(like.device, like.dtype)
        # Friction has parameters that dense flow lacks, and these alone may be missing.
        missing, unexpected = model.load_state_dict(dfi.state_dict(), strict=False)
        differing = [name for name in missing if ".friction." not in name] + unexpected
        if differing:
            raise ValueError(
                f"attention must leave the parameters of dfi as they are; these differ: {differing}."
            )
        return model
