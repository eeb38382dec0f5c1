"""Features to states: a linear layer for numbers, dense or sparse, and tables for categories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from diffusion_mp.errors import INTEGERS, check_counts, check_device, check_kind, describe, found_later
from diffusion_mp.layers.features import channels_at_first, check_features, input_linear


def feature_columns(channels: int | Sequence[int], name: str) -> int:
    """How many columns features have that are numbers (``channels`` of them, or -1) or categories (a list of sizes)."""
    if isinstance(channels, (int, str)) or not isinstance(channels, Sequence):
        if not found_later(channels):
            check_counts(**{name: channels})
        return channels
    if not channels:
        raise ValueError(f"{name} must be a number of channels or a list with a table size per column; got none.")
    check_counts(**{f"{name}[{column}]": size for column, size in enumerate(channels)})
    return len(channels)


class FeatureEncoder(nn.Module):
    """W x + b for floating-point features, or Σ_f T_f[x_f] for categories (atoms, bonds), one table per column.

    Args:
        channels: the number of floating-point features, -1 for that of the first call; or a list with the number of
            categories of every column.
        out_channels: of the state.
        name: what sentences call the input.

    Shapes:
        x: [N, channels] floating point, dense or sparse; or [N, len(channels)], or [N] for one column, of integers.

    Raises:
        TypeError, ValueError: the input does not fit, or a category is not in its table.
    """

    def __init__(self, channels: int | Sequence[int], out_channels: int, name: str = "x") -> None:
        super().__init__()
        self.name = name
        self.channels = feature_columns(channels, "channels")
        self.sizes = None if isinstance(channels, int) else tuple(channels)
        check_counts(out_channels=out_channels)
        self.linear = input_linear(self.channels, out_channels) if self.sizes is None else None
        self.tables = nn.ModuleList(nn.Embedding(size, out_channels) for size in self.sizes or ())

    def forward(self, x: Tensor, name: str | None = None) -> Tensor:
        """The states [N, out_channels]; ``name`` is what sentences call this input."""
        name = name or self.name
        if self.linear is not None:
            if self.channels == -1:
                self.channels = channels_at_first(self, x)
            check_features(x, name, channels=self.channels, module=self)
            return self.linear(x)
        columns = self._columns(x, name).unbind(1)
        check_device(x, name, self.tables[0].weight.device, f"the tables of {name}")  # type: ignore[arg-type]
        return reduce(torch.add, (table(column) for table, column in zip(self.tables, columns, strict=True)))

    def _columns(self, x: Tensor, name: str) -> Tensor:
        """x as [N, F], its categories checked unless ``torch.compile`` is looking."""
        check_kind(x, name, Tensor, f"a tensor [rows, {self.channels}] of integers")
        if x.dtype not in INTEGERS:
            raise TypeError(f"{name} must hold categories (integers); got {describe(x)}. Convert it with .long().")
        columns = x.unsqueeze(1) if x.dim() == 1 else x
        if columns.dim() != 2 or columns.size(1) != self.channels:
            raise ValueError(f"{name} must be [rows, {self.channels}], one column per table; got {describe(x)}.")
        if columns.numel() and not torch.compiler.is_compiling():
            for column, size in enumerate(self.sizes or ()):
                low, high = columns[:, column].aminmax()
                if low < 0 or high >= size:
                    raise ValueError(
                        f"column {column} of {name} must lie in 0..{size - 1}, as its table does; "
                        f"got {int(low)}..{int(high)}."
                    )
        return columns.long()

    def extra_repr(self) -> str:
        return f"{self.channels if self.sizes is None else list(self.sizes)}"
