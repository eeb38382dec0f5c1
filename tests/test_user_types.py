"""The types of the library are seen in a program that uses it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "user_types.py"


def test_the_program_runs():
    made = runpy.run_path(str(PROGRAM))
    assert made["out"].shape == (10, 8)


@pytest.mark.slow
def test_mypy_finds_the_types_that_it_names(tmp_path):
    pytest.importorskip("mypy", reason="mypy is of the extra `dev`")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from diffusion_mp import Graph\nGraph('ten').ptr + 'x'\n")
    command = [sys.executable, "-m", "mypy", str(PROGRAM), str(wrong)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    ).stdout
    assert "user_types.py" not in said, said
    assert "wrong.py:2: error" in said
