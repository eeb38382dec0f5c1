"""Sequences: ``PDEDiffusion1d``, and a Transformer block with sites at which it may be placed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffusion_mp import checks
from diffusion_mp.checks import Count, Probability
from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities.base import check_heads_divide
from diffusion_mp.diffusivities.fixed import NeumannDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.modules import Resettable
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.torch_private import forward_mode_active
from diffusion_mp.saving import Saved
from diffusion_mp.updates import ExplicitEuler, StateUpdate

#: States of B sequences of length L.
Sequences = Float[Tensor, "B L C"]
#: True at the positions of sequences that hold tokens.
TokenMask = Bool[Tensor, "B L"]


class PDEDiffusion1d(Resettable):
    r"""Diffusion along a sequence, x + Σ_k α_k Δ_{h_k} x channel by channel, in any model (Zhang & Zhou, Eq. 2, § 3.2).

        (Δ_h x)_i = x_{i−h} − 2x_i + x_{i+h}

    The tokens of a row form one sequence, wherever its padding stands. Padded positions are unchanged.

    Args:
        channels: Number of channels C.
        heads: Number of heads H, which cuts the channels for ``per="head"``.
        per: Share of one set of α: the whole ``"layer"``, every ``"head"``, or every ``"channel"``.
        update: Moves the state. ``None`` is ``ExplicitEuler(1.0)``, the equation above.
        norm: LayerNorm after the step (Eq. 16). By default there is none, since the guarantees hold without it only
            (docs/errata.md, P5).

    Options:
        strides (tuple of int): Strides h_k ≥ 1; (1,) by default.
        boundary (str): Neighbours beyond the ends of a sequence: ``"symmetric"`` (default, for which all guarantees
            hold), ``"replicate"``, ``"drop"``, ``"periodic"`` or ``"causal"``; see `NeumannCoupling`.
        alpha (float): Initial Σ_k α_k, divided equally between the strides; 0.1 by default.
        budget (float or None): Upper limit of Σ_k α_k throughout training; 0.5 by default, as in the paper; the
            spectrum of the explicit step then lies in [−1, 1]. ``None`` is no limit, for updates that are stable at any
            α.

    Shapes:
        x: [B, L, C], or rows [N, C] with ``batch``.
        mask: [B, L], true at tokens; for sequences only.
        batch: [N], the sorted number of the sequence of every row; for rows only.
        output: The shape of x. The coupling is over B · L rows, sequence by sequence, with tokens before padding.

    Examples:
        >>> PDEDiffusion1d(4, strides=(1, 2))(torch.rand(3, 10, 4)).shape  # [sequences, positions, channels]
        torch.Size([3, 10, 4])
    """

    is_diffusion_layer = True
    references = ("zhangwhere",)

    def __init__(
        self,
        channels: Count,
        *,
        heads: Count = 1,
        per: Literal["layer", "head", "channel"] = "layer",
        update: StateUpdate | None = None,
        norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_heads_divide(channels, heads)
        self.in_channels = channels
        self.out_channels = channels
        # An α for every channel is a head of one channel each.
        self.diffusivity = NeumannDiffusivity(
            {"layer": 1, "head": heads, "channel": channels}[per], **options
        )
        self.update = update or ExplicitEuler(1.0)
        self.norm = nn.LayerNorm(channels) if norm else None

    # A shortcut for reports: what was learned along the sequence are these few numbers.
    @property
    def alpha(self) -> Float[Tensor, "K sets"]:
        """α_k of every stride and set [K, sets], where K is the number of strides."""
        return self.diffusivity.alpha

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, Coupling]:
        """Return the next state; with ``return_coupling`` also the coupling.

        Args:
            x: Sequences, or rows with ``batch``.
            mask: Positions with tokens; by default all positions have tokens.
            batch: Number of the sequence of every row; by default all rows form one sequence.
            return_coupling: Return the coupling too.
        """
        checks.check_flags(return_coupling=return_coupling)
        # Rows with a batch are what layers of graphs pass on; sequences what Transformers do.
        if isinstance(x, Tensor) and x.dim() == 2:
            if mask is not None:
                raise ValueError(
                    f"mask goes with sequences [B, L, C]; got {checks.describe(x)}. For its rows pass batch [N]."
                )
            checks.check_state(x, channels=self.in_channels, module=self.norm)
            out, coupling = self._step(x, Graph.coerce(x, batch=batch))
        else:
            if batch is not None:
                raise ValueError(
                    f"batch goes with rows x [N, C]; got {checks.describe(x)}. For its padding pass mask [B, L]."
                )
            checks.check_sequences(x, mask, self.in_channels, self.norm)
            out, coupling = self._stacked(x, mask)
        if self.norm is not None:
            out = self.norm(out)
        if return_coupling:
            return out, coupling
        return out

    def _stacked(
        self, x: Sequences, mask: TokenMask | None
    ) -> tuple[Sequences, Coupling]:
        """Return the step of stacked sequences; a masked row is split in two, its tokens and its padding."""
        size, length = x.shape[:2]
        if mask is None:
            # Sequences of a batch are its graphs, of equal length.
            graph = Graph(size * length, ptr=length * torch.arange(size + 1))
            out, coupling = self._step(x.flatten(0, 1), graph)
            return out.view_as(x), coupling
        # Tokens and padding of a sequence become two graphs, between which nothing flows.
        order, ptr = tokens_first(mask)
        kept = mask.unsqueeze(2)
        # Padding may hold NaN, and 0·NaN in the gradient of α would not be 0.
        rows = torch.where(kept, x, 0.0).flatten(0, 1).index_select(0, order)
        moved, coupling = self._step(rows, Graph(size * length, ptr=ptr))
        moved = torch.zeros_like(moved).index_copy(0, order, moved).view_as(x)
        # Padding stays as it was, and has no part in the gradient.
        return torch.where(kept, moved, x), coupling

    def _step(self, x: State, graph: Graph) -> tuple[State, Coupling]:
        coupling = self.diffusivity(x, graph)
        by_head = x.unflatten(1, (self.diffusivity.heads, -1))
        return self.update(by_head, coupling).flatten(1), coupling


def tokens_first(
    mask: TokenMask,
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " ends"]]:
    """Return the order of the B·L rows that puts tokens before padding, and the row boundaries [2B + 1]."""
    size, length = mask.shape
    start = length * torch.arange(size, device=mask.device)
    position = torch.arange(length, device=mask.device)
    # Distinct keys, since ONNX has no stable sort: padding comes a whole length later.
    keys = position + length * mask.logical_not().long()
    order = start.unsqueeze(1) + keys.argsort(dim=1)
    ends = torch.stack([start + mask.sum(1), start + length], dim=1)
    ptr = torch.cat([ends.new_zeros(1), ends.flatten()])
    # Boundaries lie on the CPU, where a graph reads them as numbers.
    return order.flatten(), ptr.cpu()


#: Function of (site, channels) that makes the module at that site, called as ``module(state, mask)``.
Place = Callable[[str, int], nn.Module]


# `nn.Identity` takes one argument, and sites are called with two.
class NoDiffusion(nn.Identity):
    """The identity, called as diffusion layers on sequences are; as a :data:`Place`, the identity at every site."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class SelfAttention(Saved):
    r"""Multi-head self-attention over the tokens of a sequence (Vaswani et al. 2017, Eqs. 1 and 3).

        𝒜(x) = W_O ‖_h A_h(x) W_V^h x + b,   A_h(x) = softmax(q_h k_hᵀ/√D)

    It has two sites: ``"values"`` [B, L, C] before attention, and ``"heads"`` [B · L, H, D], just before W_O, where the
    heads of a token form the sequence.

    Args:
        channels: Number of channels C of input and output.
        heads: Number of heads H, a divisor of C, of D = C / H channels.
        causal: A position receives only from itself and earlier positions.
        dropout: Dropout rate on the attention weights.
        place: Makes the modules at the sites; the identity by default.

    Shapes:
        x: [B, L, C].
        mask: [B, L], true at tokens. Masked positions must be finite and send nothing.
        output: [B, L, C].
    """

    references = ("vaswani2017attention",)
    # Diagnostics find attention by this attribute, which a module of one's own may have too.
    is_self_attention = True

    def __init__(
        self,
        channels: Count,
        heads: Count = 8,
        *,
        causal: bool = False,
        dropout: Probability = 0.0,
        place: Place = NoDiffusion,
    ) -> None:
        super().__init__()
        check_heads_divide(channels, heads)
        self.channels = channels
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        # Queries, keys and values in one product.
        self.project = nn.Linear(channels, 3 * channels)
        self.on_values = place("values", channels)
        self.on_heads = place("heads", channels // heads)
        self.mix = nn.Linear(channels, channels)

    def forward(self, x: Sequences, mask: TokenMask | None = None) -> Sequences:
        checks.check_sequences(x, mask, self.channels, self)
        query, key, value = self.project(x).chunk(3, -1)
        pairs = None if mask is None else self._senders(mask)
        attend = partial(
            scaled_dot_product_attention,
            self._by_head(query),
            self._by_head(key),
            self._by_head(self.on_values(value, mask)),
            attn_mask=pairs,
            dropout_p=self.dropout if self.training else 0.0,
            # With a mask the order is a part of ``pairs``; torch takes either the one or the other.
            is_causal=self.causal and mask is None,
        )
        if forward_mode_active():
            # Only the formula has derivatives in forward mode, not torch's fused kernels.
            with sdpa_kernel(SDPBackend.MATH):
                return self._join(attend())
        return self._join(attend())

    def weights(
        self, x: Sequences, mask: TokenMask | None = None
    ) -> Float[Tensor, "B H L length"]:
        """Return A_h(x), whose rows sum to one, in O(L²) memory; ``forward`` does not form it."""
        checks.check_sequences(x, mask, self.channels, self)
        query, key, _ = self.project(x).chunk(3, -1)
        q = self._by_head(query)
        scores = q @ self._by_head(key).transpose(2, 3) / q.size(3) ** 0.5
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return scores.masked_fill(~self._senders(mask), -torch.inf).softmax(-1)

    def frozen(
        self, x: Tensor, mask: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the map y ↦ W_O ‖_h A_h(x) W_V^h y + b, attention with its weights frozen at x."""
        weights = self.weights(x, mask)

        def attend(y: Tensor) -> Tensor:
            _, _, value = self.project(y).chunk(3, -1)
            return self._join(weights @ self._by_head(self.on_values(value, mask)))

        return attend

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape [B, L, C] to [B, H, L, D]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _join(self, heads: Tensor) -> Tensor:
        # The heads of a token stand side by side, as the site after attention takes them.
        tokens = heads.transpose(1, 2)
        routed = self.on_heads(tokens.flatten(0, 1)).flatten(1)
        return self.mix(routed).unflatten(0, tokens.shape[:2])

    def _senders(self, mask: Tensor) -> Tensor:
        """Return the mask of allowed pairs. No row is empty, since a softmax over nothing is NaN."""
        tokens = (mask | ~mask.any(1, keepdim=True))[:, None, None, :]
        if not self.causal:
            return tokens
        sender = torch.arange(mask.size(1), device=mask.device)
        receiver = sender.unsqueeze(1)
        # A position always sends to itself: before the first token of a causal row nothing else does.
        return (tokens & (sender < receiver)) | (sender == receiver)


class TransformerBlock(Saved):
    r"""x ← x + 𝒜(LN(x)), x ← x + MLP(LN(x)), with four sites around these (Zhang & Zhou, Table 1).

    With 𝒮_s for the module at site s,

        x̂ = 𝒮_attention(x + 𝒜(LN(𝒮_norm(x))))
        x′ = 𝒮_block(𝒮_mlp(x̂ + MLP(LN(𝒮_norm(x̂)))))

    The sites ``"mlp"`` and ``"block"`` coincide, as in the table. Two more sites are inside :class:`SelfAttention`.

    Args:
        channels: Number of channels C of input and output.
        heads: Number of heads H, a divisor of C.
        mlp_channels: Number of hidden channels of the MLP.
        causal: A position receives only from itself and earlier positions.
        dropout: Dropout rate on the attention weights, on the hidden units of the MLP, and on both changes of the
            state.
        place: Makes the modules at the sites; the identity by default.

    Shapes:
        x: [B, L, C].
        mask: [B, L], true at tokens.
        output: [B, L, C].
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        mlp_channels: Count,
        causal: bool = False,
        dropout: float = 0.0,
        place: Place = NoDiffusion,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        # Every site has a module of its own, though some have one name.
        self.before_attention_norm = place("norm", channels)
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = SelfAttention(
            channels, heads, causal=causal, dropout=dropout, place=place
        )
        self.after_attention = place("attention", channels)
        self.before_mlp_norm = place("norm", channels)
        self.mlp_norm = nn.LayerNorm(channels)
        widen = nn.Linear(channels, mlp_channels)
        narrow = nn.Linear(mlp_channels, channels)
        self.mlp = nn.Sequential(widen, nn.GELU(), nn.Dropout(dropout), narrow)
        self.after_mlp = place("mlp", channels)
        self.after_block = place("block", channels)

    def forward(self, x: Sequences, mask: TokenMask | None = None) -> Sequences:
        routed = self.attention(
            self.attention_norm(self.before_attention_norm(x, mask)), mask
        )
        # A site in front of the sum would smooth only the change; these sites smooth the state.
        x = self.after_attention(x + dropout(routed, self.dropout, self.training), mask)
        changed = self.mlp(self.mlp_norm(self.before_mlp_norm(x, mask)))
        x = self.after_mlp(x + dropout(changed, self.dropout, self.training), mask)
        return self.after_block(x, mask)
