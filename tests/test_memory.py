"""Peak memory of whole processes: no N × N tensor, no [N, d, d] tensor, forward and backward.

What is compared is the peak resident size of a fresh process less its size after a call with a few nodes, so input,
values, gradients and every intermediate count, and neither the interpreter nor what a first call loads does. By default
glibc keeps freed blocks of up to 32 MiB after it has seen one, so that the peak says how they happened to fit: 0.74 to
1.6 of the size of the samples below for the same tensors. A fixed threshold returns every freed block at once.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from subrun import run_program

PROGRAM = """
import resource, sys
import torch
from diffusion_mp import layers, graph
from diffusion_mp.diffusivities import *

torch.set_num_threads(2)
unit = 1024 if sys.platform != "darwin" else 1  # kilobytes on Linux, bytes on macOS
expression, n, d = sys.argv[1], int(sys.argv[2]), 64


def call(n):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, requires_grad=True)
    v = torch.randn(n, 1, d, generator=generator, requires_grad=True)
    out = eval(expression)(x) @ v
    out.square().mean().backward()
    assert x.grad.isfinite().all() and v.grad.isfinite().all()


call(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
call(n)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before)
"""


def case(
    diffusivity: str, num_nodes: int, limit: float, mark: pytest.MarkDecorator
) -> Any:
    return pytest.param(
        diffusivity,
        num_nodes,
        limit,
        marks=mark,
        id=f"{diffusivity.partition('(')[0]}-{num_nodes}",
    )


SLOW = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive
SHARE = 0.8
#: Bytes that D(x) @ v may need, forward and backward, with 64 channels, input, values and gradients.
CASES = [
    # the dense scores would take 1.07 GB in float32, seven times over
    case("SigmoidDiffusivity()", 16_384, 2e8, SLOW),
    case("SimpleDiffusivity()", 1_000_000, 3 * 2**30, SLOW),
    # [H, N, N] scores, frictions and flows would take 1.07 GB each in float32
    case("SparseFlowDiffusivity(64, heads=4)", 8_192, 1e9, SLOW),
    # less than the scores alone
    case("SigmoidDiffusivity()", 6_000, SHARE * 4 * 6_000**2, pytest.mark.unwatched),
    case(
        "SparseFlowDiffusivity(64, heads=4, head_channels=16)",
        3_000,
        SHARE * 4 * 4 * 3_000**2,
        EXHAUSTIVE,
    ),
    # 50 samples of 32 features for every node and sample would be 0.12 GiB; they never exist together
    case(
        "KernelizedSoftmaxDiffusivity(64, head_channels=16, num_samples=50, num_features=32)",
        20_000,
        SHARE * 4 * 20_000 * 50 * 32,
        EXHAUSTIVE,
    ),
]


@pytest.mark.parametrize(("diffusivity", "num_nodes", "limit"), CASES)
def test_no_matrix_of_all_pairs_or_samples_exists(
    diffusivity, num_nodes, limit, monkeypatch
):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert float(run_program("-c", PROGRAM, diffusivity, str(num_nodes))) < limit


@pytest.mark.slow
def test_a_training_step_of_nodeformer_needs_a_third_of_the_textbook():
    """At N = 200 000, H = 4, d = 32, m = 32, K = 10, where [N, H, K, m] takes 1 GB; and not more time."""
    printed = run_program(
        str(Path(__file__).parents[1] / "benchmarks" / "nodeformer.py")
    )
    memory, seconds = re.search(
        r"textbook / library \| (\S+) \| (\S+) \|", printed
    ).groups()
    assert float(memory) > 3, printed
    assert float(seconds) >= 1, printed
