"""The options of the test run itself: of every test function every tenth case, or the others."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize("case", [pytest.param("long", marks=pytest.mark.exhaustive), *range(12)])
def test_table(case): ...

@pytest.mark.exhaustive
def test_long(): ...

@pytest.mark.unwatched
def test_process(): ...

def test_single(): ...
"""
SAMPLE = {"test_table[0]", "test_table[10]", "test_single"}
REST = {"test_process", *(f"test_table[{case}]" for case in (*range(1, 10), 11))}
LONG = {"test_table[long]", "test_long"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", SAMPLE | REST | LONG),
        ("--cases=sample", SAMPLE),
        ("--cases=rest", REST | LONG),
        ("--cases=rest -m exhaustive", LONG),
    ],
)
def test_the_sample_and_the_rest_are_all(pytester, options, expected):
    pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    pytester.makepyfile(TESTS)
    result = pytester.runpytest(
        "--collect-only", "-p", "no:cacheprovider", "-W", "ignore", *options.split()
    )
    assert set(re.findall(r"<Function (.*)>", result.stdout.str())) == expected
