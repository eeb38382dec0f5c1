"""``torch.jit.trace`` is refused: its program would fix the iterations of solvers, silently wrong on other edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp.layers.sequences import SelfAttention
from model_cases import MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
]

SENTENCE = r"torch\.jit\.trace fixes .* iterations of every solver.* torch\.export\.export\(model, \(x, edge_index\)\)"

EDGES = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 4, 0, 1, 2, 3]])


class ByPlace(nn.Module):
    """A model that takes its inputs by place, as torch.jit.trace passes them."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Any) -> Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


@pytest.mark.parametrize("name", MODELS)
def test_no_model_is_traced(name: str) -> None:
    case = MODELS[name]
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.jit.trace(
            ByPlace(case.model().eval(), case.names), tuple(case.inputs(12).values())
        )


def moved_by(update: dm.StateUpdate) -> nn.Module:
    return dm.DiffusionConv(
        4, 4, dm.AdjacencyDiffusivity("sym"), update, transform=False, bias=False
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "teleport": lambda: dm.APPNPConv(4, K=None, alpha=0.01),
    "implicit": lambda: moved_by(dm.ImplicitEuler(50.0)),
    "trapezoidal": lambda: moved_by(dm.CrankNicolson(50.0)),
    "heat": lambda: moved_by(dm.HeatKernel(5.0)),
    "limit": lambda: dm.CertifiedConv(4, num_layers=None),
    "one step": lambda: dm.GCNConv(4, 4),
    "diffusivity": lambda: dm.AdjacencyDiffusivity("sym"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_is_traced(name: str) -> None:
    """With edges, and with a graph that was made before."""
    layer = LAYERS[name]().eval()
    graph = dm.Graph(5, EDGES)
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.jit.trace(lambda x, edges: layer(x, edges), (torch.randn(5, 4), EDGES))
    if isinstance(layer, dm.Diffusivity):
        return
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.jit.trace(lambda x: layer(x, graph), torch.randn(5, 4))


def test_sequences_and_labels_are_not_traced() -> None:
    for layer in (dm.PDEDiffusion1d(4), SelfAttention(4, 2)):
        with pytest.raises(RuntimeError, match=SENTENCE):
            torch.jit.trace(layer.eval(), torch.randn(2, 5, 4))
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.jit.trace(dm.LabelPropagation(None), (torch.rand(5, 3), EDGES))
