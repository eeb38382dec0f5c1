"""The laws of diffusivities: their declarations and their couplings, in addition to those of all modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, get_args

import torch
from torch import Tensor

from diffusion_mp.checks import check_counts
from diffusion_mp.couplings import Coupling, PooledCoupling, SparseCoupling, merged
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.diffusivities.base import Dependence
from diffusion_mp.inference import RowBlock
from diffusion_mp.testing.coupling_laws import (
    COUPLING_LAWS,
    CouplingCase,
    expect_promises,
)
from diffusion_mp.testing.laws import (
    Law,
    expect,
    expect_close,
    expect_equal,
    expect_flags,
    run_laws,
)
from diffusion_mp.testing.module_laws import (
    LIBRARY_LAWS,
    MODULE_LAWS,
    Instance,
    ModuleCase,
    builder,
    join,
)


@dataclass(frozen=True)
class DiffusivityCase(ModuleCase[Diffusivity]):
    """A diffusivity; its response is its coupling times values that determine the matrix."""

    def __call__(self, module: Diffusivity, instance: Instance) -> Coupling:
        graph = None
        if self.edges or instance.ptr is not None:
            graph = self.graph(instance)
        return cast(Coupling, module(instance.x, graph))

    def call(self, module: Diffusivity, instance: Instance) -> Tensor:
        # Values [N, 1, 8] in [1, 2] are functions of each row. For at most eight nodes,
        # the product determines S.
        values = 1.5 + 0.5 * torch.sin(instance.x.double() @ self.directions)
        values = values.to(instance.x.dtype).unsqueeze(1)
        # Dynamo traces a method, not the operator @.
        return self(module, instance).matmul(values)

    @cached_property
    def directions(self) -> Tensor:
        return torch.randn(
            self.channels, 8, generator=self.generator(), dtype=torch.float64
        )


def check_diffusivity(
    diffusivity: Diffusivity | Callable[[], Diffusivity],
    *,
    channels: int | None = None,
    edges: bool | None = None,
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check a diffusivity and the couplings that it returns, on small graphs with states in the unit ball.

    The graphs are directed and weighted; batches, single nodes and isolated nodes are among them.

    Args:
        diffusivity: an instance, which is copied, or a class or function that builds one.
        channels: C, the number of channels of the states. By default the attribute ``channels`` of the diffusivity, or
            6 if it has none.
        edges: whether the graphs have observed edges. By default ``diffusivity.needs_graph``, so that a diffusivity
            that needs no graph is checked on all pairs.
        skip: laws to leave out, as {name of the law: why it does not apply}. By default every law is checked.
        compile: whether to check also that `torch.compile` captures one full graph. Off by default, because it takes
            seconds.
        seed: seed of the states, graphs and parameters; with the default 0 every run checks the same ones.

    Raises:
        AssertionError: a law is broken. The message has a sentence for every broken law.

    Examples:
        >>> check_diffusivity(lambda: UniformDiffusivity())  # raises nothing
    """
    build, fresh, sample = builder(diffusivity, "diffusivity", Diffusivity, seed)
    if channels is None:
        channels = getattr(sample, "channels", None) or 6
    check_counts(channels=channels)
    if edges is None:
        edges = bool(sample.needs_graph)
    case = DiffusivityCase(build, fresh, channels, edges, compile, seed)
    run_laws(type(sample).__name__, DIFFUSIVITY_LAWS, case, skip, seed)


def _declarations(case: DiffusivityCase) -> None:
    """it declares needs_graph, symmetric, row_stochastic, positional, heads, and a penalty or why there is none"""
    module = case.module()
    expect_flags(module, "needs_graph", "symmetric", "row_stochastic", "positional")
    expect(
        isinstance(module.heads, int) and module.heads >= 1,
        f"heads is {module.heads!r}, expected a positive int",
    )
    if module.penalty is None:
        reason = module.why_no_penalty
        expect(
            bool(reason) and isinstance(reason, str),
            f"penalty is None and why_no_penalty is {reason!r}",
        )


def _promises(case: DiffusivityCase) -> None:
    """the coupling has N nodes, the state's dtype and device, the declared heads and properties"""
    module = case.module()
    x = case.instance().x
    coupling = case(module, case.instance())
    expect(isinstance(coupling, Coupling), f"forward returned {coupling!r}")
    got = (coupling.num_nodes, coupling.heads, coupling.dtype, coupling.device)
    expected = (len(x), module.heads, x.dtype, x.device)
    expect_equal(got, expected, "nodes, heads, dtype and device of the coupling")
    _expect_declared("the diffusivity", module, coupling)


def _expect_declared(name: str, module: Diffusivity, coupling: Coupling) -> None:
    for promise in ("symmetric", "row_stochastic"):
        # One way only: a coupling may know more than the diffusivity can promise of all of them.
        kept = getattr(coupling, promise) or not getattr(module, promise)
        expect(kept, f"{promise} is declared by {name}, but not by its coupling")


def _dependence(case: DiffusivityCase) -> None:
    """the entries depend on no more of the state than depends_on says"""
    module = case.module().eval()
    declared = module.depends_on
    kinds = get_args(Dependence)
    expect(declared in kinds, f"depends_on is {declared!r}, expected one of {kinds}")
    if declared == "parts":
        parts = [part for part in module.modules() if isinstance(part, Diffusivity)]
        expect(len(parts) > 1, "depends_on is 'parts', but no part is a Diffusivity")
    elif declared == "rows":
        _depends_on_rows(case, module)
    elif declared in ("nothing", "edges"):
        _depends_on_edges(case, module, declared)


def _depends_on_edges(
    case: DiffusivityCase, module: Diffusivity, declared: str
) -> None:
    instance = case.instance()
    coupling = case(module, instance)
    apart = torch.ones(instance.num_nodes, dtype=torch.bool)
    if declared == "edges":
        if not isinstance(coupling, SparseCoupling):
            raise AssertionError(f"depends_on is 'edges', but {coupling} has none")
        # Rows that do not depend on node 0: neither its own, nor those to which it sends.
        source, target = coupling.graph.edges
        apart[target[source == 0]] = False
        apart[0] = False
    # Only a sign changes, so the state stays in the unit ball, where every penalty is defined.
    changed = torch.cat([-instance.x[:1], instance.x[1:]])
    got = case(module, replace(instance, x=changed)).to_dense()[:, apart]
    what = "S of another state of node 0, in rows that do not depend on it,"
    expect_close(got, coupling.to_dense()[:, apart], "rearranged", what)


def _depends_on_rows(case: DiffusivityCase, module: Diffusivity) -> None:
    instance = case.instance()
    coupling = case(module, instance)
    x = instance.x
    if isinstance(coupling, PooledCoupling):  # it merges couplings of some rows itself
        values = x[:, :1].unsqueeze(2)
        # Both blocks measure from one point, or their sums could not be merged.
        centre: list[Tensor] = []
        blocks = [
            (module(x[rows], RowBlock(x[rows], centre)), values[rows])
            for rows in (slice(3), slice(3, None))
        ]
        total = merged([block.pool(part) for block, part in blocks])
        got = torch.cat([block.read(total, part) for block, part in blocks])
        expected = coupling @ values
    else:
        # No two blocks are merged here, so what is compared are the entries themselves.
        got = module(x[:3]).to_dense()
        expected = coupling.to_dense()[:, :3, :3]
        if module.row_stochastic:
            # Rows of three nodes are divided by sums over three nodes.
            expected = expected / expected.sum(2, keepdim=True)
    expect_close(got, expected, "rearranged", "what some of the rows give")


def _coupling_laws(case: DiffusivityCase) -> None:
    """the couplings it returns obey the laws of couplings, gradients to the state and the parameters included"""
    _expect_coupling_laws(case, case.instance(), join(case.batch()))


def _coupling_laws_of_isolated_nodes(case: DiffusivityCase) -> None:
    """so do those of nodes without an edge, of a single node, and of a batch with an empty graph"""
    generator = case.generator()
    five, three, single = (case.instance(size, generator) for size in (5, 3, 1))
    # The edges of five nodes among eight.
    isolated = replace(five, x=torch.cat([five.x, three.x]))
    _expect_coupling_laws(case, isolated, single, join([five, five.empty(), single]))


def _expect_coupling_laws(case: DiffusivityCase, *instances: Instance) -> None:
    module = case.module()
    for instance in instances:
        state = replace(instance, x=instance.x.clone().requires_grad_())
        coupling = case(module, state)
        checked = CouplingCase(coupling, instance.ptr, case.seed)
        run_laws(type(coupling).__name__, COUPLING_LAWS, checked)


def _needs_graph(case: DiffusivityCase) -> None:
    """without a graph it works, or says that it needs one"""
    module = case.module()
    # A message that names a graph or edges is what a user needs, whatever its words.
    error = None
    try:
        module(case.instance().x)
    except ValueError as caught:
        error = str(caught).lower()
    what = f"needs_graph is {module.needs_graph}, and without a graph it says {error}"
    expect(module.needs_graph == (error is not None), what)
    expect(error is None or "graph" in error or "edge" in error, what)


def _duplicated_nodes(case: DiffusivityCase) -> None:
    """giving every node twice leaves a row-normalised all-pair product unchanged"""
    module, instance = case.sample()
    if case.edges or not module.row_stochastic:
        return
    dense = case(module, instance).to_dense()
    if bool((dense == torch.eye(instance.num_nodes)).all()):
        return  # the identity couples a node to itself, not to its copy
    twice = torch.arange(instance.num_nodes).repeat(2)
    got = case.response(module, replace(instance, x=instance.x[twice]))
    expected = case.response(module, instance)[twice]
    expect_close(got, expected, "rearranged", "S @ v of the doubled nodes")


def _same_in_training(case: DiffusivityCase) -> None:
    """training and evaluation use the same operator"""
    module, instance = case.sample()
    # Dropout belongs to layers: an operator that changed in training would be another
    # energy.
    evaluated = case.response(module, instance)
    trained = case.response(module.train(), instance)
    expect_close(trained, evaluated, "rearranged", "S @ v in training mode")


def _algebra(case: DiffusivityCase) -> None:
    """a * D and D1 + D2 give a * S and S1 + S2, and declare no more than is true"""
    module, instance = case.sample()
    dense = case(module, instance).to_dense()
    for name, combined, expected in (
        ("½ D", 0.5 * module, 0.5 * dense),
        ("¼ D + ½ D", 0.25 * module + 0.5 * module, 0.75 * dense),
        # Factors that add up to one keep row sums of one, and others must not claim to.
        ("½ D + ½ D", 0.5 * module + 0.5 * module, dense),
    ):
        coupling = case(combined, instance)
        expect_close(coupling.to_dense(), expected, "entries", name)
        _expect_declared(name, combined, coupling)
        expect_promises(name, coupling, expected)
        expect_equal(combined.needs_graph, module.needs_graph, f"needs_graph of {name}")


DIFFUSIVITY_LAWS: tuple[Law[DiffusivityCase], ...] = (
    _declarations,
    _promises,
    _dependence,
    _coupling_laws,
    _coupling_laws_of_isolated_nodes,
    _needs_graph,
    _duplicated_nodes,
    _same_in_training,
    _algebra,
    *MODULE_LAWS,
    *LIBRARY_LAWS,
)
