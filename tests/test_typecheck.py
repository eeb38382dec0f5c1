"""Everything public is called once with types and shapes checked, in a process of its own."""

import pytest

from subrun import run_tests


@pytest.mark.exhaustive
def test_everything_public_has_the_types_and_shapes_that_it_says() -> None:
    run_tests("test_conformance.py", "typechecked", typecheck=True)
