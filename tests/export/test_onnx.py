"""ONNX of every model, in a process of its own."""

from __future__ import annotations

import os

import pytest

from subrun import RUNS, run_tests

if not os.environ.get("CI"):
    pytest.importorskip(
        "onnxscript",
        reason="ONNX is made with the extra `onnx`, which the extra `test` has",
    )
    pytest.importorskip(
        "onnxruntime",
        reason="ONNX is run with the extra `onnx`, which the extra `test` has",
    )


@pytest.mark.parametrize("select", [RUNS[0], RUNS[2]])
def test_models_become_onnx(select: str) -> None:
    run_tests("onnx_cases.py", select, typecheck=False)
