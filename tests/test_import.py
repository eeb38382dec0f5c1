"""What `import diffusion_mp` does: no warning, and nothing that waits for its first use is loaded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, warnings
import torch, torch_geometric
before = set(sys.modules)
warnings.simplefilter("error")
import diffusion_mp, diffusion_mp.data, diffusion_mp.estimators, diffusion_mp.experiments.train
late = {"sklearn", "matplotlib", "pytorch_lightning", "torchmetrics", "rdkit", "pymetis", "onnx"}
print(*sorted(late & (set(sys.modules) - before)))
"""


def test_nothing_is_warned_of_and_extras_wait() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
