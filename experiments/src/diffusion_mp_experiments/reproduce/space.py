"""Declared search spaces, and the settings that are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

_KINDS = ("choice", "uniform", "loguniform")


class Space:
    """Axes by the dotted path of what they set: `{"model.dropout": {"uniform": [0, 0.8]}}`.

    Args:
        axes: each `{"choice": [...]}` of plain values, `{"uniform": [low, high]}` or `{"loguniform": [low, high]}`.

    Raises:
        ValueError: what is no such axis.
    """

    def __init__(self, axes: Mapping[str, Any]) -> None:
        self.axes = {path: _distribution(path, axis) for path, axis in axes.items()}
        self.declared = dict(axes)


def _distribution(path: str, axis: Any) -> BaseDistribution:
    if not isinstance(axis, dict) or len(axis) != 1 or (kind := next(iter(axis))) not in _KINDS:
        raise ValueError(f"the axis {path} must be one of {', '.join(_KINDS)} with a list; got {axis!r}.")
    values = axis[kind]
    if kind == "choice":
        if not isinstance(values, list) or not all(isinstance(v, bool | int | float | str | None) for v in values):
            raise ValueError(f"the choices of {path} must be a list of numbers, names or null; got {values!r}.")
        return CategoricalDistribution(values)
    numbers = [float(value) for value in values] if isinstance(values, list) else []
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or not numbers[0] < numbers[1]:
        raise ValueError(f"{kind} of {path} must be [low, high]; got {values!r}.")
    low, high = numbers
    return FloatDistribution(low, high, log=kind == "loguniform")
