"""No random call of anything public is bad: 300 in every run of the tests, three seeds of 20 000 by the marker slow.

DIFFUSION_MP_FUZZ_CALLS sets another number than 300; a failure prints every kind with a program that shows it.
"""

import os

import pytest

from .search import search


def test_random_calls_are_right_or_refused() -> None:
    result = search(0, int(os.environ.get("DIFFUSION_MP_FUZZ_CALLS", "300")))
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"
    assert min(result.verdicts["right"], result.verdicts["refused"]) > 0.3 * result.verdicts.total()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_thousand_random_calls(seed: int) -> None:
    result = search(seed, 20_000)
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"
