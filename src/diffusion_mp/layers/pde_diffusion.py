"""``PDEDiffusion1d``: one step of the heat equation along a sequence."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities.neumann import NeumannDiffusivity
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_flags,
    check_kind,
    check_mask,
    check_sequences,
    check_state,
    describe,
)
from diffusion_mp.graph import Graph
from diffusion_mp.updates import ExplicitEuler, StateUpdate


class PDEDiffusion1d(nn.Module):
    r"""x + Σ_k α_k Δ_{h_k} x along the sequence, channel by channel (Zhang & Zhou, Eq. 2, § 3.2).

    Position by position: x′_i = x_i + Σ_k α_k (x_{i−h_k} − 2x_i + x_{i+h_k}), where the boundary says what lies beyond
    the ends. Only tokens are neighbours: the tokens of a row, in order, are one sequence, wherever its padding stands,
    and a padded position keeps what it has.

    Args:
        channels: C.
        heads: H; cuts the channels for ``per="head"``.
        per: one set of α for the ``"layer"``, for every ``"head"``, or for every ``"channel"``.
        update: moves the state; ``ExplicitEuler(1.0)``, which is the equation above, by default.
        norm: LayerNorm after the step (Eq. 16). The guarantees are those of the bare step, and none covers the
            composite, unlike the paper says (docs/errata.md, P5).
        batch_first: sequences are [B, L, C]; ``False``: [L, B, C], as PyTorch's attention has them by default.
        options: of :class:`NeumannDiffusivity`, where α comes from (``strides``, ``boundary``, ``alpha``, ``budget``).

    Shapes:
        - x: [B, L, C] with mask [B, L] (True: a token), or [N, C] with batch [N], sorted: the sequence of every row.
          key_padding_mask: [B, L] in place of the mask (True: padding), as PyTorch's attention takes it.
        - output: that of x. The coupling of ``return_coupling`` is over the B·L rows, those of a row of the batch in
          order, its tokens before its padding.

    Raises:
        TypeError, ValueError: the input does not fit; a sentence says what came and what was expected.

    Examples:
        >>> smooth = PDEDiffusion1d(4, strides=(1, 2))
        >>> smooth(torch.rand(3, 10, 4)).shape  # [sequences, positions, channels]
        torch.Size([3, 10, 4])
    """

    is_diffusion_layer = True
    references = ("zhangwhere",)

    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        per: Literal["layer", "head", "channel"] = "layer",
        update: StateUpdate | None = None,
        norm: bool = False,
        batch_first: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_counts(channels=channels, heads=heads)
        check_flags(norm=norm, batch_first=batch_first)
        check_choice(per, "per", ["layer", "head", "channel"])
        check_kind(update, "update", (StateUpdate, NoneType), "a StateUpdate")
        if channels % heads:
            raise ValueError(f"heads must divide channels={channels}; got {heads}.")
        self.in_channels = self.out_channels = channels
        self.batch_first = batch_first
        self.diffusivity = NeumannDiffusivity({"layer": 1, "head": heads, "channel": channels}[per], **options)
        self.update = ExplicitEuler(1.0) if update is None else update
        self.norm = nn.LayerNorm(channels) if norm else None

    @property
    def alpha(self) -> Float[Tensor, "K sets"]:
        """α_k of every stride and set."""
        return self.diffusivity.alpha

    def reset_parameters(self) -> None:
        """Back to the initial α and the identity of the norm."""
        self.diffusivity.reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, Coupling]:
        """The next state, and with ``return_coupling`` the operator that moved it."""
        check_flags(return_coupling=return_coupling)
        name = "mask" if key_padding_mask is None else "key_padding_mask"
        mask = mask if key_padding_mask is None else _not_padding(key_padding_mask, mask)
        self._check(x, mask, batch, name)
        if x.dim() == 2:
            out, coupling = self._step(x, Graph.coerce(x, batch=batch))
        elif self.batch_first:
            out, coupling = self._stacked(x, mask)
        else:
            out, coupling = self._stacked(x.transpose(0, 1), mask)
            out = out.transpose(0, 1)
        out = out if self.norm is None else self.norm(out)
        return (out, coupling) if return_coupling else out

    def _stacked(self, x: Float[Tensor, "B L C"], mask: Tensor | None) -> tuple[Float[Tensor, "B L C"], Coupling]:
        """The step of sequences that are stacked."""
        if mask is not None:
            return self._masked(x, mask)
        size, length = x.shape[:2]
        ends = length * torch.arange(size + 1)
        out, coupling = self._step(x.flatten(0, 1), Graph(size * length, ptr=ends))
        return out.view_as(x), coupling

    def _step(self, x: Float[Tensor, "N C"], graph: Graph) -> tuple[Float[Tensor, "N C"], Coupling]:
        coupling = self.diffusivity(x, graph)
        return self.update(x.unflatten(1, (self.diffusivity.heads, -1)), coupling).flatten(1), coupling

    def _masked(self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"]) -> tuple[Float[Tensor, "B L C"], Coupling]:
        """The step with the tokens of every row moved to its front, where they and its padding are two sequences."""
        order, ptr = tokens_first(mask)
        kept = mask.unsqueeze(2)
        rows = torch.where(kept, x, 0.0).flatten(0, 1)  # zeros, because 0·NaN in the gradient of α would not be 0
        moved, coupling = self._step(rows.index_select(0, order), Graph(rows.size(0), ptr=ptr))
        moved = torch.zeros_like(moved).index_copy(0, order, moved).view_as(x)
        return torch.where(kept, moved, x), coupling

    def _check(self, x: Tensor, mask: Tensor | None, batch: Tensor | None, name: str) -> None:
        if not isinstance(x, Tensor) or x.dim() not in (2, 3):
            raise ValueError(f"x must be a tensor [B, L, channels], or rows [N, channels]; got {describe(x)}.")
        if x.dim() == 3:
            check_sequences(x, None, self.in_channels, self.norm)
            self._check_mask(x if self.batch_first else x.transpose(0, 1), mask, name)
            if batch is not None:
                raise ValueError(f"batch goes with rows [N, C]; got {describe(x)}. For its padding pass mask [B, L].")
            return
        check_state(x, channels=self.in_channels, module=self.norm)
        if mask is not None:
            raise ValueError(f"{name} goes with sequences [B, L, C]; got {describe(x)}. For its rows pass batch [N].")

    def _check_mask(self, x: Tensor, mask: Tensor | None, name: str) -> None:
        turned = isinstance(mask, Tensor) and mask.shape == x.shape[1::-1] != x.shape[:2]
        if turned and self.batch_first:
            raise ValueError(
                f"{name} must be {list(x.shape[:2])}, one entry per position of x; got {describe(mask)}. If x is "
                f"[length, batch, channels], build the layer with batch_first=False."
            )
        check_mask(mask, x, name)

    def extra_repr(self) -> str:
        return f"{self.in_channels}"


def _not_padding(key_padding_mask: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of the tokens, from PyTorch's of the padding."""
    if mask is not None:
        raise ValueError("mask and key_padding_mask say the same thing, one is the inverse of the other; pass one.")
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be a bool tensor, true where there is padding; got {describe(key_padding_mask)}."
        )
    return ~key_padding_mask


def tokens_first(mask: Bool[Tensor, "B L"]) -> tuple[Int[Tensor, " rows"], Int[Tensor, " ends"]]:
    """The order of the B·L rows with the tokens of every row before its padding, and where each of both begins."""
    size, length = mask.shape
    start = length * torch.arange(size, device=mask.device)
    # No two keys are equal: ONNX has no stable sort.
    keys = mask.logical_not().long() * length + torch.arange(length, device=mask.device)
    order = keys.argsort(dim=1) + start.unsqueeze(1)
    ends = torch.stack([start + mask.sum(1), start + length], dim=1).flatten()
    return order.flatten(), torch.cat([ends.new_zeros(1), ends]).cpu()
