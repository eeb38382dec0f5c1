"""Every test trains in an empty folder, and keeps the random states that it moves to itself."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytorch_lightning.utilities.seed import isolate_rng


@pytest.fixture(autouse=True)
def _on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Lightning must not complain of a second one.
    monkeypatch.setattr(sys, "argv", ["diffusion-mp", "something"])
    monkeypatch.chdir(tmp_path)
    with isolate_rng():
        yield
