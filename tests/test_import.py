"""What `import diffusion_mp` does: no warning, nothing that waits for its first use is loaded, and no experiment."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import diffusion_mp

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, warnings
import torch, torch_geometric
before = set(sys.modules)
warnings.simplefilter("error")
import diffusion_mp, diffusion_mp.data, diffusion_mp.estimators, diffusion_mp_experiments.train
late = {"sklearn", "matplotlib", "pytorch_lightning", "torchmetrics", "rdkit", "pymetis", "onnx"}
print(*sorted(late & (set(sys.modules) - before)))
"""


def test_nothing_is_warned_of_and_extras_wait() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


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
def test_no_module_warns_when_it_is_imported() -> None:
    ran = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    files = [path for folder in ("src", "experiments/src") for path in (ROOT / folder).rglob("*.py")]
    assert len(ran.stdout.split()) == len(files) - 2  # of a package itself, the name is not printed


def test_the_library_imports_no_experiment() -> None:
    """Nor does any function of it; that it works without them is checked by test_extras.py."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            assert not any("experiments" in name for name in [*names, *modules]), path


def test_the_experiments_are_of_the_version_of_the_library() -> None:
    project = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())["project"]
    (library,) = [asked for asked in map(Requirement, project["dependencies"]) if asked.name == "diffusion-mp"]
    assert project["version"] == diffusion_mp.__version__
    assert str(library.specifier) == f"=={diffusion_mp.__version__}"
