"""Programs of solves: exported for graphs of all sizes, in plain torch, and compiled; run by `test_solve_programs.py`.

``docs/which-model.md`` says which solves are exported; the tables of this file are compared with it.
"""

from collections.abc import Callable

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.testing import assert_close

import diffusion_mp as dm
from diffusion_mp.export import in_plain_torch
from diffusion_mp.layers import (
    APPNPConv,
    CertifiedBlock,
    CertifiedConv,
    DiffusionConv,
    WeightedGraph,
)
from diffusion_mp.updates import CrankNicolson, HeatKernel, ImplicitEuler
from helpers import built

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Adjacency = dm.AdjacencyDiffusivity

EXPORTED: dict[str, Callable[[], nn.Module]] = {
    "ImplicitEuler": lambda: DiffusionConv(4, 4, Adjacency("sym"), ImplicitEuler(0.5)),
    "CrankNicolson": lambda: DiffusionConv(4, 4, Adjacency("row"), CrankNicolson(0.5)),
    "HeatKernel": lambda: DiffusionConv(4, 4, Adjacency("sym"), HeatKernel(0.5)),
    "HeatKernel of attention": lambda: DiffusionConv(
        4, 4, dm.SimpleDiffusivity(), HeatKernel(0.5)
    ),
    "ImplicitEuler of attention": lambda: DiffusionConv(
        4, 4, dm.GaussianDiffusivity(), ImplicitEuler(0.5)
    ),
    "ImplicitEuler of sequences": lambda: DiffusionConv(
        4, 4, dm.NeumannDiffusivity(budget=None), ImplicitEuler(0.5)
    ),
    "APPNPConv(K=None)": lambda: APPNPConv(4, K=None),
    "LabelPropagation(None)": lambda: dm.LabelPropagation(None),
    "CertifiedConv": lambda: CertifiedConv(
        4, penalty=None, constraint=None, num_layers=None
    ),
    "CertifiedDIFFormer": lambda: dm.CertifiedDIFFormer(
        4, 8, 3, num_layers=None, penalty=None, constraint=None
    ),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a ball": lambda: CertifiedConv(4, penalty=None, num_layers=None),
    "attention": lambda: CertifiedConv(4, num_layers=None),
    "matrices": lambda: CertifiedBlock(4, [WeightedGraph(4)], None, constraint=None),
}
COMPILED = {**EXPORTED, **REFUSED}
QUICK = ("APPNPConv(K=None)", "CertifiedDIFFormer", "HeatKernel", "matrices")


def marked(names: dict[str, Callable[[], nn.Module]]) -> list[object]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
        for name in names
    ]


def ring(num_nodes: int) -> Tensor:
    node = torch.arange(num_nodes)
    one_way = torch.stack([node, (node + 1) % num_nodes])
    return torch.cat([one_way, one_way.flip(0)], 1)


def inputs(num_nodes: int, edges: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = torch.rand(num_nodes, 4, generator=torch.Generator().manual_seed(num_nodes))
    return x, ring(num_nodes) if edges is None else edges


def export_any_size(module: nn.Module) -> ExportedProgram:
    # `strict=False` is the default of PyTorch 2.7 and later, and 2.6 needs to be told.
    return export(
        module,
        inputs(7),
        dynamic_shapes=({0: Dim("nodes")}, {1: Dim("edges")}),
        strict=False,
    )


@pytest.mark.parametrize("name", marked(EXPORTED))
def test_an_exported_solve_takes_graphs_of_all_sizes(name):
    module = built(EXPORTED[name]).eval()
    program = export_any_size(module)
    programs = [program]
    if name != "ImplicitEuler of sequences":
        programs.append(in_plain_torch(program))
    star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])
    for exported in programs:
        for args in (
            inputs(1),
            inputs(1, ring(1)[:, :0]),
            inputs(2),
            inputs(3),
            inputs(9),
            inputs(9, star),
        ):
            assert_close(exported.module()(*args), module(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_limit_that_iterates_is_not_exported_and_says_what_is(name):
    with pytest.raises(
        NotImplementedError,
        match=r"torch.export has no values. Export a fixed number of .*num_layers",
    ):
        export_any_size(built(REFUSED[name]).eval())


@pytest.mark.parametrize("name", marked(COMPILED))
def test_a_compiled_solve_is_the_solve_and_so_is_its_gradient(name):
    module = built(COMPILED[name])
    compiled = torch.compile(module, backend="aot_eager", dynamic=True)
    for num_nodes in (7, 12):
        x, edges = inputs(num_nodes)
        results = []
        for run in (module, compiled):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            out = run(leaf, edges)
            if out.requires_grad:
                out.square().sum().backward()
            gradients = [
                part.grad.clone()
                for part in module.parameters()
                if part.grad is not None
            ]
            results.append([out.detach(), *gradients])
        assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="an older compiler stops earlier, at Python of ours that it does not trace",
)
def test_fullgraph_ends_where_an_iteration_begins():
    module = built(EXPORTED["CertifiedConv"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.compiler.disable"):
        torch.compile(module, backend="eager", fullgraph=True)(*inputs(7))
