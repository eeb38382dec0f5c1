"""``GatedGCN``, ``GPS``, ``DFiFormer`` and ``SFiFormer``: stacks of blocks with message passing and attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import NoneType
from typing import Any

from torch import nn

from diffusion_mp.errors import check_counts, check_flags, check_kind, check_probability, describe
from diffusion_mp.layers import GatedGCNConv, GPSBlock, SFiConv
from diffusion_mp.layers.gps import Norm
from diffusion_mp.models.base import BlockStack


class GatedGCN(BlockStack):
    """A stack of :class:`GatedGCNConv` (Bresson & Laurent 2017; Dwivedi et al. 2023): message passing alone.

    Args:
        in_channels, hidden_channels, out_channels, num_layers: as in :class:`BlockStack`.
        norm, dropout: of every layer.
        task: ``"node"``; ``"graph"``: logits of every graph, from the mean of its nodes; ``"link"``: scores of pairs.
        options: further ones of :class:`BlockStack` (``edge_dim``, ``pe_channels``, ``pe_encoder``).

    Examples:
        >>> GatedGCN(4, 16, 3, num_layers=2)(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        norm: Norm = "batch",
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        def block() -> nn.Module:
            return GatedGCNConv(hidden_channels, norm=norm, dropout=dropout)

        super().__init__(in_channels, hidden_channels, out_channels, num_layers, block, **options)


class GPS(BlockStack):
    r"""GraphGPS (Rampášek et al. 2022): GatedGCN and attention over all pairs in every block, see :class:`GPSBlock`.

    The attention is a :class:`SFiConv`, by default softmax attention without friction (λ* = 0) and adjacency.

    Args:
        in_channels, hidden_channels, out_channels, num_layers: as in :class:`BlockStack`.
        heads, lam, adjacency: H, λ* and the term Ã of the attention.
        attention: further options of :class:`SFiConv` (``alpha``, ``friction``, ``gamma``, ``hops``, …).
        local: message passing by GatedGCN; ``False``: attention alone.
        norm, dropout: of the blocks.
        attention_dropout: dropout rate of the values of the attention.
        task: ``"node"``; ``"graph"``: logits of every graph, from the mean of its nodes; ``"link"``: scores of pairs.
        options: further ones of :class:`BlockStack` (``edge_dim``, ``pe_channels``, ``pe_encoder``).

    Examples:
        >>> model = GPS(4, 16, 3, num_layers=2)
        >>> model(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        heads: int = 4,
        lam: float = 0.0,
        adjacency: bool = False,
        attention: dict[str, Any] | None = None,
        local: bool = True,
        norm: Norm = "batch",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        check_kind(attention, "attention", (dict, NoneType), "a dictionary with options of SFiConv")
        check_flags(local=local)
        check_probability(attention_dropout, "attention_dropout")
        check_counts(hidden_channels=hidden_channels, heads=heads)
        if hidden_channels % heads and "head_channels" not in (attention or {}):
            raise ValueError(
                f"heads must divide hidden_channels; got {heads} heads, {hidden_channels} channels. Or pass "
                f"attention={{'head_channels': …}}."
            )

        def block() -> nn.Module:
            own: dict[str, Any] = {"lam": lam, "adjacency": adjacency, "residual": False, "dropout": attention_dropout}
            further = copy.deepcopy(attention or {})  # blocks share no module
            passing = GatedGCNConv(hidden_channels, norm=norm, dropout=dropout) if local else None
            global_ = SFiConv(hidden_channels, hidden_channels, heads, **own, **further)
            return GPSBlock(hidden_channels, passing, global_, norm=norm, dropout=dropout)

        super().__init__(in_channels, hidden_channels, out_channels, num_layers, block, **options)


class DFiFormer(GPS):
    """DFi-Former: :class:`SFiFormer` without friction, softmax attention beside the adjacency (SFi-Former, § 4.2).

    Args:
        in_channels, hidden_channels, out_channels, num_layers: as in :class:`BlockStack`.
        adjacency: the term Ã.
        task: ``"node"``; ``"graph"``: logits of every graph, from the mean of its nodes; ``"link"``: scores of pairs.
        options: further options of :class:`GPS` except ``lam`` (``heads``, ``edge_dim``, ``pe_channels``, …).

    Examples:
        >>> model = DFiFormer(4, 16, 3, num_layers=2, task="graph")
        >>> model(x, edge_index).shape  # one row for the one graph
        torch.Size([1, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        adjacency: bool = True,
        **options: Any,
    ) -> None:
        sizes = (in_channels, hidden_channels, out_channels, num_layers)
        super().__init__(*sizes, lam=0.0, adjacency=adjacency, **options)
        self.arguments = (sizes, {"adjacency": adjacency, **options})


class SFiFormer(GPS):
    r"""SFi-Former (Section 4): GatedGCN beside sparse-flow attention with the adjacency (Eq. 11), in GraphGPS's frame.

    Args:
        in_channels, hidden_channels, out_channels, num_layers: as in :class:`BlockStack`.
        lam: λ*.
        adjacency: the term Ã (Table 3 compares).
        task: ``"node"``; ``"graph"``: logits of every graph, from the mean of its nodes; ``"link"``: scores of pairs.
        options: further options of :class:`GPS` (``heads``, ``edge_dim``, ``pe_channels``, …); α, frictions and γ in
            ``attention={"alpha": ...}``.

    Examples:
        >>> model = SFiFormer(4, 16, 3, num_layers=2)
        >>> logits, couplings = model(x, edge_index, return_coupling=True)
        >>> logits.shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 4,
        *,
        lam: float = 1.0,
        adjacency: bool = True,
        **options: Any,
    ) -> None:
        sizes = (in_channels, hidden_channels, out_channels, num_layers)
        super().__init__(*sizes, lam=lam, adjacency=adjacency, **options)

    @classmethod
    def from_dfi(cls, dfi: DFiFormer, *, lam: float = 1.0, attention: dict[str, Any] | None = None) -> SFiFormer:
        """Return an SFi-Former+, initialised with the parameters of a trained DFi-Former (Section 4.2).

        The projections of the frictions, which DFi-Former lacks, are drawn at random. From a checkpoint:

        ```python
        dfi = DFiFormer(16, 64, 6)
        dfi.load_state_dict(torch.load(path, weights_only=True))
        model = SFiFormer.from_dfi(dfi)
        ```

        Args:
            dfi: the trained model, which is not modified.
            lam: λ*, positive.
            attention: options that override those of ``dfi`` (``alpha``, ``friction``).

        Raises:
            TypeError, ValueError: not a :class:`DFiFormer`, or options that its parameters do not fit.
        """
        if not isinstance(dfi, DFiFormer):
            raise TypeError(f"dfi must be a DFiFormer; got {describe(dfi)}.")
        check_kind(attention, "attention", (dict, NoneType), "a dictionary with options of SFiConv")
        sizes, options = copy.deepcopy(dfi.arguments)
        options["attention"] = {**(options.get("attention") or {}), **(attention or {})}
        model = cls(*sizes, lam=lam, **options)
        like = next(dfi.parameters())
        model.to(like.device, like.dtype)
        missing, unexpected = model.load_state_dict(dfi.state_dict(), strict=False)
        left = [name for name in missing if ".friction." not in name] + unexpected
        if left:
            raise ValueError(f"attention must leave the parameters of dfi their places; these have none: {left}.")
        return model
