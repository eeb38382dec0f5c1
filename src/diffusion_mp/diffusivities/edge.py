"""Edge attention: who influences whom among the observed neighbours (GAT and Example 5)."""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch_geometric.nn.inits import glorot

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.couplings.features import distance_features
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.energies.penalties import Penalty, get_penalty
from diffusion_mp.errors import check_choice, check_counts, check_fits, check_flags, check_number
from diffusion_mp.graph import Graph, SelfLoops
from diffusion_mp.kernels.edge_softmax import at_rows, edge_softmax, row_sums
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.spmm import sddmm
from diffusion_mp.kernels.unit import quotient


class GATDiffusivity(Diffusivity):
    r"""GAT's attention (Veličković et al. 2018; Wu, Wipf & Yan 2025, Table 1), an edge's weight as a prior.

    s_ij = a_ij exp(e_ij) / Σ_{l ∈ N(i)} a_il exp(e_il),  e_ij = LeakyReLU(α_src·x_j + α_dst·x_i), per head.

    It reads *transformed* features, cut into heads: use it in a ``DiffusionConv`` with ``reads="values"``, where x is
    W x.

    Args:
        channels: C of what it reads, all heads together.
        heads: H.
        negative_slope: of the LeakyReLU.
        self_loops: policy of ``Graph.with_self_loops``; ``"remaining"`` is what PyG's ``GATConv`` amounts to.

    Examples:
        >>> DiffusionConv(4, 8, GATDiffusivity(8), reads="values")(x, edge_index).shape
        torch.Size([6, 8])
    """

    depends_on = "edges"
    needs_graph = True
    row_stochastic = True
    why_no_penalty = "GAT's score is not a decreasing function of a distance (Example 5), so no penalty belongs to it."

    def __init__(
        self, channels: int, heads: int = 1, *, negative_slope: float = 0.2, self_loops: SelfLoops = "remaining"
    ) -> None:
        super().__init__()
        check_counts(channels=channels, heads=heads)
        if channels % heads:
            raise ValueError(f"heads must divide channels; got {heads} heads, {channels} channels.")
        check_choice(self_loops, "self_loops", get_args(SelfLoops))
        check_number(negative_slope, "negative_slope")
        self.heads = heads
        self.negative_slope = negative_slope
        self.self_loops: SelfLoops = self_loops
        self.att_src = nn.Parameter(torch.empty(1, heads, channels // heads))
        self.att_dst = nn.Parameter(torch.empty(1, heads, channels // heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        glorot(self.att_src)
        glorot(self.att_dst)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        _, heads, width = self.att_src.shape
        if x.size(1) != heads * width:
            raise ValueError(
                f"GATDiffusivity was built for {heads * width} channels; got {x.size(1)}. "
                f"It reads transformed features: DiffusionConv(..., reads='values')."
            )
        check_fits(x, self)
        graph = graph.with_self_loops(self.self_loops)
        rows, cols = graph.pattern
        sent, received = self._scores(x)
        logits = leaky_relu(at_rows(cols, sent) + at_rows(rows, received), self.negative_slope)
        weight = edge_softmax(rows, logits, _prior(graph, logits))
        return SparseCoupling(graph, weight, symmetric=False, row_stochastic=True, nonnegative=True)

    def _scores(self, x: Float[Tensor, "N C"]) -> tuple[Tensor, Tensor]:
        """α_src·x and α_dst·x of every node and head [N, H], by one product with a matrix that is diagonal by head."""
        blocks = [torch.diag_embed(att[0].t()).transpose(0, 1).flatten(0, 1) for att in (self.att_src, self.att_dst)]
        with without_autocast(x):
            (state, by_head), _ = accumulating(x, torch.cat(blocks, 1))
            sent, received = (state @ by_head).chunk(2, 1)
        return sent, received

    def extra_repr(self) -> str:
        return f"{self.att_src.size(1) * self.att_src.size(2)}, heads={self.heads}, self_loops={self.self_loops!r}"


class EdgeDiffusivity(Diffusivity):
    r"""Energy-based edge attention: s_ij = a_ij f(‖x_i − x_j‖²), normalised over N(i) (Wu, Wipf & Yan 2025, Example 5).

    f = δ′ of a penalty is non-negative and decreasing, so that unlike GAT's score closer neighbours count more, and
    ``Energy(penalty, coupling=<the adjacency>)`` goes down.

    Args:
        penalty: a ``Penalty`` or its name.
        row_stochastic: divide rows by their sums; ``False`` keeps the symmetric Ω.
        self_loops: policy of ``Graph.with_self_loops``.

    Examples:
        >>> EdgeDiffusivity("sigmoid")(x, graph).heads
        1
    """

    depends_on = "edges"
    needs_graph = True
    why_no_penalty = (
        "its pairs are the observed edges, certify the coupling at hand (Theorem 1 holds for one step with S fixed)."
    )

    def __init__(
        self, penalty: str | Penalty = "sigmoid", *, row_stochastic: bool = True, self_loops: SelfLoops = "keep"
    ) -> None:
        super().__init__()
        check_choice(self_loops, "self_loops", get_args(SelfLoops))
        check_flags(row_stochastic=row_stochastic)
        self.edge_penalty = get_penalty(penalty)
        self.row_stochastic = row_stochastic
        self.self_loops: SelfLoops = self_loops

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        graph = graph.with_self_loops(self.self_loops)
        s = sddmm(graph.pattern, *distance_features(x.unsqueeze(1)))
        rows, score = graph.pattern.by_row, self.edge_penalty.score
        if self.row_stochastic and score.g != "linear":
            weight = edge_softmax(rows, score.log(s), _prior(graph, s))
        else:
            weight = graph.weights(s).unsqueeze(1) * score(s)
        if self.row_stochastic and score.g == "linear":
            weight = quotient(weight, at_rows(rows, row_sums(rows, weight)))
        return SparseCoupling(
            graph,
            weight,
            symmetric=False if self.row_stochastic else None,
            row_stochastic=self.row_stochastic,
            nonnegative=self.edge_penalty.domain[1] == float("inf"),
        )

    def extra_repr(self) -> str:
        return f"{self.edge_penalty}, row_stochastic={self.row_stochastic}, self_loops={self.self_loops!r}"


def _prior(graph: Graph, like: Tensor) -> Float[Tensor, "E one"] | None:
    """Edge weights, or ``None`` where they are known to be ones, which spares passes over all edges and heads."""
    return graph.weights(like).unsqueeze(1) if graph.weighted else None
