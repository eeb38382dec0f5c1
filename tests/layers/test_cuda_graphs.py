"""The recipes for CUDA graphs in docs/performance.md."""

import gc
from functools import partial

import pytest
import torch

from diffusion_mp import CertifiedConv, CertifiedTransformer, DIFFormerConv, SFiConv
from diffusion_mp.graph import Graph
from helpers import close

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a GPU"
)


class OnGraph(torch.nn.Module):
    """A layer on a graph that stays the same."""

    def __init__(self, layer: torch.nn.Module, graph: Graph) -> None:
        super().__init__()
        self.layer = layer
        self.graph = graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.graph)


ATTENTION = partial(CertifiedTransformer, 8, 8, 8, attention="all", mlp_channels=8)
LAYERS = {
    "linear": partial(DIFFormerConv, 8, 8),
    "certified": partial(CertifiedConv, 8),
    "blocks": ATTENTION,
    "sparse flow": partial(SFiConv, 8, 8),
}
CASES = [
    *(
        ("make_graphed_callables", name, batch)
        for name in LAYERS
        for batch in (False, True)
    ),
    *(("reduce-overhead", name, False) for name in ("linear", "certified")),
]


@pytest.mark.parametrize(("recipe", "name", "batch"), CASES)
def test_a_layer_is_replayed(recipe, name, batch, generator):
    gc.collect()  # a recording of an earlier test that is freed while torch records would end this one
    member = torch.arange(30) // 10 if batch else None
    edges = torch.randint(10, (2, 100), generator=generator)
    edges += 10 * torch.randint(3, (100,), generator=generator)
    graph = Graph(30, edges, batch=member).to("cuda")
    model = OnGraph(LAYERS[name]().cuda(), graph)
    x, other, grad = (
        torch.randn(30, 8, generator=generator).cuda().requires_grad_()
        for _ in range(3)
    )
    parameters = list(model.parameters())

    def results(run, y):
        out = run(y)
        leaves = [y, *parameters]
        slopes = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
        # Copies, since a replay writes over them; a graph of autograd that stays alive would end the next capture.
        return [tensor.detach().clone() for tensor in (out, *slopes)]

    # This also fills the caches of the graph.
    expected = [results(model, y) for y in (x, other)]
    if recipe == "reduce-overhead":
        run = torch.compile(model, mode=recipe)
        results(run, x)  # recorded
    else:
        sample = x.detach().clone().requires_grad_()
        run = torch.cuda.make_graphed_callables(
            OnGraph(model.layer, graph), (sample,), allow_unused_input=True
        )
    for y, of_layer in zip((x, other), expected, strict=True):
        close(results(run, y), of_layer, "gradient")
