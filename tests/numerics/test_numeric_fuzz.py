"""Random cases against double precision: what × precision × size × corner × scale, each from a seed of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from precision_cases import CASES, CORNERS, SCALE_FREE, check_precision, draw

pytestmark = pytest.mark.usefixtures("no_typecheck")

NAMES = sorted(set(CASES) - {"adjacency-error"})
QUICK, BLOCK = 300, 25
PRECISIONS = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16)]


@dataclass(frozen=True)
class Draw:
    """What a seed says; printed where it fails."""

    name: str
    dtype: torch.dtype
    autocast: torch.dtype | None
    nodes: int
    corner: str
    scale: float
    seed: int

    @classmethod
    def of(cls, seed: int) -> Draw:
        choose = random.Random(seed)
        name, (dtype, autocast) = choose.choice(NAMES), choose.choice(PRECISIONS)
        narrow = dtype != torch.float32 or autocast is not None
        low, high = (-3.0, 2.0) if narrow else (-20.0, 20.0) if name in SCALE_FREE else (-6.0, 1.0)
        return cls(
            name, dtype, autocast,
            choose.choice([0, 1, 2, 3, 7, 17, 40]) if "transformer" not in name else choose.randrange(18),
            choose.choice(CORNERS), 10 ** choose.uniform(low, high), seed,
        )  # fmt: skip

    def check(self) -> None:
        """Values are compared where a score of the states, rounded to that precision, still has digits."""
        state = draw(self.nodes, CASES[self.name].channels, self.corner, self.scale, self.seed)
        narrow = self.dtype != torch.float32 or self.autocast is not None
        digits = self.name in SCALE_FREE or self.scale <= 1 or not narrow
        check_precision(self.name, state, self.dtype, self.autocast, values=digits)


def run(first: int, count: int) -> None:
    broken = []
    for seed in range(first, first + count):
        case = Draw.of(seed)
        try:
            case.check()
        except Exception as error:  # whatever it is, the draw that met it is what one wants to know
            broken.append(f"{case}: {type(error).__name__}: {error}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("first", range(0, QUICK, BLOCK))
def test_random_cases(first: int) -> None:
    run(first, BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, 6300, 200))
def test_many_random_cases(first: int) -> None:
    run(first, 200)
