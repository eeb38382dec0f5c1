"""``torch.jit.trace`` is refused: its program would fix the iterations of solvers, silently wrong on other edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import diffusion_mp as dm

EDGES = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 4, 0, 1, 2, 3]])
X = torch.randn(5, 4)
GRAPH = dm.Graph(5, EDGES)
#: What a call begins with: a model, a layer, a diffusivity, sequences and labels.
TRACED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "a model": (lambda: dm.DIFFormer(4, 8, 3), (X, EDGES)),
    "a limit": (lambda: dm.CertifiedConv(4, num_layers=None), (X, EDGES)),
    "a diffusivity": (lambda: dm.AdjacencyDiffusivity("sym"), (X, EDGES)),
    "sequences": (lambda: dm.PDEDiffusion1d(4), (X[None],)),
    "labels": (lambda: dm.LabelPropagation(None), (X.abs(), EDGES)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
def test_nothing_is_traced(name: str) -> None:
    build, inputs = TRACED[name]
    module = build().eval()
    with pytest.raises(RuntimeError, match=r"torch\.export\.export"):
        torch.jit.trace(module, inputs)
    if name in ("a model", "a limit"):  # also of a graph that was made before
        with pytest.raises(RuntimeError, match=r"torch\.export\.export"):
            torch.jit.trace(lambda x: module(x, GRAPH), X)
