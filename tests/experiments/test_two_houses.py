"""The library imports nothing of the experiments; names that were in the library are found for one more version."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import diffusion_mp
from diffusion_mp import data, train

ROOT = Path(diffusion_mp.__file__).parent
IN_DATA = [
    *("IMDb", "ListOps", "Pathfinder", "PeptidesFunctional", "SBMDataset", "SequenceDataset", "load_digits"),
    *("load_ogb", "load_planetoid", "load_pokec", "synthetic_pokec"),
]
IN_TRAIN = [
    *("CheckpointFiles", "DigitsDataModule", "FiniteLoss", "NodeClassifier", "PlanetoidDataModule", "Resumable"),
    *("SequenceClassifier", "check_writable", "exit_code", "load_checkpoint", "mean_squared_error"),
    *("node_cross_entropy", "replace_file", "save_checkpoint", "weighted_accuracy"),
]


@pytest.mark.unwatched
def test_the_library_imports_no_experiment():
    library = [path for path in ROOT.rglob("*.py") if "experiments" not in path.relative_to(ROOT).parts]
    assert len(library) > 100
    for path in library:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            assert not any("experiments" in name for name in [*names, *modules]), path


def test_a_package_loads_no_more_than_it_needs():
    """The library no experiment, and their training no training library before it is asked for."""
    code = (
        "import sys, diffusion_mp, diffusion_mp.data, diffusion_mp.train; print(*sys.modules)\n"
        "import diffusion_mp_experiments.train; print(*sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    library, training = (set(line.split()) for line in printed.splitlines())
    assert "diffusion_mp.data" in library
    assert not [name for name in library if name.startswith("diffusion_mp_experiments")]
    assert "diffusion_mp_experiments.train" in training
    assert not {"pytorch_lightning", "torchmetrics", "sklearn", "matplotlib", "jsonargparse"} & training


@pytest.mark.parametrize(
    ("package", "name"),
    [(data, name) for name in IN_DATA] + [(train, name) for name in IN_TRAIN],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_an_old_path_works_and_says_the_new_one(package, name):
    with pytest.warns(
        DeprecationWarning, match=rf"{name} has moved: import it from diffusion_mp\.experiments\."
    ) as said:
        found = getattr(package, name)
    assert len(said) == 1
    (place,) = [word.rstrip(".") for word in str(said[0].message).split() if word.startswith("diffusion_mp.exp")]
    assert found is getattr(import_module(place), name)


@pytest.mark.parametrize("package", [data, train])
def test_what_was_never_there_is_not_there(package):
    for name in ("nothing", "_private"):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute '{name}'"):
            getattr(package, name)
