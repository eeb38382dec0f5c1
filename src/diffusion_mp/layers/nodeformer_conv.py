"""``NodeFormerConv``: kernelised attention over all pairs, and the observed graph as a bias if there is one."""

from __future__ import annotations

from typing import Any, Literal

import torch

from diffusion_mp.diffusivities import (
    Diffusivity,
    GraphAugmentedDiffusivity,
    KernelizedSoftmaxDiffusivity,
    RelationalBias,
)
from diffusion_mp.diffusivities.query_key import Normalization, Projection
from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp.layers.multi_head_conv import MultiHeadConv


class NodeFormerConv(MultiHeadConv):
    r"""One layer of NodeFormer (Wu et al. 2022; slides, Algorithm 1 and "Input Graphs as Relational Bias").

    z_u = W_O ‖_h [ Σ_v s^h_uv v^h_v + Σ_p σ(b_ph) Σ_v (A^p)_uv v^h_v ],  v = W_V x, with the kernelised
    Gumbel-softmax s of :class:`KernelizedSoftmaxDiffusivity`: a step of size 1 of the coupling S + Σ_p σ(b_p) A^p.
    Without observed edges it is attention alone (ERRATA N9).

    Args:
        in_channels, heads: as in :class:`DiffusionConv`.
        out_channels: channels after W_O, and of every head unless ``head_channels`` is given.
        head_channels: of queries, keys and values.
        tau, num_features, num_samples, logits, projection, normalize, edge_regularization, generator: of the attention,
            see :class:`KernelizedSoftmaxDiffusivity`.
        relational_bias: how observed edges are added: ``"sum"``, the plain sum of the slides, ``"sym"`` or ``"row"``,
            normalised by degrees (the released code is of this kind, ERRATA N7), or ``None``.
        hops: P, how far the bias reaches.
        bias: of W_O.
        options: further ones of :class:`DiffusionConv` (``dropout``, ``validate``).
    """

    references = ("wu2022nodeformer", "choromanski2021performer")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        head_channels: int | None = None,
        tau: float = 0.25,
        num_features: int = 32,
        num_samples: int = 10,
        logits: Literal["dot", "scaled_dot"] = "dot",
        projection: Projection = "separate",
        normalize: Normalization = None,
        relational_bias: Literal["sum", "sym", "row"] | None = "sum",
        hops: int = 1,
        edge_regularization: float = 0.0,
        generator: torch.Generator | None = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads)
        check_counts(hops=hops)
        check_choice(projection, "projection", [None, "separate", "tied"])
        check_choice(relational_bias, "relational_bias", ["sum", "sym", "row", None])
        width = out_channels if head_channels is None else head_channels
        diffusivity: Diffusivity = KernelizedSoftmaxDiffusivity(
            in_channels,
            heads=heads,
            projection=projection,
            head_channels=width if projection else None,
            normalize=normalize,
            num_features=num_features,
            tau=tau,
            logits=logits,
            num_samples=num_samples,
            edge_regularization=edge_regularization,
            generator=generator,
        )
        if relational_bias is not None:
            diffusivity = GraphAugmentedDiffusivity(
                diffusivity, RelationalBias(heads, hops=hops, normalization=relational_bias)
            )
        super().__init__(in_channels, out_channels, diffusivity, heads, head_channels=width, bias=bias, **options)
