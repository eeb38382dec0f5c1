"""What kernels have in common: registration, precision of sums, derivatives, and graphs that stay apart in a batch."""

import copy
import gc
import math
import pickle
from collections.abc import Callable
from functools import partial

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
    stencils,
)
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import members
from diffusion_mp.kernels import segments
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
from diffusion_mp.runtime import cache
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
def test_registered_operations_pass_opcheck(
    name: str, backend: str, batch: str
) -> None:
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


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name, operation in OPERATIONS.items()
        for backend in operation.backends
        if backend != "reference"
    ],
)
def test_every_backend_computes_the_formula(
    name: str, backend: str, batch: str
) -> None:
    """What a table of backends holds is compared here, also where another file has added it.

    Only results that have a gradient: others are what a fast path keeps for its backward pass.
    """
    operation = OPERATIONS[name]
    signature = operation.signature
    for given in arguments(BATCHES[batch])[name]:
        flat, _, _ = signature.bind(given, narrow=False)
        if backend != "cpu":
            flat = [
                x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in flat
            ]
        args = signature.unflatten(flat)
        results = operation(*args, backend=backend)
        expected = operation(*args, backend="reference")
        if not signature.several:
            results = (results,)
            expected = (expected,)
        for place, (x, y) in enumerate(zip(results, expected, strict=True)):
            if place not in operation._without_grad:
                close = {"rtol": 1e-9, "atol": 1e-9}
                if y.dtype == torch.float32:
                    close = tolerance("product", torch.float32)._asdict()
                torch.testing.assert_close(x, y, **close)


def test_the_boundaries_of_a_batch_pass_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.diffusion_mp.batch_pointers.default, (torch.tensor([0, 0, 2, 2, 3]),)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_taken_in_float32(dtype: torch.dtype) -> None:
    """A sum of 5 000 ones is exact in float32; in half precision it would stop at 2 048, in bfloat16 at 256."""
    n = 5000
    one = torch.ones(n, 1, 1, dtype=dtype)
    small = torch.zeros(n, 1, 1, dtype=dtype)
    zero = torch.zeros(n, 1)
    expected = torch.full((n, 1, 1), float(n)).to(dtype)
    assert torch.equal(linear_product(one, one, one), expected)
    torch.testing.assert_close(
        pairwise_product(small, small, one, zero, zero), expected
    )
    edge_index = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)])
    assert (
        spmm(Graph(n, edge_index).pattern, one.view(n, 1), one)[0].item()
        == expected[0].item()
    )

    out, den, *_ = blocked.forward(one, one, one, Terms(constant=1.0, unit=True))
    assert torch.equal(out, one)
    assert torch.equal(den, torch.full((n, 1), 2.0 * n))

    torch.testing.assert_close(
        pairwise_logsumexp(small, small), torch.full((n, 1), math.log(n))
    )
    leaf = one.clone().requires_grad_()
    out = pairwise_attention(small, small, leaf)
    assert torch.equal(out, one)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, one)

    log_features = torch.zeros(n, 1, 5, dtype=dtype)
    shift = torch.zeros(n, 1, 2, dtype=dtype)
    lse = log_linear_logsumexp(log_features, log_features, shift)
    torch.testing.assert_close(lse, torch.full((n, 1, 2), math.log(5 * n)))
    assert torch.equal(
        log_linear_product(log_features, log_features, one, -lse, shift), 2 * one
    )
    edge = log_linear_entries(
        torch.tensor([[0], [1]]), log_features[:2], log_features[:2]
    )
    torch.testing.assert_close(edge, torch.full((1, 1), math.log(5)))

    # The last neighbour of 5 000 rows is one and the same; the weights of many strides add up to one.
    ends = neumann_product(one, torch.ones(1, 1), (n,), "replicate", transpose=True)
    assert ends[0].item() == ends[-1].item() == expected[0].item()
    assert not ends[1:-1].any()
    strides = tuple(range(1, 400))
    assert torch.equal(
        neumann_product(one[:400], torch.full((399, 1), 1 / 798), strides), one[:400]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_inside(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(40, 1, 4, generator=generator) for _ in range(3))
    low = v.to(dtype)
    alpha = torch.full((3, 1), 1 / 6)
    with torch.autocast("cpu", torch.bfloat16):
        attended = linear_attention(q, k, v)
        mixed = linear_attention(q.bfloat16(), k, v)
        moved = neumann_product(low, alpha, (1, 2, 3))
        smooth = neumann_function(lambda rate: 1 / (1 + rate), low, alpha, (1, 2, 3))
    assert torch.equal(attended, linear_attention(q, k, v))
    assert mixed.dtype == torch.float32
    assert moved.dtype == smooth.dtype == dtype
    matrices = stencils(40, (1, 2, 3), "symmetric", None, low.double())
    expected = torch.einsum("kij,kh,jhd->ihd", matrices, alpha.double(), low.double())
    torch.testing.assert_close(
        moved, expected.to(dtype), rtol=0, atol=torch.finfo(dtype).eps
    )


ONCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{
        score: partial(pairwise_attention, score=score, backend="cpu")
        for score in SCORES
    },
    "lse": lambda q, k, v: pairwise_logsumexp(q, k),
    "product": lambda q, k, v: pairwise_product(q, k, v, q[:, :, 0], k[:, :, 0]),
    "log-linear": lambda q, k, v: log_linear_product(q, k, v, None, v),
    "log-linear lse": lambda q, k, v: log_linear_logsumexp(q, k, v),
    "flow": lambda q, k, v: everything(
        q, k, q, k, v[:, :, 0].exp(), v[:, :, 1].exp(), v
    ),
}


@pytest.mark.parametrize("run", ONCE.values(), ids=ONCE)
def test_kernels_have_second_derivatives(
    run: Callable[..., Tensor], generator: torch.Generator
) -> None:
    """By their formulas; a backward pass that keeps its graph runs the kernel until one is asked for."""
    inputs = [randn(4, 2, 3, generator=generator) for _ in range(3)]
    assert torch.autograd.gradgradcheck(run, inputs)


FEW = [*OPTIONS, "linear product", "sigmoid-attention"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("n", "heads"), [(0, 1), (1, 1), (7, 2), (63, 1), (130, 3)])
def test_few_numbers_are_computed_by_plain_torch(
    n, heads, name, dtype, generator, monkeypatch
):
    """Without a backend; named, the kernel runs. Rows of any size, also zero, and queries that are keys."""
    run = ATTENTION[name]
    q, k, v = (
        0.5 * torch.randn(n, heads, width, generator=generator, dtype=dtype)
        for width in (6, 6, 4)
    )
    for factor in (
        (1.0, 0.0, 1e-25, 1e15) if name in ("difformer", "sgformer") else (1.0,)
    ):
        k[: n // 3] *= factor
        assert_equals_reference(run, [q, k, v], generator, dtype, backend="auto")
    assert_equals_reference(
        lambda x, **options: run(x, x, x, **options),
        [q],
        generator,
        dtype,
        backend="auto",
    )
    leaf = q.clone().requires_grad_()
    kernel = {
        name: type(run(leaf, k, v, backend=name).grad_fn).__name__
        for name in ("auto", "cpu")
    }
    assert kernel["auto"] != kernel["cpu"]
    monkeypatch.setenv("DIFFUSION_MP_BACKEND", "cpu")
    assert type(run(leaf, k, v).grad_fn).__name__ == kernel["cpu"]


@pytest.mark.parametrize("shift", [-100.0, -30.0, 0.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_sigmoids_of_any_size(shift, dtype, generator):
    """No row vanishes, however negative its scores are."""
    q, k, v = (
        torch.randn(9, 1, width, generator=generator, dtype=dtype)
        for width in (3, 3, 2)
    )
    q = torch.cat([q, torch.full_like(q[..., :1], shift)], 2)
    k = torch.cat([k, torch.ones_like(k[..., :1])], 2)
    assert_equals_reference(
        partial(pairwise_attention, score="sigmoid"),
        [q, k, v],
        generator,
        dtype,
        backend="auto",
    )


@pytest.mark.parametrize("name", FEW)
def test_few_numbers_have_derivatives_of_any_order(name, generator):
    inputs = [randn(4, 2, 3, generator=generator).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradgradcheck(ATTENTION[name], inputs)


def without_loops(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Every node weighs e^900 for itself, which neither sums nor gradients may see."""
    own = 30 * torch.eye(len(q), dtype=q.dtype).unsqueeze(1).expand(-1, q.size(1), -1)
    far = torch.cat([q, own], 2)
    near = torch.cat([k, own], 2)
    return pairwise_product(
        far, near, v, 0.1 * q.sum(2), 0.1 * k.sum(2), ptr, loops=False
    )


KINDS: dict[str, Callable[..., Tensor]] = {
    **{name: partial(linear_attention, **options) for name, options in OPTIONS.items()},
    "product": linear_product,
    "log-linear": lambda q, k, v, ptr: log_linear_product(
        q, k, v, None, v[..., :2], ptr
    ),
    "log-linear shifts": lambda q, k, v, ptr: log_linear_product(
        q, k, v, q[..., :2] - 9, v[..., :2], ptr
    ),
    **{
        score: lambda q, k, v, ptr, score=score: pairwise_attention(
            q, k, v, ptr, score=score
        )
        for score in SCORES
    },
    "without loops": without_loops,
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_graph_alone_gives_what_it_gives_in_a_batch(kind, sizes, heads, generator):
    """To 1e-12, forward and backward, whatever it is stacked with; and a NaN stays in its graph."""
    ptr, n = boundaries(sizes)
    assert ptr is not None
    inputs = [randn(n, heads, 6, generator=generator) for _ in range(3)]
    weight = torch.randn(n, heads, 6, generator=generator, dtype=DOUBLE)
    out = kind(*inputs, ptr)
    grads = torch.autograd.grad(out, inputs, weight)
    for first, last in ptr.unfold(0, 2, 1).tolist():
        alone = [x[first:last].detach().requires_grad_() for x in inputs]
        single = kind(*alone, None)
        found = [single, *torch.autograd.grad(single, alone, weight[first:last])]
        for batched, its in zip([out, *grads], found, strict=True):
            scale = float(its.detach().abs().max()) if its.numel() else 0.0
            torch.testing.assert_close(
                batched[first:last], its, rtol=1e-12, atol=1e-12 * max(1.0, scale)
            )
    largest = int(ptr.diff().argmax())
    rows = slice(int(ptr[largest]), int(ptr[largest + 1]))
    spoiled = [x.detach().clone() for x in inputs]
    for x in spoiled:
        x[rows] = torch.nan
        x.requires_grad_()
    found = kind(*spoiled, ptr)
    for mine, clean in zip(
        [found, *torch.autograd.grad(found, spoiled, weight)],
        [out, *grads],
        strict=True,
    ):
        assert mine[rows].isnan().any()
        for others in (slice(0, rows.start), slice(rows.stop, None)):
            torch.testing.assert_close(
                mine[others], clean[others], rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("rows", [1, 10, 64, 10**6])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_row_is_stacked_once_and_comes_back(
    sizes: list[int], heads: int, rows: int
) -> None:
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    n = sum(sizes)
    width = 5
    x = torch.arange(1.0, n * heads * width + 1).view(n, heads, width)
    graph = (
        torch.arange(len(sizes))
        .repeat_interleave(torch.tensor(sizes))
        .view(-1, 1, 1)
        .expand(-1, heads, 1)
    )
    out = torch.full_like(x, torch.nan)
    seen = torch.zeros(())
    for mask, (result,), (block, number) in stacks(
        ptr, rows, [out], [x, graph.float()]
    ):
        assert (number == number[:, :1]).all()  # also in padding
        nodes = torch.ones_like(number) if mask is None else mask
        seen = seen + (block * nodes).sum()
        assert mask is None or len(block) == 1 or block.size(1) <= rows
        result.copy_(block)
    assert torch.equal(out, x)
    assert seen == x.sum()


def test_rows_that_are_added_are_few() -> None:
    """A bucket more is cheaper than some 128 rows; so there are few of both."""
    sizes = SIZES["molecules"]
    (chunk,) = chunks(torch.tensor([0, *sizes]).cumsum(0), 10**6)
    stacked = sum(graphs * size for graphs, size in chunk.shapes)
    assert len(chunk.shapes) <= 3
    assert sum(sizes) <= stacked <= sum(sizes) + 128 * len(chunk.shapes)


def test_chunks_are_cached_with_their_boundaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Tensor] = []
    find = segments._chunks
    monkeypatch.setattr(
        segments,
        "_chunks",
        lambda ptr, rows: made.append(ptr.clone()) or find(ptr, rows),
    )
    gc.collect()  # what other tests have left
    before = len(cache._KEPT)
    ptr = torch.tensor([0, *[3, 9, 5]]).cumsum(0)
    q = torch.rand(17, 2, 4, requires_grad=True)  # positive, so that no row sum cancels
    for dtype in (torch.float64, torch.float32):  # its masks by dtype
        linear_product(*3 * [q.detach().to(dtype)], ptr)
    for _ in range(3):
        linear_attention(q, q, q, ptr).sum().backward()
    assert len(made) == 1
    assert members(ptr, 17, q.device)[1].tolist() == [3, 9, 5]
    ptr.numpy()[1] = 4  # torch's own count of changes does not see this one
    assert members(ptr, 17, q.device)[1].tolist() == [4, 8, 5]
    expected = linear_attention(q, q, q, ptr.clone(), backend="reference")
    torch.testing.assert_close(linear_attention(q, q, q, ptr), expected)
    assert len(made) == 2
    assert copy.deepcopy(ptr).equal(pickle.loads(pickle.dumps(ptr)))
    del ptr, expected
    q.grad = None
    gc.collect()
    assert len(cache._KEPT) == before
