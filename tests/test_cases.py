"""The options of the test run itself: of every test function the first case, or the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.exhaustive), 1, 2])
def test_table(case): ...

@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [0, 1])
def test_long(case): ...

def test_single(): ...
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--cases=first",), ["test_table[1]", "test_single"]),
        (("--cases=others",), ["test_table[0]", "test_table[2]", "test_long[0]", "test_long[1]"]),
        (("--cases=others", "-m", "not exhaustive"), ["test_table[2]"]),
        (("-m", "not exhaustive"), ["test_table[1]", "test_table[2]", "test_single"]),
    ],
)
def test_first_and_others_are_all(pytester: pytest.Pytester, options: tuple[str, ...], expected: list[str]) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("--collect-only", "-p", "no:cacheprovider", "-W", "ignore", *options)
    assert re.findall(r"<Function (.*)>", result.stdout.str()) == expected
