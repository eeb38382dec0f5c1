"""Everything in single and half precision and under autocast against double: on the corners of what a state can be, and
in random cases of what × precision × size × corner × scale, each from a seed of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from precision_cases import CASES, CORNERS, SCALE_FREE, check_precision, draw, results
from torch.testing import assert_close

from diffusion_mp.testing import tolerance
from diffusion_mp.testing.laws import expect_close

HALVES = (torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 17)

NAMES = sorted(CASES)

# The quick run takes one in four.
THINNED = [
    pytest.param(name, marks=pytest.mark.exhaustive if number % 4 else ())
    for number, name in enumerate(NAMES)
]

pytestmark = pytest.mark.usefixtures("no_typecheck")


@pytest.mark.parametrize("name", THINNED)
def test_single_and_half_precision(name):
    """A few of the corners for every case; all of them below."""
    channels = CASES[name].channels
    check_precision(name, draw(0, channels, "plain"), torch.float16)
    check_precision(name, draw(1, channels, "zeros"), torch.float16)
    for dtype in (torch.float32, *HALVES):
        check_precision(name, draw(17, channels, "zero rows"), dtype)
    check_precision(name, draw(17, channels, "isolated"), torch.float16)
    check_precision(name, draw(17, channels, "zero rows"), torch.float32, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_corner_in_every_precision(name, corner):
    for nodes in SIZES:
        state = draw(nodes, CASES[name].channels, corner)
        for dtype in (torch.float32, *HALVES):
            check_precision(name, state, dtype)
        for dtype in HALVES:
            check_precision(name, state, torch.float32, dtype)


# a scale for every row.
SIDE_BY_SIDE = torch.logspace(-20, 20, 17, dtype=torch.float64).unsqueeze(1)
OF_ROWS = [name for name in SCALE_FREE if "frobenius" not in name]


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *product(SCALE_FREE, (1e-20, 1e20)),
        *(pytest.param(name, SIDE_BY_SIDE, id=f"{name}-rows") for name in OF_ROWS),
    ],
)
def test_a_normalised_state_of_any_scale(name, scale):
    """The same coupling as at scale one; the gradient is that divided by the scale."""
    case = CASES[name]
    state = draw(17, CASES[name].channels, "zero rows")
    expected, truth = results(case, case.module(torch.float64), state)
    got, grads = results(
        case,
        case.module(torch.float32),
        replace(state, x=scale * state.x).to(torch.float32),
    )
    for operation, part in expected.items():
        expect_close(got[operation], part, operation)
    rtol, atol = tolerance("gradient", torch.float32)
    assert_close(grads["x"].double() * scale, truth["x"], rtol=rtol, atol=atol)
    assert all(grad.isfinite().all() for grad in grads.values())


QUICK = 300
BLOCK = 25
PRECISIONS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, torch.bfloat16),
]


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
    def of(cls, seed):
        choose = random.Random(seed)
        name = choose.choice(NAMES)
        (dtype, autocast) = choose.choice(PRECISIONS)
        narrow = dtype != torch.float32 or autocast is not None
        low, high = (
            (-3.0, 2.0)
            if narrow
            else (-20.0, 20.0)
            if name in SCALE_FREE
            else (-6.0, 1.0)
        )
        return cls(
            name,
            dtype,
            autocast,
            choose.choice([0, 1, 2, 3, 7, 17, 40])
            if "transformer" not in name
            else choose.randrange(18),
            choose.choice(CORNERS),
            10 ** choose.uniform(low, high),
            seed,
        )

    def check(self):
        """Values are compared where a score of the states, rounded to that precision, still has digits."""
        state = draw(
            self.nodes, CASES[self.name].channels, self.corner, self.scale, self.seed
        )
        narrow = self.dtype != torch.float32 or self.autocast is not None
        digits = self.name in SCALE_FREE or self.scale <= 1 or not narrow
        check_precision(self.name, state, self.dtype, self.autocast, values=digits)


LATER = [
    pytest.param(first, 200, marks=pytest.mark.slow)
    for first in range(QUICK, 6300, 200)
]


@pytest.mark.parametrize(
    ("first", "count"), [*((first, BLOCK) for first in range(0, QUICK, BLOCK)), *LATER]
)
def test_random_cases(first, count):
    broken = []
    for seed in range(first, first + count):
        case = Draw.of(seed)
        try:
            case.check()
        except (
            Exception
        ) as error:  # whatever it is, the draw that met it is what one wants to know
            broken.append(f"{case}: {type(error).__name__}: {error}")
    assert not broken, "\n".join(broken)
