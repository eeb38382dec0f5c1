"""The recipes for CUDA graphs in docs/performance.md."""

from functools import partial

import pytest
import torch

from diffusion_mp import CertifiedConv, DIFFormerConv
from diffusion_mp.graph import Graph
from diffusion_mp.testing import tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class OnGraph(torch.nn.Module):
    """A layer on a graph that stays the same."""

    def __init__(self, layer: torch.nn.Module, graph: Graph) -> None:
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.graph)


@pytest.mark.parametrize("make", [partial(DIFFormerConv, 8, 8), partial(CertifiedConv, 8)], ids=["linear", "certified"])
@pytest.mark.parametrize("recipe", ["make_graphed_callables", "reduce-overhead"])
def test_a_layer_is_replayed(make, recipe, generator):
    edge_index = torch.randint(30, (2, 100), generator=generator)
    graph = Graph(30, edge_index).to("cuda")
    model = OnGraph(make().cuda(), graph)
    x, other, grad = (torch.randn(30, 8, generator=generator).cuda().requires_grad_() for _ in range(3))
    parameters = list(model.parameters())

    def results(run, *inputs):
        found = []
        for y in inputs:
            out = run(y)
            given = [out, *torch.autograd.grad(out, [y, *parameters], grad, allow_unused=True)]
            # Copies, since a replay writes over them; a graph of autograd that stays alive would end the next capture.
            found += [tensor.detach().clone() for tensor in given if tensor is not None]
        return found

    expected = results(model, x, other)  # this also fills the caches of the graph
    if recipe == "reduce-overhead":
        run = torch.compile(model, mode=recipe)
        results(run, x)  # recorded
    else:
        run = torch.cuda.make_graphed_callables(
            OnGraph(model.layer, graph), (x.detach().clone().requires_grad_(),), allow_unused_input=True
        )
    for got, wanted in zip(results(run, x, other), expected, strict=True):
        torch.testing.assert_close(got, wanted, **tolerance("gradient", torch.float32)._asdict())
