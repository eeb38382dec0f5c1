"""Shapes and types checked at run time, a deterministic hypothesis profile, and the folder of real data.

jaxtyping and beartype can compare the arguments and results of all calls inside `diffusion_mp` with their annotations.
That makes some folders half as slow again, so the environment variable DIFFUSION_MP_TYPECHECK says where it happens:

    some    in the tests with the marker `typechecked`, which call everything public once (the default)
    all     in every test but those with the marker `exhaustive`, whose shapes the others have (.ci/run)
    none    nowhere: the library as users import it, which graph capture needs

Tests about our own sentences take the fixture `no_typecheck`: the checker would answer a wrong shape before them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings

TYPECHECK = os.environ.get("DIFFUSION_MP_TYPECHECK", "some")
if TYPECHECK not in ("none", "some", "all"):
    raise pytest.UsageError(f"DIFFUSION_MP_TYPECHECK must be none, some or all; got {TYPECHECK!r}.")
if TYPECHECK != "none":  # before anything imports the package; the hook stays installed so that lazy submodules have it
    jaxtyping.install_import_hook("diffusion_mp", "tower.checked")
jaxtyping.config.update("jaxtyping_disable", True)  # except within `typecheck`

# The GPU kernels run in Triton's interpreter, on the CPU. Read when Triton is imported, which PyG does.
os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for each other cost more than they save

settings.register_profile("repeatable", derandomize=True, max_examples=25, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def typecheck(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check types and shapes during this test, where that was asked for."""
    marked = request.node.get_closest_marker
    wanted = marked("typechecked") or (TYPECHECK == "all" and not marked("exhaustive"))
    jaxtyping.config.update("jaxtyping_disable", not wanted)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def no_typecheck(typecheck: None) -> None:
    """Turn the checks off for one test, so that the package's own answer is seen."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of randomness, so that no test reads or moves the global one."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets: DIFFUSION_MP_DATA, or shared/data beside the repository."""
    root = Path(os.environ.get("DIFFUSION_MP_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not root.is_dir():
        reason = f"no data sets at {root}; point DIFFUSION_MP_DATA at the folder that holds Planetoid/, TUDataset/, ..."
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    return root
