"""The laws of layers (PyG's calling convention) and of updates, on top of `MODULE_LAWS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffusion_mp.checks import check_counts, check_function
from diffusion_mp.couplings import Coupling, ScaledCoupling
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.testing.laws import (
    Law,
    Level,
    expect,
    expect_close,
    expect_equal,
    run_laws,
)
from diffusion_mp.testing.module_laws import (
    MODULE_LAWS,
    Instance,
    ModuleCase,
    builder,
    join,
)
from diffusion_mp.updates import StateUpdate

Extra = Callable[[Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class LayerCase(ModuleCase[nn.Module]):
    """A layer, and further arguments as a function of the state."""

    extra: Extra

    def response(self, module: nn.Module, instance: Instance, **options: Any) -> Any:
        graphs = instance.edge_index, instance.edge_weight, instance.batch
        return module(instance.x, *graphs, **self.extra(instance.x), **options)

    def size(self, response: Tensor) -> Tensor:
        """Return the largest entry of each row, at least the median row's, since terms may cancel within a row."""
        size = response.abs().amax(dim=1, keepdim=True)
        return size.clamp(min=float(size.detach().median()))


def check_layer(
    layer: nn.Module | Callable[[], nn.Module],
    *,
    in_channels: int | None = None,
    edges: bool = True,
    extra: Extra = lambda x: {},
    level: Level = "strict",
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check a layer or model called as ``layer(x, edge_index, edge_weight, batch)`` on small graphs, without dropout.

    Args:
        layer: an instance, which is copied, or a function that builds one.
        in_channels: C of the states; by default its attribute ``in_channels``.
        edges: whether the graphs have observed edges; else ``edge_index`` is None.
        extra: further keyword arguments as a function of the state, such as ``lambda x: {"source": x}``.
        level, skip, compile, seed: see :func:`check_diffusivity`.

    Examples:
        >>> check_layer(lambda: GCNConv(4, 3), in_channels=4)
    """
    build, fresh, sample = builder(layer, "layer", nn.Module, seed)
    channels = (
        in_channels if in_channels is not None else getattr(sample, "in_channels", None)
    )
    if channels is None:
        raise ValueError(
            f"{type(sample).__name__} has no attribute in_channels; pass check_layer(..., in_channels=C)"
        )
    check_counts(in_channels=channels)
    check_function(extra, "extra", "of the state to keyword arguments")
    case = LayerCase(build, fresh, channels, edges, compile, seed, extra)
    run_laws(type(sample).__name__, LAYER_LAWS, case, skip or {}, level=level)


def _output(case: LayerCase) -> None:
    """the output is [N, out_channels], finite, in the dtype of the input"""
    module = case.module()
    instance = case.instance()
    out = case.response(module, instance)
    expect(
        isinstance(out, Tensor),
        f"forward returned {type(out).__name__}, expected a tensor",
    )
    expect(out.dim() == 2, f"the output has shape {tuple(out.shape)}, expected [N, C]")
    expect_equal(
        (len(out), out.dtype),
        (instance.num_nodes, instance.x.dtype),
        "rows and dtype of the output",
    )
    expect(bool(out.isfinite().all()), "the output is not finite")


def _unit_weights(case: LayerCase) -> None:
    """weights of one are no weights"""
    module = case.module()
    part = case.instance()
    if part.edge_weight is None:
        return
    # Kernels take another path without weights.
    ones = torch.ones_like(part.edge_weight)
    weighted, plain = (
        case.response(module, replace(part, edge_weight=weight))
        for weight in (ones, None)
    )
    expect_close(weighted, plain, "rearranged", "the output with weights of one")


def _graph_in_place_of_edges(case: LayerCase) -> None:
    """a Graph or a sparse matrix in place of edge_index gives the same output"""
    module = case.module()
    joined = join(case.batch())
    expected = case.response(module, joined)
    extra = case.extra(joined.x)
    expect_close(
        module(joined.x, joined.graph(), **extra),
        expected,
        "rearranged",
        "the output for a Graph",
    )
    if joined.edge_index is None or joined.edge_weight is None:
        return
    # a sparse matrix has one entry per pair, and edge attention distinguishes repeated edges from their sum
    pairs = joined.edge_index.flip(0)
    size = (joined.num_nodes, joined.num_nodes)
    matrix = torch.sparse_coo_tensor(
        pairs, joined.edge_weight, size, check_invariants=True
    ).coalesce()
    expected = module(
        joined.x, matrix.indices().flip(0), matrix.values(), joined.batch, **extra
    )
    got = module(joined.x, matrix.to_sparse_csr(), None, joined.batch, **extra)
    expect_close(
        got, expected, "rearranged", "the output for a sparse CSR matrix (row = target)"
    )


def _returned_coupling(case: LayerCase) -> None:
    """return_coupling=True adds the coupling of the step and leaves the output as it is"""
    module = case.module()
    instance = join(case.batch())
    out, couplings = case.response(module, instance, return_coupling=True)
    expect_close(
        out,
        case.response(module, instance),
        "rearranged",
        "the output beside the coupling",
    )
    for coupling in couplings if isinstance(couplings, (list, tuple)) else [couplings]:
        expect(
            isinstance(coupling, Coupling),
            f"the returned coupling is {type(coupling).__name__}",
        )
        expect_equal(
            coupling.num_nodes,
            instance.num_nodes,
            "the number of nodes of the returned coupling",
        )


def _state_dict(case: LayerCase) -> None:
    """a state_dict carries the whole layer"""
    module = case.module()
    instance = case.instance()
    # Built from another seed, so that whatever is not loaded differs.
    other = replace(case, seed=case.seed + 1).module()
    other.load_state_dict(module.state_dict())
    loaded = case.response(other, instance)
    expect_close(
        loaded,
        case.response(module, instance),
        "rearranged",
        "the output after load_state_dict",
    )


LAYER_LAWS: tuple[Law[LayerCase], ...] = (
    _output,
    _unit_weights,
    _graph_in_place_of_edges,
    _returned_coupling,
    _state_dict,
    *MODULE_LAWS,
)


@dataclass(frozen=True)
class UpdateCase(ModuleCase[StateUpdate]):
    """An update; its response is the state after a step with D^-½AD^-½ of an undirected, weighted graph."""

    def response(self, module: StateUpdate, instance: Instance) -> Tensor:
        return self.moved(module, instance.x, self.coupling(instance))

    def coupling(self, instance: Instance) -> Coupling:
        """Return a symmetric, nonnegative coupling with eigenvalues in [−1, 1], for stable explicit steps."""
        return cast(
            Coupling,
            AdjacencyDiffusivity("sym", direction="undirected")(
                instance.x, instance.graph()
            ),
        )

    def moved(
        self, module: StateUpdate, x: Tensor, coupling: Coupling, **options: Any
    ) -> Tensor:
        """Return the next state; the source, where an update uses one, is a function of each entry of x."""
        if module.takes_source and module.beta != 0.0:
            source = x.cos()
        else:
            source = None
        return cast(Tensor, module(x, coupling, source=source, **options))


def check_update(
    update: StateUpdate | Callable[[], StateUpdate],
    *,
    channels: int = 4,
    level: Level = "strict",
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check an update on states of C channels in the unit ball and symmetric couplings; see :func:`check_diffusivity`.

    Examples:
        >>> check_update(lambda: ExplicitEuler(tau=0.5), level="core")  # raises nothing
    """
    check_counts(channels=channels)
    build, fresh, sample = builder(update, "update", StateUpdate, seed)
    case = UpdateCase(build, fresh, channels, True, compile, seed)
    run_laws(type(sample).__name__, UPDATE_LAWS, case, skip or {}, level=level)


def _shapes(case: UpdateCase) -> None:
    """the next state has the shape and the dtype of the state, [N, C] as [N, H, D]"""
    module = case.module()
    instance = case.instance()
    two = ScaledCoupling(
        torch.ones(2, dtype=torch.float64), case.coupling(instance), nonnegative=True
    )
    x = instance.x.repeat(1, 2)
    flat = case.moved(module, x, two)
    by_head = case.moved(module, x.unflatten(1, (2, -1)), two)
    expect_equal(
        (flat.shape, flat.dtype),
        (x.shape, x.dtype),
        "shape and dtype of the next state",
    )
    expect_close(by_head.flatten(1), flat, "rearranged", "the next state by head")


def _heads(case: UpdateCase) -> None:
    """a coupling of one head moves every head of the state alike, a state of one head goes through every coupling"""
    module = case.module()
    instance = case.instance()
    one = case.coupling(instance)
    x = instance.x.unsqueeze(1)
    alone = case.moved(module, x, one)
    both = case.moved(module, x.expand(-1, 2, -1), one)
    expect_close(
        both, alone.expand(-1, 2, -1), "rearranged", "the next state of two equal heads"
    )
    scales = torch.tensor([1.0, 0.5], dtype=torch.float64)
    got, *parts = (
        case.moved(module, x, ScaledCoupling(a, one, nonnegative=True))
        for a in (scales, *scales)
    )
    expect_close(
        got, torch.cat(parts, 1), "rearranged", "the next state of a state of one head"
    )


def _refusals(case: UpdateCase) -> None:
    """a state of other nodes, a missing source and an unused one are refused before any arithmetic"""
    module = case.module()
    instance = case.instance()
    coupling = case.coupling(instance)
    x = instance.x
    _expect_refused(
        lambda: case.moved(module, torch.cat([x, x]), coupling),
        "a state of other nodes",
    )
    try:  # some updates use no source, or the state itself
        module(x, coupling)
    except ValueError as error:
        expect("source" in str(error), f"without a source it says {error}")
    if not module.takes_source:
        _expect_refused(
            lambda: module(x, coupling, source=x),
            "a source, though takes_source is False,",
        )


def _expect_refused(call: Callable[[], Tensor], what: str) -> None:
    try:
        call()
    except (TypeError, ValueError):
        return
    expect(
        False,
        f"{what} gave a result, expected a ValueError: begin step with self.validate(...)",
    )


def _constants(case: UpdateCase) -> None:
    """form='conservative' without source and leak leaves constants alone"""
    module = case.module()
    instance = join(case.batch())
    if (
        getattr(module, "form", None) != "conservative"
        or module.beta != 0.0
        or getattr(module, "leak", 0.0) != 0.0
    ):
        return
    constant = torch.full_like(instance.x, 0.7)
    got = case.response(module, replace(instance, x=constant))
    expect_close(got, constant, "rearranged", "the next state of a constant")


def _previous(case: UpdateCase) -> None:
    """with takes_previous it starts without a previous state, and depends on one that is passed"""
    module = case.module()
    instance = case.instance()
    if not module.takes_previous:
        return
    coupling = case.coupling(instance)
    x = instance.x
    first, moving = (
        case.moved(module, x, coupling, previous=previous) for previous in (None, x - 1)
    )
    expect(bool(first.isfinite().all()), "the first step, previous=None, is not finite")
    expect(
        not torch.equal(first, moving),
        "the next state does not depend on the previous state",
    )


UPDATE_LAWS: tuple[Law[UpdateCase], ...] = (
    _shapes,
    _heads,
    _refusals,
    _constants,
    _previous,
    *MODULE_LAWS,
)
