"""The last state of ``energies`` is the output: for every certified layer, block and model."""

from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp import CertifiedDIFFormer, CertifiedTransformer, Graph
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.layers import CertifiedBlock, CertifiedConv
from diffusion_mp.layers.certified_block import (
    Neighbours,
    RowAttention,
    TiedMLP,
    WeightedGraph,
)
from helpers import built, randn, refuses

N = 13
C = 6
EDGES = torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(0))
BATCH = torch.arange(3).repeat_interleave(torch.tensor([5, 1, 7]))
KINDS = randn(40, 2, seed=5)
CONSTRAINTS = (None, "nonnegative", "ball", "sphere", "nonnegative_ball")
PENALTIES = (None, "simple", "gaussian", "sigmoid", "quadratic")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def inputs(
    ragged: bool, scale: float
) -> tuple[Tensor, Tensor, None, Tensor | None, Tensor]:
    kept = (
        BATCH[EDGES[0]] == BATCH[EDGES[1]]
        if ragged
        else torch.ones(40, dtype=torch.bool)
    )
    return (
        scale * randn(N, C, seed=1),
        EDGES[:, kept],
        None,
        BATCH if ragged else None,
        KINDS[kept],
    )


def allowing(block: CertifiedBlock) -> Any:
    """On a set that is not convex the steps need not converge, which the limit then says."""
    if block.num_layers is None and not block.update.constraint.convex:
        return suppress(ConvergenceError)
    return nullcontext()


def convs() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for penalty in PENALTIES:
        for constraint in CONSTRAINTS:
            if penalty == "simple" and constraint in (None, "nonnegative"):
                continue
            for extra in ({}, {"heads": 2}, {"heads": 3, "projection": "tied"}):
                cases.append({"penalty": penalty, "constraint": constraint, **extra})
    return cases


@pytest.mark.parametrize("num_layers", [1, 3, None])
@pytest.mark.parametrize("options", convs(), ids=str)
def test_of_a_layer(options: dict[str, Any], num_layers: int | None) -> None:
    conv = (
        built(lambda: CertifiedConv(C, num_layers=num_layers, lam=0.5, **options))
        .double()
        .requires_grad_(False)
    )
    for ragged, scale in ((False, 0.5), (True, 3.0)):
        x, edges, _, batch, _ = inputs(ragged, scale)
        graph = Graph.coerce(x, edges, None, batch)
        given = {"source": 0.3 * x.flip(0)} if ragged and num_layers == 3 else {}
        with allowing(conv):
            energies = conv.energies(x, edges, None, batch, **given)
            out = conv(x, edges, None, batch, **given)
            energy = conv.energy(given.get("source", x), graph)
            start = conv.update.constraint.project(conv.by_head(x))
            assert len(energies) == (num_layers or 1) + 1
            torch.testing.assert_close(energies[-1], energy(conv.by_head(out)), **CLOSE)
            torch.testing.assert_close(energies[0], energy(start), **CLOSE)


TERMS = {
    "graph": lambda: [WeightedGraph(C)],
    "penalty of neighbours": lambda: [Neighbours(C, penalty="gaussian")],
    "relations": lambda: [WeightedGraph(C, edge_dim=2, symmetric=False, gate=True)],
    "all": lambda: [WeightedGraph(C), RowAttention(C, 2), TiedMLP(C, 5, weight=0.2)],
    "MLP": lambda: [RowAttention(C, neighbours=True), TiedMLP(C, 5, weight=0.2)],
}


@pytest.mark.parametrize("num_layers", [1, 3, None])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("name", TERMS)
def test_of_a_block(name: str, constraint: str | None, num_layers: int | None) -> None:
    block = built(
        lambda: CertifiedBlock(C, TERMS[name](), num_layers, constraint=constraint)
    ).double()
    block.requires_grad_(False)
    for ragged in (False, True):
        x, edges, _, batch, kinds = inputs(ragged, 2.0)
        given = {"edge_attr": kinds} if "edge_attr" in block.reads else {}
        energy = block.energy(x, Graph.coerce(x, edges, None, batch), **given)
        with allowing(block):
            last = block.energies(x, edges, None, batch, **given)[-1]
            out = block(x, edges, None, batch, **given)
            torch.testing.assert_close(last, energy(block.by_head(out)), **CLOSE)


def energies_of_the_run(model: nn.Module, *args: Any, **given: Any) -> Tensor:
    """F of the output of every block, from hooks on a call of the model."""
    values: list[Tensor] = []

    def record(
        block: CertifiedBlock, args: Any, kwargs: dict[str, Any], out: Tensor
    ) -> None:
        x, graph = args[:2]
        others = {
            name: kwargs[name]
            for name in ("edge_attr", "beside")
            if kwargs.get(name) is not None
        }
        source = kwargs.get("source", x)
        values.append(block.energy(source, graph, **others)(block.by_head(out)))

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            if isinstance(module, CertifiedBlock):
                handle = module.register_forward_hook(record, with_kwargs=True)
                stack.callback(handle.remove)
        model(*args, **given)
    return torch.stack(values)


MODELS = {
    "difformer": lambda k: CertifiedDIFFormer(C, 8, 3, k),
    "centred": lambda k: CertifiedDIFFormer(
        C, 8, 3, k, centre=True, constraint="sphere", heads=2
    ),
    "inputs": lambda k: CertifiedDIFFormer(
        C, 8, 3, k, penalty=None, inputs=dm.UniformDiffusivity()
    ),
    "tied": lambda k: CertifiedDIFFormer(
        C, 8, 3, k, penalty="gaussian", projection="tied", constraint="nonnegative"
    ),
    "transformer": lambda k: CertifiedTransformer(C, 8, 3, 2, k),
    "relations": lambda k: CertifiedTransformer(
        C, 8, 3, 2, k, edge_dim=2, mlp_channels=4, constraint="ball"
    ),
    "attention": lambda k: CertifiedTransformer(
        C, 8, 3, 2, k, attention="all", heads=2, constraint="sphere"
    ),
}


@pytest.mark.parametrize("num_layers", [1, 3, None])
@pytest.mark.parametrize("name", MODELS)
def test_of_a_model(name: str, num_layers: int | None) -> None:
    model = built(lambda: MODELS[name](num_layers)).double().eval()
    for ragged in (False, True):
        x, edges, _, batch, kinds = inputs(ragged, 2.0)
        given = {"edge_attr": kinds} if name == "relations" else {}
        with allowing(
            next(
                module
                for module in model.modules()
                if isinstance(module, CertifiedBlock)
            )
        ):
            last = model.energies(x, edges, None, batch, **given)[..., -1].flatten()
            run = energies_of_the_run(model, x, edges, None, batch, **given)
            torch.testing.assert_close(run, last, **CLOSE)


X = torch.rand(4, C)
GRAPH = Graph(4, torch.tensor([[0, 1], [1, 0]]))
ATTR = torch.rand(2, 2)
UNREAD = "takes no edge_attr"
CALLS = ("forward", "energies", "certificate")
SILENT = {
    "block": lambda: CertifiedBlock(
        C, [WeightedGraph(C), RowAttention(C), TiedMLP(C, 2)]
    ),
    "conv": lambda: CertifiedConv(C),
    "transformer": lambda: CertifiedTransformer(C, 4, 2),
    "transformer without a graph": lambda: CertifiedTransformer(
        C, 4, 2, graph=None, edge_dim=2, mlp_channels=2
    ),
}
test_features_of_edges_that_nothing_reads_are_refused = refuses(
    *(
        (
            lambda name=name, call=call: getattr(SILENT[name](), call)(
                X, GRAPH, edge_attr=ATTR
            ),
            TypeError,
            UNREAD,
        )
        for name in SILENT
        for call in CALLS
    ),
    (lambda: SILENT["block"]().energy(X, GRAPH, edge_attr=ATTR), TypeError, UNREAD),
    (
        lambda: next(iter([*SILENT["block"]().states(X, GRAPH, edge_attr=ATTR)])),
        TypeError,
        UNREAD,
    ),
    *(
        (
            lambda call=call: getattr(SILENT["block"](), call)(X, GRAPH, pos=ATTR),
            TypeError,
            "takes no pos",
        )
        for call in CALLS
    ),
)


def test_a_module_of_ones_own_may_read_features_of_edges() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = WeightedGraph(C, edge_dim=2)

        def forward(
            self, source: Tensor, graph: Graph, edge_attr: Tensor | None = None
        ) -> object:
            assert edge_attr is ATTR
            return self.part(source, graph, edge_attr)

    assert CertifiedBlock(C, [Own()]).certificate(X, GRAPH, edge_attr=ATTR)


def test_heads_are_for_terms_without_matrices() -> None:
    with pytest.raises(ValueError, match="heads must be 1"):
        CertifiedBlock(4, [WeightedGraph(4)], heads=2)
