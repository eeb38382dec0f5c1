"""The laws of layers, in PyG's calling convention, and of updates, in addition to those of all modules."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.utils import coalesce

from diffusion_mp.checks import Count, check_counts, check_function, checked
from diffusion_mp.couplings import Coupling, ScaledCoupling
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.testing.coupling_laws import expect_promises
from diffusion_mp.testing.laws import Law, expect, expect_close, expect_equal, run_laws
from diffusion_mp.testing.module_laws import (
    LIBRARY_LAWS,
    MODULE_LAWS,
    Instance,
    ModuleCase,
    builder,
    join,
    parameter_of,
)
from diffusion_mp.updates import Equilibrium, StateUpdate

Extra = Callable[[Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class LayerCase(ModuleCase[nn.Module]):
    """A layer, its further arguments as a function of the state, and which of edge_weight and batch it takes."""

    extra: Extra
    takes: frozenset[str]
    needs: frozenset[str]  # those of them that have no default

    def call(self, module: nn.Module, instance: Instance, **options: Any) -> Any:
        inputs = {}
        if self.edges:
            inputs["edge_weight"] = instance.edge_weight
        if instance.ptr is not None or "batch" in self.needs:
            inputs["batch"] = self.graph(instance).batch
        taken = {name: inputs[name] for name in inputs if name in self.takes}
        edges = instance.edge_index if self.edges else None
        return module(instance.x, edges, **taken, **self.extra(instance.x), **options)

    def size(self, response: Tensor) -> Tensor:
        """Return the largest entry of each row, at least the median row's, since terms may cancel within a row."""
        size = response.abs().amax(dim=1, keepdim=True)
        return size.clamp(min=float(size.detach().median()))


class ForeignCase(LayerCase):
    """A layer that is not of this library, on graphs in which no edge is repeated."""

    def instance(
        self, num_nodes: int = 7, generator: torch.Generator | None = None
    ) -> Instance:
        drawn = super().instance(num_nodes, generator)
        # PyG's GCNConv takes the weight of the last of several loops of a node, so that
        # their order would matter.
        edge_index, edge_weight = coalesce(drawn.edge_index, drawn.edge_weight)
        return replace(drawn, edge_index=edge_index, edge_weight=edge_weight)


def check_layer(
    layer: nn.Module | Callable[[], nn.Module],
    *,
    in_channels: int | None = None,
    edges: bool = True,
    extra: Extra = lambda x: {},
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check a layer or model of this library, of PyG or of your own on small graphs, and name every law that it breaks.

    The layer is called as ``layer(x, edge_index)``, with ``edge_weight=`` and ``batch=`` if its forward pass has these
    arguments. It runs in evaluation mode, that is without dropout. What any layer should obey is checked of all: names
    of nodes, the order of edges and other graphs of a batch do not matter; results and gradients are finite and right;
    inputs do not change; copies and saved parameters give the same layer. A layer of this library is also called with
    a `Graph`, with ``return_coupling=True`` and in half precision.

    Args:
        layer: an instance, which is copied, or a function that builds one.
        in_channels: C, the number of channels of the states. By default the attribute ``in_channels`` of the layer.
        edges: whether the graphs have observed edges, as most layers need them; ``False`` passes ``edge_index=None``.
        extra: further keyword arguments as a function of the state, such as ``lambda x: {"source": x}``. None by
            default.
        skip: laws to leave out, as {name of the law: why it does not apply}. By default every law is checked.
        compile: whether to check also that `torch.compile` captures one full graph. Off by default, because it takes
            seconds.
        seed: seed of the states, graphs and parameters; with the default 0 every run checks the same ones.

    Raises:
        AssertionError: a law is broken. The message has a sentence for every broken law.
        ValueError: the layer has no attribute ``in_channels`` and the argument is missing.

    Examples:
        >>> check_layer(lambda: GCNConv(4, 3), in_channels=4)
    """
    build, fresh, sample = builder(layer, "layer", nn.Module, seed)
    channels = in_channels
    if channels is None:
        channels = getattr(sample, "in_channels", None)
    if channels is None:
        raise ValueError(
            f"{type(sample).__name__} has no attribute in_channels; pass check_layer(..., in_channels=C)"
        )
    check_counts(in_channels=channels)
    check_function(extra, "extra", "of the state to keyword arguments")
    inputs = [parameter_of(sample, name) for name in ("edge_weight", "batch")]
    known = [each for each in inputs if each is not None]
    takes = frozenset(each.name for each in known)
    needs = frozenset(each.name for each in known if each.default is each.empty)
    kind: type[LayerCase] = ForeignCase
    laws = LAYER_LAWS
    if isinstance(sample, GraphLayer):
        kind = LayerCase
        laws += GRAPH_LAYER_LAWS
    name = type(sample).__name__
    case = kind(build, fresh, channels, edges, compile, seed, extra, takes, needs)
    # Once before the laws, since a layer that cannot be called breaks every one.
    try:
        with torch.inference_mode(False), torch.enable_grad():
            case.response(*case.sample())
    except Exception as error:
        raise AssertionError(
            f"{name} cannot be called, so that no law was checked: {type(error).__name__}: {error}\n"
            f"The layer was called with C = {channels} channels; pass in_channels= if it takes another number."
        ) from error
    run_laws(name, laws, case, skip, seed)


def _output(case: LayerCase) -> None:
    """the output is [N, out_channels], finite, in the dtype of the input"""
    for dtype in (torch.float64, torch.float32):
        x = case.instance().to(dtype)
        out = case.response(case.module(dtype), x)
        expect(
            isinstance(out, Tensor),
            f"forward returned {type(out).__name__}, expected a tensor",
        )
        got = (out.dim(), len(out), out.dtype)
        expected = (2, x.num_nodes, dtype)
        expect_equal(got, expected, "dimensions, rows and dtype of the output")
        expect(bool(out.isfinite().all()), "the output is not finite")


def _unit_weights(case: LayerCase) -> None:
    """weights of one are no weights"""
    module, instance = case.sample()
    if not case.edges or "edge_weight" not in case.takes - case.needs:
        return
    ones = torch.ones_like(instance.edge_weight)
    weighted = case.response(module, replace(instance, edge_weight=ones))
    # Kernels take another path without weights.
    without = replace(case, takes=case.takes - {"edge_weight"})
    plain = without.response(module, instance)
    expect_close(weighted, plain, "rearranged", "the output with weights of one")


def _saved(case: LayerCase) -> None:
    """a deep copy, and a state_dict in a file without pickled objects, carry the whole layer"""
    module, instance = case.sample()
    expected = case.response(module, instance)
    copied = copy.deepcopy(module)
    # Built from another seed, so that whatever is not loaded differs.
    other = replace(case, seed=case.seed + 1).module()
    with torch.no_grad():
        for parameter in [*module.parameters(), *other.parameters()]:
            parameter.fill_(17.0)
    got = case.response(copied, instance)
    expect_close(got, expected, "rearranged", "the output of a deep copy")
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    got = case.response(other, instance)
    expect_close(got, expected, "rearranged", "the output after load_state_dict")


LAYER_LAWS: tuple[Law[LayerCase], ...] = (
    _output,
    _unit_weights,
    _saved,
    *MODULE_LAWS,
)


def _graph_in_place_of_edges(case: LayerCase) -> None:
    """a Graph or a sparse matrix in place of edge_index gives the same output"""
    module = case.module()
    # A batch, whose boundaries a Graph carries, and which edge_index gets as ``batch``.
    joined = join(case.batch())
    graph = case.graph(joined)
    extra = case.extra(joined.x)
    got = module(joined.x, graph, **extra)
    expected = case.response(module, joined)
    expect_close(got, expected, "rearranged", "the output for a Graph")
    if not case.edges:
        return
    # A sparse matrix has one entry per pair, and edge attention distinguishes repeated
    # edges from their sum.
    pairs, weight = coalesce(joined.edge_index, joined.edge_weight)
    size = (joined.num_nodes, joined.num_nodes)
    matrix = torch.sparse_coo_tensor(pairs.flip(0), weight, size, check_invariants=True)
    expected = module(joined.x, pairs, weight, graph.batch, **extra)
    got = module(joined.x, matrix.to_sparse_csr(), None, graph.batch, **extra)
    what = "the output for a sparse CSR matrix (row = target)"
    expect_close(got, expected, "rearranged", what)


def _returned_coupling(case: LayerCase) -> None:
    """return_coupling=True adds the coupling of the step, with true promises, and leaves the output as it is"""
    module = case.module()
    instance = join(case.batch())
    out, couplings = case.call(module, instance, return_coupling=True)
    expected = case.response(module, instance)
    expect_close(out, expected, "rearranged", "the output beside the coupling")
    # A layer of several steps returns one for each.
    for coupling in couplings if isinstance(couplings, (list, tuple)) else [couplings]:
        expect(isinstance(coupling, Coupling), f"the coupling is {coupling!r}")
        expect_equal(coupling.num_nodes, instance.num_nodes, "its number of nodes")
        expect_promises("the coupling", coupling, coupling.to_dense())


GRAPH_LAYER_LAWS: tuple[Law[LayerCase], ...] = (
    _graph_in_place_of_edges,
    _returned_coupling,
    *LIBRARY_LAWS,
)


# Built once, since torch.compile does not trace the checks of a constructor.
_UNDIRECTED = AdjacencyDiffusivity("sym", direction="undirected")


@dataclass(frozen=True)
class UpdateCase(ModuleCase[StateUpdate]):
    """An update; its response is the state after a step with D^-½AD^-½ of an undirected, weighted graph."""

    def call(self, module: StateUpdate, instance: Instance) -> Tensor:
        return self.moved(module, instance.x, self.coupling(instance))

    def coupling(self, instance: Instance) -> Coupling:
        """Return a symmetric, nonnegative coupling with eigenvalues in [−1, 1], for stable explicit steps."""
        return cast(Coupling, _UNDIRECTED(instance.x, self.graph(instance)))

    def moved(
        self, module: StateUpdate, x: Tensor, coupling: Coupling, **options: Any
    ) -> Tensor:
        """Return the next state; the source, where an update uses one, is a function of each entry of x."""
        # Elementwise, so that it is permuted and batched as x is.
        source = x.cos() if module.takes_source and module.beta != 0.0 else None
        return cast(Tensor, module(x, coupling, source=source, **options))


@checked
def check_update(
    update: StateUpdate | Callable[[], StateUpdate],
    *,
    channels: Count = 4,
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check an update on states in the unit ball and symmetric couplings.

    Args:
        update: an instance, which is copied, or a class or function that builds one.
        channels: C, the number of channels of the states.
        skip: laws to leave out, as {name of the law: why it does not apply}. By default every law is checked.
        compile: whether to check also that `torch.compile` captures one full graph. Off by default, because it takes
            seconds.
        seed: seed of the states, graphs and parameters; with the default 0 every run checks the same ones.

    Raises:
        AssertionError: a law is broken. The message has a sentence for every broken law.

    Examples:
        >>> check_update(lambda: ExplicitEuler(tau=0.5))  # raises nothing
    """
    build, fresh, sample = builder(update, "update", StateUpdate, seed)
    case = UpdateCase(build, fresh, channels, True, compile, seed)
    run_laws(type(sample).__name__, UPDATE_LAWS, case, skip, seed)


def _shapes(case: UpdateCase) -> None:
    """the next state has the shape and the dtype of the state, [N, C] as [N, H, D]"""
    module, instance = case.sample()
    # Two heads that are equal, so that a mix-up of heads and channels shows.
    ones = torch.ones(2, dtype=torch.float64)
    two = ScaledCoupling(ones, case.coupling(instance), nonnegative=True)
    x = instance.x.repeat(1, 2)
    flat = case.moved(module, x, two)
    by_head = case.moved(module, x.unflatten(1, (2, -1)), two)
    expect_equal(flat.dtype, x.dtype, "the dtype of the next state")
    expect_equal(flat.shape, x.shape, "the shape of the next state")
    expect_close(by_head.flatten(1), flat, "rearranged", "the next state by head")


def _heads(case: UpdateCase) -> None:
    """a coupling of one head moves every head of the state alike, a state of one head goes through every coupling"""
    module, instance = case.sample()
    one = case.coupling(instance)
    x = instance.x.unsqueeze(1)
    both = case.moved(module, x.expand(-1, 2, -1), one)
    alone = case.moved(module, x, one).expand(-1, 2, -1)
    expect_close(both, alone, "rearranged", "the next state of two equal heads")
    scales = torch.tensor([1.0, 0.5], dtype=torch.float64)
    got, *parts = (
        case.moved(module, x, ScaledCoupling(a, one, nonnegative=True))
        for a in (scales, *scales)
    )
    what = "the next state of a state of one head"
    expect_close(got, torch.cat(parts, 1), "rearranged", what)


def _refusals(case: UpdateCase) -> None:
    """a state of other nodes, a missing source and an unused one are refused before any arithmetic"""
    module, instance = case.sample()
    coupling = case.coupling(instance)
    x = instance.x
    calls = {"a state of other nodes": partial(module, torch.cat([x, x]), coupling)}
    pulled = module.takes_source and module.beta != 0.0
    if pulled and not isinstance(module, Equilibrium):
        calls["a missing source"] = partial(module, x, coupling)
    if not module.takes_source:
        calls["an unused source"] = partial(module, x, coupling, source=x)
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError):
            continue
        expect(False, f"{what} gave a result, expected a ValueError")


def _constants(case: UpdateCase) -> None:
    """form='conservative' without source and leak leaves constants alone"""
    module = case.module()
    instance = join(case.batch())
    if getattr(module, "form", None) != "conservative":
        return
    if module.beta != 0.0 or getattr(module, "leak", 0.0) != 0.0:
        return
    # A batch: a constant of one graph must not be measured against another's.
    constant = torch.full_like(instance.x, 0.7)
    got = case.response(module, replace(instance, x=constant))
    expect_close(got, constant, "rearranged", "the next state of a constant")


def _previous(case: UpdateCase) -> None:
    """with takes_previous it starts without a previous state, and depends on one that is passed"""
    module, instance = case.sample()
    if not module.takes_previous:
        return
    move = partial(case.moved, module, instance.x, case.coupling(instance))
    first = move(previous=None)
    expect(bool(first.isfinite().all()), "the first step, previous=None, is not finite")
    # A law in place of numbers, since every method weighs the previous state differently.
    same = torch.equal(first, move(previous=instance.x - 1))
    expect(not same, "the next state does not depend on the previous state")


UPDATE_LAWS: tuple[Law[UpdateCase], ...] = (
    _shapes,
    _heads,
    _refusals,
    _constants,
    _previous,
    *MODULE_LAWS,
    *LIBRARY_LAWS,
)
