"""Random states and graphs, and the laws that diffusivities, layers and updates share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch_geometric.data import Batch, Data

from diffusion_mp.checks import check_function
from diffusion_mp.graph import Graph
from diffusion_mp.testing.laws import (
    Law,
    LawBroken,
    expect,
    expect_close,
    expect_equal,
    expect_rng_untouched,
    expect_writable,
    seeded,
)


@dataclass(frozen=True)
class Instance:
    """A state x [N, C] on one graph or on a batch: edge_index [2, E], edge_weight [E], row boundaries ptr [B + 1]."""

    x: Tensor
    edge_index: Tensor
    edge_weight: Tensor
    ptr: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    def to(self, dtype: torch.dtype) -> Instance:
        weight = self.edge_weight.to(dtype)
        return replace(self, x=self.x.to(dtype), edge_weight=weight)

    def empty(self) -> Instance:
        return Instance(self.x[:0], self.edge_index[:, :0], self.edge_weight[:0])


def random_instance(
    num_nodes: int, channels: int, generator: torch.Generator
) -> Instance:
    """Return a state in the unit ball, where every penalty is defined, on a graph without isolated nodes.

    The edges are a directed ring, random pairs (self-loops among them), a loop and a repeated edge. Weights lie in
    [½, 3/2].
    """
    x = torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64)
    # In the ball whatever was drawn, unlike unit vectors, which penalties and norms
    # would not tell apart.
    x = x / (1 + x.norm(dim=-1, keepdim=True))
    node = torch.arange(num_nodes)
    # A ring, so that no node is isolated.
    ring = torch.stack([node, node.roll(-1)])
    chords = torch.randint(num_nodes, (2, num_nodes), generator=generator)
    loop = torch.zeros(2, 1, dtype=torch.long)
    # With a parallel edge and a loop, which kernels treat apart.
    edge_index = torch.cat([ring, chords, ring[:, :1], loop], dim=1)
    edges = edge_index.size(1)
    weight = torch.rand(edges, generator=generator, dtype=torch.float64)
    return Instance(x, edge_index, weight + 0.5)


def join(instances: Sequence[Instance]) -> Instance:
    """Return the instances as one batch, with the edges numbered in the batch."""
    batch = Batch.from_data_list(
        [
            Data(each.x, each.edge_index, edge_weight=each.edge_weight)
            for each in instances
        ]
    )
    return Instance(batch.x, batch.edge_index, batch.edge_weight, batch.ptr)


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ModuleCase(ABC, Generic[M]):
    """A module under test: how to build it, how to call it, and the instances to call it with."""

    # A function and no module: laws train, cast and overwrite what they get.
    build: Callable[[], M]  # with parameters of the default dtype
    fresh: bool  # whether `build` draws the parameters, or copies an instance
    channels: int
    edges: bool  # whether the graphs have observed edges
    compile: bool
    seed: int

    @abstractmethod
    def call(self, module: M, instance: Instance) -> Any:
        """Return the result of the module for an instance, one row per node."""

    def response(self, module: M, instance: Instance) -> Any:
        """Return what the shared laws compare, the result for a copy of the state."""
        # A module that writes to its state breaks the law of purity, and no other for that.
        return self.call(module, replace(instance, x=instance.x.clone()))

    def graph(self, instance: Instance) -> Graph:
        """Return the graph of an instance, with its edges if the module sees them."""
        edges = (instance.edge_index, instance.edge_weight) if self.edges else ()
        return Graph(instance.num_nodes, *edges, ptr=instance.ptr)

    def size(self, response: Tensor) -> Tensor:
        """Return the magnitude of a response, to which rounding in half precision is relative."""
        return torch.ones_like(response)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def module(self, dtype: torch.dtype = torch.float64) -> M:
        with seeded(self.seed):
            return self.build().to(dtype).eval()

    def instance(
        self, num_nodes: int = 7, generator: torch.Generator | None = None
    ) -> Instance:
        return random_instance(num_nodes, self.channels, generator or self.generator())

    def sample(self) -> tuple[M, Instance]:
        """Return the module and an instance, both new, since a law may change them."""
        return self.module(), self.instance()

    def batch(self) -> list[Instance]:
        generator = self.generator()
        # Kernels stack the two graphs of one size, but not the others.
        return [self.instance(size, generator) for size in (5, 2, 7, 5)]

    def differentiable(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """Return the response as a function of the state and the parameters, and these tensors."""
        module = self.module()
        instance = self.instance(5)

        def function(x: Tensor, *parameters: Tensor) -> Tensor:
            return self.response(module, replace(instance, x=x))

        # gradcheck perturbs its inputs in place, so the module's own parameters can be
        # among them
        return function, (instance.x.clone().requires_grad_(), *trainable(module))


AnyCase = ModuleCase[Any]


def parameter_of(function: Callable[..., Any], name: str) -> Parameter | None:
    """Return the parameter of that name of a function, or of the forward pass of a module, if there is one."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return signature(called).parameters.get(name)
    except (TypeError, ValueError):  # one that is written in C
        return None


def trainable(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def builder(
    subject: Any, name: str, kind: Any, seed: int
) -> tuple[Callable[[], Any], bool, Any]:
    """Return a function that builds or copies the subject, whether that function draws parameters, and a sample."""
    fresh = not isinstance(subject, nn.Module)
    what = "torch.nn.Module" if kind is nn.Module else kind.__name__
    if fresh:
        check_function(subject, name, f"that builds a {what}, or one")
        try:
            signature(subject).bind()
        except TypeError as error:
            raise TypeError(
                f"{name} must be a {what}, or a function without arguments that builds one, such as "
                f"lambda: MyLayer(4, 3). It was called without arguments: {error}."
            ) from None
    with seeded(seed):
        sample = subject() if fresh else subject
    if not isinstance(sample, kind):
        raise TypeError(
            f"{name} must be or build a {what}, got {type(sample).__name__}"
        )
    return (subject if fresh else lambda: copy.deepcopy(sample)), fresh, sample


def _permutation(case: AnyCase) -> None:
    """renaming the nodes renames the rows of the result, unless rows are declared positions, in order"""
    module, instance = case.sample()
    if getattr(module, "positional", False):
        return
    node = torch.randperm(instance.num_nodes, generator=case.generator())
    renamed = replace(
        instance,
        x=instance.x[node],
        edge_index=node.argsort()[instance.edge_index],
    )
    got = case.response(module, renamed)
    expected = case.response(module, instance)[node]
    expect_close(got, expected, "rearranged", "the result for the renamed nodes")


def _order_of_edges(case: AnyCase) -> None:
    """the edges in another order, with their weights, give the same result"""
    module, instance = case.sample()
    edge = torch.randperm(len(instance.edge_weight), generator=case.generator())
    listed = replace(
        instance,
        edge_index=instance.edge_index[:, edge],
        edge_weight=instance.edge_weight[edge],
    )
    got = case.response(module, listed)
    expected = case.response(module, instance)
    expect_close(got, expected, "rearranged", "the result for the edges reordered")


def _batching(case: AnyCase) -> None:
    """a graph alone, in a batch, and in the batch in another order has the same result"""
    # The order too, since the first graph of a batch starts at row zero, where a wrong
    # offset does no harm.
    module = case.module()
    parts = case.batch()
    reordered = [parts[k] for k in (2, 0, 3, 1)]
    for batch in (parts, reordered):
        got = case.response(module, join(batch))
        expected = torch.cat([case.response(module, part) for part in batch])
        expect_close(got, expected, "rearranged", "the result of the batch")


def _poisoned_batch_mate(case: AnyCase) -> None:
    """NaN in one graph of a batch reaches no other graph"""
    module = case.module()
    parts = case.batch()
    joined = join(parts)
    first = parts[0].num_nodes
    clean = case.response(module, joined)[first:]
    # Not a large number, which a weight of zero would hide.
    joined.x[:first] = torch.nan
    got = case.response(module, joined)[first:]
    expect_close(got, clean, "rearranged", "the result of the other graphs")


def _single_node(case: AnyCase) -> None:
    """a single node has a finite result and finite gradients"""
    _expect_finite(case, case.instance(1))


def _isolated_nodes(case: AnyCase) -> None:
    """nodes without neighbours beside others have finite results and gradients"""
    five = case.instance(5)
    _expect_finite(case, replace(five, x=torch.cat([five.x, five.x])))


def _empty_graph(case: AnyCase) -> None:
    """an empty graph between two others of a batch leaves their results and gradients finite"""
    five = case.instance(5)
    _expect_finite(case, join([five, five.empty(), case.instance(1)]))


def _no_nodes(case: AnyCase) -> None:
    """without any node the result has no row, and gradients are finite"""
    _expect_finite(case, case.instance().empty())


def _expect_finite(case: AnyCase, instance: Instance) -> None:
    """Raise `LawBroken` unless the result, a row per node, and all gradients are finite."""
    module = case.module()
    leaf = instance.x.clone().requires_grad_()
    out = case.response(module, replace(instance, x=leaf))
    expect_equal(len(out), len(leaf), "the number of rows")
    leaves = [leaf, *trainable(module)]
    # Some parameters are not used without edges.
    grads = torch.autograd.grad(
        out.square().sum() + 0 * leaf.sum(), leaves, materialize_grads=True
    )
    for what, tensors in (("the result", [out]), ("a gradient", grads)):
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        expect(finite, f"{what} is not finite")


def _expect_derivatives(case: AnyCase, check: Callable[..., bool], atol: float) -> None:
    """Raise `LawBroken` unless `gradcheck` or `gradgradcheck` finds that derivatives agree."""
    try:
        check(*case.differentiable(), atol=atol, rtol=10 * atol, fast_mode=True)
    except GradcheckError as error:
        # Whole matrices follow the first paragraph.
        summary = str(error).partition("\n\n")[0].replace("\n", " ")
        where = "input 0 is the state, the others are the parameters in their order"
        raise LawBroken(f"{summary} ({where})") from None


def _first_derivatives(case: AnyCase) -> None:
    """gradients with respect to the state and the parameters agree with finite differences in double"""
    function, leaves = case.differentiable()
    if function(*leaves).requires_grad:
        _expect_derivatives(case, gradcheck, 1e-6)


def _second_derivatives(case: AnyCase) -> None:
    """second derivatives agree with finite differences, or are refused in words"""
    function, leaves = case.differentiable()
    out = function(*leaves)
    if not out.requires_grad:
        return
    try:
        # The loss is a square: a loss that is linear in the result has no second
        # derivative to be wrong.
        first = torch.autograd.grad(
            out.square().sum(), leaves, create_graph=True, materialize_grads=True
        )
        total = sum((grad.square().sum() for grad in first), torch.zeros(()))
        if not total.requires_grad:
            return
        torch.autograd.grad(total, leaves, allow_unused=True)
    except RuntimeError as error:
        words = "once_differentiable", "differentiate twice", "second derivative"
        clear = any(some in str(error) for some in words)
        expect(clear, f"the second derivative is not refused in words: {error}")
        return
    _expect_derivatives(case, gradgradcheck, 1e-5)


def _half_precision(case: AnyCase) -> None:
    """in bfloat16 sums over nodes are taken in float32"""
    # The reference has the parameters and inputs that were rounded, so that what is
    # compared is the arithmetic alone.
    rounded = case.module().to(torch.bfloat16)
    reference = copy.deepcopy(rounded).double()
    # Every node sends to node 0 with the weight one, so that the sum is long.
    node = torch.arange(600)
    instance = case.instance(600)
    instance = replace(
        instance,
        edge_index=torch.cat(
            [instance.edge_index, torch.stack([node, 0 * node])], dim=1
        ),
        edge_weight=torch.ones(len(instance.edge_weight) + 600),
    ).to(torch.bfloat16)
    got = case.response(rounded, instance)
    expected = case.response(reference, instance.to(torch.float64))
    expect_equal(got.dtype, torch.bfloat16, "the dtype of the result")
    size = case.size(expected)
    what = "the result in bfloat16"
    expect_close(got.double() / size, expected / size, "autocast", what)


def _autocast(case: AnyCase) -> None:
    """under autocast the result stays finite and close"""
    module = case.module(torch.float32)
    instance = case.instance().to(torch.float32)
    expected = case.response(module, instance)
    # Parameters stay in single precision under autocast, as in training.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.response(module, instance)
    expect_close(got.float(), expected, "autocast", "the result under autocast")


def _purity(case: AnyCase) -> None:
    """it leaves the state, the edges and the global random state alone, and repeats"""
    module = case.module()
    instance = join(case.batch())
    before = vars(copy.deepcopy(instance))
    with expect_rng_untouched("forward"):
        first = case.call(module, instance)
        second = case.call(module, instance)
    for name, tensor in vars(instance).items():
        expect(torch.equal(tensor, before[name]), f"forward changed {name} in place")
    expect(torch.equal(first, second), "two calls with the same state differ")


def _writable(case: AnyCase) -> None:
    """its result can be written to: no entry shares memory with another, with an input, a parameter or a buffer"""
    module = case.module()
    for instance in (case.instance(), join(case.batch())):
        expect_writable(
            partial(case.call, module, instance),
            "the result",
            *vars(instance).values(),
            *module.parameters(),
            *module.buffers(),
        )


def _reset_parameters(case: AnyCase) -> None:
    """reset_parameters() from a seed equals a fresh module of that seed in every parameter"""
    with seeded(case.seed):
        module = case.build()
    with seeded(case.seed):
        reference = case.build()
        # a copied instance is compared with another copy, reset from other values.
        if not case.fresh:
            reference.reset_parameters()
    # A parameter that is forgotten keeps this number, which no initialisation draws.
    with torch.no_grad(), seeded(case.seed):
        for parameter in module.parameters():
            parameter.fill_(17.0)
        module.reset_parameters()
    for name, fresh in reference.named_parameters():
        what = f"the parameter {name} is not the one a fresh module of that seed has"
        expect(torch.equal(module.get_parameter(name), fresh), what)


def _readable(case: AnyCase) -> None:
    """its repr names the class"""
    module = case.module()
    expect(type(module).__name__ in repr(module), f"repr is {module!r}")


def _compile(case: AnyCase) -> None:
    """torch.compile captures one full graph with a dynamic number of nodes"""
    if not case.compile:
        return
    module = case.module(torch.float32)

    def step(*tensors: Tensor) -> Tensor:
        return case.response(module, Instance(*tensors))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    # The second size shows whether the first one was compiled in.
    for size in (7, 11):
        instance = case.instance(size).to(torch.float32)
        tensors = (instance.x, instance.edge_index, instance.edge_weight)
        expect_close(compiled(*tensors), step(*tensors), "product", "compiled, it")


MODULE_LAWS: tuple[Law[Any], ...] = (
    _purity,
    _writable,
    _permutation,
    _order_of_edges,
    _batching,
    _poisoned_batch_mate,
    _single_node,
    _isolated_nodes,
    _empty_graph,
    _no_nodes,
    _first_derivatives,
    _compile,
)
"""What holds for any module that passes messages."""

LIBRARY_LAWS: tuple[Law[Any], ...] = (
    _second_derivatives,
    _half_precision,
    _autocast,
    _reset_parameters,
    _readable,
)
"""What the modules of this library promise beyond."""
