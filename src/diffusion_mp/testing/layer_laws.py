"""The laws every layer and model obeys: PyG's calling convention, and what `MODULE_LAWS` ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.graph import Graph
from diffusion_mp.testing.instances import Instance, join
from diffusion_mp.testing.laws import Law, Level, expect, expect_close, run_laws, seeded
from diffusion_mp.testing.module_laws import MODULE_LAWS, ModuleCase, builder

Extra = Callable[[Tensor], Mapping[str, Any]]


def _nothing(x: Tensor) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class LayerCase(ModuleCase[nn.Module]):
    """A layer and what is passed to it beside the state and the graph."""

    extra: Extra

    def response(self, module: nn.Module, instance: Instance) -> Tensor:
        out: Tensor = self.call(module, instance)
        return out

    def call(self, module: nn.Module, at: Instance, **options: Any) -> Any:
        """As PyG calls a layer."""
        return module(at.x, at.edge_index, at.edge_weight, at.batch, **self.extra(at.x), **options)

    def step(self, module: nn.Module) -> Callable[[Tensor, Tensor | None], Tensor]:
        def forward(x: Tensor, edge_index: Tensor | None) -> Tensor:
            out: Tensor = module(x, edge_index, **self.extra(x))
            return out

        return forward

    def size(self, response: Tensor) -> Tensor:
        """Rounding is relative to what was added up: terms may cancel in a row, so small rows count as median ones."""
        size = response.abs().amax(dim=1, keepdim=True)
        return size.clamp(min=float(size.detach().median()))


def check_layer(
    layer: nn.Module | Callable[[], nn.Module],
    *,
    in_channels: int | None = None,
    edges: bool = True,
    extra: Extra = _nothing,
    level: Level = "strict",
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
        level: ``"strict"``, everything the library's own classes obey; or ``"core"``, without second derivatives, half
            precision, autocast and the like, for a first version.
        skip: law name → the reason why it does not apply.
        compile: also capture one full graph with `torch.compile` (seconds).
        seed: of states, graphs and parameters.

    Raises:
        AssertionError: with one sentence per broken law: class, law, got, expected.

    Examples:
        >>> check_layer(lambda: GCNConv(4, 3), in_channels=4)
    """
    build, fresh, sample = builder(layer, "layer", nn.Module, seed)
    channels = in_channels if in_channels is not None else getattr(sample, "in_channels", None)
    if not isinstance(channels, int):
        raise ValueError(f"{type(sample).__name__} has no attribute in_channels; pass check_layer(..., in_channels=C)")
    case = LayerCase(build, fresh, channels, edges, compile, seed, extra)
    run_laws(type(sample).__name__, LAYER_LAWS, case, skip or {}, level=level)


def _output(case: LayerCase) -> None:
    """the output is [N, out_channels], finite, in the dtype of the input"""
    module, instance = case.module(), case.instance()
    out = case.response(module, instance)
    expect(isinstance(out, Tensor), f"forward returned {type(out).__name__}, expected a tensor")
    expect(out.dim() == 2, f"the output has shape {tuple(out.shape)}, expected [N, C]")
    expect(out.shape[0] == instance.num_nodes, f"the output has {out.shape[0]} rows, expected {instance.num_nodes}")
    expect(out.dtype == instance.x.dtype, f"the output is {out.dtype}, expected {instance.x.dtype}")
    expect(bool(out.isfinite().all()), "the output is not finite")


def _unit_weights(case: LayerCase) -> None:
    """weights of one are no weights"""
    if not case.edges:
        return
    module, part = case.module(), case.instance()
    assert part.edge_index is not None
    ones = torch.ones(part.edge_index.shape[1], dtype=part.x.dtype)
    extra = case.extra(part.x)
    weighted, plain = module(part.x, part.edge_index, ones, **extra), module(part.x, part.edge_index, **extra)
    expect_close(weighted, plain, "rearranged", "the output with weights of one")


def _graph_in_place_of_edges(case: LayerCase) -> None:
    """a Graph or a sparse matrix in place of edge_index gives the same output"""
    module, joined = case.module(), join(case.batch())
    expected = case.response(module, joined)
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


def _returned_coupling(case: LayerCase) -> None:
    """return_coupling=True adds the coupling of the step and leaves the output as it is"""
    module, instance = case.module(), join(case.batch())
    expected = case.response(module, instance)
    out, couplings = case.call(module, instance, return_coupling=True)
    expect_close(out, expected, "rearranged", "the output beside the coupling")
    for coupling in couplings if isinstance(couplings, (list, tuple)) else [couplings]:
        expect(isinstance(coupling, Coupling), f"the returned coupling is {type(coupling).__name__}")
        expect(
            coupling.num_nodes == instance.num_nodes,
            f"the returned coupling has {coupling.num_nodes} nodes, expected {instance.num_nodes}",
        )


def _state_dict(case: LayerCase) -> None:
    """a state_dict carries the whole layer"""
    module, instance = case.module(), case.instance()
    with seeded(case.seed + 1):
        other = case.build().double().eval()
    other.load_state_dict(module.state_dict())
    got, expected = case.response(other, instance), case.response(module, instance)
    expect_close(got, expected, "rearranged", "the output after load_state_dict")


LAYER_LAWS: tuple[Law[LayerCase], ...] = (
    _output,
    _unit_weights,
    _graph_in_place_of_edges,
    _returned_coupling,
    _state_dict,
    *MODULE_LAWS,
)
