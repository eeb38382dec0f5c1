"""Runtime shape checks where they are asked for, the choice of cases, a limit of time, hypothesis, the real data.

With DIFFUSION_MP_TYPECHECK=1, as in .ci/run, jaxtyping and beartype compare arguments and results of every call inside
both packages with their annotations, before our own sentences can answer: tests of these take `no_typecheck`.
`--cases sample` runs every tenth case of every test function, the first among them, and `--cases rest` the others;
.ci/run watches types and coverage in the sample, which reaches nearly every line, and `.ci/run rest` runs the others
unwatched.
A test that waits for ever fails after `LIMIT` seconds, and names the line where it waits.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Threads that wait must not keep a core from the tests of another process; read when OpenMP is loaded, with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jaxtyping
import pytest
import torch
from hypothesis import settings

if os.environ.get("DIFFUSION_MP_TYPECHECK"):
    # Before anything imports them; the hook stays installed so that lazy submodules are checked too.
    jaxtyping.install_import_hook(
        ["diffusion_mp", "diffusion_mp_experiments"], "tower.checked"
    )

# The GPU kernels run in Triton's interpreter, on the CPU, unless TRITON_INTERPRET=0 asks for a real GPU.
# Read when Triton is imported, which PyG does; see CONTRIBUTING.md.
os.environ.setdefault("TRITON_INTERPRET", "1")

#: Folders whose tests run on two threads, as a user's program runs on several; elsewhere the tensors are tiny, and
#: threads that wait for each other cost more than they save.
TWO_THREADS = [
    Path(__file__).parent / folder
    for folder in ("tests/kernels", "tests/models", "experiments/tests/train")
]

LIMIT = 600  # seconds; the longest test takes two minutes on two cores

settings.register_profile(
    "repeatable", derandomize=True, max_examples=25, deadline=None, database=None
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", "sample", "rest"),
        default="all",
        help="a tenth of the cases, or the others",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Limit the time of each; keep the sample, or what is not in it, which long cases never are."""
    wanted = config.getoption("cases")
    seen = Counter[str]()
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(LIMIT))
        left_out = any(
            item.get_closest_marker(name)
            for name in ("exhaustive", "slow", "unwatched")
        )
        function = item.nodeid.partition("[")[0]
        sampled = not left_out and seen[function] % 10 == 0
        seen[function] += not left_out
        kept[wanted == "all" or sampled == (wanted == "sample")].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(
        2 if any(map(request.path.is_relative_to, TWO_THREADS)) else 1
    )


@pytest.fixture
def two_threads(_threads: None) -> None:
    """For a test of what threads share, wherever it stands; the next test has its own number of them again."""
    torch.set_num_threads(2)


@pytest.fixture
def no_typecheck() -> Iterator[None]:
    """Turn the runtime shape checks off for one test, so that the package's own answer is seen."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def in_double() -> Iterator[None]:
    """The default dtype is float64 for one test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of randomness, so that no test reads or moves the global one."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets: DIFFUSION_MP_DATA, or shared/data beside the repository.

    ``DIFFUSION_MP_DATA=none`` says that this machine has none, as those of GitHub, where CI skips these tests too.
    """
    if os.environ.get("DIFFUSION_MP_DATA") == "none":
        pytest.skip("DIFFUSION_MP_DATA=none: this machine has no data sets")
    root = Path(
        os.environ.get(
            "DIFFUSION_MP_DATA", Path(__file__).resolve().parents[1] / "shared" / "data"
        )
    )
    if not root.is_dir():
        reason = f"no data sets at {root}; point DIFFUSION_MP_DATA at the folder that holds Planetoid/, TUDataset/, ..."
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    return root
