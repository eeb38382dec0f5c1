"""The example scripts as modules, as a user starts them, but without a new interpreter for each test."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # where Python looks when it runs a script there


@pytest.fixture
def cora():
    return importlib.import_module("cora")


@pytest.fixture
def sfi_former():
    return importlib.import_module("sfi_former")


@pytest.fixture
def pde_transformer():
    return importlib.import_module("pde_transformer")


@pytest.fixture
def inside():
    return importlib.import_module("inside")


@pytest.fixture
def pokec():
    return importlib.import_module("pokec")


@pytest.fixture
def classifier():
    return importlib.import_module("classifier")


@pytest.fixture
def attention():
    return importlib.import_module("attention")


@pytest.fixture(autouse=True)
def _own_randomness():
    with torch.random.fork_rng():
        yield
