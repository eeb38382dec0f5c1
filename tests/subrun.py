"""Programs and tests in an interpreter of their own, where shape checks are on or off and memory is measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

#: The tests of a file that are run quickly, in `.ci/run`, and by `-m slow`.
RUNS = [
    pytest.param(
        "not exhaustive and not slow", marks=pytest.mark.unwatched, id="quick"
    ),
    pytest.param(
        "exhaustive and not slow", marks=pytest.mark.exhaustive, id="exhaustive"
    ),
    pytest.param("slow", marks=pytest.mark.slow, id="slow"),
]


def run_program(*arguments: str, **environment: str) -> str:
    """What Python prints when it is run with these arguments, unwatched by the coverage of this run."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("COV")
    } | environment
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_tests(name: str, select: str, *, typecheck: bool) -> None:
    """Run the tests of a file that a marker selects, and fail with their output if one fails."""
    # Without the options of the outer run, such as a coverage floor.
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"
    }
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-m",
            select,
            str(TESTS / name),
        ],
        env={**environment, "DIFFUSION_MP_TYPECHECK": "1" if typecheck else ""},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
