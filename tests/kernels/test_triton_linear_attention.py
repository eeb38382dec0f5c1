"""The GPU kernels of linear attention, run by Triton's interpreter, against the reference in double precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import CASES, DEVICE, assert_equals_reference, boundaries, randn

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels.linear_attention import Terms, linear_attention, linear_pool, linear_read
from diffusion_mp.kernels.linear_attention import triton as kernels
from diffusion_mp.testing import tolerance

DIFFORMER: dict[str, Any] = {"constant": 1.0, "unit": True}
SGFORMER: dict[str, Any] = {"own": 1.0, "unit": True}
PLAIN: dict[str, Any] = {"constant": 9.0, "own": 0.25}
OPTIONS = {"difformer": DIFFORMER, "sgformer": SGFORMER, "plain": PLAIN}

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("sizes", "heads", "features", "channels"),
    [pytest.param(*case, id=name, marks=[pytest.mark.exhaustive] * (name == "4097")) for name, case in CASES.items()],
)
def test_values_and_gradients(
    sizes: int | list[int], heads: int, features: int, channels: int, generator: torch.Generator
) -> None:
    ptr, n = boundaries(sizes)
    inputs = [randn(n, heads, width, generator=generator) for width in (features, features, channels)]
    assert_equals_reference(partial(linear_attention, ptr=ptr, **DIFFORMER), inputs, generator)


@pytest.mark.parametrize("options", [SGFORMER, PLAIN], ids=["sgformer", "plain"])
def test_other_scores(options: dict[str, Any], generator: torch.Generator) -> None:
    """In a batch with an empty graph, and with several blocks of features and of channels."""
    ptr, n = boundaries([20, 0, 45])
    inputs = [randn(n, 1, width, generator=generator) for width in (70, 70, 40)]
    assert_equals_reference(partial(linear_attention, ptr=ptr, **options), inputs, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_half_precision(options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
    inputs = [randn(70, 1, width, generator=generator) for width in (9, 9, 20)]
    assert_equals_reference(partial(linear_attention, **options), inputs, generator, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_halves_are_the_whole(options: dict[str, Any], generator: torch.Generator) -> None:
    """From two parts of the senders: values and all gradients."""

    def halves(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        parts = zip(k.split(40), v.split(40), strict=True)
        sums = sum(linear_pool(keys, values, terms, backend=backend) for keys, values in parts)
        return linear_read(q, v, sums, terms, backend=backend).values

    terms = Terms(**options)
    inputs = [randn(70, 2, width, generator=generator) for width in (9, 9, 20)]
    assert_equals_reference(halves, inputs, generator)


def test_the_states_of_many_runs_are_summed(generator: torch.Generator) -> None:
    """More runs than one step of the sum takes, and a graph without any."""
    parts, out = randn(150, 5, generator=generator), torch.empty(3, 5, device=DEVICE)
    kernels._sum_runs[(3,)](parts, torch.tensor([0, 130, 130, 150], device=DEVICE), out, 5, 1, BLOCK_T=64, BLOCK_S=16)
    expected = torch.stack([part.sum(0) for part in parts.split([130, 0, 20])])
    torch.testing.assert_close(out, expected, **tolerance("product", torch.float32)._asdict())


def test_sums_are_taken_in_float32(generator: torch.Generator) -> None:
    """Σ_j k_j of 3 000 ones is exact; float16 would stop at 2 048. Each gradient is as small as 1/n, and not lost."""
    one = torch.ones(3000, 1, 1, dtype=torch.float16, device=DEVICE)
    out, den, *_ = kernels.forward(one, one, one, Terms())
    assert torch.equal(out, one)
    assert torch.equal(den, torch.full((3000, 1), 3000.0, device=DEVICE))


def test_rows_whose_sum_is_zero_are_zero_and_so_is_their_gradient(generator: torch.Generator) -> None:
    q, k, v = (randn(4, 1, 3, generator=generator) for _ in range(3))
    nobody = q * torch.tensor([1.0, 0, 1, 0], device=DEVICE)[:, None, None]
    for unit in (False, True):
        assert_equals_reference(partial(linear_attention, unit=unit), [nobody, k.abs(), v], generator)
    whole, opposite = (3 * q).round(), torch.cat([k[:2], -k[:2]]).sign()  # scores cancel exactly, values do not
    assert_equals_reference(linear_attention, [whole, opposite, v], generator)


def test_a_zero_vector_stays_zero_and_so_does_its_gradient(generator: torch.Generator) -> None:
    q, k, v, grad = (randn(4, 1, 3, generator=generator) for _ in range(4))
    inputs = [q * torch.tensor([0.0, 1, 1, 1], device=DEVICE)[:, None, None], k, v]
    gradients = []
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in inputs]
        linear_attention(*leaves, constant=1.0, unit=True, backend=backend).backward(grad)
        gradients.append(leaves[0].grad)
    assert not gradients[1][0].any()
    torch.testing.assert_close(*gradients)


def test_inputs_are_read_where_they_lie(generator: torch.Generator) -> None:
    """A head axis that is expanded, columns of a wider tensor, and rows that are not side by side."""
    wide = randn(40, 2, 12, generator=generator)
    q, k = wide[:, :1, :5].expand(-1, 2, -1), wide[..., 5:10]
    v = randn(40, 3, 2, generator=generator).transpose(1, 2)
    got = linear_attention(q, k, v, constant=9.0, backend="triton")
    torch.testing.assert_close(got, linear_attention(q, k, v, constant=9.0, backend="reference"))


@pytest.mark.parametrize("ragged", [False, True])
def test_the_registered_operation_passes_opcheck(ragged: bool, generator: torch.Generator) -> None:
    ptr = torch.tensor([0, 3, 3, 9]) if ragged else None
    inputs = [randn(9, 2, 3, generator=generator).requires_grad_() for _ in range(3)]
    torch.library.opcheck(torch.ops.diffusion_mp.linear_attention.default, (*inputs, ptr, 1.0, 0.0, True, "triton"))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="is about tensors on the CPU, which only the interpreter takes")
def test_what_is_declined(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(width: int, backend: str, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs = [randn(4, 1, width, generator=generator).to(dtype) for _ in range(3)]
        return linear_attention(*inputs, constant=1.0, unit=True, backend=backend)

    with pytest.raises(BackendError, match="neither float32 nor half precision"):
        run(3, "triton", torch.float64)
    with pytest.raises(BackendError, match="at most 256 channels, and a tensor has 257"):
        run(257, "triton")
    monkeypatch.setattr(kernels, "forward", None)
    assert run(3, "auto").isfinite().all()  # the interpreter is too slow to be taken by itself
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="not on a GPU"):
        run(3, "triton")
