"""What the tests of GPU kernels share: shapes, and the comparison with the reference in double precision."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from diffusion_mp.testing import tolerance

#: Triton's interpreter reads tensors on the CPU; with TRITON_INTERPRET=0 the kernels run on a GPU.
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

#: Nodes of one graph or of the graphs of a batch, heads, features, channels. The interpreter is slow, so large is thin.
CASES: dict[str, tuple[int | list[int], int, int, int]] = {
    "no node": (0, 1, 3, 3),
    "one node": (1, 2, 8, 8),
    "odd": (63, 2, 7, 33),
    "wide": (130, 1, 100, 70),
    "500": (500, 1, 16, 16),
    "1000": (1000, 1, 4, 3),
    "4097": (4097, 1, 2, 2),
    "ragged": ([3, 1, 1, 40, 3, 0, 17, 3, 70], 1, 5, 3),
    "empty at both ends": ([0, 0, 5, 0, 5, 12, 0], 1, 5, 3),
}


def boundaries(sizes: int | list[int]) -> tuple[Tensor | None, int]:
    """``ptr``, which stays on the CPU, and the number of nodes."""
    return (None, sizes) if isinstance(sizes, int) else (torch.tensor([0, *sizes]).cumsum(0), sum(sizes))


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=generator).to(DEVICE)


def assert_equals_reference(
    run: Callable[..., Tensor],
    inputs: list[Tensor],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = "triton",
) -> None:
    """``run(*inputs, backend=...)`` on inputs of ``dtype``: values, and the gradient of every input."""
    ours = [t.to(dtype).requires_grad_() for t in inputs]
    truth = [t.detach().double().requires_grad_() for t in ours]
    got, expected = run(*ours, backend=backend), run(*truth, backend="reference")
    assert got.dtype == dtype
    assert_close(got, expected, "product", dtype)
    weight = randn(*got.shape, generator=generator).to(dtype)
    mine, theirs = torch.autograd.grad(got, ours, weight), torch.autograd.grad(expected, truth, weight.double())
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, "gradient", dtype)


def assert_close(got: Tensor, expected: Tensor, operation: str, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected, **tolerance(operation, dtype)._asdict())
