"""The last state of ``energies`` is the output: for every certified layer, block and model."""

from collections.abc import Callable
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
from helpers import built, close, randn, refuses

N = 13
C = 6
EDGES = torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(0))
BATCH = torch.arange(3).repeat_interleave(torch.tensor([5, 1, 7]))
KINDS = randn(40, 2, seed=5)
CONSTRAINTS = (None, "nonnegative", "ball", "sphere", "nonnegative_ball")
PENALTIES = (None, "simple", "gaussian", "sigmoid", "quadratic")


def inputs(ragged: bool) -> tuple[tuple[Tensor, Tensor, None, Tensor | None], Tensor]:
    """A state with its edges, far from zero in a batch of graphs, and features of the edges."""
    if not ragged:
        return (0.5 * randn(N, C, seed=1), EDGES, None, None), KINDS
    inside = BATCH[EDGES[0]] == BATCH[EDGES[1]]
    return (3.0 * randn(N, C, seed=1), EDGES[:, inside], None, BATCH), KINDS[inside]


def test_a_gate_multiplies_the_weights_of_edges():
    edges = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    module = WeightedGraph(C, gate=True, matrix="identity").double()
    x = randn(5, C)
    z = randn(5, C, seed=1)
    sender, receiver = edges
    ends = torch.cat([x[sender] + x[receiver], (x[sender] - x[receiver]).abs()], 1)
    weights = torch.zeros(5, 5, dtype=torch.float64)
    weights[receiver, sender] = module.gate(ends).tanh()[:, 0].detach()
    graph = Graph(5, edges)
    half = module(x, graph).half_gradient(z.unsqueeze(1), graph)
    expected = weights.abs().sum(1)[:, None] * z - weights @ z
    close(half[:, 0], module.weight() * expected)


def energies_of_the_run(module: nn.Module, *args: Any, **given: Any) -> Tensor:
    """F of every block before its first step and of its output, from hooks on a call."""
    values: list[Tensor] = []

    def record(block: CertifiedBlock, args: Any, options: Any, out: Tensor) -> None:
        names = {"edge_attr", "beside"} & options.keys()
        others = {name: options[name] for name in names if options[name] is not None}
        source = options.get("source", args[0])
        energy = block.energy(source, Graph.coerce(*args), **others)
        start = block.update.constraint.project(block.by_head(args[0]))
        values.append(torch.stack([energy(start), energy(block.by_head(out))]))

    with ExitStack() as stack, torch.no_grad():
        for block in module.modules():
            if isinstance(block, CertifiedBlock):
                handle = block.register_forward_hook(record, with_kwargs=True)
                stack.callback(handle.remove)
        module(*args, **given)
    return torch.stack(values)


TERMS = {
    "graph": lambda: [WeightedGraph(C)],
    "penalty of neighbours": lambda: [Neighbours(C, penalty="gaussian")],
    "relations": lambda: [WeightedGraph(C, edge_dim=2, symmetric=False, gate=True)],
    "all": lambda: [WeightedGraph(C), RowAttention(C, 2), TiedMLP(C, 5, weight=0.2)],
    "MLP": lambda: [RowAttention(C, neighbours=True), TiedMLP(C, 5, weight=0.2)],
}
SIZES = C, 8, 3
#: How to build each from ``num_layers``.
MODULES: dict[str, Callable[[int | None], nn.Module]] = {
    "difformer": lambda k: CertifiedDIFFormer(*SIZES, k),
    "centred": lambda k: CertifiedDIFFormer(
        *SIZES, k, centre=True, constraint="sphere", heads=2
    ),
    "inputs": lambda k: CertifiedDIFFormer(
        *SIZES, k, penalty=None, inputs=dm.UniformDiffusivity()
    ),
    "tied": lambda k: CertifiedDIFFormer(
        *SIZES, k, penalty="gaussian", projection="tied", constraint="nonnegative"
    ),
    "transformer": lambda k: CertifiedTransformer(*SIZES, 2, k),
    "relations": lambda k: CertifiedTransformer(
        *SIZES, 2, k, edge_dim=2, mlp_channels=4, constraint="ball"
    ),
    "attention": lambda k: CertifiedTransformer(
        *SIZES, 2, k, attention="all", heads=2, constraint="sphere"
    ),
}
for constraint in CONSTRAINTS:
    for name, terms in TERMS.items():
        MODULES[f"block of {name}, {constraint}"] = lambda k, t=terms, c=constraint: (
            CertifiedBlock(C, t(), k, constraint=c)
        )
    for penalty in PENALTIES:
        # The simple penalty needs states near each other.
        if penalty == "simple" and constraint in (None, "nonnegative"):
            continue
        for heads, projection in ((1, None), (2, None), (3, "tied")):
            options = {
                "lam": 0.5,
                "penalty": penalty,
                "constraint": constraint,
                "heads": heads,
                "projection": projection,
            }
            name = f"layer, {penalty}, {constraint}, {heads}, {projection}"
            MODULES[name] = lambda k, o=options: CertifiedConv(C, num_layers=k, **o)


@pytest.mark.parametrize("num_layers", [1, 3, None])
@pytest.mark.parametrize("name", MODULES)
def test_the_ends_of_energies_are_those_of_a_call(
    name: str, num_layers: int | None
) -> None:
    module = built(lambda: MODULES[name](num_layers)).double().eval()
    blocks = [part for part in module.modules() if isinstance(part, CertifiedBlock)]
    convex = all(block.update.constraint.convex for block in blocks)
    for ragged in (False, True):
        args, kinds = inputs(ragged)
        given: dict[str, Tensor] = {}
        if any("edge_attr" in block.reads for block in blocks):
            given["edge_attr"] = kinds
        if ragged and num_layers == 3 and isinstance(module, CertifiedConv):
            given["source"] = 0.3 * args[0].flip(0)
        # On a set that is not convex the steps need not converge, which the limit then says.
        allowed = num_layers is None and not convex
        with suppress(ConvergenceError) if allowed else nullcontext():
            energies = torch.atleast_2d(module.energies(*args, **given))
            assert energies.size(1) == (num_layers or 1) + 1
            ends = energies[:, [0, -1]]
            close(energies_of_the_run(module, *args, **given), ends)


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
