"""Programs and tests in an interpreter of their own, where shape checks are on or off and memory is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def run_program(*arguments: str) -> str:
    """What Python prints when it is run with these arguments, unwatched by the coverage of this run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_tests(name: str, select: str, *, typecheck: bool) -> None:
    """Run the tests of a file that a marker selects; what they say is said here if one fails."""
    # The options of the outer run (a coverage floor, say) are not meant for this one.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", select, str(TESTS / name)],
        env={**environment, "DIFFUSION_MP_TYPECHECK": "1" if typecheck else ""},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
