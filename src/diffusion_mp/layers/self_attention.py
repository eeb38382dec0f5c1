"""``SelfAttention``: softmax attention over the positions of padded sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch_geometric.nn.inits import reset

from diffusion_mp.errors import check_counts, check_flags, check_probability, check_sequences

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

    Two sites for a module called as ``module(state, mask)``: ``"values"``, the values [B, L, C] before they are routed,
    and ``"heads"``, where the heads of one token are the sequence, [B · L, H, D], just before W_O.

    Args:
        channels: C of in- and output.
        heads: H, a divisor of C.
        causal: a position receives only from itself and those before it.
        dropout: of the attention weights.
        place: (site, channels) → the module at that site; by default none.

    Shapes:
        x, output: [B, L, C]; mask: [B, L], true where there is a token. A masked position sends nothing; what is
        computed for it is finite and means nothing. Its content must be finite.

    Raises:
        TypeError, ValueError: an option or the input does not fit.
    """

    references = ("vaswani2017attention",)
    is_self_attention = True

    def __init__(
        self,
        channels: int,
        heads: int = 8,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        place: Place = nowhere,
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

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        for child in self.children():
            reset(child)

    def forward(self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L C"]:
        """The state after routing."""
        check_sequences(x, mask, self.channels, self)
        query, key, value = self.project(x).chunk(3, -1)
        allowed = self._allowed(mask)
        heads = scaled_dot_product_attention(
            self._by_head(query),
            self._by_head(key),
            self._by_head(self.on_values(value, mask)),
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and allowed is None,
        )
        return self._join(heads)

    def weights(
        self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B H L length"]:
        """A_h(x), whose rows sum to one, in O(L²) memory; ``forward`` never forms it."""
        check_sequences(x, mask, self.channels, self)
        query, key, _ = self.project(x).chunk(3, -1)
        scores = self._by_head(query) @ self._by_head(key).transpose(2, 3) / (self.channels // self.heads) ** 0.5
        allowed = self._allowed(mask)
        if allowed is None and self.causal:
            allowed = self._past(x.size(1), x.device)
        return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)

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
        return self.mix(self.on_heads(tokens).reshape(batch, length, self.channels))

    def _allowed(self, mask: Tensor | None) -> Tensor | None:
        """Who may send to whom, where that is not everybody or the past; no row is empty."""
        if mask is None:
            return None
        tokens = mask | ~mask.any(1, keepdim=True)
        if not self.causal:
            return tokens[:, None, None, :]
        itself = torch.eye(mask.size(1), dtype=torch.bool, device=mask.device)
        return (tokens[:, None, None, :] & self._past(mask.size(1), mask.device)) | itself

    @staticmethod
    def _past(length: int, device: torch.device) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}, causal={self.causal}, dropout={self.dropout}"
