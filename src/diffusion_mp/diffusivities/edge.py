"""Edge attention among observed neighbours: GAT, and the diffusivity of a penalty along edges (Example 5)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.inits import glorot

from diffusion_mp import checks
from diffusion_mp.checks import Count, FiniteNumber, Probability
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.couplings.features import distance_features
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities.base import Diffusivity, check_heads_divide
from diffusion_mp.energies.penalties import Penalty, get_penalty
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.kernels.spmm import at_rows, edge_softmax, row_sums, sddmm
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.precision import accumulating, quotient, without_autocast


class GATDiffusivity(Diffusivity):
    """Attend to observed neighbours as GAT does, with edge weights as a prior (Veličković et al. 2018).

    The attention is a row of Table 1 of Wu, Wipf & Yan (2025). For every head, with edge weights a and edge features f:

        s_ij = a_ij exp(e_ij) / Σ_l a_il exp(e_il)

        e_ij = LeakyReLU(α_src·x_j + α_dst·x_i + α_edge·W_E f_ij)

    Here l runs over the neighbours N(i). The diffusivity reads transformed features W x, so a layer uses it as
    ``DiffusionConv(..., reads="values")``.

    Args:
        channels: number C of transformed features of all heads together.
        heads: number H of heads, which divides C.
        negative_slope: slope of the LeakyReLU for negative arguments; 0.2 as in the paper.
        self_loops: ``"keep"``: loops as observed. ``"add"``: one more loop of weight 1 at every node. ``"remaining"``,
            the default, as in PyG's ``GATConv``: exactly one loop at every node, the mean of its observed loops or of
            weight 1. ``"remove"``: no loops.
        edge_dim: channels of ``edge_attr``. ``None`` is without features of edges. An added self-loop has the mean of
            the features of the edges that arrive at its node.
        dropout: dropout rate of the entries in training. If it is positive, rows sum to one only in expectation.

    Shapes:
        - x: [N, C].
        - edge_attr: [E, edge_dim], or [E] if edge_dim is 1.
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> DiffusionConv(4, 8, GATDiffusivity(8), reads="values")(x, edge_index).shape
        torch.Size([6, 8])
    """

    depends_on = "edges"
    needs_graph = row_stochastic = True
    why_no_penalty = "GAT's score is not a decreasing function of a distance (Example 5), so no penalty belongs to it."

    def __init__(
        self,
        channels: Count,
        heads: Count = 1,
        *,
        negative_slope: FiniteNumber = 0.2,
        self_loops: SelfLoops = "remaining",
        edge_dim: Count | None = None,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        check_heads_divide(channels, heads)
        self.heads = heads
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.self_loops = self_loops
        shape = (1, heads, channels // heads)
        self.att_src = nn.Parameter(torch.empty(shape))
        self.att_dst = nn.Parameter(torch.empty(shape))
        self.edge: Linear | None = None
        self.att_edge: nn.Parameter | None = None
        if edge_dim is not None:
            self.edge = Linear(
                edge_dim, channels, bias=False, weight_initializer="glorot"
            )
            self.att_edge = nn.Parameter(torch.empty(shape))
        self._draw()

    def _draw(self) -> None:
        # PyG's function leaves out what is None.
        for parameter in (self.att_src, self.att_dst, self.att_edge):
            glorot(parameter)

    def forward(
        self,
        x: State,
        graph: Graph | None = None,
        edge_attr: Float[Tensor, "E ..."] | None = None,
    ) -> Coupling:
        """Return the coupling at a state and features of the edges.

        Args:
            x: state [N, C] of transformed features.
            graph: graph of the nodes, with observed edges.
            edge_attr: features of the edges [E, edge_dim] or [E], in the order of the graph. ``None`` is without
                features.

        Raises:
            ValueError: the graph has no observed edges, or is a part of a graph while there are features, or the
                channels of x are not C.
        """
        # Without features, the base class makes all checks and refuses features that nobody reads.
        if edge_attr is None or self.edge is None:
            return super().forward(x, graph, edge_attr)
        graph = Graph.coerce(x, graph)
        if graph.edge_index is None:
            return super().forward(x, graph)  # raises
        if type(graph) is not Graph:
            # The edges of a block or a rank are a part of the passed edges, in another order.
            raise ValueError(
                f"edge_attr needs a Graph, whose edges have an order; got a {type(graph).__name__}."
            )
        # One number per edge, which PyG also takes.
        if isinstance(edge_attr, Tensor) and edge_attr.dim() == 1:
            edge_attr = edge_attr.unsqueeze(1)
        checks.check_edge_rows(
            edge_attr, graph.num_edges, channels=self.edge.in_channels, module=self
        )
        return self.couple(x, graph, edge_attr)

    def couple(
        self,
        x: State,
        graph: Graph,
        edge_attr: Float[Tensor, "E F"] | None = None,
    ) -> Coupling:
        _, heads, width = self.att_src.shape
        if x.size(1) != heads * width:
            raise ValueError(
                f"GATDiffusivity was built for {heads * width} channels; got {x.size(1)}. "
                f"It reads transformed features: DiffusionConv(..., reads='values')."
            )
        checks.check_place(x, self, dtype=True)
        # Features belong to the observed edges, and give added loops their features.
        observed = graph
        graph = graph.with_self_loops(self.self_loops)
        rows = graph.csr
        cols = graph.csc
        sent, received = self._scores(x)
        # α·x per node first and then per edge: O(N C + E H) instead of O(E C).
        logits = at_rows(cols, sent) + at_rows(rows, received)
        if edge_attr is not None:
            logits = logits + self._edge_scores(edge_attr, observed, graph)
        logits = leaky_relu(logits, self.negative_slope)
        weight = edge_softmax(rows, logits, _prior(graph, logits))
        dropping = self.training and self.dropout > 0
        if dropping:
            # Dropout of entries, as in PyG: a row then sums to one only in expectation.
            weight = dropout(weight, self.dropout)
        return SparseCoupling(
            graph,
            weight,
            symmetric=False,
            row_stochastic=not dropping,
            nonnegative=True,
            _checked=True,
        )

    def _scores(self, x: State) -> tuple[Tensor, Tensor]:
        """Return α_src·x and α_dst·x [N, H], by one product with a block-diagonal matrix."""
        attention = (self.att_src[0], self.att_dst[0])
        blocks = torch.cat([torch.block_diag(*by_head) for by_head in attention])
        with without_autocast(x):
            (state, blocks), _ = accumulating(x, blocks)
            sent, received = (state @ blocks.t()).chunk(2, 1)
        return sent, received

    def _edge_scores(
        self, edge_attr: Float[Tensor, "E F"], observed: Graph, looped: Graph
    ) -> Float[Tensor, "L H"]:
        """Return α_edge·W_E f of the observed edges; for added self-loops, the mean over the node's other edges."""
        assert self.edge is not None
        assert self.att_edge is not None
        with without_autocast(edge_attr):
            # α_edge·W_E f = (W_Eᵀα_edge)·f: the transformed features of E edges and C channels are never stored.
            weight = self.edge.weight.unflatten(0, self.att_edge.shape[1:])
            (features, by_head), _ = accumulating(
                edge_attr, torch.einsum("hdf,hd->fh", weight, self.att_edge[0])
            )
            score = features @ by_head
        # A graph that came with loops has features of them, too.
        if looped is observed or looped.origin is None:
            return score
        # PyG's fill_value="mean": an added loop has the mean score of the edges that arrive at its node.
        source, target = observed.edges
        # Observed loops do not count, since PyG replaces them.
        counts = (source != target).to(score.dtype).unsqueeze(1)
        sums = score.new_zeros(observed.num_nodes, score.size(1) + 1)
        # Scores and their number in one pass over the edges.
        sums = sums.index_add(0, target, torch.cat([score * counts, counts], 1))
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        # ``origin`` numbers the observed edges, and behind them the loops by node.
        return torch.cat([score, means]).index_select(0, looped.origin)


class EdgeDiffusivity(Diffusivity):
    """Attend to observed neighbours by the derivative f = δ′ of a penalty (Wu, Wipf & Yan 2025, Example 5).

    With edge weights a, normalised over the neighbours N(i):

        s_ij = a_ij f(‖x_i − x_j‖²) / Σ_l a_il f(‖x_i − x_l‖²)

    f = δ′ is nonnegative and decreasing. Closer neighbours thus weigh more, unlike in GAT's score, and the energy of
    ``EdgeTerm(penalty, <the adjacency>)`` descends.

    Args:
        penalty: the penalty δ, a ``Penalty`` or its name. ``"sigmoid"`` by default, whose f is positive at any
            distance.
        row_stochastic: divide the rows by their sums. ``False`` keeps Ω = [a_ij f], which is symmetric if the graph is.
        self_loops: ``"keep"``, the default: loops as observed. ``"add"``: one more loop of weight 1 at every node.
            ``"remaining"``: exactly one loop at every node, the mean of its observed loops or of weight 1.
            ``"remove"``: no loops.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and one head.

    Examples:
        >>> EdgeDiffusivity("sigmoid")(x, graph).heads
        1
    """

    depends_on = "edges"
    needs_graph = True
    why_no_penalty = "its pairs are the observed edges: certify its coupling (Theorem 1 holds for a step with S fixed)."

    def __init__(
        self,
        penalty: str | Penalty = "sigmoid",
        *,
        row_stochastic: bool = True,
        self_loops: SelfLoops = "keep",
    ) -> None:
        super().__init__()
        self.edge_penalty = get_penalty(penalty)
        self.row_stochastic = row_stochastic
        self.self_loops = self_loops

    def couple(self, x: State, graph: Graph) -> Coupling:
        graph = graph.with_self_loops(self.self_loops)
        rows = graph.pattern.by_row
        penalty = self.edge_penalty
        z2 = self._squared_distances(x, graph)
        if self.row_stochastic and penalty.positive:
            # In log space, where no row of far neighbours vanishes.
            weight = edge_softmax(rows, penalty.log_f(z2), _prior(graph, z2))
        else:
            # An f that may vanish has no logarithm.
            weight = graph.weights(z2).unsqueeze(1) * penalty.f(z2)
            if self.row_stochastic:
                weight = quotient(weight, at_rows(rows, row_sums(rows, weight)))
        return SparseCoupling(
            graph,
            weight,
            # Divided rows are not symmetric. Ω is symmetric if the graph is.
            symmetric=False if self.row_stochastic else None,
            row_stochastic=self.row_stochastic,
            # Nothing bounds the distance of neighbours, so f must be nonnegative at any distance.
            nonnegative=penalty.covers(math.inf),
            _checked=True,
        )

    def _squared_distances(self, x: State, graph: Graph) -> Float[Tensor, "E one"]:
        """Return ‖x_i − x_j‖² of every edge."""
        # Sharpness matters for a linear f too: sums over all pairs cancel its rounding, sums over a few edges do not.
        query, key = distance_features(
            x.unsqueeze(1), ptr=graph.segments, sharpness=self.edge_penalty.sharpness
        )
        z2 = -2 * sddmm(graph.pattern, query, key)
        source, target = graph.edges
        # Exactly zero, also in the gradient: with far neighbours, the rounding of a loop would dominate it.
        return z2.masked_fill((source == target).unsqueeze(1), 0.0)


def _prior(graph: Graph, like: Tensor) -> Float[Tensor, "E one"] | None:
    """Return edge weights, or ``None`` if all are one, which saves passes over all edges and heads."""
    return graph.weights(like).unsqueeze(1) if graph.weighted else None
