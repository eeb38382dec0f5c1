"""No random call of anything public is bad: 300 in every run of the tests, three seeds of 20 000 by the marker slow.

DIFFUSION_MP_FUZZ_CALLS sets another number than 300; a failure prints every kind with a program that shows it. And
every argument of everything public refuses all that is wrong for it, so that tests elsewhere have only the sentences
that are an argument's own.
"""

import os
from contextlib import closing
from dataclasses import replace

import pytest

from .pool import Worker
from .program import plain_program, put_wrong
from .search import search
from .table import ERRORS, STRATEGIES


def test_random_calls_are_right_or_refused() -> None:
    result = search(0, int(os.environ.get("DIFFUSION_MP_FUZZ_CALLS", "300")))
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"
    assert (
        min(result.verdicts["right"], result.verdicts["refused"])
        > 0.3 * result.verdicts.total()
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_thousand_random_calls(seed: int) -> None:
    result = search(seed, 20_000)
    assert not result.verdicts["bad"], f"\n{result.as_markdown()}"


#: Words and numbers that are wrong, which take seconds; lists, tensors and modules in their place take minutes.
PLAIN = {
    "another string",
    "a fraction",
    "zero",
    "negative",
    "NaN",
    "infinite",
    "one",
    "two",
    "beyond its bound",
}


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
            program = replace(
                plain_program(name, strategy), errors=tuple(ERRORS.get(name, ()))
            )
            places = [
                (k, key) for k, call in enumerate(program.calls) for key in call.args
            ]
            wrong = [
                (place, w)
                for place in places
                for w in program.calls[place[0]].args[place[1]].wrong
            ]
            for place, w in wrong:
                if w.valid is False and (w.what in PLAIN) == plain:
                    found = worker.judge(put_wrong(program, place, w).as_request())
                    if found["verdict"] != "refused" or not any(
                        word in found["text"] for word in said
                    ):
                        faults.append((name, place[1], w.what, found))
    assert not faults, "\n".join(map(str, faults))
