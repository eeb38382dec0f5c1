"""What `import diffusion_mp` does: no warning, and nothing that waits for its first use is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
import diffusion_mp
for module in walk_packages(diffusion_mp.__path__, "diffusion_mp."):
    import_module(module.name)
    print(module.name)
"""


@pytest.mark.exhaustive
def test_no_module_warns_when_it_is_imported() -> None:
    ran = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 200
