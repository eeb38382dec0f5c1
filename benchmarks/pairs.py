"""What benchmarks/ratios.py compares: operations, layers on Cora, on batches and on large graphs, and models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import textbook
import torch
from batches import batch_of, with_ring
from operations import OPERATIONS, Operation
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric import nn as pyg
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.attention import SGFormerAttention
from torch_geometric.utils import coalesce, to_undirected

import diffusion_mp as mp
from diffusion_mp.graph import Graph

#: Ways of operations that compute less than the operation, and stand for a limit.
LIMITS = ("its products alone", "a copy")


@dataclass(frozen=True)
class Side:
    """One way to compute something: called without gradients, and with the gradients of some leaves."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    module: nn.Module | None = None
    train: Callable[[], Any] | None = None
    """A training step; by default the gradients of the leaves."""

    def step(self, grad: Tensor) -> Any:
        """Forward and backward."""
        if self.train:
            return self.train()
        out = self.call()
        return torch.autograd.grad(out, self.leaves, grad.view(out.shape))


@dataclass(frozen=True, eq=False)
class Pair:
    """The library and another way."""

    what: str
    where: str
    """The input."""
    other: str
    sides: Callable[[], tuple[Side, Side]]
    """A function that makes the library's side and the other side."""
    targets: dict[str, float] = field(
        default_factory=lambda: {"forward": 1.0, "step": 1.0}
    )
    """By what is timed, how many times the library's time the other side should take."""
    same: bool = True
    """Whether both do the same work: then their results have to agree."""
    nodes: int = 0
    """N if the pair is a point of a line over N."""

    @property
    def name(self) -> str:
        return f"{self.what} | {self.where} | {self.other}"


def pairs() -> Iterator[Pair]:
    """Yield all pairs, small pairs first."""
    for name, operation in OPERATIONS.items():
        yield from of_operation(name, operation)
    yield from layers_on_cora()
    yield from certified_on_cora()
    yield from certified_on_batches()
    yield from layers_on_batches()
    yield from layers_on_a_large_graph()
    yield from models_on_cora()


# ---------------------------------------------------------------- operations


def of_operation(name: str, operation: Operation) -> Iterator[Pair]:
    """The library and every other way that computes the same, at all sizes up to some 10⁵ nodes."""
    for nodes in operation.sizes:
        for other, way in operation.ways.items():
            if other in ("library", *LIMITS) or nodes > min(way.largest, 300_000):
                continue
            targets = {"forward": 1.0, "step": 1.0} if way.trains else {"forward": 1.0}
            if name == "linear_attention":
                targets["step"] = (
                    1.5 if 1_000 <= nodes < 10_000 else 2.0 if nodes >= 10_000 else 1.0
                )
            if name.endswith(
                "_of_one_state"
            ):  # compiled ones have to be level at all sizes
                targets["forward"] = targets["step"] = 1.0 if nodes >= 1_000 else 0.8
            if name == "linear_attention_of_one_state" and nodes >= 10_000:
                targets["step"] = 2.0 if nodes >= 65_536 else 1.5
            if name.startswith(
                ("linear_attention_MUTAG", "linear_attention_of_one_state_MUTAG")
            ):
                targets["step"] = 2.0
            if name.startswith(
                ("linear_attention_PROTEINS", "linear_attention_of_one_state_PROTEINS")
            ):
                targets["step"] = 5.0
            both = partial(sides_of_operation, operation, nodes, other)
            # The textbook's 200 proximal steps are far from the solution, and each way computes as many.
            same = name != "sparse_flow"
            yield Pair(
                name.replace("_", " "),
                f"N = {nodes:,}",
                other,
                both,
                targets,
                same,
                nodes,
            )


def sides_of_operation(
    operation: Operation, nodes: int, other: str
) -> tuple[Side, Side]:
    """The same inputs for both."""

    def side(way: str) -> Side:
        inputs = operation.inputs(nodes, torch.Generator().manual_seed(0))
        leaves = [
            x.requires_grad_(operation.ways[way].trains)
            for x in inputs[: operation.leaves]
        ]
        forward = operation.ways[way].forward
        # Without a look at all functions and constants of modules in every call.
        if operation.compiled:
            options = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
            forward = torch.compile(
                forward, fullgraph=True, dynamic=False, options=options
            )
        return Side(partial(forward, *inputs), leaves)

    torch.compiler.reset()  # which has a limit for what it compiles of one function
    return side("library"), side(other)


# ---------------------------------------------------------------- layers


def side_of_module(
    module: nn.Module,
    x: Tensor,
    parameters: Iterable[Tensor],
    *rest: Any,
    call: Callable[..., Tensor] | None = None,
) -> Side:
    """A layer called with a state; gradients of the state and of the parameters."""
    x = x.clone().requires_grad_()
    return Side(partial(call or module, x, *rest), [x, *parameters], module)


def copied(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """The same numbers in both layers, whose parameters correspond up to their shape."""
    with torch.no_grad():
        for a, b in zip(mine, theirs, strict=True):
            b.copy_(a.view_as(b))


def two_layers(
    make: Callable[[], tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]],
    graph: Callable[[], tuple[Tensor, Any, tuple[Any, ...]]],
) -> tuple[Side, Side]:
    """Layers with the same parameters on a state; with the further inputs of the library's layer and of the other."""
    torch.manual_seed(0)
    mine, my_parameters, theirs, their_parameters = make()
    copied(my_parameters, their_parameters)
    x, given, others = graph()
    return side_of_module(mine, x, my_parameters, given), side_of_module(
        theirs, x, their_parameters, *others
    )


@cache
def cora() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, labels, edges and training mask of Cora where it is at hand, else random ones of its size."""
    root = Path(os.environ.get("DIFFUSION_MP_DATA", "data"), "Planetoid")
    if (root / "Cora").is_dir():
        data = Planetoid(str(root), "Cora")[0]
        return data.x, data.y, data.edge_index, data.train_mask
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(2_708, 1_433, generator=generator) < 0.0127).float()
    edges = to_undirected(torch.randint(2_708, (2, 5_278), generator=generator))
    y = torch.randint(7, (2_708,), generator=generator)
    return x, y, edges, torch.arange(2_708) < 140


def gcn() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    mine = mp.GCNConv(64, 64)
    theirs = pyg.GCNConv(64, 64)
    return (
        mine,
        [mine.value.weight, mine.bias],
        theirs,
        [theirs.lin.weight, theirs.bias],
    )


def gat() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    mine = mp.GATConv(64, 8, 8)
    theirs = pyg.GATConv(64, 8, 8)
    of_mine = [
        mine.value.weight,
        mine.diffusivity.att_src,
        mine.diffusivity.att_dst,
        mine.bias,
    ]
    return (
        mine,
        of_mine,
        theirs,
        [theirs.lin.weight, theirs.att_src, theirs.att_dst, theirs.bias],
    )


def appnp() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    return mp.APPNPConv(64, 10, 0.1), [], pyg.APPNP(10, 0.1), []


def gin() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    first, second = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)
    )
    mine = mp.GINConv(64, first)
    theirs = pyg.GINConv(second)
    return mine, list(mine.mlp.parameters()), theirs, list(theirs.nn.parameters())


def sgformer() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    mine = mp.SGFormerConv(64, 64, beta=1.0)
    theirs = SGFormerAttention(64, 1, 64)
    of_mine = [
        mine.diffusivity.query.weight,
        mine.diffusivity.key.weight,
        mine.value.weight,
    ]
    return mine, of_mine, theirs, [theirs.q.weight, theirs.k.weight, theirs.v.weight]


def cora_state(kept: bool) -> tuple[Tensor, Any, tuple[Any, ...]]:
    """64 channels on Cora's nodes; the library's layer is given the edges as they come, or a Graph."""
    _, _, edges, _ = cora()
    x = torch.randn(2_708, 64, generator=torch.Generator().manual_seed(0))
    return x, Graph(2_708, edges) if kept else edges, (edges,)


def layers_on_cora() -> Iterator[Pair]:
    """PyG's layers of the same name, forward and backward."""
    for name, make in {
        "GCNConv": gcn,
        "GATConv, 8 × 8": gat,
        "APPNP, 10 steps": appnp,
        "GINConv": gin,
    }.items():
        for given, kept, target in (("edge_index", False, 1.0), ("Graph", True, 1.3)):
            both = partial(two_layers, make, partial(cora_state, kept))
            target = 1.0 if name == "GINConv" else target
            yield Pair(
                name, f"Cora, {given}", "PyG", both, {"forward": target, "step": target}
            )

    def alone() -> tuple[Tensor, Any, tuple[Any, ...]]:
        x = torch.randn(2_708, 64, generator=torch.Generator().manual_seed(0))
        return x, None, ()

    def both() -> tuple[Side, Side]:
        mine, theirs = two_layers(sgformer, alone)
        layer = theirs.module
        x = theirs.leaves[0]
        return mine, Side(
            lambda: layer(x.unsqueeze(0)).squeeze(0), theirs.leaves, layer
        )

    yield Pair("SGFormer's attention", "Cora", "PyG", both)

    def gated() -> tuple[Side, Side]:
        x, graph, (edges,) = cora_state(True)
        mine = mp.GatedGCNConv(64)
        theirs = pyg.ResGatedGraphConv(64, 64)
        # There are no features of edges.
        used = [
            weight
            for name, weight in mine.named_parameters()
            if not name.startswith("edge")
        ]
        return side_of_module(mine, x, used, graph), side_of_module(
            theirs, x, theirs.parameters(), edges
        )

    # PyG's gates are not divided by their sums, and it has neither normalisation nor residual.
    yield Pair(
        "GatedGCNConv", "Cora, Graph", "PyG's ResGatedGraphConv", gated, same=False
    )


def certified_on_cora() -> Iterator[Pair]:
    """Certified steps and as many of PyG's APPNP and GCN; the state at rest, by conjugate gradients here and there."""
    steps = 16

    def block(matrix: Any, num_layers: int | None) -> nn.Module:
        torch.manual_seed(0)
        term = mp.layers.WeightedGraph(64, normalization="sym", matrix=matrix)
        constraint = "nonnegative" if num_layers else None
        return mp.layers.CertifiedBlock(
            64, [term], num_layers=num_layers, constraint=constraint
        )

    def gcns() -> nn.Module:
        return pyg.Sequential(
            "x, edges", [(pyg.GCNConv(64, 64), "x, edges -> x") for _ in range(steps)]
        )

    def both(matrix: Any, other: Callable[[], nn.Module]) -> tuple[Side, Side]:
        mine = block(matrix, steps)
        theirs = other()
        x, graph, others = cora_state(True)
        parameters = list(mine.parameters()), list(theirs.parameters())
        return side_of_module(mine, x, parameters[0], graph), side_of_module(
            theirs, x, parameters[1], *others
        )

    def appnp() -> nn.Module:
        return pyg.APPNP(steps, 0.1)

    for matrix, name, other in (
        ("identity", "APPNP", appnp),
        ("full", "APPNP", appnp),
        ("full", "GCNConv", gcns),
    ):
        target = 1.0 if name == "GCNConv" else 2.0
        targets = {"forward": target, "step": target}
        sides = partial(both, matrix, other)
        what = f"CertifiedBlock, matrix={matrix!r}"
        yield Pair(
            what, f"Cora, {steps} steps", f"PyG's {name}", sides, targets, same=False
        )

    def at_rest() -> tuple[Side, Side]:
        """βZ + kZ − AZB = βH in float32, to the relative residual that the library asks for."""
        mine = block("full", None)
        x, graph, _ = cora_state(True)
        with torch.no_grad():
            (term, _), beta = mine.energy(x, graph).terms, mine.beta().item()
            mu = float(term.weight)
            graph_term = term.term
            matrix = mu * graph_term.matrix[0].mT.numpy()
            diagonal = beta + mu * graph_term.degree[:, 0].numpy()
            adjacency = csr_array(graph_term.forward.to_dense()[0].numpy())

        def product(v: Any) -> Any:
            z = v.reshape(x.shape)
            return (diagonal * z - adjacency @ z @ matrix).ravel()

        def theirs() -> Tensor:
            operator = LinearOperator((x.numel(), x.numel()), product, dtype=np.float32)
            found, left_over = cg(operator, beta * x.numpy().ravel(), rtol=1e-6)
            assert not left_over
            return torch.from_numpy(found).view(x.shape)

        return Side(partial(mine, x, graph), [], mine), Side(theirs, [])

    yield Pair(
        "CertifiedBlock, at rest",
        "Cora",
        "SciPy's conjugate gradients",
        at_rest,
        {"forward": 1.0},
    )


def certified_on_batches() -> Iterator[Pair]:
    """`CertifiedTransformer` and as many layers of GINE, on molecules with four types of bonds."""
    num_nodes = 3_000
    graph = batch_of("ZINC", num_nodes)
    edges = with_ring(graph)
    generator = torch.Generator().manual_seed(0)
    # The same in both directions.
    kinds = torch.randint(4, (edges.size(1) // 2,), generator=generator).repeat(2)
    attr = torch.eye(4)[kinds]
    x = torch.randn(num_nodes, 64, generator=generator)

    def both() -> tuple[Side, Side]:
        torch.manual_seed(0)
        mine = mp.CertifiedTransformer(
            64, 64, 64, 4, 1, edge_dim=4, mlp_channels=64, layer_norm=True
        )

        def layer() -> nn.Module:
            return pyg.GINEConv(
                nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
                edge_dim=4,
            )

        theirs = pyg.Sequential(
            "x, edges, attr", [(layer(), "x, edges, attr -> x") for _ in range(4)]
        )
        of_mine = side_of_module(
            mine,
            x,
            mine.parameters(),
            Graph(num_nodes, edges),
            call=partial(mine, edge_attr=attr),
        )
        return of_mine, side_of_module(theirs, x, theirs.parameters(), edges, attr)

    half = {"forward": 0.5, "step": 0.5}
    where = f"ZINC, N = {num_nodes:,}"
    yield Pair(
        "CertifiedTransformer, 4 blocks",
        where,
        "PyG's GINEConv, 4 layers",
        both,
        half,
        same=False,
    )


def gps() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
    """GraphGPS's layer with a GCN and softmax attention of four heads."""
    attention = mp.SoftmaxDiffusivity(
        64, heads=4, projection="separate", head_channels=16, normalize=None
    )
    mixed = mp.MultiHeadConv(64, 64, attention, 4, head_channels=16)
    mine = mp.layers.GPSBlock(64, mp.GCNConv(64, 64), mixed, norm="batch")
    theirs = pyg.GPSConv(64, pyg.GCNConv(64, 64), heads=4)
    # PyG's projections of queries, keys and values are one matrix, with a bias.
    with torch.no_grad():
        projections = [attention.query.weight, attention.key.weight, mixed.value.weight]
        theirs.attn.in_proj_weight.copy_(torch.cat(projections))
        theirs.attn.in_proj_bias.zero_()
    ours = (mixed.mix, *mine.ffn)
    others = (theirs.attn.out_proj, *theirs.mlp)
    of_mine = [
        mine.local.value.weight,
        *(p for layer in ours for p in layer.parameters()),
    ]
    return (
        mine,
        of_mine,
        theirs,
        [theirs.conv.lin.weight, *(p for layer in others for p in layer.parameters())],
    )


def layers_on_batches() -> Iterator[Pair]:
    """GraphGPS's layer and PyG's, and layers on a batch and the same on one graph of as many nodes."""
    for data, num_nodes in (("MUTAG", 3_371), ("PROTEINS", 7_265), ("ZINC", 3_000)):
        graph = batch_of(data, num_nodes)
        edges = with_ring(graph)
        x = torch.randn(num_nodes, 64, generator=torch.Generator().manual_seed(0))
        batch = Graph(num_nodes, edges, batch=graph.batch)

        def state(
            x: Tensor = x, batch: Graph = batch, edges: Tensor = edges
        ) -> tuple[Tensor, Any, tuple[Any, ...]]:
            return x, batch, (edges, batch.batch)

        where = f"{data}, N = {num_nodes:,}"
        yield Pair(
            "GPSBlock, softmax", where, "PyG's GPSConv", partial(two_layers, gps, state)
        )

        def both(
            make: Callable[[], nn.Module],
            x: Tensor = x,
            batch: Graph = batch,
            edges: Tensor = edges,
        ) -> tuple[Side, Side]:
            torch.manual_seed(0)
            layer = make()
            parameters = list(layer.parameters())
            one = Graph(x.size(0), edges)
            return side_of_module(layer, x, parameters, batch), side_of_module(
                layer, x, parameters, one
            )

        for layer in (mp.DIFFormerConv, mp.NodeFormerConv):
            make = partial(layer, 64, 64)
            half = {"forward": 0.5, "step": 0.5}
            yield Pair(
                layer.__name__,
                where,
                "the same on one graph",
                partial(both, make),
                half,
                same=False,
            )


@cache
def large_graph() -> tuple[Tensor, Tensor]:
    """100 000 nodes with 64 channels, a million edges."""
    generator = torch.Generator().manual_seed(0)
    edges = coalesce(torch.randint(100_000, (2, 1_000_000), generator=generator))
    return torch.randn(100_000, 64, generator=generator), edges


def layers_on_a_large_graph() -> Iterator[Pair]:
    """GIN and PyG's GIN; the layer of the README and the layer that is written for it."""
    where = "N = 100,000, E = 1,000,000"

    def state() -> tuple[Tensor, Any, tuple[Any, ...]]:
        x, edges = large_graph()
        return x, edges, (edges,)

    yield Pair("GINConv", where, "PyG", partial(two_layers, gin, state))

    def readme() -> tuple[nn.Module, list[Tensor], nn.Module, list[Tensor]]:
        diffusivity = 0.5 * mp.SimpleDiffusivity() + 0.5 * mp.AdjacencyDiffusivity(
            "sym"
        )
        mine = mp.DiffusionConv(64, 64, diffusivity, mp.ExplicitEuler(tau=0.5))
        theirs = mp.DIFFormerConv(
            64,
            64,
            graph="mean",
            self_loops="keep",
            transform=True,
            keep="values",
            bias=True,
        )
        return mine, list(mine.parameters()), theirs, list(theirs.parameters())

    slower = {"forward": 1 / 1.2, "step": 1 / 1.2}
    yield Pair(
        "README's layer",
        where,
        'DIFFormerConv(graph="mean")',
        partial(two_layers, readme, state),
        slower,
    )


# ---------------------------------------------------------------- models


def models_on_cora() -> Iterator[Pair]:
    """DIFFormer-s, 8 layers × 64: a training step and an evaluation; sparse features, and dense ones."""

    def both(projection: str | None, sparse: bool) -> tuple[Side, Side]:
        x, y, edges, mask = cora()
        torch.manual_seed(0)
        former = {"tau": 0.5, "layer_norm": True, "dropout": 0.2}
        mine = mp.DIFFormer(
            1_433, 64, 7, 8, projection=projection, self_loops="keep", **former
        )
        theirs = textbook.DIFFormer(1_433, 64, 7, 8, rate=0.2)
        if projection:
            copied(
                [
                    *mine.encoder.parameters(),
                    *mine.decoder.parameters(),
                    *mine.norms.parameters(),
                ]
                + [conv.diffusivity.attention.query.weight for conv in mine.convs]
                + [conv.diffusivity.attention.key.weight for conv in mine.convs],
                [
                    *theirs.encoder.parameters(),
                    *theirs.decoder.parameters(),
                    *theirs.norms.parameters(),
                ]
                + [layer.weight for layer in (*theirs.queries, *theirs.keys)],
            )
        my_x = x.to_sparse_csr() if sparse else x
        graph = Graph(2_708, edges)
        return trained(mine, (my_x, graph), y, mask), trained(
            theirs, (x, edges), y, mask
        )

    where = "Cora, 8 layers × 64"
    targets = {"forward": 1.0, "step": 2.0}
    for name, projection, sparse in (
        ("DIFFormer-s, sparse x", None, True),
        ("DIFFormer-s", None, False),
        ("DIFFormer-s with projections, sparse x", "separate", True),
        ("DIFFormer-s with projections", "separate", False),
    ):
        yield Pair(
            name,
            where,
            "the released form",
            partial(both, projection, sparse),
            targets if sparse and projection is None else {"forward": 1.0, "step": 1.0},
            same=projection is not None,
        )


def trained(model: nn.Module, inputs: tuple[Any, ...], y: Tensor, mask: Tensor) -> Side:
    """A model that is trained with Adam; its evaluation is the forward pass."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        cross_entropy(model(*inputs)[mask], y[mask]).backward()
        optimizer.step()

    return Side(
        partial(model, *inputs),
        [model.encoder.weight, model.decoder.weight],
        model,
        train,
    )
