"""``TransformerBlock``: one pre-norm layer of a Transformer, with a named site wherever diffusion may be inserted."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch_geometric.nn.inits import reset

from diffusion_mp.errors import check_counts
from diffusion_mp.layers.self_attention import Place, SelfAttention, nowhere


class TransformerBlock(nn.Module):
    r"""x ← x + 𝒜(LN(x)), x ← x + MLP(LN(x)), and four sites around these (Zhang & Zhou, Table 1).

    With 𝒮_s for the module at site s, x̂ = 𝒮_attention(x + 𝒜(LN(𝒮_norm(x)))) and
    x′ = 𝒮_block(𝒮_mlp(x̂ + MLP(LN(𝒮_norm(x̂))))). The MLP comes last, so ``"mlp"`` and ``"block"`` are two names
    of one place, as the table prints them. Two more sites are inside :class:`SelfAttention`.

    Args:
        channels, heads, causal: see :class:`SelfAttention`.
        mlp_channels: between the two layers of the MLP.
        dropout: of the attention weights, of the MLP's hidden units, and of both changes of the state.
        place: (site, channels) → the module at that site, called as ``module(state, mask)``; by default none.

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

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        for child in self.children():
            reset(child)

    def forward(self, x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L C"]:
        """The next state."""
        routed = self.attention(self.attention_norm(self.before_attention_norm(x, mask)), mask)
        x = self.after_attention(x + dropout(routed, self.dropout, self.training), mask)
        changed = self.mlp(self.mlp_norm(self.before_mlp_norm(x, mask)))
        x = self.after_mlp(x + dropout(changed, self.dropout, self.training), mask)
        return self.after_block(x, mask)
