"""What the benchmarks compare is the same computation, in values and gradients."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

# Where Python looks when it runs a script there.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from operations import OPERATIONS

from helpers import randn

# Ways that stand for a limit, and compute less.
LIMITS = ("its products alone", "a copy")

# The textbook's 200 proximal steps are far from the solution; with so many, in small graphs, they are near.
STEPS = 20_000
GRAPHS = torch.arange(0, 513, 8)
NEAR = 1e-6


@pytest.mark.parametrize("name", OPERATIONS)
def test_ways_agree(name):
    operation = OPERATIONS[name]
    results = []
    for way, (forward, backward, _, trains) in operation.ways.items():
        if way in LIMITS:
            continue
        inputs = []
        for x in operation.inputs(512, torch.Generator().manual_seed(0)):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x = x.double()
            inputs.append(x)
        if name == "sparse_flow":
            inputs[-1] = GRAPHS
        if (name, way) == ("sparse_flow", "textbook"):
            forward = partial(forward, steps=STEPS)
        leaves = [leaf.requires_grad_(trains) for leaf in inputs[: operation.leaves]]
        out = forward(*inputs)
        if out.dim() == 4:
            out = out.transpose(0, 1)
        parts = [out.flatten()]
        if trains and backward is None and name != "sparse_flow":
            pull = randn(out.numel(), seed=1).view(out.shape)
            slopes = torch.autograd.grad(out, leaves, pull)
            parts += [slope.flatten() for slope in slopes]
        results.append(parts)
    first, *others = results
    assert others
    error = NEAR if name == "sparse_flow" else 1e-9
    for other in others:
        for got, expected in zip(other, first, strict=False):
            torch.testing.assert_close(got, expected, rtol=error, atol=error)


@pytest.mark.parametrize("name", ["linear_attention_4_heads", "sigmoid_attention"])
def test_the_products_have_the_shapes_of_what_they_stand_for(name):
    inputs = OPERATIONS[name].inputs(70, torch.Generator().manual_seed(0))
    forward, backward, *_ = OPERATIONS[name].ways["its products alone"]
    out = forward(*inputs)
    assert out.shape == inputs[2].shape
    assert len(backward(*inputs, out)) == 3
