"""What `import diffusion_mp` does: no warning, nothing that waits for its first use is loaded, and no experiment."""

import ast
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import diffusion_mp
from subrun import run_program

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, warnings
import torch, torch_geometric
before = set(sys.modules)
warnings.simplefilter("error")
import diffusion_mp, diffusion_mp.data, diffusion_mp.estimators, diffusion_mp_experiments.train
late = {"sklearn", "matplotlib", "huggingface_hub", "pytorch_lightning", "torchmetrics", "rdkit", "pymetis", "onnx"}
late |= {"scipy.linalg", "scipy.sparse"}
print(*sorted(late & (set(sys.modules) - before)))
"""


def test_nothing_is_warned_of_and_extras_wait():
    assert run_program("-c", PROGRAM).split() == []


SECONDS = """
import time, torch, torch_geometric
before = time.process_time()
import diffusion_mp
print(time.process_time() - before)
"""


@pytest.mark.slow
def test_it_adds_less_than_half_a_second_to_torch_and_pyg():
    assert min(float(run_program("-c", SECONDS)) for _ in range(3)) < 0.5


EVERYTHING = """
import warnings
from importlib import import_module
from pkgutil import walk_packages
import pytorch_lightning.cli, torch_geometric.explain, torch_geometric.nn  # what they warn of is theirs
warnings.simplefilter("error")
import diffusion_mp, diffusion_mp_experiments
for package in (diffusion_mp, diffusion_mp_experiments):
    for module in walk_packages(package.__path__, package.__name__ + "."):
        import_module(module.name)
        print(module.name)
"""


@pytest.mark.exhaustive
def test_no_module_warns_when_it_is_imported():
    printed = run_program("-c", EVERYTHING)
    files = [
        path
        for folder in ("src", "experiments/src")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert (
        len(printed.split()) == len(files) - 2
    )  # of a package itself, the name is not printed


#: Packages of the library from the bottom up: each imports those before it alone.
FLOORS = [
    "runtime",
    "errors",
    "checks",
    "saving",
    "modules",
    "graph",
    "kernels",
    "couplings",
    "energies",
    "updates",
    "diffusivities",
    "layers",
    "models",
]
#: What stands beside them, and the highest floor that it may import.
BESIDE = {
    "cite": "checks",
    "data": "graph",
    "export": "kernels",
    "inference": "layers",
    "released": "models",
    "distributed": "models",
    "diagnostics": "layers",
    "estimators": "layers",
    "plot": "layers",
    "testing": "models",
}
ALSO = {("estimators", "data"), ("plot", "diagnostics")}
ALSO |= {("distributed", "inference"), ("testing", "inference")}
# Both functions are public names of `models` too.
ALSO |= {("models", "inference"), ("models", "released")}
FILES = sorted((ROOT / "src").rglob("*.py"))
MODULES = {
    ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(
        ".__init__"
    ): file
    for file in FILES
}


def imported(module: str, *, anywhere: bool) -> set[str]:
    tree = ast.parse(MODULES[module].read_text())
    found = set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            paths = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {path if path in MODULES else str(node.module) for path in paths}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module):
    """Nor does anything import an experiment; that the library works without them is checked by test_extras.py."""
    own = [*module.split("."), ""][1]
    for name in imported(module, anywhere=True):
        assert not name.startswith("diffusion_mp_experiments")
        other = [*name.split("."), ""][1]
        if (
            name.startswith("diffusion_mp.")
            and own not in ("", other)
            and (own, other) not in ALSO
        ):
            if own in BESIDE:
                floors = FLOORS[: FLOORS.index(BESIDE[own]) + 1]
            else:
                floors = FLOORS[: FLOORS.index(own)]
            assert other in floors, f"{module} imports {name}, which is not below it"


def test_no_modules_import_each_other_in_a_circle():
    parts = {
        module: imported(module, anywhere=False) & MODULES.keys() - {module}
        for module in MODULES
    }
    assert list(TopologicalSorter(parts).static_order())  # raises CycleError


def test_the_experiments_are_of_the_version_of_the_library():
    project = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())[
        "project"
    ]
    (library,) = [
        asked
        for asked in map(Requirement, project["dependencies"])
        if asked.name == "diffusion-mp"
    ]
    assert project["version"] == diffusion_mp.__version__
    assert str(library.specifier) == f"=={diffusion_mp.__version__}"
