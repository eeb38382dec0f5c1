"""ONNX of every model, in a process of its own."""

from __future__ import annotations

import os

import pytest

from subrun import run_tests

if not os.environ.get("CI"):
    pytest.importorskip("onnxscript", reason="ONNX is made with the extra `onnx`, which the extra `test` has")
    pytest.importorskip("onnxruntime", reason="ONNX is run with the extra `onnx`, which the extra `test` has")


@pytest.mark.unwatched
def test_models_become_onnx() -> None:
    run_tests("onnx_cases.py", "not slow", typecheck=False)


@pytest.mark.slow
def test_all_models_become_onnx() -> None:
    run_tests("onnx_cases.py", "slow", typecheck=False)
