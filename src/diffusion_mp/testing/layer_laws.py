"""The laws every layer and model obeys: PyG's calling convention, symmetries, batches, derivatives, parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_function
from diffusion_mp.graph import Graph
from diffusion_mp.testing.instances import Instance, hub_instance, join
from diffusion_mp.testing.laws import Law, expect, expect_close, expect_rng_untouched, run_laws, seeded
from diffusion_mp.testing.module_laws import (
    ModuleCase,
    check_compiles,
    check_first_derivatives,
    check_reset_parameters,
    check_second_derivatives,
)

Extra = Callable[[Tensor], Mapping[str, Any]]


def _nothing(x: Tensor) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class LayerCase(ModuleCase[nn.Module]):
    """A way to build the layer, and how to call it."""

    extra: Extra

    def __call__(self, module: nn.Module, at: Instance, **options: Any) -> Any:
        return module(at.x, at.edge_index, at.edge_weight, at.batch, **self.extra(at.x), **options)


def check_layer(
    layer: nn.Module | Callable[[], nn.Module],
    *,
    in_channels: int | None = None,
    edges: bool = True,
    extra: Extra = _nothing,
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check a layer or a model called as ``layer(x, edge_index, edge_weight, batch)`` on small random graphs.

    It is checked in evaluation mode, so dropout does not disturb the comparisons.

    Args:
        layer: an instance (which is copied, never changed), or a function that builds one.
        in_channels: C of the states; by default its attribute ``in_channels``.
        edges: whether the graphs have observed edges (False: ``edge_index`` is None throughout).
        extra: further keyword arguments as a function of the state, such as ``lambda x: {"source": x}``.
        skip: law name → the reason why it does not apply.
        compile: also capture one full graph with `torch.compile` (seconds).
        seed: of states, graphs and parameters.

    Raises:
        AssertionError: with one sentence per broken law: class, law, got, expected.
    """
    fresh = not isinstance(layer, nn.Module)
    if fresh:
        check_function(layer, "layer", "that builds a torch.nn.Module, or one")
    with seeded(seed):
        sample = layer() if fresh else layer
    if not isinstance(sample, nn.Module):
        raise TypeError(f"layer must be or build a torch.nn.Module, got {type(sample).__name__}")
    build: Callable[[], nn.Module] = layer if fresh else lambda: copy.deepcopy(sample)
    channels = in_channels if in_channels is not None else getattr(sample, "in_channels", None)
    if not isinstance(channels, int):
        raise ValueError(f"{type(sample).__name__} has no attribute in_channels; pass check_layer(..., in_channels=C)")
    case = LayerCase(build, channels, edges, compile, seed, fresh, extra)
    run_laws(type(sample).__name__, LAYER_LAWS, case, skip)


def _output(case: LayerCase) -> None:
    """the output is [N, out_channels], finite, in the dtype of the input"""
    module, instance = case.module(), case.instance()
    out = case(module, instance)
    expect(isinstance(out, Tensor), f"forward returned {type(out).__name__}, expected a tensor")
    expect(out.dim() == 2, f"the output has shape {tuple(out.shape)}, expected [N, C]")
    expect(out.shape[0] == instance.num_nodes, f"the output has {out.shape[0]} rows, expected {instance.num_nodes}")
    expect(out.dtype == instance.x.dtype, f"the output is {out.dtype}, expected {instance.x.dtype}")
    expect(bool(out.isfinite().all()), "the output is not finite")


def _permutation(case: LayerCase) -> None:
    """renaming the nodes renames the rows of the output"""
    module, instance, generator = case.module(), case.instance(), case.generator()
    order = torch.randperm(instance.num_nodes, generator=generator)
    got = case(module, instance.permuted(order, generator))
    expect_close(got, case(module, instance)[order], "rearranged", "the output for the renamed nodes")


def _batching(case: LayerCase) -> None:
    """a graph alone, in a batch, and in the batch in another order has the same output"""
    module, parts = case.module(), case.batch()
    alone = [case(module, part) for part in parts]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        got = case(module, join([parts[k] for k in order]))
        expected = torch.cat([alone[k] for k in order])
        expect_close(got, expected, "rearranged", f"the output of the batch in the order {order}")


def _poisoned_batch_mate(case: LayerCase) -> None:
    """NaN in one graph of a batch reaches no other graph"""
    module, parts = case.module(), case.batch()
    joined, first = join(parts), parts[0].num_nodes
    clean = case(module, joined)
    joined.x[:first] = torch.nan
    got = case(module, joined)
    expect_close(got[first:], clean[first:], "rearranged", "the output of the other graphs")


def _unit_weights(case: LayerCase) -> None:
    """weights of one are no weights"""
    if not case.edges:
        return
    module, part = case.module(), case.instance()
    assert part.edge_index is not None
    ones = torch.ones(part.edge_index.shape[1], dtype=part.x.dtype)
    extra = case.extra(part.x)
    expect_close(
        module(part.x, part.edge_index, ones, **extra),
        module(part.x, part.edge_index, **extra),
        "rearranged",
        "the output with weights of one",
    )


def _graph_in_place_of_edges(case: LayerCase) -> None:
    """a Graph or a sparse matrix in place of edge_index gives the same output"""
    module, joined = case.module(), join(case.batch())
    expected = case(module, joined)
    extra = case.extra(joined.x)
    graph = Graph(joined.num_nodes, joined.edge_index, joined.edge_weight, batch=joined.batch)
    expect_close(module(joined.x, graph, **extra), expected, "rearranged", "the output for a Graph")
    if joined.edge_index is None or joined.edge_weight is None:
        return
    # a sparse matrix holds one entry per pair; the sum of repeated edges is a different graph to an edge attention
    source, target = joined.edge_index
    size = (joined.num_nodes, joined.num_nodes)
    pairs = torch.stack([target, source])
    matrix = torch.sparse_coo_tensor(pairs, joined.edge_weight, size, check_invariants=True).coalesce()
    edge_index = matrix.indices().flip(0)
    expected = module(joined.x, edge_index, matrix.values(), joined.batch, **extra)
    got = module(joined.x, matrix.to_sparse_csr(), None, joined.batch, **extra)
    expect_close(got, expected, "rearranged", "the output for a sparse CSR matrix (row = target)")


def _edge_cases(case: LayerCase) -> None:
    """a single node, isolated nodes and no node at all have finite outputs and gradients"""
    module, generator = case.module(), case.generator()
    five = case.instance(5, generator)
    isolated = Instance(torch.cat([five.x, five.x]), five.edge_index, five.edge_weight, torch.tensor([0, 10]))
    for name, instance in (("a single node", case.instance(1, generator)), ("five isolated nodes", isolated)):
        leaf = instance.x.clone().requires_grad_()
        out = case(module, Instance(leaf, instance.edge_index, instance.edge_weight, instance.ptr))
        expect(bool(out.isfinite().all()), f"{name} gives an output that is not finite")
        leaves = [leaf, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
        for grad in torch.autograd.grad(out.square().sum(), leaves, allow_unused=True):
            expect(grad is None or bool(grad.isfinite().all()), f"{name} gives a gradient that is not finite")
    edges = None if five.edge_index is None else five.edge_index[:, :0]
    nothing = Instance(five.x[:0], edges, None, torch.tensor([0, 0]))
    out = case(module, nothing)
    expect(out.shape[0] == 0, f"no node at all gives an output of shape {tuple(out.shape)}")


def _first_derivatives(case: LayerCase) -> None:
    """gradients with respect to the state and the parameters agree with finite differences in double"""
    check_first_derivatives(*_differentiable(case))


def _second_derivatives(case: LayerCase) -> None:
    """second derivatives agree with finite differences, or are refused in words"""
    check_second_derivatives(*_differentiable(case))


def _half_precision(case: LayerCase) -> None:
    """in bfloat16 sums over nodes are taken in float32"""
    brain = case.module().to(torch.bfloat16)
    reference = copy.deepcopy(brain).double()
    instance = hub_instance(600, case.channels, case.generator(), edges=case.edges).to(torch.bfloat16)
    got, expected = case(brain, instance), case(reference, instance.to(torch.float64))
    expect(got.dtype == torch.bfloat16, f"the output is {got.dtype}, expected bfloat16")
    size = expected.abs().amax(dim=1, keepdim=True)
    # Rounding is relative to what was added up: terms may cancel in a row.
    size = size.clamp(min=float(size.detach().median()))
    expect_close(got.double() / size, expected / size, "autocast", "the output in bfloat16")


def _autocast(case: LayerCase) -> None:
    """under autocast the output stays finite and close"""
    module, instance = case.module(torch.float32), case.instance().to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case(module, instance)
    expect_close(got.float(), case(module, instance), "autocast", "the output under autocast")


def _purity(case: LayerCase) -> None:
    """it leaves the state, the edges and the global random state alone, and repeats"""
    module, instance = case.module(), join(case.batch())
    before = copy.deepcopy(instance)
    with expect_rng_untouched("forward"):
        first, second = case(module, instance), case(module, instance)
    expect(torch.equal(instance.x, before.x), "forward changed x in place")
    for name in ("edge_index", "edge_weight"):
        now, then = getattr(instance, name), getattr(before, name)
        expect(now is None or torch.equal(now, then), f"forward changed {name} in place")
    expect(torch.equal(first, second), "two calls with the same state differ")


def _returned_coupling(case: LayerCase) -> None:
    """return_coupling=True adds the coupling of the step and leaves the output as it is"""
    module, instance = case.module(), join(case.batch())
    expected = case(module, instance)
    out, couplings = case(module, instance, return_coupling=True)
    expect_close(out, expected, "rearranged", "the output beside the coupling")
    for coupling in couplings if isinstance(couplings, (list, tuple)) else [couplings]:
        expect(isinstance(coupling, Coupling), f"the returned coupling is {type(coupling).__name__}")
        expect(
            coupling.num_nodes == instance.num_nodes,
            f"the returned coupling has {coupling.num_nodes} nodes, expected {instance.num_nodes}",
        )


def _reset_parameters(case: LayerCase) -> None:
    """reset_parameters() from a seed equals a fresh module of that seed in every parameter"""
    check_reset_parameters(case.build, case.fresh, case.seed)


def _state_dict(case: LayerCase) -> None:
    """a state_dict carries the whole layer"""
    module, instance = case.module(), case.instance()
    with seeded(case.seed + 1):
        other = case.build().double().eval()
    other.load_state_dict(module.state_dict())
    expect_close(case(other, instance), case(module, instance), "rearranged", "the output after load_state_dict")


def _readable(case: LayerCase) -> None:
    """its repr names the class"""
    module = case.module()
    expect(type(module).__name__ in repr(module), f"repr is {module!r}")


def _compile(case: LayerCase) -> None:
    """torch.compile captures one full graph with a dynamic number of nodes"""
    if not case.compile:
        return
    module = case.module(torch.float32)

    def forward(x: Tensor, edge_index: Tensor | None) -> Tensor:
        out: Tensor = module(x, edge_index, **case.extra(x))
        return out

    instances = [case.instance(size).to(torch.float32) for size in (7, 11)]
    check_compiles(forward, [(instance.x, instance.edge_index) for instance in instances])


LAYER_LAWS: tuple[Law[LayerCase], ...] = (
    _output,
    _permutation,
    _batching,
    _poisoned_batch_mate,
    _unit_weights,
    _graph_in_place_of_edges,
    _edge_cases,
    _first_derivatives,
    _second_derivatives,
    _half_precision,
    _autocast,
    _purity,
    _returned_coupling,
    _reset_parameters,
    _state_dict,
    _readable,
    _compile,
)


def _differentiable(case: LayerCase) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    module, instance = case.module(), case.instance(5)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = case(module, Instance(x, instance.edge_index, instance.edge_weight, instance.ptr))
        return out

    return module, forward, instance.x
