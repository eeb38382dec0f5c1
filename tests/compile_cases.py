"""Graph capture: full graphs with a dynamic number of nodes, equal values and gradients.

Run by `test_compile.py` in a process without the runtime shape checks, whose wrappers cannot be captured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    EdgeSparseFlowDiffusivity,
    NeumannDiffusivity,
    PenaltyDiffusivity,
    Positive,
    SimpleDiffusivity,
    SparseFlowDiffusivity,
    auxiliary_loss,
)
from diffusion_mp.energies import FunctionPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.layers import (
    DIFFormerConv,
    DiffusionConv,
    GATConv,
    GatedGCNConv,
    GCNConv,
    GPSBlock,
    PDEDiffusion1d,
    SFiConv,
)
from diffusion_mp.models import (
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    GatedGCN,
    NodeFormer,
    PDETransformer,
    SFiFormer,
    SGFormer,
)
from diffusion_mp.testing import check_diffusivity, check_update, tolerance
from diffusion_mp.updates import CertifiedStep, CrankNicolson, ExplicitEuler, HeatKernel
from reading_features import ReadsInputs


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def instance(num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, 8, generator=generator)
    edge_index = torch.randint(num_nodes, (2, 3 * num_nodes), generator=generator)
    batch = torch.arange(num_nodes) * 3 // num_nodes
    return x, edge_index, batch


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def captured(module: nn.Module) -> Callable[..., Any]:
    torch._dynamo.utils.counters.clear()
    return torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")


def graphs_captured() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same(module: nn.Module, compiled: Callable[..., Any], x: Tensor, *inputs: Any) -> None:
    """Both have the same output and the same gradients."""
    results = []
    for run in (module, compiled):
        leaf = x.clone().requires_grad_(x.is_floating_point())
        out = run(leaf, *inputs)
        module.zero_grad()
        out.square().sum().backward()
        grads = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        results.append([out.detach(), *grads, *([] if leaf.grad is None else [leaf.grad])])
    rtol, atol = tolerance("product", torch.float32)
    torch.testing.assert_close(results[1], results[0], rtol=rtol * 10, atol=atol * 10)


def readme() -> nn.Module:
    """The layer of README, "A layer in your own model"."""
    return DiffusionConv(8, 6, 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"), ExplicitEuler(tau=0.5))


def certified(constraint: str) -> nn.Module:
    """Attention and graph in one certified step with learned weights."""
    attention = Positive(0.5) * SimpleDiffusivity(row_stochastic=False)
    graph_term = Positive(2.0) * AdjacencyDiffusivity("sym", direction="undirected")
    step = CertifiedStep(Positive(1.0), constraint=constraint)
    return DiffusionConv(8, 8, attention + graph_term, step, transform=False, bias=False)


CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "difformer-s": (lambda: DIFFormer(8, 6, 3), False),
    "difformer-s-graph": (lambda: DIFFormer(8, 6, 3), True),
    "difformer-s-published-graph": (
        lambda: DIFFormer(8, 6, 3, 1, heads=2, projection="separate", transform=True, source=True, leak=0.1),
        True,
    ),
    "difformer-a": (lambda: DIFFormer(8, 6, 3, 1, kernel="sigmoid"), False),
    "difformer-s-mean-graph": (lambda: DIFFormer(8, 6, 3, 1, graph="mean"), True),
    "certified": (lambda: CertifiedDIFFormer(8, 6, 3, 2, heads=2, constraint="sphere"), False),
    "certified-graph": (lambda: CertifiedDIFFormer(8, 6, 3, 1), True),
    "certified-projections-graph": (
        lambda: CertifiedDIFFormer(8, 6, 3, 1, penalty="gaussian", constraint="nonnegative", projection="tied"),
        True,
    ),
    "nodeformer": (lambda: NodeFormer(8, 6, 3, heads=2), False),
    "nodeformer-graph": (lambda: NodeFormer(8, 6, 3, 1, heads=2, hops=2), True),
    "sgformer": (lambda: SGFormer(8, 6, 3, heads=2), False),
    "sgformer-graph": (lambda: SGFormer(8, 6, 3, shared_encoder=False), True),
    "sgformer-frobenius-graph": (lambda: SGFormer(8, 6, 3, normalize="frobenius", projection="tied"), True),
    "difformer-released-graph": (
        lambda: DIFFormer(
            8, 6, 3, 1, projection="separate", qkv_bias=True, graph_weight=0.3, direction="pyg", degrees="count"
        ),
        True,
    ),
    "nodeformer-released-graph": (
        lambda: NodeFormer(8, 6, 3, 1, hops=2, powers="reach", gate=None, qkv_bias=True, stabilizer=1e-6),
        True,
    ),
    "sgformer-pyg-graph": (
        lambda: SGFormer(8, 6, 3, trans_num_layers=2, gnn="residual", activation="relu", aggregate="cat"),
        True,
    ),
    "readme-graph": (readme, True),
    "certified-sphere-graph": (lambda: certified("sphere"), True),
    "certified-ball-graph": (lambda: certified("ball"), True),
    "reads-features-graph": (lambda: ReadsInputs(8, 3), True),
    "gin-graph": (lambda: DiffusionGNN(8, 6, 3, conv="gin"), True),
    "gcn-graph": (lambda: GCNConv(8, 3), True),
    "sfi-conv": (lambda: SFiConv(8, 8, 2), False),
    "gps-block-graph": (lambda: GPSBlock(8, GatedGCNConv(8), SFiConv(8, 8, 2, residual=False)), True),
    "gated-gcn-model-graph": (lambda: GatedGCN(8, 6, 3, 2), True),
    "sfi-former-graph": (lambda: SFiFormer(8, 6, 3, 1, heads=2), True),
    "sfi-former": (lambda: SFiFormer(8, 6, 3, 1, heads=2), False),
    "pde-diffusion": (lambda: PDEDiffusion1d(8, strides=(1, 4)), False),
    "gat-graph": (lambda: GATConv(8, 3, 2), True),
}


# What the quick run compiles, and what it leaves to .ci/run; of the others each takes a path that one of these takes.
QUICK = ("readme-graph", "difformer-s-graph", "certified-graph")
EXHAUSTIVE = (
    "certified-sphere-graph",
    "reads-features-graph",
    "difformer-s",
    "nodeformer-graph",
    "sgformer-graph",
    "sfi-former-graph",
    "gat-graph",
)


def marked(case: str) -> Any:
    """The case with the marker that says which run compiles it."""
    marks = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(EXHAUSTIVE, pytest.mark.exhaustive)}
    return pytest.param(case, marks=marks.get(case, pytest.mark.slow))


@pytest.mark.parametrize("name", [marked(case) for case in CASES])
def test_full_graph_with_dynamic_shapes(name: str) -> None:
    """Captured once, for graphs of all sizes."""
    build, with_graph = CASES[name]
    module = seeded(build).eval()
    compiled = captured(module)
    for num_nodes in (12, 19):
        x, edge_index, _ = instance(num_nodes)
        assert_same(module, compiled, x, *((edge_index,) if with_graph else ()))
    assert graphs_captured() == 1


def batch_of_graphs(count: int) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """A batch of so many random graphs, with everything that a model may read."""
    generator = torch.Generator().manual_seed(count)
    batch = torch.repeat_interleave(torch.arange(count), torch.randint(1, 20, (count,), generator=generator))
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


@pytest.mark.parametrize(
    ("build", "also"),
    [
        (lambda: DIFFormer(8, 6, 3, 1), ()),
        pytest.param(lambda: DIFFormer(8, 6, 3, 1, kernel="sigmoid"), (), marks=pytest.mark.slow),
        pytest.param(lambda: NodeFormer(8, 6, 3, 1, heads=2), (), marks=pytest.mark.exhaustive),
        pytest.param(lambda: DiffusionGNN(8, 6, 3, conv="gin"), (), marks=pytest.mark.slow),
        pytest.param(lambda: DiffusionGNN(8, 6, 3, conv="gat", heads=2), (), marks=pytest.mark.slow),
        pytest.param(lambda: CertifiedDIFFormer(8, 6, 3, 2), (), marks=pytest.mark.exhaustive),
        pytest.param(
            lambda: SFiFormer(8, 6, 3, 1, heads=2, edge_dim=4, pe_channels=2),
            ("edge_attr", "pe"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["difformer-s", "difformer-a", "nodeformer", "gin", "gat", "certified", "sfi-former"],
)
def test_changing_batches_are_captured_once(build: Callable[[], nn.Module], also: tuple[str, ...]) -> None:
    compiled = captured(seeded(build))
    for count in (5, 6, 9, 4, 11):
        given = batch_of_graphs(count)
        compiled(**{name: given[name] for name in ("x", "edge_index", "batch", *also)}).square().sum().backward()
    assert graphs_captured() == 1


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: DIFFormer(8, 6, 3, 1), marks=pytest.mark.exhaustive),
        lambda: DIFFormer(8, 6, 3, 1, task="graph"),
        pytest.param(lambda: SGFormer(8, 6, 3, normalize="frobenius"), marks=pytest.mark.slow),
        lambda: SFiFormer(8, 6, 3, 1, heads=2),
        pytest.param(lambda: SFiFormer(8, 6, 3, 1, heads=2, task="graph"), marks=pytest.mark.slow),
    ],
    ids=["difformer", "difformer-graph-task", "sgformer", "sfi-former", "sfi-former-graph-task"],
)
def test_a_ragged_batch_is_captured_too(build: Callable[[], nn.Module]) -> None:
    module = seeded(build).eval()
    compiled = captured(module)
    for num_nodes in (12, 19):
        x, _, batch = instance(num_nodes)
        assert_same(module, compiled, x, None, None, batch)


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("placement", "causal"),
    [pytest.param("P5", True, marks=pytest.mark.exhaustive)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in (None, "P1", "P2", "P3", "P4", "P6", "P7")],
)
def test_a_transformer_on_sequences_is_captured(placement: str | None, causal: bool, masked: bool) -> None:
    options = {"max_length": 20, "placement": placement, "causal": causal}
    module = seeded(lambda: PDETransformer([9], 8, 3, 1, 2, **options)).eval()
    compiled = captured(module)
    for length in (12, 19):
        generator = torch.Generator().manual_seed(length)
        x = torch.randint(9, (3, length), generator=generator)
        assert_same(module, compiled, x, torch.rand(3, length, generator=generator) < 0.7 if masked else None)


@pytest.mark.exhaustive
def test_a_training_step_with_noise_and_edge_loss_is_captured() -> None:
    """The captured step advances the state of the noise: every call draws the noise that eager execution draws."""
    module = seeded(lambda: NodeFormer(8, 6, 3, heads=2, num_samples=3)).train()
    eager = copy.deepcopy(module)

    def step(model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, edge_index), auxiliary_loss(model)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    rtol, atol = tolerance("product", torch.float32)
    x, edge_index, _ = instance(12)
    outputs = []
    for _ in range(2):
        got, expected = compiled(module, x, edge_index), step(eager, x, edge_index)
        assert got[1] > 0
        assert torch.equal(auxiliary_loss(module), got[1])  # what the captured step left is there outside of it
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        outputs.append(got[0])
    assert not torch.equal(*outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": (1, 2), "heads": 2, "per": "head", "norm": True},
        pytest.param({"boundary": "causal"}, marks=pytest.mark.slow),
        pytest.param({"update": HeatKernel(1.0), "strides": (1, 3)}, marks=pytest.mark.slow),
        pytest.param(
            {"update": CrankNicolson(1.0), "boundary": "periodic", "per": "channel"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["explicit", "causal", "heat", "trapezoidal"],
)
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["stacked", "padded"])
def test_diffusion_along_sequences_is_captured(options: dict[str, Any], masked: bool) -> None:
    module = seeded(lambda: PDEDiffusion1d(8, **options))
    compiled = captured(module)
    for size, length in ((3, 12), (4, 19)):
        x = instance(size * length)[0].unflatten(0, (size, length))
        mask = torch.arange(length) < torch.tensor([length, 5, 1, 7])[:size, None] if masked else None
        assert_same(module, compiled, x, mask)


@pytest.mark.slow
@pytest.mark.parametrize("with_graph", [True, False], ids=["graph", "no-graph"])
def test_generated_code_agrees(with_graph: bool) -> None:
    """The default backend compiles C++, which takes a minute."""
    module = seeded(lambda: DIFFormer(8, 6, 3)).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    rtol, atol = tolerance("product", torch.float32)
    for num_nodes in (12, 19):
        x, edge_index, _ = instance(num_nodes)
        arguments = (edge_index,) if with_graph else ()
        torch.testing.assert_close(compiled(x, *arguments), module(x, *arguments), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "build",
    [
        SimpleDiffusivity,
        pytest.param(lambda: NeumannDiffusivity(strides=(1, 3)), marks=pytest.mark.slow),
        pytest.param(lambda: SparseFlowDiffusivity(4), marks=pytest.mark.slow),
        pytest.param(lambda: EdgeSparseFlowDiffusivity(4, heads=2, alpha=math.inf), marks=pytest.mark.exhaustive),
        pytest.param(lambda: EdgeSparseFlowDiffusivity(4, hops=2, friction="constant"), marks=pytest.mark.slow),
    ],
    ids=["simple", "neumann", "sparse-flow", "edge-sparse-flow", "edge-sparse-flow-hops"],
)
def test_check_diffusivity_compiles_on_request(build: Callable[[], nn.Module]) -> None:
    check_diffusivity(build, channels=4, compile=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DiffusionConv(
            8, 4, PenaltyDiffusivity(FunctionPenalty(lambda z2: 1 / (1 + z2)), 8, projection="separate")
        ),
        pytest.param(
            lambda: DiffusionConv(
                8, 4, PenaltyDiffusivity(FunctionPenalty(delta=torch.log1p), 8, projection="separate")
            ),
            marks=pytest.mark.slow,
        ),
        lambda: DIFFormerConv(8, 8, tau=nn.Parameter(torch.tensor(0.25))),
    ],
    ids=["f", "delta", "learned-step"],
)
def test_a_layer_is_one_graph(build: Callable[[], nn.Module]) -> None:
    conv = build()
    x, edge_index, batch = instance(7)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for inputs in ({}, {"batch": batch}, {"edge_index": Graph(7, edge_index)}):
        torch.testing.assert_close(compiled(x, **inputs), conv(x, **inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_check_update_compiles_on_request() -> None:
    check_update(lambda: ExplicitEuler(0.5), channels=3, compile=True)


def test_edges_are_seen_not_what_was_made_of_others_before():
    """A layer keeps the graph that it made of the same tensors, but never of those it is captured with."""
    layer, x, first = GCNConv(2, 2), torch.rand(4, 2), torch.tensor([[0, 1, 2], [1, 2, 3]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for edge_index in (first, first.flip(0)):
        torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
