"""Checks at the boundary, and the errors they raise.

Every sentence names the argument, says what came and what was expected, and shows the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class CouplingMismatchError(ValueError):
    """An update or a theorem needs a property that the coupling does not declare."""


class SingularSystemError(ValueError):
    """A steady state was asked for that does not exist or is not unique."""


class ConvergenceError(RuntimeError):
    """An iteration used up its budget before it reached its tolerance."""


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot compute this."""


def describe(value: object) -> str:
    """What came, in words: type, and for tensors dtype and shape."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def check_choice(value: object, name: str, choices: Iterable[Any]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    options = list(choices)
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {value!r}.")


def check_positive(value: float, name: str, *, allow_zero: bool = False) -> None:
    """Raise unless ``value`` is a finite number above zero (or, with ``allow_zero``, at least zero)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {describe(value)}.")
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ValueError(f"{name} must be finite and {'>= 0' if allow_zero else '> 0'}; got {value}.")


def check_counts(**counts: int) -> None:
    """Raise unless every named value is a positive integer (numbers of heads, channels or layers)."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer; got {describe(value)}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def check_probability(value: float, name: str) -> None:
    """Raise unless ``value`` lies in [0, 1)."""
    if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1); got {value!r}.")


def check_state(x: Tensor, name: str = "x", channels: int | None = None) -> None:
    """Raise unless ``x`` is a floating-point state [N, C] (with C = ``channels`` where that is known)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [num_nodes, channels]; got {describe(x)}.")
    if x.dim() != 2:
        raise ValueError(
            f"{name} must have two dimensions [num_nodes, channels]; got {describe(x)}. "
            f"Flatten a padded batch to its real rows and pass `batch`."
        )
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {describe(x)}. Convert it with {name}.float().")
    if channels is not None and x.size(1) != channels:
        raise ValueError(f"{name} must have {channels} channels as the layer was built for; got {describe(x)}.")


def check_sequences(x: Tensor, mask: Tensor | None, channels: int) -> None:
    """Raise unless ``x`` is a floating-point state [B, L, C] and ``mask`` is [B, L] of bool, or None."""
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point; got {describe(x)}. Convert it with x.float().")
    if x.dim() != 3 or x.size(2) != channels:
        raise ValueError(f"x must be [batch, length, {channels}]; got {describe(x)}.")
    check_mask(mask, x)


def check_mask(mask: Tensor | None, x: Tensor) -> None:
    """Raise unless ``mask`` is None or says for each position of ``x`` [B, L, …] whether it is a token."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, true where there is a token; got {describe(mask)}.")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be {list(x.shape[:2])}, one entry per position of x; got {describe(mask)}.")


def check_edge_rows(edge_attr: Tensor, num_edges: int) -> None:
    """Raise unless ``edge_attr`` has a row for every edge."""
    if edge_attr.size(0) != num_edges:
        raise ValueError(f"edge_attr must have one row for each of {num_edges} edges; got {describe(edge_attr)}.")


def check_values(v: Tensor, num_nodes: int, heads: int, name: str = "v") -> None:
    """Raise unless ``v`` is [N, H, D] for a coupling of ``num_nodes`` nodes and ``heads`` heads (1 broadcasts)."""
    if not isinstance(v, Tensor):
        raise TypeError(f"{name} must be a tensor [num_nodes, heads, channels]; got {describe(v)}.")
    if v.dim() != 3:
        raise ValueError(
            f"{name} must have three dimensions [num_nodes, heads, channels]; got {describe(v)}. "
            f"For one head use {name}.unsqueeze(1)."
        )
    if not v.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {describe(v)}.")
    if v.size(0) != num_nodes:
        raise ValueError(f"{name} must have {num_nodes} rows, one per node of the coupling; got {describe(v)}.")
    if heads != 1 and v.size(1) not in (1, heads):
        raise ValueError(f"{name} must have {heads} heads (or 1) as the coupling does; got {describe(v)}.")


def check_finite(x: Tensor, name: str) -> None:
    """Raise ``ValueError`` if ``x`` holds NaN or infinity (costs one pass; a synchronisation on a GPU)."""
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"{name} must be finite; {bad} of its {x.numel()} entries are NaN or infinite.")
