"""Every operation inside the transforms of ``torch.func``, in double precision, against its fast pair.

The formula runs there, and the fast pair was written without it, so that each is a check of the other. One graph of an
odd size, and a ragged batch with an empty graph and one of a single node, with two heads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, hessian, jvp, vmap
from torch.testing import assert_close

from diffusion_mp import (
    GCNConv,
    SFiConv,
)
from diffusion_mp.couplings import DistanceCoupling
from diffusion_mp.kernels.operation import Operation
from diffusion_mp.kernels.pairwise import pairwise_attention
from diffusion_mp.kernels.sparse_flow import RowPotentials
from diffusion_mp.kernels.sparse_flow.reference import _edge_support
from helpers import built
from operation_cases import BATCHES, OPERATIONS, arguments

DIFFERENTIABLE = [
    name
    for name, operation in OPERATIONS.items()
    if operation._derivatives is not None and "backward" not in name
]
CASES = [
    (name, place)
    for name in DIFFERENTIABLE
    for place in range(len(arguments(None)[name]))
]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

# An operation without a batching rule.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


class Called:
    """An operation as a function of the arguments that have a derivative, with its results in one vector."""

    def __init__(
        self, operation: Operation[Any], given: tuple[Any, ...], backend: str = "auto"
    ) -> None:
        self.operation = operation
        self.backend = backend
        self.flat, _, _ = operation.signature.bind(given, narrow=False)
        places = {
            place for places, *_ in operation._derivatives or [] for place in places
        }
        self.places = [
            place for place in sorted(places) if self.flat[place] is not None
        ]
        count = len(operation.signature.results)
        self.results = [
            place for place in range(count) if place not in operation._without_grad
        ]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.flat[place].detach().clone() for place in self.places]

    def __call__(self, *inputs: Tensor) -> Tensor:
        flat = list(self.flat)
        for place, x in zip(self.places, inputs, strict=True):
            flat[place] = x
        out = self.operation(
            *self.operation.signature.unflatten(flat), backend=self.backend
        )
        results = out if self.operation.signature.several else (out,)
        return torch.cat([results[place].flatten() for place in self.results])


def of(name: str, place: int, batch: str, backend: str = "auto") -> Called:
    return Called(OPERATIONS[name], arguments(BATCHES[batch])[name][place], backend)


def weights(like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, like.numel(), dtype=like.dtype).view_as(like)


def loss(run: Called, *inputs: Tensor) -> Tensor:
    out = run(*inputs)
    return (out * weights(out)).sum()


def gradients(run: Called, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(run, *leaves), leaves)


def pushed(gradients: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [(g * t).sum() for g, t in zip(gradients, tangents, strict=True)]
    ).sum()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_first_derivatives(name, place, batch):
    """``grad`` and ``jvp`` are those of the fast pair; test_transform_matrix.py has what torch makes of these."""
    run = of(name, place, batch)
    fast = of(name, place, batch, "cpu")
    inputs = run.inputs
    scalar = partial(loss, run)
    expected = gradients(fast, inputs)
    got = grad(scalar, tuple(range(len(inputs))))(*inputs)
    assert_close(got, expected, **CLOSE)
    tangents = [x.flip(0) for x in inputs]
    value, tangent = jvp(scalar, tuple(inputs), tuple(tangents))
    assert_close(value, loss(fast, *inputs), **CLOSE)
    assert_close(tangent, pushed(expected, tangents), **CLOSE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_many_at_once(name, place, batch):
    """``vmap`` and ``vmap(grad)`` over all arguments together, and ``vmap`` over one of them alone."""
    run = of(name, place, batch)
    fast = of(name, place, batch, "cpu")
    inputs = run.inputs
    every = tuple(range(len(inputs)))
    pairs = [inputs, [0.9 * x for x in inputs]]
    stacked = [torch.stack(both) for both in zip(*pairs, strict=True)]
    expected = torch.stack([fast(*each) for each in pairs])
    assert_close(vmap(run)(*stacked), expected, **CLOSE)
    slopes = [gradients(fast, each) for each in pairs]
    expected = tuple(map(torch.stack, zip(*slopes, strict=True)))
    got = vmap(grad(partial(loss, run), every))(*stacked)
    assert_close(got, expected, **CLOSE)
    for alone in every:
        dims = [None] * len(inputs)
        dims[alone] = 0
        mixed = list(inputs)
        mixed[alone] = stacked[alone]
        got = vmap(run, tuple(dims))(*mixed)
        for k in (0, 1):
            mixed[alone] = pairs[k][alone]
            assert_close(got[k], fast(*mixed), **CLOSE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_second_derivatives(name, place, batch):
    """``hessian``, and a second backward pass, are differences of the gradient of the fast pair."""
    run = of(name, place, batch)
    fast = of(name, place, batch, "cpu")
    if name == "sparse_flow_potentials":
        # Other terms are in units that count as constants; test_kernels.py differentiates the flow of all of them.
        run.results = fast.results = [RowPotentials._fields.index("log_mu")]
    inputs = run.inputs
    every = tuple(range(len(run.places)))
    directions = [x.flip(0) for x in inputs]
    step = 1e-6
    ends = [
        gradients(
            fast, [x + sign * step * t for x, t in zip(inputs, directions, strict=True)]
        )
        for sign in (1, -1)
    ]
    expected = tuple(
        (ahead - behind) / (2 * step) for ahead, behind in zip(*ends, strict=True)
    )

    rows = hessian(partial(loss, run), every)(*inputs)
    pairs = [list(zip(row, directions, strict=True)) for row in rows]
    found = tuple(
        sum(torch.tensordot(block, t, t.dim()) for block, t in row) for row in pairs
    )
    assert_close(found, expected, rtol=1e-5, atol=1e-6)

    leaves = [x.requires_grad_() for x in inputs]
    first = torch.autograd.grad(loss(fast, *leaves), leaves, create_graph=True)
    inner = pushed(first, directions)
    if inner.requires_grad:
        second = torch.autograd.grad(inner, leaves, materialize_grads=True)
    else:
        second = expected
    assert_close(second, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name.endswith("_backward")]
)
def test_the_formula_of_a_backward_pass_is_the_kernel(name, batch):
    operation = OPERATIONS[name]
    for given in arguments(BATCHES[batch])[name]:
        found = [operation(*given, backend=backend) for backend in ("reference", "cpu")]
        assert_close(*found, **CLOSE)


def test_gradients_of_many_outputs_at_once(generator):
    """``is_grads_batched`` maps by other means than ``torch.func.vmap``, over the fast pair."""
    for name, place in CASES:
        run = of(name, place, "ragged", "cpu")
        leaves = [x.requires_grad_() for x in run.inputs]
        out = run(*leaves)
        many = torch.randn(3, *out.shape, generator=generator, dtype=out.dtype)
        found = torch.autograd.grad(
            out, leaves, many, is_grads_batched=True, retain_graph=True
        )
        expected = [
            torch.autograd.grad(out, leaves, each, retain_graph=True) for each in many
        ]
        assert_close(
            found, tuple(map(torch.stack, zip(*expected, strict=True))), **CLOSE
        )


@pytest.mark.parametrize("edges", [40, 1, 0])
def test_which_edges_flow_by_sorting(edges):
    """The same edges as by Newton's method, also for several scores at once; some nodes have no edge."""
    problem, target = arguments(None)["sparse_flow_support"][0]
    problem = problem._replace(s=problem.s[:edges], u=problem.u[:edges])
    target = target[:edges]
    operation: Operation[Any] = OPERATIONS["sparse_flow_support"]
    flows, best = operation(problem, target, backend="reference")
    expected, best_of_all = _edge_support(problem, target)
    assert torch.equal(flows, expected)
    some = torch.zeros_like(problem.lam).index_add(0, target, expected.double()) > 0
    assert torch.equal(best[some], best_of_all[some])
    run: Callable[..., Any] = vmap(lambda s: operation(problem._replace(s=s), target))
    both = run(torch.stack([problem.s, problem.s - 1]))
    for k in (0, 1):
        shifted = problem._replace(s=problem.s - k)
        assert torch.equal(both[0][k], _edge_support(shifted, target)[0])


def test_forward_mode_of_more_pairs_than_are_few(generator):
    """Dual numbers go neither to torch's fused kernel nor through checkpoints of tiles, which have no tangent."""
    q, k, v, t, g = (
        torch.randn(1100, 1, 3, dtype=torch.double, generator=generator)
        for _ in range(5)
    )
    runs = (
        lambda q: pairwise_attention(q, k, v),
        lambda q: DistanceCoupling(lambda squares: 1 / (1 + squares), q, k).matmul(v),
    )
    for run in runs:
        with dual_level():
            tangent = unpack_dual(run(make_dual(q, t))).tangent
        leaf = q.clone().requires_grad_()
        (pulled,) = torch.autograd.grad(run(leaf), leaf, g)
        assert_close((tangent * g).sum(), (pulled * t).sum(), **CLOSE)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch.compile of torch 2.8 stops at Python that it does not trace inside torch.func; of 2.13 it does not",
)
@pytest.mark.unwatched
def test_a_compiled_transform(generator):
    """``torch.compile`` sees the transform, and takes the formula."""
    x = torch.randn(6, 4, generator=generator)
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 4]])
    for layer in (built(lambda: GCNConv(4, 4)), built(lambda: SFiConv(4, 4))):

        def gradients(states: Tensor, layer: Any = layer) -> Tensor:
            return vmap(grad(lambda x: layer(x, edges).square().sum()))(states)

        states = torch.stack([x, -x])
        compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
        assert_close(compiled(states), gradients(states))


def test_weights_of_edges_for_every_element(generator):
    """Values of a batch are not checked, for there is no single one; those of one graph are, also in ``grad``."""
    layer = built(lambda: GCNConv(4, 4)).double()
    x = torch.randn(6, 4, dtype=torch.double)
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 4]])
    weights_of_edges = torch.rand(3, 5, dtype=torch.double, generator=generator) + 0.5
    found = vmap(lambda weight: layer(x, edges, weight))(weights_of_edges)
    assert_close(
        found, torch.stack([layer(x, edges, weight) for weight in weights_of_edges])
    )
    with pytest.raises(ValueError, match=r"edge_index must lie in \[0, 5\]"):
        grad(lambda x: layer(x, edges + 3).sum())(x)
