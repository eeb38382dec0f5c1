"""What kernels have in common: registration, precision of sums, derivatives, and graphs that stay apart in a batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kernel_cases import (
    ATTENTION,
    DOUBLE,
    OPTIONS,
    SIZES,
    assert_equals_reference,
    boundaries,
    everything,
    randn,
)
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import members
from diffusion_mp.kernels import log_linear_attention, segments
from diffusion_mp.kernels.linear_attention import (
    Terms,
    blocked,
    linear_attention,
    linear_product,
)
from diffusion_mp.kernels.log_linear_attention import (
    log_linear_entries,
    log_linear_logsumexp,
    log_linear_product,
)
from diffusion_mp.kernels.neumann import neumann_function, neumann_product
from diffusion_mp.kernels.pairwise import (
    SCORES,
    pairwise_attention,
    pairwise_logsumexp,
    pairwise_product,
)
from diffusion_mp.kernels.segments import chunks, stacks
from diffusion_mp.kernels.spmm import spmm
from diffusion_mp.testing import tolerance
from operation_cases import BATCHES, OPERATIONS, arguments

ON_GPU = [
    "linear_attention",
    "pairwise_attention",
    "pairwise_product",
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "auto") for name in OPERATIONS), *((name, "triton") for name in ON_GPU)],
)
def test_registered_operations_pass_opcheck(name, backend, batch):
    """In single precision, with gradients of everything that has one."""
    operation = OPERATIONS[name]
    derivatives = [] if name.endswith("_backward") else operation._derivatives or []
    leaves = {place for places, *_ in derivatives for place in places}
    for given in arguments(BATCHES[batch])[name][:3]:
        flat = [
            x.float().requires_grad_(place in leaves)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for place, x in enumerate(operation.signature.bind(given, narrow=False)[0])
        ]
        torch.library.opcheck(operation.written_out()[0], (*flat, backend))


#: Every backend that a table of backends holds, also where another file has added it.
BACKENDS = [
    (name, backend)
    for name, operation in OPERATIONS.items()
    for backend in operation.backends
    if backend != "reference"
]


def accepted(name: str, backend: str, batch: str) -> Iterator[list[Any]]:
    """Yield the flat arguments of every case that a backend does not decline."""
    operation = OPERATIONS[name]
    declines = operation.backends[backend].declines
    for given in arguments(BATCHES[batch])[name]:
        flat, _, _ = operation.signature.bind(given, narrow=False)
        if backend != "cpu":
            flat = [
                x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in flat
            ]
        args = operation.signature.unflatten(flat)
        if declines is None or declines(True, *args) is None:
            yield flat


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_no_backend_declines_all_cases(name: str, backend: str) -> None:
    assert any(list(accepted(name, backend, batch)) for batch in BATCHES)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_nan_is_where_the_formula_has_it(name: str, backend: str) -> None:
    """In a ragged batch, in the first row of the first argument: no other graph, and no node without it, gets it."""
    operation = OPERATIONS[name]
    for flat in accepted(name, backend, "ragged"):
        place = next(at for at, x in enumerate(flat) if is_rows(x))
        values = [*flat]
        values[place] = flat[place].clone()
        values[place][0] = torch.nan
        args = operation.signature.unflatten(values)
        found, expected = (
            operation(*args, backend=chosen) for chosen in (backend, "reference")
        )
        if operation.signature.several:
            found, expected = found[0], expected[0]
        if name.startswith("sparse_flow"):
            # Potentials of a NaN may be 0, and the product is NaN. In the graph of that row only.
            first = slice(BATCHES["ragged"][1], None)
            found, expected = found[first], expected[first]
        assert torch.equal(found.isnan(), expected.isnan())


def is_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_every_backend_computes_the_formula(
    name: str, backend: str, batch: str
) -> None:
    """In values and gradients.

    Only results that have a gradient: others are what a fast path keeps for its backward pass.
    """
    operation = OPERATIONS[name]
    for flat in accepted(name, backend, batch):
        results, gradients = results_and_gradients(operation, flat, backend)
        expected, expected_gradients = results_and_gradients(
            operation, flat, "reference"
        )
        for x, y in zip(
            [*results, *gradients], [*expected, *expected_gradients], strict=True
        ):
            close = {"rtol": 1e-9, "atol": 1e-9}
            if y.dtype == torch.float32:
                close = tolerance("product", torch.float32)._asdict()
            torch.testing.assert_close(x, y, **close)


def results_and_gradients(
    operation: Any, flat: Sequence[Any], backend: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results that have a gradient, and the gradients of a weighted sum of them."""
    # Without declared derivatives all arguments have the derivative of the formula.
    places = range(len(flat))
    if operation._derivatives is not None:
        places = [at for each in operation._derivatives for at in each.places]
    inputs = list(flat)
    for place in places:
        if isinstance(flat[place], Tensor) and flat[place].is_floating_point():
            inputs[place] = flat[place].detach().requires_grad_()
    out = operation(*operation.signature.unflatten(inputs), backend=backend)
    several = out if operation.signature.several else (out,)
    results = [
        x for place, x in enumerate(several) if place not in operation._without_grad
    ]
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for x in results:
        if x.requires_grad:
            weight = torch.rand(x.shape, generator=generator, dtype=x.dtype)
            total = total + (weight * x).sum()
    # An operation that finds out which entries there are has no gradient.
    if not total.requires_grad:
        return results, []
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    found = torch.autograd.grad(
        total, leaves, allow_unused=True, materialize_grads=True
    )
    return [x.detach() for x in results], list(found)


def test_the_boundaries_of_a_batch_pass_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.diffusion_mp.batch_pointers.default, (torch.tensor([0, 0, 2, 2, 3]),)
    )


MANY = 5000


def edges_to_one_node() -> Graph:
    return Graph(MANY, torch.stack([torch.arange(MANY), torch.zeros(MANY).long()]))


def summed_by_a_gradient(one: Tensor) -> Tensor:
    leaf = one.clone().requires_grad_()
    out = pairwise_attention(0 * one, 0 * one, leaf)
    return MANY * torch.autograd.grad(out.sum(), leaf)[0]


#: Sums of as many ones, or numbers made of them, of features and values [N, 1, 1] of ones.
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear product": lambda one: linear_product(one, one, one),
    "linear attention": lambda one: (
        blocked.forward(one, one, one, Terms(constant=1.0, unit=True))[1] / 2
    ),
    "pairwise product": lambda one: pairwise_product(
        0 * one, 0 * one, one, torch.zeros(MANY, 1), torch.zeros(MANY, 1)
    ),
    "pairwise logsumexp": lambda one: pairwise_logsumexp(0 * one, 0 * one).exp(),
    "pairwise attention": lambda one: MANY * pairwise_attention(0 * one, 0 * one, one),
    "its gradient": summed_by_a_gradient,
    "spmm": lambda one: spmm(edges_to_one_node().pattern, one.view(-1, 1), one)[:1],
    "log-linear logsumexp": lambda one: log_linear_logsumexp(
        0 * one, 0 * one, 0 * one
    ).exp(),
    "log-linear product": lambda one: log_linear_product(
        0 * one, 0 * one, one, 0 * one[..., 0:1], 0 * one
    ),
    "log-linear entries": lambda one: (
        MANY
        / 5
        * log_linear_entries(
            torch.eye(2).long(), *2 * [0 * one[:2].expand(-1, -1, 5)]
        ).exp()
    ),
    # The last neighbour of all rows is one and the same.
    "neumann": lambda one: neumann_product(
        one, torch.ones(1, 1), (MANY,), "replicate", transpose=True
    )[:1],
    # The weights of many strides add up to one.
    "many strides": lambda one: (
        MANY
        * neumann_product(
            one[:400], torch.full((399, 1), 1 / 798), tuple(range(1, 400))
        )
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_taken_in_float32(name, dtype):
    """A sum of 5 000 ones is exact in float32; in half precision it would stop at 2 048, in bfloat16 at 256."""
    total = SUMS[name](torch.ones(MANY, 1, 1, dtype=dtype))
    expected = torch.full_like(total, MANY)
    rounding = 1e-5 if total.dtype == torch.float32 else 0.0
    assert_close(total, expected, rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_inside(dtype, generator):
    q, k, v = torch.randn(3, 40, 1, 4, generator=generator)
    low = v.to(dtype)
    alpha = torch.full((3, 1), 1 / 6)
    strides = (1, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        attended = linear_attention(q, k, v)
        mixed = linear_attention(q.bfloat16(), k, v)
        moved = neumann_product(low, alpha, strides)
        smooth = neumann_function(lambda rate: 1 / (1 + rate), low, alpha, strides)
    assert torch.equal(attended, linear_attention(q, k, v))
    assert torch.equal(moved, neumann_product(low, alpha, strides))
    assert mixed.dtype == torch.float32
    assert moved.dtype == smooth.dtype == dtype


#: Compositions of operations; `test_function_transforms.py` has the operations.
COMPOSED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "lse": lambda q, k, v: pairwise_logsumexp(q, k),
    "log-linear": lambda q, k, v: log_linear_product(q, k, v, None, v),
    "log-linear lse": log_linear_logsumexp,
    "flow": lambda q, k, v: everything(
        q, k, q, k, v[:, :, 0].exp(), v[:, :, 1].exp(), v
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_second_derivatives(name, generator, monkeypatch):
    """Also of samples of log features that the backward pass computes again."""
    monkeypatch.setattr(log_linear_attention, "CHUNK", 1)
    inputs = [randn(4, 2, 3, generator=generator) for _ in range(3)]
    assert torch.autograd.gradgradcheck(COMPOSED[name], inputs)


FEW = [*OPTIONS, "linear product", "sigmoid-attention"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("n", "heads"), [(0, 1), (1, 1), (7, 2), (63, 1), (130, 3)])
def test_few_numbers_are_computed_by_plain_torch(
    n,
    heads,
    name,
    dtype,
    generator,
    monkeypatch,
):
    """Without a backend; named, the kernel runs. Rows of any size, also zero, and queries that are keys."""
    run = ATTENTION[name]
    q, k, v = (
        0.5 * torch.randn(n, heads, width, generator=generator, dtype=dtype)
        for width in (6, 6, 4)
    )
    factors = (1.0, 0.0, 1e-25, 1e15) if name in ("difformer", "sgformer") else (1.0,)
    for factor in factors:
        k[: n // 3] *= factor
        assert_equals_reference(run, [q, k, v], generator, dtype, backend="auto")

    def tied(x: Tensor, backend: str) -> Tensor:
        return run(x, x, x, backend=backend)

    assert_equals_reference(tied, [q], generator, dtype, backend="auto")

    leaf = q.clone().requires_grad_()
    formula = type(run(leaf, k, v).grad_fn)
    kernel = type(run(leaf, k, v, backend="cpu").grad_fn)
    assert formula.__name__ != kernel.__name__
    monkeypatch.setenv("DIFFUSION_MP_BACKEND", "cpu")
    assert type(run(leaf, k, v).grad_fn).__name__ == kernel.__name__


def without_loops(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Every node weighs e^900 for itself, which neither sums nor gradients may see."""
    own = 30 * torch.eye(len(q), dtype=q.dtype).unsqueeze(1).expand(-1, q.size(1), -1)
    far = torch.cat([q, own], 2)
    near = torch.cat([k, own], 2)
    return pairwise_product(
        far, near, v, 0.1 * q.sum(2), 0.1 * k.sum(2), ptr, loops=False
    )


def flow(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    friction = v[:, :, 0].exp() / 4
    leak = q[:, :, 0].exp()
    return everything(q / 2, k, k, q / 2, friction, leak, v, ptr)


#: Functions of q, k, v and ptr.
KINDS: dict[str, Callable[..., Tensor]] = {
    **{name: ATTENTION[name] for name in (*OPTIONS, "linear product")},
    **{score: ATTENTION[f"{score}-attention"] for score in SCORES},
    "log-linear": lambda q, k, v, ptr: log_linear_product(
        q, k, v, None, v[..., :2], ptr
    ),
    "log-linear shifts": lambda q, k, v, ptr: log_linear_product(
        q, k, v, q[..., :2] - 9, v[..., :2], ptr
    ),
    "without loops": without_loops,
    "flow": flow,
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_alone_gives_what_it_gives_in_a_batch(kind, sizes, heads, generator):
    """To 1e-12, forward and backward, whatever it is stacked with; and a NaN stays in its graph."""
    ptr, n = boundaries(sizes)
    assert ptr is not None
    inputs = [randn(n, heads, 6, generator=generator) for _ in range(3)]
    weight = torch.randn(n, heads, 13, generator=generator, dtype=DOUBLE)

    def run(inputs: Sequence[Tensor], rows: slice, ptr: Tensor | None) -> list[Tensor]:
        """The value and all gradients of some rows."""
        leaves = [x[rows].detach().clone().requires_grad_() for x in inputs]
        out = KINDS[kind](*leaves, ptr=ptr)
        return [out, *torch.autograd.grad(out, leaves, weight[rows, :, : out.size(2)])]

    everyone = slice(None)
    together = run(inputs, everyone, ptr)
    for first, last in ptr.unfold(0, 2, 1).tolist():
        for batched, alone in zip(
            together, run(inputs, slice(first, last), None), strict=True
        ):
            scale = float(alone.detach().abs().max()) if alone.numel() else 0.0
            assert_close(
                batched[first:last], alone, rtol=1e-12, atol=1e-12 * max(1.0, scale)
            )

    largest = int(ptr.diff().argmax())
    first, last = ptr[largest : largest + 2].tolist()
    spoiled = [x.detach().clone() for x in inputs]
    for x in spoiled:
        x[first:last] = torch.nan
    for mine, clean in zip(run(spoiled, everyone, ptr), together, strict=True):
        assert mine[first:last].isnan().any()
        for others in (slice(0, first), slice(last, None)):
            assert_close(mine[others], clean[others], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 10, 64, 10**6])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_row_is_stacked_once_and_comes_back(sizes, heads, rows):
    ptr, n = boundaries(sizes)
    x = torch.arange(1, n * heads * 5 + 1, dtype=DOUBLE).view(n, heads, 5)
    member = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    number = member.double().view(-1, 1, 1).expand(-1, heads, 1)
    out = torch.full_like(x, torch.nan)
    total = 0.0
    for mask, (result,), (block, graph) in stacks(ptr, rows, [out], [x, number]):
        assert (graph == graph[:, :1]).all()  # also in padding
        nodes = torch.ones_like(graph) if mask is None else mask
        total += float((block * nodes).sum())
        assert mask is None or len(block) == 1 or block.size(1) <= rows
        result.copy_(block)
    assert torch.equal(out, x)
    assert total == x.sum()


def test_rows_that_are_added_are_few():
    """A bucket more is cheaper than some 128 rows; so there are few of both."""
    ptr, n = boundaries(SIZES["molecules"])
    (chunk,) = chunks(ptr, 10**6)
    stacked = sum(graphs * size for graphs, size in chunk.shapes)
    assert len(chunk.shapes) <= 3
    assert n <= stacked <= n + 128 * len(chunk.shapes)


def test_chunks_are_cached_with_their_boundaries(
    monkeypatch,
):
    """For all dtypes, heads, and both passes; `test_cache.py` says when values are forgotten."""
    calls: list[Tensor] = []
    find = segments._chunks

    def counted(ptr: Tensor, rows: int) -> Any:
        calls.append(ptr)
        return find(ptr, rows)

    monkeypatch.setattr(segments, "_chunks", counted)
    ptr = torch.tensor([0, 3, 12, 17])
    q = torch.rand(17, 2, 4, requires_grad=True)  # positive, so that no row sum cancels
    linear_product(q.double(), q.double(), q.double(), ptr)
    for _ in range(3):
        linear_attention(q, q, q, ptr).sum().backward()
    assert len(calls) == 1
    assert members(ptr, 17, q.device)[1].tolist() == [3, 9, 5]
    ptr.numpy()[1] = 4  # torch's own count of changes does not see this one
    assert members(ptr, 17, q.device)[1].tolist() == [4, 8, 5]
    expected = linear_attention(q, q, q, ptr.clone(), backend="reference")
    assert_close(linear_attention(q, q, q, ptr), expected)
    assert len(calls) == 2
