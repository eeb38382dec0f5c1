"""What the benchmarks compare is the same computation, in values and gradients."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

# Where Python looks when it runs a script there.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operations import OPERATIONS

# Ways that stand for a limit, and compute less.
LIMITS = ("its products alone", "a copy")

# The textbook's 200 proximal steps are far from the solution; with so many, in small graphs, they are near.
STEPS = 20_000
GRAPHS = torch.arange(0, 513, 8)
NEAR = 1e-6


@pytest.mark.parametrize("name", OPERATIONS)
def test_ways_agree(name):
    operation = OPERATIONS[name]
    results = {}
    for way, (forward, backward, _, trains) in operation.ways.items():
        if way in LIMITS:
            continue
        drawn = operation.inputs(512, torch.Generator().manual_seed(0))
        inputs = [
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in drawn
        ]
        if name == "sparse_flow":
            inputs[-1] = GRAPHS
            forward = partial(forward, steps=STEPS) if way == "textbook" else forward
        leaves = [
            tensor.requires_grad_(trains) for tensor in inputs[: operation.leaves]
        ]
        out = forward(*inputs)
        out = out.transpose(0, 1) if out.dim() == 4 else out
        results[way] = [out.flatten()]
        if trains and backward is None and name != "sparse_flow":
            grad = torch.randn(
                out.shape,
                generator=torch.Generator().manual_seed(1),
                dtype=torch.float64,
            )
            results[way] += [
                found.flatten()
                for found in torch.autograd.grad(out, leaves, grad.view(out.shape))
            ]
    first, *others = results.values()
    assert others
    for other in others:
        for a, b in zip(first, other, strict=False):
            error = NEAR if name == "sparse_flow" else 1e-9
            torch.testing.assert_close(b, a, rtol=error, atol=error)


@pytest.mark.parametrize("name", ["linear_attention_4_heads", "sigmoid_attention"])
def test_the_products_have_the_shapes_of_what_they_stand_for(name):
    inputs = OPERATIONS[name].inputs(70, torch.Generator().manual_seed(0))
    forward, backward, *_ = OPERATIONS[name].ways["its products alone"]
    out = forward(*inputs)
    assert out.shape == inputs[2].shape
    assert len(backward(*inputs, out)) == 3
