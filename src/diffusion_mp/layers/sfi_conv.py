"""``SFiConv``: sparse-flow attention beside the adjacency."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from diffusion_mp.diffusivities import (
    AdjacencyEnhancedDiffusivity,
    Diffusivity,
    EdgeSparseFlowDiffusivity,
    SparseFlowDiffusivity,
)
from diffusion_mp.diffusivities.query_key import Normalization, Projection
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_positive
from diffusion_mp.graph import SelfLoops
from diffusion_mp.layers.multi_head_conv import MultiHeadConv


class SFiConv(MultiHeadConv):
    r"""x′ = x + (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h with the sparse flow S (SFi-Former, Eq. 11).

    Ã = D^-½ (A + I) D^-½, and γ > 0 is learnable. Without observed edges the bracket is S^h alone. With ``lam=0`` S is
    softmax attention, and this is a layer of DFi-Former; that and ``adjacency=False`` is multi-head attention.

    Args:
        in_channels, heads: as in :class:`DiffusionConv`.
        out_channels: channels after W_O; those of x with ``residual``.
        head_channels: of queries, keys and values; by default ``out_channels / heads``.
        lam, alpha, lam_scale, friction, projection, normalize: of the attention; see :class:`SparseFlowDiffusivity`.
        hops: let flow come only from nodes at most so many edges away (:class:`EdgeSparseFlowDiffusivity`, O(E));
            ``None``: from all.
        adjacency: the term Ã; ``False`` leaves it out, and (1 + γ)⁻¹ γ with it.
        gamma: γ at the start.
        self_loops: of Ã.
        residual: add x; ``False`` gives the change only, as :class:`GPSBlock` needs it.
        bias: of W_O.
        options: further ones of :class:`DiffusionConv` (``dropout``, ``validate``).

    Raises:
        TypeError, ValueError: channels that do not fit, or as in the diffusivities.
    """

    references = ("sfiformer",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        head_channels: int | None = None,
        lam: float = 1.0,
        alpha: float = 0.1,
        lam_scale: Literal["own", "batch_max"] = "own",
        friction: Literal["attention", "constant"] | nn.Module = "attention",
        projection: Projection = "separate",
        normalize: Normalization = None,
        hops: int | None = None,
        adjacency: bool = True,
        gamma: float = 1.0,
        self_loops: SelfLoops = "remaining",
        residual: bool = True,
        bias: bool = False,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads)
        check_choice(self_loops, "self_loops", get_args(SelfLoops))
        check_choice(projection, "projection", [None, "separate", "tied"])
        check_positive(gamma, "gamma")
        check_flags(adjacency=adjacency, residual=residual, bias=bias)
        if head_channels is None and out_channels % heads:
            raise ValueError(
                f"heads must divide out_channels; got {heads} heads, {out_channels} channels. Or pass head_channels."
            )
        width = out_channels // heads if head_channels is None else head_channels
        shared: dict[str, Any] = {
            "heads": heads,
            "projection": projection,
            "head_channels": width if projection else None,
            "normalize": normalize,
            "lam": lam,
            "alpha": alpha,
            "friction": friction,
        }
        diffusivity: Diffusivity = (
            SparseFlowDiffusivity(in_channels, lam_scale=lam_scale, **shared)
            if hops is None
            else EdgeSparseFlowDiffusivity(in_channels, hops=hops, **shared)
        )
        if adjacency:
            diffusivity = AdjacencyEnhancedDiffusivity(diffusivity, gamma=gamma, self_loops=self_loops)
        super().__init__(
            in_channels,
            out_channels,
            diffusivity,
            heads,
            head_channels=width,
            residual=residual,
            bias=bias,
            **options,
        )
