"""The quick run calls everything public once with types and shapes checked, in a process of its own."""

from __future__ import annotations

import os

import pytest

from subrun import run_tests


@pytest.mark.skipif(bool(os.environ.get("DIFFUSION_MP_TYPECHECK")), reason="in this run every call is checked")
def test_everything_public_has_the_types_and_shapes_that_it_says() -> None:
    run_tests("test_conformance.py", "typechecked", typecheck=True)
