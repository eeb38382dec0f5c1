"""torch.export, compilation for changing sizes and tracing of every model, in a process of their own."""

import pytest

from subrun import RUNS, run_tests


@pytest.mark.parametrize("select", RUNS)
def test_models_are_exported_and_traced(select: str) -> None:
    run_tests("export_cases.py", select, typecheck=False)
