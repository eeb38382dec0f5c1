"""The example scripts as modules, as a user starts them, but without a new interpreter for each test."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(
    0, str(EXAMPLES)
)  # where Python looks first when it runs a script there


def script(name):
    return pytest.fixture(name=name)(lambda: importlib.import_module(name))


cora, inside, pokec, attention = map(script, ("cora", "inside", "pokec", "attention"))
classifier, sfi_former, pde_transformer = map(
    script, ("classifier", "sfi_former", "pde_transformer")
)


@pytest.fixture(autouse=True)
def _own_randomness():
    with torch.random.fork_rng():
        yield
