"""No random call of anything public is bad: 300 in every run of the tests, three seeds of 20 000 by the marker slow.

DIFFUSION_MP_FUZZ_CALLS sets another number than 300; a failure prints every kind with a program that shows it. And
every argument of everything public refuses all that is wrong for it, so that tests elsewhere have only the sentences
that are an argument's own.
"""

import os
from contextlib import closing

import pytest

from .program import plain_program, put_wrong, wrong_places
from .search import search
from .table import STRATEGIES
from .worker import Worker


def test_random_calls_are_right_or_refused() -> None:
    calls = int(os.environ.get("DIFFUSION_MP_FUZZ_CALLS", "300"))
    result = search(0, calls)
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"
    assert min(result.verdicts["right"], result.verdicts["refused"]) > 0.3 * calls


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_thousand_random_calls(seed: int) -> None:
    result = search(seed, 20_000)
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"


#: Words and numbers that are wrong, which take seconds; lists, tensors and modules in their place take minutes.
PLAIN = {"another string", "a fraction", "zero", "negative", "NaN", "infinite"}
PLAIN |= {"one", "two", "beyond its bound"}


@pytest.mark.parametrize(
    "plain", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
def test_every_wrong_argument_is_refused_in_a_sentence_that_names_it(
    plain: bool,
) -> None:
    faults = []
    said = ("must", "no tolerance", "FileNotFoundError") if plain else ("",)
    with closing(Worker()) as worker:
        for name, strategy in STRATEGIES.items():
            program = plain_program(name, strategy)
            wrong = [
                (position, each)
                for position, several in wrong_places(program).items()
                for each in several
                if each.valid is False and (each.what in PLAIN) == plain
            ]
            for position, each in wrong:
                verdict = worker.judge(put_wrong(program, position, each).as_request())
                named = any(word in verdict.get("text", "") for word in said)
                if verdict["verdict"] != "refused" or not named:
                    faults.append((name, position[1], each.what, verdict))
    assert not faults, "\n".join(map(str, faults))
