"""Layers on states of nodes and edges: ``GatedGCNConv``, and ``GPSBlock``, which adds an attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import relu

from diffusion_mp import checks
from diffusion_mp.checks import Count, PositiveNumber, Probability
from diffusion_mp.couplings import Coupling, ReweightedCoupling, SparseCoupling
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm import at_rows
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.modules import Norm, make_norm
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.precision import widened

#: The next states of nodes and, where there are any, of edges; and the coupling.
Moved = tuple[Tensor, Tensor | None, Coupling]


class EdgeLayer(GraphLayer, ABC):
    """Base of layers on states of nodes and, optionally, of edges; a subclass implements :meth:`step`.

    Args:
        channels: Number of channels C of nodes and edges.
        dropout: Dropout rate on changes of the state.

    Shapes:
        x: [N, C].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, C], or ``None``.
        output: x′ [N, C], or (x′, e′) with e′ [E, C] if ``edge_attr`` is given; with ``return_coupling`` also the
            coupling.
    """

    def __init__(self, channels: Count, dropout: Probability) -> None:
        super().__init__()
        self.in_channels = channels
        self.out_channels = channels
        self.dropout = dropout

    @abstractmethod
    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> Moved:
        """Return the next states of nodes and of edges, and the coupling, for checked inputs."""

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Any:
        """Return the next states of the nodes and, with ``edge_attr``, of the edges; and on request the coupling.

        Args:
            x: States of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            edge_attr: States of the edges.
            return_coupling: Return the coupling too.
        """
        graph = self.inputs_to_graph(
            x, edge_index, edge_weight, batch, return_coupling, others, edge_attr
        )
        # States of edges move as states of nodes do, so they have as many channels.
        if edge_attr is not None:
            checks.check_edge_rows(
                edge_attr, graph.num_edges, channels=self.in_channels, module=self
            )
        out, edges, coupling = self.step(x, graph, edge_attr)
        if edge_attr is None and not return_coupling:
            return out
        # States of edges are returned if they were passed, so that one loop runs blocks with and without them.
        results: list[Any] = [out]
        if edge_attr is not None:
            results.append(edges)
        if return_coupling:
            results.append(coupling)
        return tuple(results)


class GatedGCNConv(EdgeLayer):
    r"""Residual gated graph convolution with edge features (Bresson & Laurent 2017; Dwivedi et al. 2023, Section 3).

        h′_i = h_i + ReLU(BN(A h_i + Σ_j η_ij ∘ B h_j))
        η_ij = a_ij σ(ê_ij) / (Σ_l a_il σ(ê_il) + ε)
        ê_ij = C e_ij + D h_i + E h_j,   e′_ij = e_ij + ReLU(BN(ê_ij))

    j runs over the senders of i, and all linear maps have a bias. The gates are a coupling with one head per channel.
    The weight a_ij is the multiplicity of its edge. Without ``edge_attr`` C e_ij is 0.

    Args:
        channels: Number of channels C of nodes and edges, of input and output.
        norm: BN: ``"batch"``, ``"layer"`` or ``None``.
        residual: Add h_i and e_ij.
        dropout: Dropout rate on the terms that are added to h_i and e_ij.
        eps: ε, which keeps a node whose gates are all closed from a division by zero.

    Shapes:
        x: [N, C].
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``; required.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, C], or ``None``.
        output: h′ [N, C], or (h′, e′) with e′ [E, C] if ``edge_attr`` is given; with ``return_coupling`` also the
            gates.

    Examples:
        >>> nodes, edges = GatedGCNConv(4)(x, edge_index, edge_attr=torch.rand(12, 4))
    """

    references = ("bresson2017gatedgcn", "dwivedi2023benchmarking")

    def __init__(
        self,
        channels: int,
        *,
        norm: Norm = "batch",
        residual: bool = True,
        dropout: float = 0.0,
        eps: PositiveNumber = 1e-6,
    ) -> None:
        super().__init__(channels, dropout)
        self.residual = residual
        self.eps = eps
        # A to E of the equations, by what they read: the node itself, messages, the edge and its two ends.
        self.own, self.value, self.edge, self.target, self.source = (
            nn.Linear(channels, channels) for _ in range(5)
        )
        self.node_norm = make_norm(norm, channels)
        self.edge_norm = make_norm(norm, channels)

    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> Moved:
        if graph.edge_index is None:
            raise ValueError(
                "GatedGCNConv works on observed edges; got none. Pass edge_index (an empty [2, 0] one if no edge was "
                "observed), or choose a layer with attention over all pairs."
            )
        pattern = graph.pattern
        # Nodes are mapped before edges look them up: N products instead of E.
        received = at_rows(pattern.by_row, self.target(x))
        sent = at_rows(pattern.by_col, self.source(x))
        logits = (received + sent).to(x.dtype)
        if edge_attr is not None:
            logits = logits + self.edge(edge_attr)
        # The derivative of a gate is up to |v|/ε, beyond half precision until the sigmoid's own makes it small.
        gate = widened(logits).sigmoid()
        # An edge of weight 2 counts as two edges.
        if graph.edge_weight is not None:
            gate = gate * graph.weights(gate).unsqueeze(1)
        # A coupling with one head per channel, so that ``return_coupling`` and the diagnostics see the gates.
        total = SparseCoupling(graph, gate, symmetric=False, nonnegative=True)
        # ε keeps a node whose gates are all closed from a division by zero.
        gates = ReweightedCoupling(
            total, 1 / (total.degree() + self.eps), nonnegative=True
        )
        change = self.own(x) + gates.matmul(self.value(x).unsqueeze(2)).squeeze(2)
        moved = self._next(x, change, self.node_norm)
        if edge_attr is not None:
            edge_attr = self._next(edge_attr, logits, self.edge_norm)
        return moved, edge_attr, gates

    def _next(self, state: Tensor, change: Tensor, norm: nn.Module) -> Tensor:
        change = dropout(relu(norm(change)), self.dropout, self.training)
        return state + change if self.residual else change


class GPSBlock(EdgeLayer):
    r"""One layer of GraphGPS (Rampášek et al. 2022, Eqs. 3–8), the frame of SFi-Former.

        x_M = Norm(local(x, e, A)),   x_T = Norm(x + Dropout(attention(x, A))),   z = x_M + x_T
        x′ = Norm(z + FFN(z)),   FFN(z) = Dropout(W₂ Dropout(ReLU(W₁ z)))

    The FFN has 2C hidden channels. Without observed edges, or without ``local``, z = x_T; without ``attention``, z =
    x_M. With ``return_coupling`` a call returns the coupling of the attention, or of ``local`` without attention.

    Args:
        channels: Number of channels C of nodes and edges.
        local: A :class:`GatedGCNConv`, which has its own residual and updates edge features; or any layer on
            ``channels``, used as x_M = Norm(x + Dropout(local(x, A))). ``None``: no message passing.
        attention: Layer that returns the change of the state, such as ``SFiConv(..., residual=False)``. ``None``: no
            attention.
        norm: ``"batch"``, ``"layer"`` or ``None``.
        dropout: Rate of all dropouts above. ``local`` and ``attention`` have their own.

    Shapes:
        x: [N, C].
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``; may be ``None`` if there is ``attention``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, C], or ``None``.
        output: x′ [N, C], or (x′, e′) with e′ [E, C] if ``edge_attr`` is given; with ``return_coupling`` also the
            coupling.

    Examples:
        >>> block = GPSBlock(4, local=GatedGCNConv(4), attention=SFiConv(4, 4, heads=2))
        >>> nodes, edges = block(x, edge_index, edge_attr=torch.rand(12, 4))
    """

    references = ("rampasek2022gps",)

    def __init__(
        self,
        channels: int,
        local: nn.Module | None = None,
        attention: nn.Module | None = None,
        *,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, dropout)
        if local is None and attention is None:
            raise ValueError("GPSBlock needs local or attention, or both; got neither.")
        for name, layer in (("local", local), ("attention", attention)):
            # A layer of the user that does not declare its channels is not checked.
            read = getattr(layer, "in_channels", channels)
            written = getattr(layer, "out_channels", channels)
            if (read, written) != (channels, channels):
                raise ValueError(
                    f"{name} must map {channels} channels to {channels}; got {read} to {written}."
                )
        self.local = local
        self.attention = attention
        self.local_norm = None if local is None else make_norm(norm, channels)
        self.attention_norm = None if attention is None else make_norm(norm, channels)
        widen = nn.Linear(channels, 2 * channels)
        narrow = nn.Linear(2 * channels, channels)
        self.ffn = nn.Sequential(
            widen, nn.ReLU(), nn.Dropout(dropout), narrow, nn.Dropout(dropout)
        )
        self.norm = make_norm(norm, channels)

    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> Moved:
        # A zero to add to, since either of the two terms may be missing.
        total = x.new_zeros(())
        # Edge states pass through unless `local` moves them.
        edges = edge_attr
        coupling = cast("Coupling", None)
        # Without edges and attention, local runs all the same and raises the error about missing edges.
        if self.local is not None and (
            graph.edge_index is not None or self.attention is None
        ):
            # Only GatedGCNConv moves the states of edges. It has its own residual; other layers get one here.
            if isinstance(self.local, GatedGCNConv):
                moved, *carried, coupling = self.local(
                    x, graph, edge_attr=edge_attr, return_coupling=True
                )
                edges = carried[0] if carried else None
            else:
                moved, coupling = self._residual(self.local, x, graph)
            total = total + cast("nn.Module", self.local_norm)(moved)
        if self.attention is not None:
            moved, coupling = self._residual(self.attention, x, graph)
            total = total + cast("nn.Module", self.attention_norm)(moved)
        return self.norm(total + self.ffn(total)), edges, coupling

    def _residual(
        self, layer: nn.Module, x: Tensor, graph: Graph
    ) -> tuple[Tensor, Coupling]:
        change, coupling = layer(x, graph, return_coupling=True)
        return x + dropout(change, self.dropout, self.training), coupling
