"""Peak memory of whole processes: no N × N tensor, no [N, d, d] tensor, forward and backward.

What is compared is the peak resident size of a fresh process less its size once the package is imported, so input,
values, gradients and every intermediate count, and the interpreter does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
import torch
from diffusion_mp import layers, graph
from diffusion_mp.diffusivities import *

torch.set_num_threads(2)
unit = 1024 if sys.platform != "darwin" else 1  # kilobytes on Linux, bytes on macOS
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
expression, n, d = sys.argv[1], int(sys.argv[2]), 64
generator = torch.Generator().manual_seed(0)
x = torch.randn(n, d, generator=generator, requires_grad=True)
v = torch.randn(n, 1, d, generator=generator, requires_grad=True)
out = eval(expression)(x) @ v
out.square().mean().backward()
assert x.grad.isfinite().all() and v.grad.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before) / 2**30)
"""


def peak_gib(diffusivity: str, num_nodes: int) -> float:
    """Peak resident GiB above the imports of D(x) @ v, forward and backward, with 64 channels."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, diffusivity, str(num_nodes)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


@pytest.mark.slow
def test_sigmoid_attention_over_16_384_nodes_stays_below_200_megabytes() -> None:
    """With input, values and gradients; the dense scores would take 1.07 GB in float32, seven times over."""
    assert peak_gib("SigmoidDiffusivity()", 16_384) * 2**30 < 2e8


@pytest.mark.slow
def test_simple_attention_over_a_million_nodes_stays_below_3_gib() -> None:
    assert peak_gib("SimpleDiffusivity()", 1_000_000) < 3.0


@pytest.mark.slow
def test_sparse_flow_over_8_192_nodes_and_4_heads_stays_below_a_gigabyte() -> None:
    """Its [H, N, N] scores, frictions and flows would take 1.07 GB each in float32."""
    assert peak_gib("SparseFlowDiffusivity(64, heads=4)", 8_192) * 2**30 < 1e9


@pytest.mark.unwatched
def test_sigmoid_attention_needs_less_than_its_score_matrix() -> None:
    num_nodes = 6_000
    assert peak_gib("SigmoidDiffusivity()", num_nodes) < 4 * num_nodes**2 / 2**30 * 0.8


@pytest.mark.exhaustive
def test_gumbel_samples_are_accumulated() -> None:
    """50 samples of 32 features for every node and sample would be 0.12 GiB; they never exist together."""
    num_nodes, samples, features = 20_000, 50, 32
    module = f"KernelizedSoftmaxDiffusivity(64, head_channels=16, num_samples={samples}, num_features={features})"
    assert peak_gib(module, num_nodes) < 4 * num_nodes * samples * features / 2**30 * 0.8


@pytest.mark.exhaustive
def test_sparse_flow_needs_less_than_its_scores() -> None:
    num_nodes, heads = 3_000, 4
    module = f"SparseFlowDiffusivity(64, heads={heads}, head_channels=16)"
    assert peak_gib(module, num_nodes) < 4 * heads * num_nodes**2 / 2**30 * 0.8


@pytest.mark.slow
def test_a_training_step_of_nodeformer_needs_a_third_of_the_textbook() -> None:
    """At N = 200 000, H = 4, d = 32, m = 32, K = 10, where [N, H, K, m] takes 1 GB; and not more time."""
    script = Path(__file__).parents[1] / "benchmarks" / "nodeformer.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    memory, seconds = re.search(r"textbook / library \| (\S+) \| (\S+) \|", result.stdout).groups()
    assert float(memory) > 3, result.stdout
    assert float(seconds) >= 1, result.stdout
