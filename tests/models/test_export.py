"""torch.export, compilation for changing sizes and tracing of every model, in a process of their own."""

from __future__ import annotations

import pytest

from subrun import run_tests


@pytest.mark.unwatched
def test_models_are_exported_and_traced() -> None:
    run_tests("export_cases.py", "not exhaustive and not slow", typecheck=False)


@pytest.mark.exhaustive
def test_all_models_are_exported_and_traced() -> None:
    run_tests("export_cases.py", "exhaustive and not slow", typecheck=False)


@pytest.mark.slow
def test_all_models_are_exported_strictly() -> None:
    run_tests("export_cases.py", "slow", typecheck=False)
