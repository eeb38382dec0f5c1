"""Capture and export, in processes of their own, and second derivatives."""

import pytest

from subrun import RUNS, run_tests


@pytest.mark.parametrize("select", RUNS)
@pytest.mark.parametrize("file", ["compile_cases.py", "export_cases.py"])
def test_programs_are_captured_and_exported(file, select):
    run_tests(file, select, typecheck=False)


@pytest.mark.exhaustive
def test_everything_public_has_the_types_and_shapes_that_it_says():
    run_tests("test_laws.py", "typechecked", typecheck=True)
