"""Queries and keys: what every attention reads of the state."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings.features import unit_rows
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_choice, check_counts, check_state
from diffusion_mp.graph import Graph

Projection = Literal["separate", "tied"] | None
Normalization = Literal["row", "frobenius"] | None


class QueryKeyDiffusivity(Diffusivity):
    r"""Attention over all nodes of a graph: queries q and keys k of the state, by head.

    Args:
        channels: C of the state. Needed with projections; otherwise ``None`` leaves it open.
        heads: H. Without projections the channels are cut into H pieces.
        projection: ``None``: q = k = x; ``"separate"``: q = W_Q x, k = W_K x; ``"tied"``: W_Q = W_K.
        head_channels: channels of a projected head; C by default.
        normalize: ``"row"``: every query and key has unit norm; ``"frobenius"``: one norm over all nodes, heads and
            channels of a graph; ``None``: vectors as they are.
    """

    def __init__(
        self,
        channels: int | None,
        heads: int,
        projection: Projection,
        head_channels: int | None,
        normalize: Normalization,
    ) -> None:
        super().__init__()
        check_counts(heads=heads)
        check_choice(projection, "projection", [None, "separate", "tied"])
        check_choice(normalize, "normalize", ["row", "frobenius", None])
        if channels is not None:
            check_counts(channels=channels)
        if head_channels is not None:
            check_counts(head_channels=head_channels)
        if projection is None and channels is not None and channels % heads:
            raise ValueError(
                f"heads must divide channels when there is no projection; got {heads} heads, {channels} channels."
            )
        self.channels, self.heads = channels, heads
        self.projection, self.normalize = projection, normalize
        self.depends_on = "graph" if normalize == "frobenius" else "rows"
        if projection is not None:
            if channels is None:
                raise ValueError(f"channels must be given for {projection=}: W_Q and W_K act on them; got None.")
            width = heads * (head_channels or channels)
            self.query = nn.Linear(channels, width, bias=False)
            if projection == "separate":
                self.key = nn.Linear(channels, width, bias=False)

    def queries_and_keys(
        self, x: Float[Tensor, "N C"], graph: Graph, *, unit: bool = True
    ) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H D"]]:
        """q and k as the attention sees them; the same object where they are equal.

        ``unit=False`` leaves ``normalize="row"`` to a coupling that divides by the norms itself.
        """
        if self.projection is None:
            if x.size(1) % self.heads:
                raise ValueError(f"heads must divide the channels of x; got {self.heads} heads, {x.size(1)} channels.")
            q = x.unflatten(1, (self.heads, -1))
        else:
            check_state(x, channels=self.channels, module=self)
            q = self.query(x).unflatten(1, (self.heads, -1))
        k = self.key(x).unflatten(1, (self.heads, -1)) if self.projection == "separate" else q
        if self.normalize == "row":
            return unit_rows(q, k) if unit else (q, k)
        if self.normalize is None:
            return q, k
        q_normal = self._frobenius(q, graph)
        return q_normal, q_normal if k is q else self._frobenius(k, graph)

    def _frobenius(self, q: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
        square = q.double().square().sum((1, 2))  # the squares of single precision leave its own range
        if graph.is_single:
            total = graph.total(square.sum())
        else:
            batch = graph.batch.to(q.device)
            total = square.new_zeros(graph.num_graphs).index_add(0, batch, square)[batch, None, None]
        # √0 has no derivative: a state of zeros stays as it is.
        norm = torch.where(total == 0, torch.inf, total).sqrt()
        wide = torch.promote_types(q.dtype, torch.float32)
        return (q.to(wide) / norm.to(wide)).to(q.dtype)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, projection={self.projection!r}, normalize={self.normalize!r}"


def graph_size(graph: Graph, like: Tensor) -> Tensor | int:
    """n, the nodes of the graph that each row [N, 1, 1] belongs to."""
    if graph.is_single:
        return graph.num_nodes
    # (Gathered twice: torch.compile cannot take differences of a tensor whose length depends on values.)
    bounds, batch = graph.ptr.to(like.device), graph.batch.to(like.device)
    return (bounds[batch + 1] - bounds[batch])[:, None, None].to(like)
