"""Graph capture: full graphs with a dynamic number of nodes, equal values and gradients; run by `test_compile.py`."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import diffusion_mp as dm
from diffusion_mp.kernels.linear_attention import linear_attention, linear_product
from diffusion_mp.kernels.neumann import Boundary, neumann_product
from diffusion_mp.kernels.pairwise import pairwise_attention
from diffusion_mp.testing import check_diffusivity, check_layer, check_update, tolerance
from helpers import built
from model_cases import BATCH, MODELS, Case

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def instance(num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, 8, generator=generator)
    edge_index = torch.randint(num_nodes, (2, 3 * num_nodes), generator=generator)
    batch = torch.arange(num_nodes) * 3 // num_nodes
    return x, edge_index, batch


def captured(module: nn.Module) -> Callable[..., Any]:
    torch._dynamo.utils.counters.clear()
    return torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")


def graphs_captured() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same(
    module: nn.Module,
    compiled: Callable[..., Any],
    x: Tensor,
    *inputs: Any,
    **named: Any,
) -> None:
    results = []
    for run in (module, compiled):
        leaf = x.clone().requires_grad_(x.is_floating_point())
        out = run(leaf, *inputs, **named)
        module.zero_grad()
        out.square().sum().backward()
        leaves = [leaf, *module.parameters()]
        results.append([out, *(each.grad for each in leaves if each.grad is not None)])
    rtol, atol = tolerance("product", torch.float32)
    assert_close(results[1], results[0], rtol=rtol * 10, atol=atol * 10)


def readme() -> nn.Module:
    return dm.DiffusionConv(
        8,
        6,
        0.5 * dm.SimpleDiffusivity() + 0.5 * dm.AdjacencyDiffusivity("sym"),
        dm.ExplicitEuler(tau=0.5),
    )


CASES = {
    name: case
    for name, case in MODELS.items()
    if "x" in case.names and "mask" not in case.names
} | {
    "readme": Case(readme),
    "difformer-nodes": Case(lambda: dm.DIFFormer(8, 6, 3), ("x",)),
    "pde-diffusion": Case(lambda: dm.PDEDiffusion1d(8, strides=(1, 4)), ("x",)),
}
# What the quick run compiles, and what it leaves to .ci/run; of the others each takes a path that one of these takes.
QUICK = ("readme", "difformer", "certified")
EXHAUSTIVE = (
    "certified-transformer",
    "nodeformer",
    "sfi-former",
    "gat",
)


def marked(case: str) -> Any:
    if case in QUICK:
        marks = ()
    elif case in EXHAUSTIVE:
        marks = pytest.mark.exhaustive
    else:
        marks = pytest.mark.slow
    return pytest.param(case, marks=marks)


@pytest.mark.parametrize("name", [marked(case) for case in CASES])
def test_full_graph_with_dynamic_shapes(name):
    """Captured once, for graphs of all sizes."""
    module = CASES[name].model().eval()
    compiled = captured(module)
    for num_nodes in (12, 19):
        assert_same(module, compiled, **CASES[name].inputs(num_nodes))
    assert graphs_captured() == 1


def batch_of_graphs(count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    batch = torch.repeat_interleave(
        torch.arange(count), torch.randint(1, 20, (count,), generator=generator)
    )
    pairs = torch.randint(len(batch), (2, 30 * count), generator=generator)
    edges = pairs[:, batch[pairs[0]] == batch[pairs[1]]]
    encodings = tuple(torch.randn(len(batch), 5, generator=generator) for _ in range(2))
    return {
        "x": torch.randn(len(batch), 8, generator=generator),
        "edge_index": edges,
        "batch": batch,
        "edge_attr": torch.randn(edges.size(1), 4, generator=generator),
        "pe": (*encodings, torch.rand(len(batch), 5, generator=generator) < 0.8),
    }


ALL = (*BATCH, "edge_attr", "pe")
NODES = ("x", "batch")
SLOW = pytest.mark.slow
LATER = pytest.mark.exhaustive
BATCHES = [
    ("difformer", BATCH, ()),
    ("difformer-sigmoid", BATCH, SLOW),
    ("nodeformer", BATCH, SLOW),
    ("gin", BATCH, SLOW),
    ("gat", BATCH, SLOW),
    ("certified", BATCH, LATER),
    ("gatedgcn", ALL, LATER),
    ("sfi-former-options", ALL[:-1], SLOW),
    ("difformer", NODES, LATER),
    ("difformer-graphs", NODES, ()),
    ("sgformer", NODES, SLOW),
    ("sfi-former", NODES, ()),
]


@pytest.mark.parametrize(
    ("name", "names"), [pytest.param(*case, marks=marks) for *case, marks in BATCHES]
)
def test_changing_batches_are_captured_once(name, names):
    module = MODELS[name].model().train("edge_index" in names)
    compiled = captured(module)
    for count in (5, 6, 9, 4, 11):
        given = batch_of_graphs(count)
        inputs = {name: given[name] for name in names}
        out = compiled(**inputs)
        out.square().sum().backward()
        if not module.training:
            rtol, atol = tolerance("product", torch.float32)
            assert_close(out, module(**inputs), rtol=rtol, atol=atol)
    assert graphs_captured() == 1


@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["whole", "masked"],
)
@pytest.mark.parametrize(
    ("placement", "causal"),
    [pytest.param("P5", True, marks=pytest.mark.exhaustive)]
    + [
        pytest.param(name, False, marks=pytest.mark.slow)
        for name in (None, "P1", "P2", "P3", "P4", "P6", "P7")
    ],
)
def test_a_transformer_on_sequences_is_captured(placement, causal, masked):
    options = {"max_length": 20, "placement": placement, "causal": causal}
    module = built(lambda: dm.PDETransformer([9], 8, 3, 1, 2, **options)).eval()
    compiled = captured(module)
    for length in (12, 19):
        generator = torch.Generator().manual_seed(length)
        x = torch.randint(9, (3, length), generator=generator)
        assert_same(
            module,
            compiled,
            x,
            torch.rand(3, length, generator=generator) < 0.7 if masked else None,
        )


@pytest.mark.exhaustive
def test_a_training_step_with_noise_and_edge_loss_is_captured():
    """The captured step advances the state of the noise: every call draws the noise that eager execution draws."""
    module = built(lambda: dm.NodeFormer(8, 6, 3, heads=2, num_samples=3)).train()
    eager = copy.deepcopy(module)

    def step(model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, edge_index), dm.auxiliary_loss(model)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    rtol, atol = tolerance("product", torch.float32)
    x, edge_index, _ = instance(12)
    outputs = []
    for _ in range(2):
        got = compiled(module, x, edge_index)
        expected = step(eager, x, edge_index)
        assert got[1] > 0
        # What the captured step left is there outside of it.
        assert torch.equal(dm.auxiliary_loss(module), got[1])
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs, rtol=rtol, atol=atol)
        outputs.append(got[0])
    assert not torch.equal(*outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": (1, 2), "heads": 2, "per": "head", "norm": True},
        pytest.param({"boundary": "causal"}, marks=pytest.mark.slow),
        pytest.param(
            {"update": dm.HeatKernel(1.0), "strides": (1, 3)}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"update": dm.CrankNicolson(1.0), "boundary": "periodic", "per": "channel"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["explicit", "causal", "heat", "trapezoidal"],
)
@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["stacked", "padded"],
)
def test_diffusion_along_sequences_is_captured(options, masked):
    module = built(lambda: dm.PDEDiffusion1d(8, **options))
    compiled = captured(module)
    for size, length in ((3, 12), (4, 19)):
        x = instance(size * length)[0].unflatten(0, (size, length))
        if masked:
            mask = torch.arange(length) < torch.tensor([length, 5, 1, 7])[:size, None]
        else:
            mask = None
        assert_same(module, compiled, x, mask)


@pytest.mark.slow
@pytest.mark.parametrize("with_graph", [True, False], ids=["graph", "no-graph"])
def test_generated_code_agrees(with_graph):
    """The default backend compiles C++, which takes a minute."""
    module = built(lambda: dm.DIFFormer(8, 6, 3)).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    rtol, atol = tolerance("product", torch.float32)
    for num_nodes in (12, 19):
        x, edge_index, _ = instance(num_nodes)
        arguments = (edge_index,) if with_graph else ()
        assert_close(
            compiled(x, *arguments), module(x, *arguments), rtol=rtol, atol=atol
        )


@pytest.mark.slow
def test_batches_of_any_size_without_fullgraph():
    """Torch then ends its graph where the number of graphs is read, which must not be within a block."""
    module = built(lambda: dm.CertifiedTransformer(8, 8, 3, num_blocks=2, edge_dim=2))
    compiled = torch.compile(module, dynamic=True)
    for num_nodes in (12, 19):
        x, edge_index, batch = instance(num_nodes)
        edge_index = edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]]
        edge_attr = torch.eye(2)[torch.arange(edge_index.size(1)) % 2]
        assert_same(module, compiled, x, edge_index, batch=batch, edge_attr=edge_attr)


@pytest.mark.parametrize(
    "build",
    [
        dm.SimpleDiffusivity,
        pytest.param(
            lambda: dm.NeumannDiffusivity(strides=(1, 3)), marks=pytest.mark.slow
        ),
        pytest.param(lambda: dm.SparseFlowDiffusivity(4), marks=pytest.mark.slow),
        pytest.param(
            lambda: dm.diffusivities.EdgeSparseFlowDiffusivity(
                4, heads=2, alpha=math.inf
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            lambda: dm.diffusivities.EdgeSparseFlowDiffusivity(
                4, hops=2, friction="constant"
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "simple",
        "neumann",
        "sparse-flow",
        "edge-sparse-flow",
        "edge-sparse-flow-hops",
    ],
)
def test_check_diffusivity_compiles_on_request(build):
    check_diffusivity(build, channels=4, compile=True)


class ReadsAValue(dm.DiffusionConv):
    def output(self, out: Tensor, x: Tensor) -> Tensor:
        return out if x.sum().item() > 0 else 1.0 * out


def test_check_layer_finds_what_does_not_compile():
    check_layer(lambda: dm.DiffusionConv(4, 3, dm.SimpleDiffusivity()), compile=True)
    with pytest.raises(AssertionError, match=r"ReadsAValue breaks the law 'compile'"):
        check_layer(lambda: ReadsAValue(4, 3, dm.SimpleDiffusivity()), compile=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: dm.DiffusionConv(
            8,
            4,
            dm.PenaltyDiffusivity(
                dm.FunctionPenalty(lambda z2: 1 / (1 + z2)), 8, projection="separate"
            ),
        ),
        lambda: dm.DIFFormerConv(8, 8, tau=nn.Parameter(torch.tensor(0.25))),
    ],
    ids=["f", "learned-step"],
)
def test_a_layer_is_one_graph(build):
    conv = build()
    x, edge_index, batch = instance(7)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for inputs in ({}, {"batch": batch}, {"edge_index": dm.Graph(7, edge_index)}):
        assert_close(compiled(x, **inputs), conv(x, **inputs), rtol=1e-5, atol=1e-6)


FEW: dict[str, Callable[..., Tensor]] = {
    "difformer": partial(linear_attention, constant=1.0, unit=True),
    "sgformer": partial(linear_attention, own=1.0, unit=True),
    "product": linear_product,
    "softmax": pairwise_attention,
    "sigmoid": partial(pairwise_attention, score="sigmoid"),
}


@pytest.mark.parametrize(
    "ptr", [None, torch.tensor([0, 20, 40])], ids=["one graph", "batch"]
)
@pytest.mark.parametrize("name", FEW)
def test_few_numbers_of_one_graph_are_written_out(name, ptr):
    """So that their calls are fused; a batch is one call."""
    run = FEW[name]
    inputs = instance(40)[0].view(40, 1, 8).split([3, 3, 2], 2)
    codes: list[str] = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        codes.append(module.code)
        return module.forward

    out = torch.compile(partial(run, ptr=ptr), backend=backend, fullgraph=True)(*inputs)
    assert_close(out, run(*inputs, ptr=ptr), atol=1e-5, rtol=1e-5)
    assert ("ops.diffusion_mp" in codes[0]) == (ptr is not None)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_norms_of_any_size_are_traced(scale):
    """Traced code cannot look at the norms before it chooses a formula."""
    x = instance(20)[0].view(20, 1, 8)
    x[3:5] *= scale
    x[5] = 0
    check_traced(FEW["difformer"], [x, x / 2, instance(21)[0][:20].unsqueeze(1)])


@pytest.mark.parametrize("shift", [-100.0, -30.0, 0.0, 30.0])
def test_scores_of_any_size_are_traced(shift):
    x = instance(20)[0].view(20, 1, 8)
    q = torch.cat([x, torch.full_like(x, shift / 8)], 2)
    k = torch.cat([x, torch.ones_like(x)], 2)
    check_traced(FEW["sigmoid"], [q, k, x], 1e-2)


@pytest.mark.parametrize("boundary", get_args(Boundary))
@pytest.mark.parametrize("n", [1, 4, 20])
def test_sequences_of_any_boundary_are_traced(boundary, n):
    """By shifts where no stride is longer than the sequence; several heads, also transposed."""
    v = instance(20)[0][:n].view(n, 2, 4)
    alpha = torch.tensor([[0.25, 0.1], [0.5, -0.1], [0.1, 0.3]])
    for strides in [(1, 2, 3), (4, 1, 4)]:
        for transpose in (False, True):
            run = partial(
                neumann_product,
                strides=strides,
                boundary=boundary,
                transpose=transpose,
            )
            check_traced(run, [v, alpha])
            torch.compiler.reset()


def check_traced(
    run: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 1e-4
) -> None:
    """Compare with double precision, value and gradients."""
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    both = []
    for of, dtype in ((compiled, torch.float32), (run, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = of(*leaves)
        both.append((out, *torch.autograd.grad(out.sum() + out.square().sum(), leaves)))
    for found, expected in zip(*both, strict=True):
        size = expected.abs().amax(-1, keepdim=True).clamp(min=1e-12)  # of every row
        assert_close(
            found / size, expected / size, atol=tolerance, rtol=0, check_dtype=False
        )


@pytest.mark.exhaustive
def test_check_update_compiles_on_request():
    check_update(lambda: dm.ExplicitEuler(0.5), channels=3, compile=True)


def test_edges_are_seen_not_what_was_made_of_others_before():
    """A layer keeps the graph that it made of the same tensors, but never of those it is captured with."""
    layer = dm.GCNConv(2, 2)
    x = torch.rand(4, 2)
    first = torch.tensor([[0, 1, 2], [1, 2, 3]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for edge_index in (first, first.flip(0)):
        assert_close(compiled(x, edge_index), layer(x, edge_index))
