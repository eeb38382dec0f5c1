"""``MultiHeadConv``: the heads of an attention concatenated and mixed, as in a Transformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.errors import check_counts, check_flags
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.updates import ExplicitEuler


class MultiHeadConv(DiffusionConv):
    r"""x′ = W_O ‖_h S^h W_V^h x, and with ``residual`` x more: a step of size 1 of any diffusivity, heads mixed by W_O.

    Args:
        in_channels, diffusivity, heads: as in :class:`DiffusionConv`.
        out_channels: channels after W_O; those of x with ``residual``.
        head_channels: of a head's values.
        residual: add x.
        bias: of W_O.
        options: further ones of :class:`DiffusionConv` (``dropout``, ``validate``).

    Examples:
        >>> softmax = SoftmaxDiffusivity(4, projection="separate", heads=2)
        >>> MultiHeadConv(4, 8, softmax, heads=2, head_channels=5)(x).shape
        torch.Size([6, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        diffusivity: Diffusivity,
        heads: int = 1,
        *,
        head_channels: int,
        residual: bool = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads, head_channels=head_channels)
        check_flags(residual=residual, bias=bias)
        if residual and in_channels != out_channels:
            raise ValueError(
                f"residual adds x to the output, so both must have the same channels; got {in_channels} and "
                f"{out_channels}. Or pass residual=False."
            )
        update = ExplicitEuler(1.0, "residual")
        super().__init__(in_channels, head_channels, diffusivity, update, heads, concat=True, bias=False, **options)
        self.out_channels, self.residual = out_channels, residual
        self.mix = nn.Linear(heads * head_channels, out_channels, bias=bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.mix.reset_parameters()

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        return x + self.mix(out) if self.residual else self.mix(out)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, residual={self.residual}"
