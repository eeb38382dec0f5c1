"""The table: a strategy for every public name, or the reason why it has none."""

from __future__ import annotations

from random import Random

from .program import Program, Strategy, draw_program
from .table_layers import LAYERS
from .table_models import MODELS
from .table_operators import COUPLINGS, DIFFUSIVITIES, UPDATES

STRATEGIES: dict[str, Strategy] = {**COUPLINGS, **DIFFUSIVITIES, **UPDATES, **LAYERS, **MODELS}

#: What is not called at random, and why.
EXEMPT: dict[str, str] = {}

#: How often a name is drawn, compared with one.
WEIGHTS: dict[str, float] = {}


def drawn(seed: int, index: int, name: str | None = None) -> Program:
    """Program number ``index`` of a seed; the first of them visit every name once."""
    if name is None:
        names = list(STRATEGIES)
        if index < len(names):
            name = names[index]
        else:
            weights = [WEIGHTS.get(each, 1.0) for each in names]
            (name,) = Random(f"{seed}/{index}").choices(names, weights)
    return draw_program(name, STRATEGIES[name], seed, index)
