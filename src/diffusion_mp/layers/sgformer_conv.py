"""``SGFormerConv``: the single attention layer of SGFormer."""

from __future__ import annotations

from typing import Any, Literal

from diffusion_mp.diffusivities import SGFormerDiffusivity
from diffusion_mp.errors import check_counts, check_flags, check_positive
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.updates import teleport


class SGFormerConv(DiffusionConv):
    r"""Z = β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z⁽⁰⁾, heads averaged (slides, "SGFormer"; Wu et al. 2023b).

    Node by node, with v = W_V x: z_i = β (v_i + (1/n) Σ_j (q̃_i·k̃_j) v_j) / (1 + (1/n) Σ_j q̃_i·k̃_j) + (1 − β) z⁽⁰⁾_i.
    Observed edges are not read. Z⁽⁰⁾ is the ``source`` of the call, x itself by default; β = 1 leaves it out, which is
    the attention of PyG's ``SGFormerAttention``.

    Args:
        in_channels, out_channels, heads: as in :class:`DiffusionConv`; in- and output have the same channels.
        beta: β in (0, 1].
        projection: W_Q and W_K: ``"separate"``, ``"tied"`` or ``None``.
        normalize: ``"row"`` or ``"frobenius"``, with which large graphs see no attention (ERRATA G1); see
            :class:`SGFormerDiffusivity`.
        transform: W_V.
        bias: add a bias at the end.
        options: further ones of :class:`DiffusionConv` (``concat``, ``dropout``, ``validate``, …).

    Raises:
        TypeError, ValueError: β does not lie in (0, 1], or as in :class:`DiffusionConv`.
    """

    references = ("wu2023sgformer",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        beta: float = 0.5,
        projection: Literal["separate", "tied"] | None = "separate",
        normalize: Literal["row", "frobenius"] = "row",
        transform: bool = True,
        bias: bool = False,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels)
        check_flags(transform=transform)
        check_positive(beta, "beta", allow_zero=True)
        if not 0 < beta <= 1:
            raise ValueError(
                f"beta must lie in (0, 1], the attention beside 1 - beta of the initial state; got {beta}."
            )
        diffusivity = SGFormerDiffusivity(in_channels, heads=heads, projection=projection, normalize=normalize)
        super().__init__(
            in_channels,
            out_channels,
            diffusivity,
            teleport(1 - beta),
            heads if transform else 1,
            transform=transform,
            bias=bias,
            keep="state",
            **options,
        )
