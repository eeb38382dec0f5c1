"""``PDETransformer``: a Transformer encoder with one-dimensional diffusion at one of seven sites."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch_geometric.nn import PositionalEncoding

from diffusion_mp.checks import (
    Count,
    check_counts,
    check_kind,
    check_mask,
    describe,
)
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import (
    NoDiffusion,
    Sequences,
    TokenMask,
    TransformerBlock,
)
from diffusion_mp.models.base import FeatureEncoder
from diffusion_mp.modules import Resettable
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.precision import widened

Pooling = Literal["mean", "first", "last"]
Placement = Literal["P1", "P2", "P3", "P4", "P5", "P6", "P7"] | None

# Zhang & Zhou, Table 1. Every site is called once, with a diffusion or the identity in it.
SITES: dict[str, str] = {
    "P1": "embedding",  # X ← S(Embed(·))
    "P2": "mlp",  # X ← S(X + MLP(X))
    "P3": "block",  # X ← S(Block(X))
    "P4": "norm",  # X ← LN(S(X)), both LayerNorms of a block
    "P5": "values",  # Attn(Q, K, S(V))
    "P6": "heads",  # H ← S_head(H)
    "P7": "attention",  # X ← S(X + Attn(X))
}


class PDETransformer(Resettable):
    r"""A pre-norm Transformer for sequences, with learned positions and :class:`PDEDiffusion1d` at one of seven places.

        X⁰ = 𝒮_embedding(W x + p),   X^(k+1) = TransformerBlock(X^(k))

    An MLP reads the pooled LN(X^K). The positions p start as sinusoids (Vaswani et al. 2017, Section 3.5) and are
    learned. P2 and P3 are the same function. P6 smooths along the heads of one token and not along the sequence.

    Args:
        in_channels: Number of channels of floating-point sequences; for sequences of tokens, a list with the size of
            the vocabulary.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_layers: Number of blocks K.
        heads: Number of heads H.
        max_length: Number of learned positions, the length of the longest sequence.
        placement: Site of the diffusion, ``"P1"`` … ``"P7"`` of Table 1 (Zhang & Zhou); ``None`` for no diffusion.
        diffusion: Options of :class:`PDEDiffusion1d` in a dict; ``None`` for none.
        mlp_channels: Number of hidden channels of the MLP of a block; 4C by default.
        pooling: How a sequence is represented: by the ``"mean"`` of its tokens, the ``"first"`` or the ``"last"``.
        task: ``"classify"``: sequences; ``"retrieve"``: pairs, by an MLP on [u, v, u ∘ v, u − v] (Tay et al. 2021).
        causal: No position reads a later one. Diffusion along the sequence then has ``boundary="causal"``.
        dropout: Dropout rate of the blocks and after the embedding. In a block it acts on the attention weights, on the
            hidden units of the MLP, and on both changes of the state.

    Shapes:
        x: [B, L, in_channels] of floating point, or [B, L] of integers.
        mask: [B, L], true at tokens; by default all positions have tokens.
        other: The second sequences of pairs, [B, M, in_channels] or [B, M]; for ``task="retrieve"`` only.
        other_mask: [B, M].
        output: Raw logits [B, out_channels], whatever the place or content of padding.

    Examples:
        >>> model = PDETransformer(4, 16, 2, num_layers=1, heads=2, max_length=10, placement="P2")
        >>> model(torch.rand(3, 10, 4)).shape  # three sequences of ten positions
        torch.Size([3, 2])
    """

    references = ("zhangwhere", "vaswani2017attention", "tay2021lra")

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: Count,
        out_channels: Count,
        num_layers: Count = 6,
        heads: int = 8,
        *,
        max_length: Count,
        placement: Placement = None,
        diffusion: dict[str, Any] | None = None,
        mlp_channels: Count | None = None,
        pooling: Pooling = "mean",
        task: Literal["classify", "retrieve"] = "classify",
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if isinstance(in_channels, int):
            check_counts(in_channels=in_channels)
        if placement is None and diffusion is not None:
            raise ValueError(
                "diffusion belongs to a placement; got options of it with placement=None."
            )
        chosen = None if placement is None else SITES[placement]
        options = dict(diffusion or {})
        # Along the heads of one token (P6) no later position can come in.
        if (
            causal
            and chosen != "heads"
            and options.setdefault("boundary", "causal") != "causal"
        ):
            raise ValueError(
                "boundary must be 'causal' in a causal model, or positions see later ones; "
                f"got {options['boundary']!r}."
            )

        # Called at every site of every block; all but the one that was chosen stay the identity.
        def place(site: str, channels: int) -> nn.Module:
            if site == chosen:
                # A copy: an update among the options would be one module of all blocks.
                return PDEDiffusion1d(channels, **copy.deepcopy(options))
            return NoDiffusion()

        # For reports: what was placed is in the sites.
        self.placement = placement
        self.pooling = pooling
        self.task = task
        self.dropout = dropout
        self.positions = nn.Parameter(torch.empty(max_length, hidden_channels))
        self.encoder = FeatureEncoder(in_channels, hidden_channels)
        self.after_embedding = place("embedding", hidden_channels)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                hidden_channels,
                heads,
                mlp_channels=mlp_channels or 4 * hidden_channels,
                causal=causal,
                dropout=dropout,
                place=place,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        pooled_channels = hidden_channels
        if task == "retrieve":
            pooled_channels = 4 * hidden_channels  # u, v, u ∘ v and u − v
        self.head = nn.Sequential(
            nn.Linear(pooled_channels, hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, out_channels),
        )
        self._draw()

    def forward(
        self,
        x: Tensor,
        mask: TokenMask | None = None,
        other: Tensor | None = None,
        other_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B out"]:
        if (other is None) != (self.task == "classify"):
            raise ValueError(
                "other, the second sequences of pairs, must be passed with task='retrieve', and only then; "
                f"got {describe(other)} with task={self.task!r}."
            )
        first = self.encode(x, mask)
        if other is None:
            return self.head(first)
        second = self.encode(other, other_mask, name="other")
        return self.head(torch.cat([first, second, first * second, first - second], 1))

    def encode(
        self, x: Tensor, mask: TokenMask | None = None, *, name: str = "x"
    ) -> Float[Tensor, "B C"]:
        """Return the pooled states of the sequences [B, C].

        Args:
            x: Sequences.
            mask: Positions with tokens; by default all positions have tokens.
            name: Name of the input in messages.
        """
        state = self.embed(x, mask, name=name)
        for block in self.blocks:
            state = block(state, mask)
        if mask is None:
            mask = torch.ones_like(state[..., 0], dtype=torch.bool)
        return self._pooled(self.norm(state), mask)

    def _pooled(self, x: Sequences, mask: TokenMask) -> Float[Tensor, "B C"]:
        """Return the mean, the first or the last token of every sequence, zero for a sequence without tokens."""
        if self.pooling == "first":
            mask = mask & (mask.cumsum(1) == 1)
        elif self.pooling == "last":
            mask = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        # A sum over thousands of tokens would lose its digits in half precision.
        total = widened(x).masked_fill(~mask.unsqueeze(2), 0).sum(1)
        # A sequence without tokens has the mean zero, not 0/0.
        return (total / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)

    def embed(
        self, x: Tensor, mask: TokenMask | None = None, *, name: str = "x"
    ) -> Sequences:
        """Return the initial state [B, L, C]: embedding plus position, smoothed under P1.

        Args:
            x: Sequences.
            mask: Positions with tokens; by default all positions have tokens.
            name: Name of the input in messages.
        """
        x = self._sequences(x, mask, name)
        if mask is None:
            positions = self.positions[: x.size(1)]
        else:
            # Padding may hold anything, NaN or an index that no table has.
            x = x.masked_fill(~mask.unsqueeze(2), 0)
            # Tokens are counted, so that padding may stand anywhere.
            positions = self.positions[(mask.cumsum(1) - 1).clamp(min=0)]
        # The encoder takes rows, as for nodes.
        embedded = self.encoder(x.flatten(0, 1), name).unflatten(0, x.shape[:2])
        state = self.after_embedding(embedded + positions, mask)
        return dropout(state, self.dropout, self.training)

    def _sequences(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Check sequences, and return them as [B, L, columns]."""
        check_kind(x, name, Tensor, "a tensor of sequences [batch, length, ...]")
        if x.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor of sequences; got {describe(x)}. Use {name}.to_dense()."
            )
        columns = self.encoder.channels
        limit = self.positions.size(0)
        # One category a position needs no third dimension.
        flat = self.encoder.sizes is not None and columns == 1 and x.dim() == 2
        stacked = x
        if flat:
            stacked = x.unsqueeze(2)
        if stacked.dim() != 3 or stacked.size(2) != columns:
            raise ValueError(
                f"{name} must be [batch, length, {columns}], as in_channels says; got {describe(x)}."
            )
        check_mask(mask, x, "mask" if name == "x" else f"{name}_mask")
        if x.size(1) > limit:
            raise ValueError(
                f"{name} must not be longer than max_length={limit}; got {describe(x)}. Cut it or raise it."
            )
        return stacked

    def _draw(self) -> None:
        """Initialise the positions with sinusoids, so that neighbours start out similar."""
        count, channels = self.positions.shape
        # PyG's encoding has an even number of channels; its last channel is dropped if the state has an odd number.
        sinusoids = PositionalEncoding(channels + channels % 2)(
            torch.arange(count, dtype=self.positions.dtype)
        )
        with torch.no_grad():
            self.positions.copy_(sinusoids[:, :channels])
