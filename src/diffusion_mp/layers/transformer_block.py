"""``TransformerBlock`` and its ``SelfAttention``, with a named site wherever diffusion along the sequence may stand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from diffusion_mp.errors import check_counts, check_flags, check_probability, check_sequences
from diffusion_mp.kernels.dropout import dropout

#: (site, channels) → the module at that site, called as ``module(state, mask)``.
Place = Callable[[str, int], nn.Module]


class NoDiffusion(nn.Module):
    """The identity, called like a diffusion layer on sequences: what stands at a site without one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x


def nowhere(site: str, channels: int) -> nn.Module:
    """A :data:`Place` without diffusion at any site."""
    return NoDiffusion()


class SelfAttention(nn.Module):
    r"""𝒜(x) = W_O ‖_h A_h(x) W_V^h x + b, A_h(x) = softmax(q_hk_hᵀ/√D) (Vaswani et al. 2017, Eqs. 1 and 3).

    Two sites: ``"values"``, the values [B, L, C] before they are routed, and ``"heads"``, where the heads of one token
    are the sequence, [B · L, H, D], just before W_O.

    Args:
        channels: C of in- and output.
        heads: H, a divisor of C.
        causal: a position receives only from itself and those before it.
        dropout: of the attention weights.
        place: what stands at the sites; by default nothing.

    Shapes:
        x, output: [B, L, C]; mask: [B, L], true where there is a token. A masked position sends nothing; what is
        computed for it is finite and means nothing. Its content must be finite.

    Raises:
        TypeError, ValueError: an option or the input does not fit.
    """

    references = ("vaswani2017attention",)
    is_self_attention = True

    def __init__(
        self, channels: int, heads: int = 8, *, causal: bool = False, dropout: float = 0.0, place: Place = nowhere
    ) -> None:
        super().__init__()
        check_counts(channels=channels, heads=heads)
        check_probability(dropout, "dropout")
        check_flags(causal=causal)
        if channels % heads:
            raise ValueError(f"heads must divide the channels; got {heads} heads and {channels} channels.")
        self.channels, self.heads, self.causal, self.dropout = channels, heads, causal, dropout
        self.project = nn.Linear(channels, 3 * channels)
        self.on_values = place("values", channels)
        self.on_heads = place("heads", channels // heads)
        self.mix = nn.Linear(channels, channels)

    def forward(self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L C"]:
        """The state after routing."""
        check_sequences(x, mask, self.channels, self)
        query, key, value = self.project(x).chunk(3, -1)
        heads = scaled_dot_product_attention(
            self._by_head(query),
            self._by_head(key),
            self._by_head(self.on_values(value, mask)),
            attn_mask=None if mask is None else self._senders(mask),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        return self._join(heads)

    def weights(
        self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B H L length"]:
        """A_h(x), whose rows sum to one, in O(L²) memory; ``forward`` never forms it."""
        check_sequences(x, mask, self.channels, self)
        query, key, _ = self.project(x).chunk(3, -1)
        scores = self._by_head(query) @ self._by_head(key).transpose(2, 3) / (self.channels // self.heads) ** 0.5
        everybody = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return scores.masked_fill(~self._senders(everybody if mask is None else mask), -torch.inf).softmax(-1)

    def frozen(self, x: Tensor, mask: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """y ↦ W_O ‖_h A_h(x) W_V^h y + b: the attention linearised at x, which routes every state as it routes x."""
        weights = self.weights(x, mask)

        def route(y: Tensor) -> Tensor:
            value = self.on_values(self.project(y).chunk(3, -1)[2], mask)
            return self._join(weights @ self._by_head(value))

        return route

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, L, C] as [B, H, L, D]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _join(self, heads: Tensor) -> Tensor:
        """Heads [B, H, L, D] mixed to [B, L, C]."""
        batch, length = heads.size(0), heads.size(2)
        tokens = heads.transpose(1, 2).flatten(0, 1)
        return self.mix(self.on_heads(tokens).flatten(1)).unflatten(0, (batch, length))

    def _senders(self, mask: Tensor) -> Tensor:
        """Who may send to whom, true or false; no row is empty, for a softmax over nothing would be NaN."""
        tokens = (mask | ~mask.any(1, keepdim=True))[:, None, None, :]
        if not self.causal:
            return tokens
        square = torch.ones(mask.size(1), mask.size(1), dtype=torch.bool, device=mask.device)
        return (tokens & square.tril()) | torch.eye(mask.size(1), dtype=torch.bool, device=mask.device)

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}, causal={self.causal}, dropout={self.dropout}"


class TransformerBlock(nn.Module):
    r"""x ← x + 𝒜(LN(x)), x ← x + MLP(LN(x)), and four sites around these (Zhang & Zhou, Table 1).

    With 𝒮_s for the module at site s, x̂ = 𝒮_attention(x + 𝒜(LN(𝒮_norm(x)))) and
    x′ = 𝒮_block(𝒮_mlp(x̂ + MLP(LN(𝒮_norm(x̂))))). The MLP comes last, so ``"mlp"`` and ``"block"`` are two names
    of one place, as the table prints them. Two more sites are inside :class:`SelfAttention`.

    Args:
        channels, heads, causal, place: see :class:`SelfAttention`.
        mlp_channels: between the two layers of the MLP.
        dropout: of the attention weights, of the MLP's hidden units, and of both changes of the state.

    Shapes: as in :class:`SelfAttention`.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        mlp_channels: int,
        causal: bool = False,
        dropout: float = 0.0,
        place: Place = nowhere,
    ) -> None:
        super().__init__()
        check_counts(mlp_channels=mlp_channels)
        self.dropout = dropout
        self.before_attention_norm = place("norm", channels)
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = SelfAttention(channels, heads, causal=causal, dropout=dropout, place=place)
        self.after_attention = place("attention", channels)
        self.before_mlp_norm = place("norm", channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, mlp_channels), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_channels, channels)
        )
        self.after_mlp = place("mlp", channels)
        self.after_block = place("block", channels)

    def forward(self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L C"]:
        """The next state."""
        routed = self.attention(self.attention_norm(self.before_attention_norm(x, mask)), mask)
        x = self.after_attention(x + dropout(routed, self.dropout, self.training), mask)
        changed = self.mlp(self.mlp_norm(self.before_mlp_norm(x, mask)))
        x = self.after_mlp(x + dropout(changed, self.dropout, self.training), mask)
        return self.after_block(x, mask)
