"""Queries and keys: what every attention reads of the state."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings.features import unit_rows
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_state
from diffusion_mp.graph import Graph

Projection = Literal["separate", "tied"] | None
Normalization = Literal["row", "frobenius"] | None
Features = tuple[Float[Tensor, "N H D"], Float[Tensor, "N H D"]]


class QueryKeyDiffusivity(Diffusivity):
    r"""Attention over all nodes of a graph: queries q and keys k of the state, by head.

    Args:
        channels: C of the state. Needed with projections; otherwise ``None`` leaves it open.
        heads: H. Without projections the channels are cut into H pieces.
        projection: ``"separate"``: q = W_Q x, k = W_K x (Wu, Wipf & Yan 2025, Eq. 54); ``"tied"``: W_Q = W_K, which
            keeps a score symmetric; ``None``: q = k = x.
        head_channels: channels of a projected head; C by default, as Eq. 54 has it.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55); ``"frobenius"``: one norm over all nodes,
            heads and channels of a graph, as released code does. That makes q·k = O(1/n) and the attention nearly
            uniform, and is for parity with such code only (docs/errata.md, D1); ``None``: vectors as they are.
        bias: q = W_Q x + b_Q and k = W_K x + b_K, as released code has them; needs a projection.

    Attributes:
        head_channels: channels of a query and of a key; ``None`` where they are left open.
    """

    def __init__(
        self,
        channels: int | None = None,
        *,
        heads: int = 1,
        projection: Projection = "separate",
        head_channels: int | None = None,
        normalize: Normalization = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_counts(heads=heads)
        check_flags(bias=bias)
        check_choice(projection, "projection", [None, "separate", "tied"])
        check_choice(normalize, "normalize", ["row", "frobenius", None])
        for name, count in (("channels", channels), ("head_channels", head_channels)):
            if count is not None:
                check_counts(**{name: count})
        self.channels, self.heads, self.projection, self.normalize = channels, heads, projection, normalize
        self.depends_on = "graph" if normalize == "frobenius" else "rows"
        self.head_channels: int | None
        if projection is None:
            if bias:
                raise ValueError(
                    "bias is added to what a projection gives, and there is none; got bias=True with projection=None. "
                    "Choose projection='separate' or 'tied', or leave bias out."
                )
            if channels is not None and channels % heads:
                raise ValueError(
                    f"heads must divide channels when there is no projection; got {heads} heads, {channels} channels."
                )
            self.head_channels = None if channels is None else channels // heads
        else:
            if channels is None:
                raise ValueError(f"channels must be given for {projection=}: W_Q and W_K act on them; got None.")
            self.head_channels = head_channels or channels
            self.query = nn.Linear(channels, heads * self.head_channels, bias=bias)
            if projection == "separate":
                self.key = nn.Linear(channels, heads * self.head_channels, bias=bias)

    def queries_and_keys(
        self, x: Float[Tensor, "N C"], graph: Graph, *, unit: bool = True, origin: Tensor | None = None
    ) -> Features:
        """q and k as the attention sees them; the same object where they are equal.

        ``unit=False`` leaves ``normalize="row"`` to a coupling that divides by the norms itself. ``origin``: keys are
        those of x − origin.
        """
        if self.projection is not None or self.channels not in (None, x.size(1)):
            check_state(x, channels=self.channels, module=self)
        if self.projection is None:
            if x.size(1) % self.heads:
                raise ValueError(f"heads must divide the channels of x; got {self.heads} heads, {x.size(1)} channels.")
            q = k = x.unflatten(1, (self.heads, -1))
            if origin is not None:
                k = (x - origin).unflatten(1, (self.heads, -1))
        else:
            q = k = self.query(x).unflatten(1, (self.heads, -1))
            if self.projection == "separate" or origin is not None:
                key = self.key if self.projection == "separate" else self.query
                k = key(x if origin is None else x - origin).unflatten(1, (self.heads, -1))
        if self.normalize == "row" and unit:
            return unit_rows(q, k)
        if self.normalize == "frobenius":
            normal = frobenius(q, graph)
            return normal, normal if k is q else frobenius(k, graph)
        return q, k

    def extra_repr(self) -> str:
        return f"heads={self.heads}, projection={self.projection!r}, normalize={self.normalize!r}"


def origin_of(x: Float[Tensor, "N C"], graph: Graph) -> Tensor:
    """The smallest row of every node's graph, [N, C], or [1, C] for one graph; without gradient.

    For keys of a softmax, which a shift of all of them does not change. The difference of a row from one that is no
    larger has its digits, and equal rows differ by zero, however a product of matrices rounds them.
    """
    x = x.detach()
    size = x.abs().amax(1).nan_to_num(nan=math.inf)
    if graph.is_single:
        return x[size.argmin(0, keepdim=True)] if x.size(0) else x
    batch, number = graph.batch.to(x.device), torch.arange(x.size(0), device=x.device)
    least = size.new_zeros(graph.num_graphs).scatter_reduce(0, batch, size, "amin", include_self=False)
    others = number.masked_fill(size > least[batch], x.size(0))
    return x[number.new_zeros(graph.num_graphs).scatter_reduce(0, batch, others, "amin", include_self=False)[batch]]


def frobenius(q: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
    """q over its Frobenius norm in each graph."""
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
