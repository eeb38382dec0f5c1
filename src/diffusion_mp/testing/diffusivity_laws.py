"""The laws every diffusivity obeys: what it declares, which symmetries it has, and that it can be trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, PooledCoupling, SparseCoupling, merged
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.errors import check_function
from diffusion_mp.graph import Dependence, Graph
from diffusion_mp.testing.coupling_laws import COUPLING_LAWS, CouplingCase
from diffusion_mp.testing.instances import Instance, hub_instance, join
from diffusion_mp.testing.laws import Law, expect, expect_close, expect_rng_untouched, run_laws, seeded
from diffusion_mp.testing.module_laws import (
    ModuleCase,
    check_compiles,
    check_first_derivatives,
    check_reset_parameters,
    check_second_derivatives,
)


@dataclass(frozen=True)
class DiffusivityCase(ModuleCase[Diffusivity]):
    """A way to build the diffusivity, and how it is called."""

    def __call__(self, module: Diffusivity, instance: Instance) -> Coupling:
        coupling: Coupling = module(instance.x, self.graph(instance))
        return coupling

    def graph(self, instance: Instance) -> Graph | None:
        if not self.edges and len(instance.sizes) == 1:
            return None
        return instance.graph()


def check_diffusivity(
    diffusivity: Diffusivity | Callable[[], Diffusivity],
    *,
    channels: int | None = None,
    edges: bool | None = None,
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check a diffusivity on small random states and graphs; the couplings it returns obey the coupling laws too.

    States lie in the unit ball. Graphs are directed and weighted, with self-loops and a repeated edge.

    Args:
        diffusivity: an instance (which is copied, never changed), or a class or function that builds one.
        channels: C of the states; by default its attribute ``channels``, or 6.
        edges: whether graphs have observed edges; by default what ``needs_graph`` says.
        skip: law name → the reason why it does not apply.
        compile: also capture one full graph with `torch.compile` (seconds).
        seed: of states, graphs and parameters.

    Raises:
        AssertionError: with one sentence per broken law: class, law, got, expected.
    """
    fresh = not isinstance(diffusivity, nn.Module)
    if fresh:
        check_function(diffusivity, "diffusivity", "that builds a Diffusivity, or one")
    with seeded(seed):
        sample = diffusivity() if fresh else diffusivity
    if not isinstance(sample, Diffusivity):
        raise TypeError(f"diffusivity must be or build a Diffusivity, got {type(sample).__name__}")
    build: Callable[[], Diffusivity] = diffusivity if fresh else lambda: copy.deepcopy(sample)
    known = getattr(sample, "channels", None)
    case = DiffusivityCase(
        build=build,
        channels=channels or (known if isinstance(known, int) else 6),
        edges=bool(sample.needs_graph) if edges is None else edges,
        compile=compile,
        seed=seed,
        fresh=fresh,
    )
    run_laws(type(sample).__name__, DIFFUSIVITY_LAWS, case, skip)


def _declarations(case: DiffusivityCase) -> None:
    """it declares needs_graph, symmetric, row_stochastic, positional, heads, and a penalty or why there is none"""
    module = case.module()
    for name in ("needs_graph", "symmetric", "row_stochastic", "positional"):
        value = getattr(module, name)
        expect(isinstance(value, bool), f"{name} is {value!r}, expected True or False")
    expect(isinstance(module.heads, int) and module.heads >= 1, f"heads is {module.heads!r}, expected a positive int")
    if module.penalty is None:
        reason = module.why_no_penalty
        expect(bool(reason) and isinstance(reason, str), f"penalty is None and why_no_penalty is {reason!r}")


def _promises(case: DiffusivityCase) -> None:
    """the coupling has N nodes, the state's dtype and device, the declared heads and properties"""
    module, instance = case.module(), case.instance()
    coupling, size = case(module, instance), instance.num_nodes
    expect(isinstance(coupling, Coupling), f"forward returned {type(coupling).__name__}, expected a Coupling")
    expect(coupling.num_nodes == size, f"num_nodes is {coupling.num_nodes}, expected {size}")
    expect(coupling.dtype == instance.x.dtype, f"dtype is {coupling.dtype}, expected {instance.x.dtype}")
    expect(coupling.device == instance.x.device, f"device is {coupling.device}, expected {instance.x.device}")
    expect(coupling.heads == module.heads, f"the coupling has {coupling.heads} heads, declared {module.heads}")
    for name in ("symmetric", "row_stochastic"):
        if getattr(module, name):
            expect(getattr(coupling, name), f"{name} is declared by the diffusivity, but not by its coupling")


def _dependence(case: DiffusivityCase) -> None:
    """the entries depend on no more of the state than depends_on says"""
    module, instance = case.module().eval(), case.instance()
    declared, x = module.depends_on, instance.x
    expect(declared in get_args(Dependence), f"depends_on is {declared!r}, expected one of {get_args(Dependence)}")
    coupling = case(module, instance)
    changed = replace(instance, x=torch.cat([-x[:1], x[1:]]))
    if declared == "parts":
        parts = [part for part in module.modules() if isinstance(part, Diffusivity) and part is not module]
        expect(bool(parts), "depends_on is 'parts', but no part is a Diffusivity")
    elif declared == "nothing":
        expect_close(case(module, changed).to_dense(), coupling.to_dense(), "rearranged", "S of another state")
    elif declared == "edges":
        expect(isinstance(coupling, SparseCoupling), f"depends_on is 'edges', but {coupling} has none")
        source, target = cast(SparseCoupling, coupling).graph.edges
        apart = torch.ones(instance.num_nodes, dtype=torch.bool).index_fill(0, target[source == 0], False)[1:]
        got, expected = (c.to_dense()[:, 1:][:, apart] for c in (case(module, changed), coupling))
        expect_close(got, expected, "rearranged", "S of another state, in the rows that node 0 sends nothing to")
    elif declared == "rows":
        some = 3
        values = x[:, :1].unsqueeze(2)
        if isinstance(coupling, PooledCoupling):  # which says itself how couplings of some rows become one of all
            blocks = [(module(x[rows]), values[rows]) for rows in (slice(some), slice(some, None))]
            total = merged([block.pool(part) for block, part in blocks])
            got = torch.cat([block.read(total, part) for block, part in blocks])
            expect_close(got, coupling @ values, "rearranged", "S v from two blocks of rows")
        else:
            alone, within = module(x[:some]).to_dense(), coupling.to_dense()[:, :some, :some]
            if module.row_stochastic:
                within = within / within.sum(2, keepdim=True)
            expect_close(alone, within, "rearranged", "S of the first rows alone")


def _coupling_laws(case: DiffusivityCase) -> None:
    """the couplings it returns obey the laws of couplings, gradients to the state and the parameters included"""
    module = case.module()
    for instance in (case.instance(), join(case.batch())):
        x = instance.x.clone().requires_grad_()
        coupling = module(x, case.graph(instance))
        run_laws(type(coupling).__name__, COUPLING_LAWS, CouplingCase(coupling, instance.ptr, case.seed))


def _needs_graph(case: DiffusivityCase) -> None:
    """without a graph it works, or says that it needs one"""
    module, instance = case.module(), case.instance()
    if module.needs_graph:
        try:
            module(instance.x)
        except ValueError as error:
            expect("graph" in str(error).lower() or "edge" in str(error).lower(), f"without a graph it says {error}")
        else:
            expect(False, "needs_graph is True, but it returned a coupling without one; expected a ValueError")
    else:
        module(instance.x)


def _permutation(case: DiffusivityCase) -> None:
    """renaming the nodes renames rows and columns of S, unless rows are declared positions, in order"""
    module, instance, generator = case.module(), case.instance(), case.generator()
    if module.positional:
        return
    order = torch.randperm(instance.num_nodes, generator=generator)
    got = case(module, instance.permuted(order, generator)).to_dense()
    expected = case(module, instance).to_dense()[:, order][:, :, order]
    expect_close(got, expected, "rearranged", "S of the renamed nodes")


def _batching(case: DiffusivityCase) -> None:
    """a graph alone, in a batch, and in the batch in another order has the same S"""
    module, parts = case.module(), case.batch()
    alone = [case(module, part).to_dense() for part in parts]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        joined = join([parts[k] for k in order])
        dense = case(module, joined).to_dense()
        blocks = [[alone[k][head] for k in order] for head in range(len(dense))]
        expected = torch.stack([torch.block_diag(*block) for block in blocks])
        expect_close(dense, expected, "rearranged", f"S of the batch in the order {order}")


def _poisoned_batch_mate(case: DiffusivityCase) -> None:
    """NaN in one graph of a batch reaches no other graph"""
    module, parts = case.module(), case.batch()
    joined = join(parts)
    v = torch.randn(joined.num_nodes, module.heads, 2, generator=case.generator(), dtype=torch.float64)
    clean = case(module, joined) @ v
    first = parts[0].num_nodes
    joined.x[:first] = torch.nan
    got = case(module, joined) @ v
    expect_close(got[first:], clean[first:], "rearranged", "S @ v of the other graphs")


def _duplicated_nodes(case: DiffusivityCase) -> None:
    """giving every node twice leaves a row-normalised all-pair product unchanged"""
    module = case.module()
    if case.edges or not module.row_stochastic:
        return
    instance = case.instance()
    v = torch.randn(instance.num_nodes, module.heads, 2, generator=case.generator(), dtype=torch.float64)
    once = module(instance.x) @ v
    twice = module(torch.cat([instance.x, instance.x])) @ torch.cat([v, v])
    dense = module(instance.x).to_dense().detach()
    if bool((dense != torch.eye(instance.num_nodes)).any()):  # an MLP couples a node to itself, not to its twin
        expect_close(twice, torch.cat([once, once]), "rearranged", "S @ v of the doubled nodes")


def _edge_cases(case: DiffusivityCase) -> None:
    """a single node, an empty graph in a batch, and no node at all have finite couplings"""
    module, generator = case.module(), case.generator()
    single, five = case.instance(1, generator), case.instance(5, generator)
    between = join([five, _empty(five), single])
    for name, instance in (("a single node", single), ("an empty graph between two", between)):
        coupling = case(module, instance)
        expect(bool(coupling.to_dense().isfinite().all()), f"{name} gives entries that are not finite")
        v = torch.ones(instance.num_nodes, module.heads, 2, dtype=torch.float64)
        expect(bool((coupling @ v).isfinite().all()), f"{name} gives a product that is not finite")
    nothing = _empty(five)
    product = case(module, nothing) @ torch.ones(0, module.heads, 2, dtype=torch.float64)
    shape = tuple(product.shape)
    expect(shape == (0, module.heads, 2), f"no node at all gives a product of shape {shape}")


def _isolated_nodes(case: DiffusivityCase) -> None:
    """nodes without an edge get finite entries, and no row of theirs is NaN under a gradient"""
    if not case.edges:
        return
    module, generator = case.module(), case.generator()
    part = case.instance(5, generator)
    more = torch.randn(3, case.channels, generator=generator, dtype=torch.float64)
    x = torch.cat([part.x, more / (1 + more.norm(dim=-1, keepdim=True))]).requires_grad_()
    coupling = module(x, Graph(8, part.edge_index, part.edge_weight))
    expect(bool(coupling.to_dense().isfinite().all()), "entries are not finite")
    run_laws(type(coupling).__name__, COUPLING_LAWS, CouplingCase(coupling, None, case.seed))
    product = coupling @ torch.ones(8, module.heads, 2, dtype=torch.float64)
    expect(bool(product.isfinite().all()), "the product is not finite")
    leaves = [leaf for leaf in (x, *module.parameters()) if product.requires_grad]
    for grad in torch.autograd.grad(product.sum(), leaves, allow_unused=True) if leaves else ():
        expect(grad is None or bool(grad.isfinite().all()), "a gradient is not finite")


def _first_derivatives(case: DiffusivityCase) -> None:
    """gradients with respect to the state and the parameters agree with finite differences in double"""
    check_first_derivatives(*_differentiable(case))


def _second_derivatives(case: DiffusivityCase) -> None:
    """second derivatives agree with finite differences, or are refused in words"""
    check_second_derivatives(*_differentiable(case))


def _half_precision(case: DiffusivityCase) -> None:
    """in bfloat16 sums over nodes are taken in float32"""
    brain = case.module().to(torch.bfloat16)
    reference = copy.deepcopy(brain).double()
    instance = hub_instance(600, case.channels, case.generator(), edges=case.edges).to(torch.bfloat16)
    v = (1 + torch.rand(600, 1, 2, generator=case.generator(), dtype=torch.float64)).to(torch.bfloat16)
    expected = case(reference, instance.to(torch.float64)) @ v.double()
    expect_close((case(brain, instance) @ v).bfloat16(), expected.bfloat16(), "product", "S @ v in bfloat16")


def _autocast(case: DiffusivityCase) -> None:
    """under autocast S @ v stays finite, close, and in the dtype of v"""
    module, instance = case.module(torch.float32), case.instance().to(torch.float32)
    v = torch.randn(instance.num_nodes, module.heads, 2, generator=case.generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case(module, instance) @ v
    expect(got.dtype == torch.float32, f"S @ v is {got.dtype} for float32 values, expected float32")
    expect_close(got, case(module, instance) @ v, "autocast", "S @ v under autocast")


def _purity(case: DiffusivityCase) -> None:
    """it leaves the state, the edges and the global random state alone, and repeats"""
    module, instance = case.module(), case.instance()
    before = copy.deepcopy(instance)
    v = torch.ones(instance.num_nodes, module.heads, 1, dtype=torch.float64)
    with expect_rng_untouched("forward"):
        first, second = case(module, instance) @ v, case(module, instance) @ v
    expect(torch.equal(instance.x, before.x), "forward changed x in place")
    for name in ("edge_index", "edge_weight"):
        now, then = getattr(instance, name), getattr(before, name)
        expect(now is None or torch.equal(now, then), f"forward changed {name} in place")
    expect(torch.equal(first, second), "two calls with the same state differ")


def _same_in_training(case: DiffusivityCase) -> None:
    """training and evaluation use the same operator"""
    module, instance = case.module(), case.instance()
    expected = case(module, instance).to_dense()
    expect_close(case(module.train(), instance).to_dense(), expected, "rearranged", "S in training mode")


def _algebra(case: DiffusivityCase) -> None:
    """a * D and D1 + D2 give a * S and S1 + S2, and declare no more than is true"""
    module, instance = case.module(), case.instance()
    dense = case(module, instance).to_dense()
    for name, combined, expected in (
        ("½ D", 0.5 * module, 0.5 * dense),
        ("¼ D + ½ D", 0.25 * module + 0.5 * module, 0.75 * dense),
        ("½ D + ½ D", 0.5 * module + 0.5 * module, dense),
    ):
        coupling = case(combined, instance)
        expect_close(coupling.to_dense(), expected, "entries", name)
        rows = coupling.degree()
        if combined.row_stochastic:  # the instances have no isolated node
            expect_close(rows, torch.ones_like(rows), "degree", f"{name} is declared row_stochastic, but a row sum")
        if combined.symmetric:
            turned = coupling.to_dense().transpose(1, 2)
            expect_close(coupling.to_dense(), turned, "degree", f"{name} is declared symmetric, but s_ij against s_ji")
        expect(combined.needs_graph == module.needs_graph, f"{name} has needs_graph={combined.needs_graph}")


def _reset_parameters(case: DiffusivityCase) -> None:
    """reset_parameters() from a seed equals a fresh module of that seed in every parameter"""
    check_reset_parameters(case.build, case.fresh, case.seed)


def _readable(case: DiffusivityCase) -> None:
    """its repr names the class"""
    module = case.module()
    expect(type(module).__name__ in repr(module), f"repr is {module!r}")


def _compile(case: DiffusivityCase) -> None:
    """torch.compile captures D(x) @ v as one graph with a dynamic number of nodes"""
    if not case.compile:
        return
    module = case.module(torch.float32)

    def step(x: Tensor, edge_index: Tensor | None) -> Tensor:
        graph = None if edge_index is None else Graph(x.shape[0], edge_index)
        moved: Tensor = module(x, graph).matmul(x.unsqueeze(1))  # Dynamo traces a method, not the operator @
        return moved

    instances = [case.instance(size).to(torch.float32) for size in (7, 11)]
    check_compiles(step, [(instance.x, instance.edge_index) for instance in instances])


DIFFUSIVITY_LAWS: tuple[Law[DiffusivityCase], ...] = (
    _declarations,
    _promises,
    _dependence,
    _coupling_laws,
    _needs_graph,
    _permutation,
    _batching,
    _poisoned_batch_mate,
    _duplicated_nodes,
    _edge_cases,
    _isolated_nodes,
    _first_derivatives,
    _second_derivatives,
    _half_precision,
    _autocast,
    _purity,
    _same_in_training,
    _algebra,
    _reset_parameters,
    _readable,
    _compile,
)


def _empty(like: Instance) -> Instance:
    edges = None if like.edge_index is None else like.edge_index[:, :0]
    weight = None if like.edge_weight is None else like.edge_weight[:0]
    return Instance(like.x[:0], edges, weight, torch.tensor([0, 0]))


def _differentiable(case: DiffusivityCase) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    module, instance = case.module(), case.instance(5)
    v = torch.randn(5, module.heads, 2, generator=case.generator(), dtype=torch.float64)

    def product(x: Tensor) -> Tensor:
        moved: Tensor = module(x, case.graph(instance)) @ v
        return moved

    return module, product, instance.x
