"""Graph capture: full graphs with a dynamic number of nodes, equal values and gradients; run by `test_compile.py`."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp.testing import check_diffusivity, check_update, tolerance
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
    return dm.DiffusionConv(
        8, 6, 0.5 * dm.SimpleDiffusivity() + 0.5 * dm.AdjacencyDiffusivity("sym"), dm.ExplicitEuler(tau=0.5)
    )


def certified(constraint: str) -> nn.Module:
    attention = dm.diffusivities.Positive(0.5) * dm.SimpleDiffusivity(row_stochastic=False)
    graph_term = dm.diffusivities.Positive(2.0) * dm.AdjacencyDiffusivity("sym", direction="undirected")
    step = dm.CertifiedStep(dm.diffusivities.Positive(1.0), constraint=constraint)
    return dm.DiffusionConv(8, 8, attention + graph_term, step, transform=False, bias=False)


#: Modules that read edges have names that end with "graph".
CASES: dict[str, Callable[[], nn.Module]] = {
    "difformer-s": lambda: dm.DIFFormer(8, 6, 3), "difformer-s-graph": lambda: dm.DIFFormer(8, 6, 3),
    "difformer-s-published-graph": lambda: dm.DIFFormer(8, 6, 3, 1, heads=2, projection="separate", transform=True,
        source=True, leak=0.1),
    "difformer-a": lambda: dm.DIFFormer(8, 6, 3, 1, kernel="sigmoid"),
    "difformer-s-mean-graph": lambda: dm.DIFFormer(8, 6, 3, 1, graph="mean"),
    "certified": lambda: dm.CertifiedDIFFormer(8, 6, 3, 2, heads=2, constraint="sphere"),
    "certified-graph": lambda: dm.CertifiedDIFFormer(8, 6, 3, 1),
    "certified-projections-graph": lambda: dm.CertifiedDIFFormer(8, 6, 3, 1, penalty="gaussian",
        constraint="nonnegative", projection="tied"),
    "nodeformer": lambda: dm.NodeFormer(8, 6, 3, heads=2),
    "nodeformer-graph": lambda: dm.NodeFormer(8, 6, 3, 1, heads=2, hops=2),
    "sgformer": lambda: dm.SGFormer(8, 6, 3, heads=2),
    "sgformer-graph": lambda: dm.SGFormer(8, 6, 3, shared_encoder=False),
    "sgformer-frobenius-graph": lambda: dm.SGFormer(8, 6, 3, normalize="frobenius", projection="tied"),
    "difformer-released-graph": lambda: dm.DIFFormer(8, 6, 3, 1, projection="separate", qkv_bias=True,
        graph_weight=0.3, direction="pyg", degrees="count"),
    "nodeformer-released-graph": lambda: dm.NodeFormer(8, 6, 3, 1, hops=2, powers="reach", gate=None, qkv_bias=True,
        stabilizer=1e-6),
    "sgformer-pyg-graph": lambda: dm.SGFormer(8, 6, 3, trans_num_layers=2, gnn="residual", activation="relu",
        aggregate="cat"),
    "readme-graph": readme, "certified-sphere-graph": lambda: certified("sphere"),
    "certified-ball-graph": lambda: certified("ball"), "reads-features-graph": lambda: ReadsInputs(8, 3),
    "gin-graph": lambda: dm.DiffusionGNN(8, 6, 3, conv="gin"), "gcn-graph": lambda: dm.GCNConv(8, 3),
    "sfi-conv": lambda: dm.SFiConv(8, 8, 2),
    "gps-block-graph": lambda: dm.layers.GPSBlock(8, dm.GatedGCNConv(8), dm.SFiConv(8, 8, 2, residual=False)),
    "gated-gcn-model-graph": lambda: dm.GatedGCN(8, 6, 3, 2),
    "sfi-former-graph": lambda: dm.SFiFormer(8, 6, 3, 1, heads=2),
    "sfi-former": lambda: dm.SFiFormer(8, 6, 3, 1, heads=2),
    "pde-diffusion": lambda: dm.PDEDiffusion1d(8, strides=(1, 4)),
    "gat-graph": lambda: dm.GATConv(8, 3, 2),
}  # fmt: skip


# What the quick run compiles, and what it leaves to .ci/run; of the others each takes a path that one of these takes.
QUICK = ("readme-graph", "difformer-s-graph", "certified-graph")
EXHAUSTIVE = ("certified-sphere-graph", "reads-features-graph", "difformer-s", "nodeformer-graph", "sgformer-graph")
EXHAUSTIVE = (*EXHAUSTIVE, "sfi-former-graph", "gat-graph")


def marked(case: str) -> Any:
    marks = () if case in QUICK else pytest.mark.exhaustive if case in EXHAUSTIVE else pytest.mark.slow
    return pytest.param(case, marks=marks)


@pytest.mark.parametrize("name", [marked(case) for case in CASES])
def test_full_graph_with_dynamic_shapes(name: str) -> None:
    """Captured once, for graphs of all sizes."""
    module = seeded(CASES[name]).eval()
    compiled = captured(module)
    for num_nodes in (12, 19):
        x, edge_index, _ = instance(num_nodes)
        assert_same(module, compiled, x, *((edge_index,) if name.endswith("graph") else ()))
    assert graphs_captured() == 1


def batch_of_graphs(count: int) -> dict[str, Any]:
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


BATCHES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Any]] = {
    "difformer-s": (lambda: dm.DIFFormer(8, 6, 3, 1), ("edge_index",), ()),
    "difformer-a": (lambda: dm.DIFFormer(8, 6, 3, 1, kernel="sigmoid"), ("edge_index",), pytest.mark.slow),
    "nodeformer": (lambda: dm.NodeFormer(8, 6, 3, 1, heads=2), ("edge_index",), pytest.mark.exhaustive),
    "gin": (lambda: dm.DiffusionGNN(8, 6, 3, conv="gin"), ("edge_index",), pytest.mark.slow),
    "gat": (lambda: dm.DiffusionGNN(8, 6, 3, conv="gat", heads=2), ("edge_index",), pytest.mark.slow),
    "certified": (lambda: dm.CertifiedDIFFormer(8, 6, 3, 2), ("edge_index",), pytest.mark.exhaustive),
    "sfi-former": (
        lambda: dm.SFiFormer(8, 6, 3, 1, heads=2, edge_dim=4, pe_channels=2),
        ("edge_index", "edge_attr", "pe"),
        pytest.mark.exhaustive,
    ),
    "difformer-nodes": (lambda: dm.DIFFormer(8, 6, 3, 1), (), pytest.mark.exhaustive),
    "difformer-graph-task": (lambda: dm.DIFFormer(8, 6, 3, 1, task="graph"), (), ()),
    "sgformer-nodes": (lambda: dm.SGFormer(8, 6, 3, normalize="frobenius"), (), pytest.mark.slow),
    "sfi-former-nodes": (lambda: dm.SFiFormer(8, 6, 3, 1, heads=2), (), ()),
    "sfi-former-graph-task": (lambda: dm.SFiFormer(8, 6, 3, 1, heads=2, task="graph"), (), pytest.mark.slow),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (*_, marks) in BATCHES.items()])
def test_changing_batches_are_captured_once(name: str) -> None:
    build, names, _ = BATCHES[name]
    module = seeded(build).eval() if not names else seeded(build)
    compiled = captured(module)
    for count in (5, 6, 9, 4, 11):
        given = batch_of_graphs(count)
        inputs = {name: given[name] for name in ("x", "batch", *names)}
        out = compiled(**inputs)
        out.square().sum().backward()
        if not module.training:
            rtol, atol = tolerance("product", torch.float32)
            torch.testing.assert_close(out, module(**inputs), rtol=rtol, atol=atol)
    assert graphs_captured() == 1


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("placement", "causal"),
    [pytest.param("P5", True, marks=pytest.mark.exhaustive)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in (None, "P1", "P2", "P3", "P4", "P6", "P7")],
)
def test_a_transformer_on_sequences_is_captured(placement: str | None, causal: bool, masked: bool) -> None:
    options = {"max_length": 20, "placement": placement, "causal": causal}
    module = seeded(lambda: dm.PDETransformer([9], 8, 3, 1, 2, **options)).eval()
    compiled = captured(module)
    for length in (12, 19):
        generator = torch.Generator().manual_seed(length)
        x = torch.randint(9, (3, length), generator=generator)
        assert_same(module, compiled, x, torch.rand(3, length, generator=generator) < 0.7 if masked else None)


@pytest.mark.exhaustive
def test_a_training_step_with_noise_and_edge_loss_is_captured() -> None:
    """The captured step advances the state of the noise: every call draws the noise that eager execution draws."""
    module = seeded(lambda: dm.NodeFormer(8, 6, 3, heads=2, num_samples=3)).train()
    eager = copy.deepcopy(module)

    def step(model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, edge_index), dm.auxiliary_loss(model)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    rtol, atol = tolerance("product", torch.float32)
    x, edge_index, _ = instance(12)
    outputs = []
    for _ in range(2):
        got, expected = compiled(module, x, edge_index), step(eager, x, edge_index)
        assert got[1] > 0
        assert torch.equal(dm.auxiliary_loss(module), got[1])  # what the captured step left is there outside of it
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        outputs.append(got[0])
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("options", [
    {"strides": (1, 2), "heads": 2, "per": "head", "norm": True},
    pytest.param({"boundary": "causal"}, marks=pytest.mark.slow),
    pytest.param({"update": dm.HeatKernel(1.0), "strides": (1, 3)}, marks=pytest.mark.slow),
    pytest.param(
        {"update": dm.CrankNicolson(1.0), "boundary": "periodic", "per": "channel"}, marks=pytest.mark.exhaustive
    ),
], ids=["explicit", "causal", "heat", "trapezoidal"])  # fmt: skip
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["stacked", "padded"])
def test_diffusion_along_sequences_is_captured(options: dict[str, Any], masked: bool) -> None:
    module = seeded(lambda: dm.PDEDiffusion1d(8, **options))
    compiled = captured(module)
    for size, length in ((3, 12), (4, 19)):
        x = instance(size * length)[0].unflatten(0, (size, length))
        mask = torch.arange(length) < torch.tensor([length, 5, 1, 7])[:size, None] if masked else None
        assert_same(module, compiled, x, mask)


@pytest.mark.slow
@pytest.mark.parametrize("with_graph", [True, False], ids=["graph", "no-graph"])
def test_generated_code_agrees(with_graph: bool) -> None:
    """The default backend compiles C++, which takes a minute."""
    module = seeded(lambda: dm.DIFFormer(8, 6, 3)).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    rtol, atol = tolerance("product", torch.float32)
    for num_nodes in (12, 19):
        x, edge_index, _ = instance(num_nodes)
        arguments = (edge_index,) if with_graph else ()
        torch.testing.assert_close(compiled(x, *arguments), module(x, *arguments), rtol=rtol, atol=atol)


@pytest.mark.parametrize("build", [
    dm.SimpleDiffusivity,
    pytest.param(lambda: dm.NeumannDiffusivity(strides=(1, 3)), marks=pytest.mark.slow),
    pytest.param(lambda: dm.SparseFlowDiffusivity(4), marks=pytest.mark.slow),
    pytest.param(
        lambda: dm.diffusivities.EdgeSparseFlowDiffusivity(4, heads=2, alpha=math.inf), marks=pytest.mark.exhaustive
    ),
    pytest.param(
        lambda: dm.diffusivities.EdgeSparseFlowDiffusivity(4, hops=2, friction="constant"), marks=pytest.mark.slow
    ),
], ids=["simple", "neumann", "sparse-flow", "edge-sparse-flow", "edge-sparse-flow-hops"])  # fmt: skip
def test_check_diffusivity_compiles_on_request(build: Callable[[], nn.Module]) -> None:
    check_diffusivity(build, channels=4, compile=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: dm.DiffusionConv(8, 4, dm.PenaltyDiffusivity(dm.FunctionPenalty(lambda z2: 1 / (1 + z2)), 8,
            projection="separate")),
        pytest.param(lambda: dm.DiffusionConv(8, 4, dm.PenaltyDiffusivity(dm.FunctionPenalty(delta=torch.log1p), 8,
            projection="separate")), marks=pytest.mark.slow),
        lambda: dm.DIFFormerConv(8, 8, tau=nn.Parameter(torch.tensor(0.25))),
    ],
    ids=["f", "delta", "learned-step"],
)  # fmt: skip
def test_a_layer_is_one_graph(build: Callable[[], nn.Module]) -> None:
    conv = build()
    x, edge_index, batch = instance(7)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for inputs in ({}, {"batch": batch}, {"edge_index": dm.Graph(7, edge_index)}):
        torch.testing.assert_close(compiled(x, **inputs), conv(x, **inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_check_update_compiles_on_request() -> None:
    check_update(lambda: dm.ExplicitEuler(0.5), channels=3, compile=True)


def test_edges_are_seen_not_what_was_made_of_others_before():
    """A layer keeps the graph that it made of the same tensors, but never of those it is captured with."""
    layer, x, first = dm.GCNConv(2, 2), torch.rand(4, 2), torch.tensor([[0, 1, 2], [1, 2, 3]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for edge_index in (first, first.flip(0)):
        torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
