"""Solves and limits that are exported and compiled, in a process of their own, and the page that says which."""

from pathlib import Path

import pytest

import solve_cases
from subrun import RUNS, run_tests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "which-model.md"


@pytest.mark.parametrize("select", RUNS[:2])
def test_solves_are_exported_and_compiled(select):
    run_tests("solve_cases.py", select, typecheck=False)


def test_the_page_names_what_is_exported():
    text = PAGE.read_text()
    for name in (
        "ImplicitEuler",
        "CrankNicolson",
        "HeatKernel",
        "APPNPConv(K=None)",
        "LabelPropagation(None)",
    ):
        assert name in solve_cases.EXPORTED
        assert f"`{name}`" in text
    for name in solve_cases.REFUSED:
        assert name in text
