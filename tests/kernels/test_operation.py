"""The declaration of an operation, a prefix sum, whose derivative is its transpose; and the choice of a backend."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels import operation as operations
from diffusion_mp.kernels.operation import (
    VARIABLE,
    Implementation,
    Narrow,
    Wide,
    choose,
    empty_like,
)

from diffusion_mp.kernels.operation import operation, requested  # isort: skip


def plain(x: Tensor, transpose: bool) -> Tensor:
    """Σ_{j ≤ i} x_j by a matrix of ones; with ``transpose`` Σ_{j ≥ i} x_j."""
    ones = torch.ones(len(x), len(x)).to(x).tril()
    return torch.einsum("ij,jhd->ihd", ones.T if transpose else ones, x)


def fast(x: Tensor, transpose: bool) -> Tensor:
    """The same in one pass."""
    return x.flip(0).cumsum(0).flip(0) if transpose else x.cumsum(0)


@operation("tests::prefix_sum", family="prefix_sum", formula=plain, cpu=fast, dtype="x")
def prefix_sum(x: Wide, transpose: bool) -> Tensor:
    return empty_like(x)


prefix_sum.derivatives(
    {
        "x": lambda grad, transpose, backend: prefix_sum(
            grad, not transpose, backend=backend
        )
    }
)


class Scales(NamedTuple):
    left: Wide
    right: Wide
    power: float


class Parts(NamedTuple):
    out: Tensor
    count: Tensor


def scaled(x: Tensor, scales: Scales) -> Parts:
    return Parts(
        (scales.left * x * scales.right) ** scales.power, x.new_full((1,), x.numel())
    )


@operation("tests::scaled", family="scaled", formula=scaled, cpu=scaled, dtype="x")
def scale(x: Narrow, scales: Scales) -> Parts:
    return Parts(empty_like(x), x.new_empty(1))


def scale_backward(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    return grad * left * right, grad * x * right


@operation(
    "tests::scaled_backward",
    family="scaled",
    formula=scale_backward,
    cpu=scale_backward,
)
def backward(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    return empty_like(x, left)


asked: list[str] = []


def by_right(grad_out: Tensor, x: Tensor, scales: Scales) -> Tensor:
    asked.append("right")
    return grad_out * x * scales.left


scale.derivatives(
    {
        "x scales.left": lambda grad_out, x, scales, backend: backward(
            grad_out, x, *scales[:2], backend=backend
        ),
        "scales.right": by_right,
    }
)


def randn(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("transpose", [False, True])
def test_values_and_two_derivatives(backend: str, transpose: bool) -> None:
    x = randn(5, 2, 3).requires_grad_()
    torch.testing.assert_close(
        prefix_sum(x, transpose, backend=backend), plain(x, transpose)
    )
    assert torch.autograd.gradcheck(
        lambda x: prefix_sum(x, transpose, backend=backend), x
    )
    assert torch.autograd.gradgradcheck(
        lambda x: prefix_sum(x, transpose, backend=backend), x
    )


def test_what_torch_is_told() -> None:
    x = randn(5, 2, 3).requires_grad_()
    torch.library.opcheck(torch.ops.tests.prefix_sum.default, (x, True, "auto"))
    torch.library.opcheck(torch.ops.tests.scaled.default, (x, x, x, 1.0, "auto"))
    compiled = torch.compile(
        lambda x: prefix_sum(x, False).square().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = prefix_sum(x, False).square().sum()
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x), x), torch.autograd.grad(expected, x)
    )
    torch.func.grad(lambda x: prefix_sum(x, False, backend="reference").sum())(
        x.detach()
    )


def test_torch_sees_a_registered_operation_only_where_it_looks() -> None:
    """Both ways have the same formulas, so that the same derivatives come of them."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Mine(Tensor):
        pass

    x = randn(5, 2, 3).requires_grad_()
    seen = []
    short = prefix_sum(x, False)
    assert type(short.grad_fn).__name__ == "_FastPairBackward"
    with Seen():
        watched = prefix_sum(x, False)
        (by_watched,) = torch.autograd.grad(watched.square().sum(), x)
    assert seen.count("tests.prefix_sum.default") == 2
    (by_short,) = torch.autograd.grad(short.square().sum(), x)
    assert torch.equal(short, watched)
    assert torch.equal(by_short, by_watched)
    traced = make_fx(lambda x: prefix_sum(x, False))(x.detach())
    assert "prefix_sum" in traced.code
    assert prefix_sum(x.to("meta"), False).shape == x.shape
    assert prefix_sum(x.detach().as_subclass(Mine), False).shape == x.shape
    assert not prefix_sum(x.detach(), False).requires_grad
    with torch.no_grad():
        assert not prefix_sum(x, False).requires_grad
    by_func = torch.func.grad(lambda x: prefix_sum(x, False).square().sum())(x.detach())
    torch.testing.assert_close(by_func, by_short)


def test_the_derivative_of_the_formula_is_the_default() -> None:
    """Also of higher order; integers have none, and a result that is not used costs nothing."""

    def sums(x: Tensor, node: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
        return x.cumsum(0) ** power, x[node], node + 1

    def quickly(x: Tensor, node: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
        return x.detach().cumsum(0) ** power, x.detach()[node], node + 1

    @operation("tests::sums", family="sums", formula=sums, cpu=quickly, dtype="x")
    def fast_sums(x: Wide, node: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
        return empty_like(x), empty_like(x), empty_like(node)

    x = randn(5, 2).abs().requires_grad_()
    node = torch.tensor([3, 1, 1, 0, 4])
    for place in (0, 1):
        assert torch.autograd.gradcheck(
            lambda x, place=place: fast_sums(x, node, 2.5)[place], x
        )
        assert torch.autograd.gradgradcheck(
            lambda x, place=place: fast_sums(x, node, 2.5)[place], x
        )
    assert torch.autograd.gradgradcheck(lambda x: fast_sums(x, node, 2.5)[:2], x)
    half = x.detach().bfloat16().requires_grad_()
    assert (
        torch.autograd.grad(fast_sums(half, node, 2.0)[0].sum(), half)[0].dtype
        == torch.bfloat16
    )
    torch.library.opcheck(torch.ops.tests.sums.default, (x, node, 2.5, "auto"))


def test_the_derivative_of_the_formula_takes_arguments_of_two_precisions() -> None:
    @operation("tests::weighted", family="weighted", formula=torch.mv, cpu=torch.mv)
    def weighted(matrix: Wide, v: Wide) -> Tensor:
        return matrix.new_empty(matrix.size(0))

    matrix = randn(3, 4).float().requires_grad_()
    v = randn(4).requires_grad_()
    grads = torch.autograd.grad(weighted(matrix, v).sum(), (matrix, v))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float64]
    torch.testing.assert_close(grads[1], matrix.detach().double().sum(0))
    torch.testing.assert_close(grads[0], v.detach().float().expand(3, 4))


def test_precision() -> None:
    """Wide arguments are summed in float32 and narrow ones stay as they are; autocast does not reach either."""
    ones = torch.ones(5000, 1, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for backend in ("cpu", "reference"):
            out = prefix_sum(ones, False, backend=backend)
            assert out.dtype == torch.bfloat16
            assert out[-1].item() == 4992  # 5 000, rounded to eight bits
    x = torch.ones(3, dtype=torch.bfloat16)
    out, count = scale(
        x, Scales(torch.ones(3), torch.ones(3, dtype=torch.float64), 1.0)
    )
    assert (out.dtype, count.dtype) == (torch.bfloat16, torch.bfloat16)
    _, count = scale(x, Scales(torch.ones(3), torch.ones(3), 1.0), backend="reference")
    assert count.dtype == torch.float32


def test_named_tuples_and_only_the_gradients_that_are_needed() -> None:
    asked.clear()
    x = randn(3).requires_grad_()
    left = randn(3)
    right = randn(3)
    result = scale(x, Scales(left, right, 1.0))
    assert isinstance(result, Parts)
    assert not result.count.requires_grad
    (grad,) = torch.autograd.grad(result.out.sum(), x, create_graph=True)
    torch.testing.assert_close(grad, left * right)
    assert not asked
    grad.sum().backward()
    assert x.grad is None or not x.grad.any()
    scale(x, Scales(left, right.requires_grad_(), 1.0)).out.sum().backward()
    torch.testing.assert_close(right.grad, (x * left).detach())
    assert asked == ["right"]


TABLE = {
    "triton": Implementation(
        lambda n: "triton", lambda named, n: "n is odd" if n % 2 else None
    ),
    "cpu": Implementation(lambda n: "cpu"),
}


@pytest.mark.parametrize(
    ("backend", "n", "expected"),
    [("auto", 2, "triton"), ("auto", 3, "cpu"), ("cpu", 2, "cpu")],
)
def test_the_first_that_does_not_decline(backend, n, expected):
    assert choose("an operation", backend, TABLE, n)(n) == expected


def test_a_named_backend_is_taken_or_says_why_not():
    assert choose("an operation", "triton", TABLE, 2)(2) == "triton"
    with pytest.raises(BackendError, match=r"'triton' declines .*: n is odd"):
        choose("an operation", "triton", TABLE, 3)
    with pytest.raises(BackendError, match="'triton' does not have tests::prefix_sum"):
        prefix_sum(randn(2, 1, 1), False, backend="triton")


def test_a_backend_of_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added in one call, is known by its name, and leaves derivatives to the backends that have them."""
    calls = []

    def mine(x: Tensor, transpose: bool) -> Tensor:
        calls.append(x.shape)
        return fast(x, transpose)

    def declines(named: bool, x: Tensor, transpose: bool) -> str | None:
        return "rows are many" if len(x) > 5 else None

    monkeypatch.setattr(prefix_sum, "backends", prefix_sum.backends)
    monkeypatch.setitem(operations.BACKENDS, "mine", None)
    prefix_sum.add_backend("mine", mine, declines)
    x = randn(5, 2, 3).requires_grad_()
    for backend in ("mine", "auto", "cpu"):
        out = prefix_sum(x, False, backend=backend)
        torch.testing.assert_close(out, plain(x, False))
    assert len(calls) == 2
    monkeypatch.setenv(VARIABLE, "prefix_sum=mine")
    torch.library.opcheck(torch.ops.tests.prefix_sum.default, (x, True, "mine"))
    prefix_sum(x, False).sum().backward()
    torch.testing.assert_close(x.grad, plain(torch.ones_like(x), True))
    with pytest.raises(
        BackendError, match="'mine' declines tests::prefix_sum: rows are many"
    ):
        prefix_sum(randn(6, 1, 1), False)
    monkeypatch.delenv(VARIABLE)
    assert prefix_sum(randn(6, 1, 1), False).shape == (6, 1, 1)
    # An operation without it runs in a backward pass, and only there.
    with pytest.raises(BackendError, match=f"'mine' does not have tests::.*{VARIABLE}"):
        scale(x[:, 0, 0], Scales(x[:, 0, 0], x[:, 0, 0], 1.0), backend="mine")


def test_the_derivative_of_a_backend_that_has_none() -> None:
    def cubed(x: Tensor) -> Tensor:
        return x**3

    def square(grad: Tensor, x: Tensor) -> Tensor:
        return 3 * grad * x * x

    @operation("tests::slope", family="cube", formula=square, cpu=square)
    def slope(grad: Tensor, x: Tensor) -> Tensor:
        return empty_like(x)

    @operation(
        "tests::cube",
        family="cube",
        formula=cubed,
        cpu=cubed,
        backends={"third": Implementation(cubed)},
    )
    def cube(x: Tensor) -> Tensor:
        return empty_like(x)

    cube.derivatives({"x": slope})
    x = randn(4).requires_grad_()
    (grad,) = torch.autograd.grad(cube(x, backend="third").sum(), x)
    torch.testing.assert_close(grad, 3 * x.detach() ** 2)
    with pytest.raises(BackendError, match="'third' does not have tests::slope"):
        slope(x, x, backend="third")


@pytest.mark.parametrize(
    ("variable", "backend", "expected"),
    [
        ("", "auto", "auto"),
        ("reference", "auto", "reference"),
        ("reference", "cpu", "cpu"),
        ("pairwise=triton, linear_attention=cpu", "auto", "cpu"),
        ("pairwise=triton,", "auto", "auto"),
        ("linear_attention=triton,cpu", "auto", "triton"),
    ],
)
def test_the_call_comes_before_the_environment(
    monkeypatch, variable, backend, expected
):
    monkeypatch.setenv(VARIABLE, variable)
    assert requested("linear_attention", backend) == expected


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ("linear_atention=cpu", "linear_atention=cpu"),
        ("cpu,pair=reference", "pair=reference"),
        ("linear_attention=fast", "linear_attention=fast"),
        ("linear_attention", "linear_attention"),
        ("spmm=cpu=cpu", "spmm=cpu=cpu"),
        ("spmm=", "spmm="),
    ],
)
def test_unknown_names(monkeypatch, value, entry):
    """Wherever they stand, and whatever operation asks; every name that exists is listed."""
    with pytest.raises(ValueError, match="backend must be one of"):
        requested("linear_attention", "cuda")
    monkeypatch.setenv(VARIABLE, value)
    for asking in ("linear_attention", "pairwise"):
        with pytest.raises(
            ValueError, match=rf"{VARIABLE} .*{entry!r}.* operations are .*spmm"
        ):
            requested(asking, "auto")
    assert requested("linear_attention", "cpu") == "cpu"
