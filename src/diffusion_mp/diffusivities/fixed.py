"""Fixed diffusivities: they do not look at the state (Wu, Wipf & Yan 2025, Section 4)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, IdentityCoupling, SparseCoupling, UniformCoupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_choice
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.kernels.precision import inverse_root, reciprocal


class IdentityDiffusivity(Diffusivity):
    """S = I: no node sees another, an MLP (Table 1).

    Examples:
        >>> S = IdentityDiffusivity()(x)
        >>> torch.equal(S @ x.unsqueeze(1), x.unsqueeze(1))
        True
    """

    depends_on = "nothing"
    symmetric = True
    row_stochastic = True
    why_no_penalty = "the identity coupling moves nothing, so every energy of pairs stays as it is."

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return IdentityCoupling(graph.num_nodes, dtype=x.dtype, device=x.device)


class UniformDiffusivity(Diffusivity):
    """S = (1/n) 11ᵀ within every graph: the *All One* ablation of Fig. 3.

    Examples:
        >>> S = UniformDiffusivity()(x)
        >>> torch.allclose((S @ x.unsqueeze(1))[0, 0], x.mean(0))
        True
    """

    depends_on = "nothing"
    symmetric = True
    row_stochastic = True
    why_no_penalty = "the all-one coupling is fixed: certify the coupling itself (Theorem 1)."

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return UniformCoupling(graph.num_nodes, graph.segments, dtype=x.dtype, device=x.device)


class AdjacencyDiffusivity(Diffusivity):
    r"""The observed graph (GCN, SGC, GIN, APPNP, GCNII; Examples 1–3, Eq. 24), with weighted degrees d.

    - ``"sym"``: a_ij / √(d_i d_j);
    - ``"row"``: a_ij / d_i;
    - ``"sum"``: a_ij.

    The released code ignores weights in the degrees and takes in-degrees at both ends (docs/errata.md, D17):
    ``degrees="count", direction="pyg"``.

    In a part of a graph whose ``full_degree`` is known, d is that of the whole graph, so that every entry is the one
    the whole graph has for this pair; rows of ``"row"`` then sum to the share of their edges that the part has.

    Args:
        normalization: ``"sym"``, ``"row"`` or ``"sum"``.
        self_loops: ``"keep"`` (as observed), ``"add"``, ``"remaining"`` (PyG's GCN) or ``"remove"``; see ``Graph``.
        direction: ``"directed"``: the receiver counts with its in-degree, the sender with its out-degree;
            ``"undirected"``: the symmetric part ½(A + Aᵀ) is taken first; ``"pyg"``: in-degrees for both ends, as
            ``torch_geometric.nn.GCNConv`` does. On an undirected graph the three agree.
        zero_degree: ``"zero"``: a row without weight stays a zero row, so a conserving update leaves the node alone;
            ``"error"``: such a node is refused.
        degrees: d is the sum of the weights of edges, ``"weighted"``, or the number of those with a positive weight,
            ``"count"``. A part of a weighted graph knows its ``full_degree`` only, which are sums.

    Examples:
        >>> S = AdjacencyDiffusivity("row")(x, graph)
        >>> torch.allclose(S.degree(), torch.ones(6, 1))  # every row sums to one
        True
    """

    depends_on = "nothing"
    needs_graph = True
    why_no_penalty = "the adjacency is fixed: certify the coupling itself (Theorem 1)."

    def __init__(
        self,
        normalization: Literal["sym", "row", "sum"] = "sym",
        *,
        self_loops: SelfLoops = "keep",
        direction: Literal["directed", "undirected", "pyg"] = "directed",
        zero_degree: Literal["zero", "error"] = "zero",
        degrees: Literal["weighted", "count"] = "weighted",
    ) -> None:
        super().__init__()
        check_choice(normalization, "normalization", ["sym", "row", "sum"])
        check_choice(self_loops, "self_loops", get_args(SelfLoops))
        check_choice(direction, "direction", ["directed", "undirected", "pyg"])
        check_choice(zero_degree, "zero_degree", ["zero", "error"])
        check_choice(degrees, "degrees", ["weighted", "count"])
        self.normalization = normalization
        self.self_loops: SelfLoops = self_loops
        self.direction = direction
        self.zero_degree = zero_degree
        self.degrees = degrees
        self.row_stochastic = normalization == "row" and degrees == "weighted"
        self.symmetric = direction == "undirected" and normalization != "row"

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        counted = self._as_asked(_ones(graph)) if self.degrees == "count" else None
        graph = self._as_asked(graph)
        # Entries are as exact as the state, and never below float32.
        dtype = torch.promote_types(x.dtype, torch.float32)
        name = f"{self.normalization}, {self.direction}, {self.zero_degree}, {self.degrees}, {dtype}"
        return SparseCoupling(
            graph.reweighted(name, lambda: self._entries(graph, counted or graph, x.new_empty(0, dtype=dtype))),
            symmetric=self.symmetric or None,
            row_stochastic=self.row_stochastic and graph.full_degree is None,
            nonnegative=True,
            metric=(lambda: _received(graph)) if self.row_stochastic else None,
        )

    def _as_asked(self, graph: Graph) -> Graph:
        """With both directions of every edge and with self-loops, as the options say."""
        return (graph.to_undirected() if self.direction == "undirected" else graph).with_self_loops(self.self_loops)

    def _entries(self, graph: Graph, counted: Graph, like: Tensor) -> Float[Tensor, " E"]:
        """The weights of the graph over the degrees of ``counted``."""
        weight = graph.weights(like)
        source, target = graph.edges
        received = counted.degree("in", weight.dtype)
        if self.zero_degree == "error" and bool((received == 0).any()):
            raise ValueError(
                f"{int((received == 0).sum())} nodes of the graph have degree zero, which zero_degree='error' refuses. "
                f"Add self-loops (self_loops='remaining') or accept zero rows (zero_degree='zero')."
            )
        if self.normalization == "sum":
            return weight
        if self.normalization == "row":
            return weight * reciprocal(received).index_select(0, target)
        by_source = by_target = inverse_root(received)
        if self.direction != "pyg":
            by_source = inverse_root(counted.degree("out", weight.dtype))
        return weight * by_target.index_select(0, target) * by_source.index_select(0, source)

    def extra_repr(self) -> str:
        return (
            f"{self.normalization!r}, self_loops={self.self_loops!r}, direction={self.direction!r}, "
            f"degrees={self.degrees!r}"
        )


def _ones(graph: Graph) -> Graph:
    """The same edges, those of positive weight with weight 1 and the others with 0."""
    weight = graph.edge_weight
    if weight is None:
        return graph
    if graph.full_degree is not None:
        raise ValueError(
            "degrees='count' needs the number of edges that every node has in the whole graph; got a part of a "
            "weighted graph, whose full_degree holds sums of weights. Take degrees='weighted', or the whole graph."
        )
    return graph.reweighted("ones", lambda: (weight > 0).to(weight.dtype))


def _received(graph: Graph) -> Float[Tensor, "N one"] | None:
    """Degrees d of an undirected graph, for which diag(d) (a_ij / d_i) is symmetric; 1 for a row of zeros."""
    degree = graph.degree(dtype=torch.float64).unsqueeze(1)
    return degree.where(degree > 0, 1.0) if graph.is_symmetric else None
