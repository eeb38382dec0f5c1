"""What the tests of kernels share: shapes, inputs, and the comparison with a reference in double precision."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from diffusion_mp.kernels import pairwise
from diffusion_mp.kernels.linear_attention import linear_attention, linear_product
from diffusion_mp.kernels.neumann import neighbours
from diffusion_mp.kernels.pairwise import (
    SCORES,
    pairwise_attention,
    pairwise_logsumexp,
    pairwise_product,
)
from diffusion_mp.kernels.sparse_flow import sparse_flow_potentials, sparse_flow_product
from diffusion_mp.testing import tolerance
from helpers import agree

DOUBLE = torch.float64

#: Triton's interpreter reads tensors on the CPU; with TRITON_INTERPRET=0 the kernels run on a GPU.
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

#: Nodes of the graphs of a batch, in which some are stacked.
SIZES: dict[str, list[int]] = {
    "ragged": [3, 1, 1, 40, 3, 0, 17, 3, 70],
    "empty at both ends": [0, 0, 5, 0, 5, 12, 0],
    "one size": [4, 4, 4],
    "one graph": [0, 7, 0],
    "molecules": [10 + (7 * i) % 19 for i in range(60)],
    "large ones": [150, 2, 300, 5, 149],
}

#: Nodes of one graph or of the graphs of a batch.
BATCHES: dict[str, int | list[int]] = {
    "one node": 1,
    "one graph": 63,
    "odd": 257,
    "ragged": SIZES["ragged"],
    "empty at both ends": SIZES["empty at both ends"],
    "no node": 0,
}

#: Nodes, heads, features, channels. The interpreter is slow, so large is thin.
CASES: dict[str, tuple[int | list[int], int, int, int]] = {
    "no node": (0, 1, 3, 3),
    "one node": (1, 2, 8, 8),
    "odd": (63, 2, 7, 33),
    "wide": (130, 1, 100, 70),
    "500": (500, 1, 16, 16),
    "1000": (1000, 1, 4, 3),
    "4097": (4097, 1, 2, 2),
    "ragged": (BATCHES["ragged"], 1, 5, 3),
    "empty at both ends": (BATCHES["empty at both ends"], 1, 5, 3),
    "one feature": (63, 2, 1, 33),
    "one channel": (63, 2, 64, 1),
}

#: Of linear attention.
OPTIONS: dict[str, dict[str, Any]] = {
    "difformer": {"constant": 1.0, "unit": True},
    "sgformer": {"own": 1.0, "unit": True},
    "plain": {"constant": 9.0, "own": 0.25},
}


def by_shifts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The product, and a gradient for both of its shifts; rows weigh about one."""
    a, b = (
        t[:, :, 0].to(torch.promote_types(t.dtype, torch.float32)) / 4 for t in (q, v)
    )
    return pairwise_product(q, k, v, a - math.log(max(1, q.size(0))), b, **options)


def by_columns(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The product with a shift of the columns alone."""
    b = k[:, :, 0].to(torch.promote_types(k.dtype, torch.float32)) / 4
    return pairwise_product(q, k, v / max(1, q.size(0)), None, b, **options)


def lse_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    lse = pairwise_logsumexp(q, k, **options)
    # −∞ for a node that is alone.
    return lse.masked_fill(lse == -torch.inf, 0.0).to(v.dtype) + 0 * v.sum()


def rows_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Both results of one pass, each with a gradient."""
    out, lse = pairwise.pairwise_rows(q, k, v, **options)
    # −∞ for a node that is alone.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return out + lse.unsqueeze(2).to(v.dtype)


def of_one_state(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    """Queries that are keys, of which large graphs compute half of the scores."""
    v = v / max(1, q.size(0)) ** 0.5
    return run(q, q, v, mutual=True, **options) + 0 * k.sum().to(v.dtype)


def mutual_product(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Symmetric scores of queries that are not keys, q_i·k_j + k_i·q_j, and equal shifts."""
    shift = (
        v[:, :, 0].to(torch.promote_types(v.dtype, torch.float32)) / 8
        - math.log(max(1, q.size(0))) / 2
    )
    both = torch.cat([q, k], 2) / 2**0.5, torch.cat([k, q], 2) / 2**0.5
    return pairwise_product(*both, v, shift, shift, mutual=True, **options)


PAIRWISE: dict[str, Callable[..., Tensor]] = {
    "attention": pairwise_attention,
    "rows": rows_of,
    "product": by_shifts,
    "product-by-columns": by_columns,
    "product-no-loops": partial(by_shifts, loops=False),
    "logsumexp": lse_of,
    "rows-no-loops": partial(rows_of, loops=False),
    "logsumexp-no-loops": partial(lse_of, loops=False),
    "rows-of-one-state": partial(of_one_state, rows_of),
    "mutual-product": mutual_product,
    "product-of-one-state-no-loops": partial(
        of_one_state, pairwise_product, loops=False
    ),
}

#: Functions of q, k, v, ptr and backend.
ATTENTION: dict[str, Callable[..., Tensor]] = {
    **{name: partial(linear_attention, **options) for name, options in OPTIONS.items()},
    "linear product": linear_product,
    **{
        f"{score}-{name}": partial(run, score=score)
        for score in SCORES
        for name, run in PAIRWISE.items()
    },
}


def attention_inputs(
    case: str, generator: torch.Generator
) -> tuple[list[Tensor], Tensor | None]:
    """q, k and v, whose inner products are of order one, and ptr."""
    sizes, heads, features, channels = CASES[case]
    ptr, n = boundaries(sizes)
    q, k, v = (
        torch.randn(n, heads, width, generator=generator)
        for width in (features, features, channels)
    )
    return [t.to(DEVICE) for t in (q / features**0.5, k, v)], ptr


def boundaries(sizes: int | list[int]) -> tuple[Tensor | None, int]:
    """``ptr``, which stays on the CPU, and the number of nodes."""
    if isinstance(sizes, int):
        return (None, sizes)
    return (torch.tensor([0, *sizes]).cumsum(0), sum(sizes))


def randn(
    *shape: int, generator: torch.Generator, dtype: torch.dtype = DOUBLE
) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)


def everything(
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    lam: Tensor,
    leak: Tensor,
    v: Tensor,
    ptr: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Product, transposed product and log-potentials of sparse flow."""
    rows = sparse_flow_potentials(q, k, fq, fk, lam, leak, ptr, backend=backend)
    there, back = (
        sparse_flow_product(
            q, k, fq, fk, v, rows.terms, ptr, transpose=transpose, backend=backend
        )
        for transpose in (False, True)
    )
    return torch.cat([there, back, rows.log_mu.to(v.dtype).unsqueeze(2)], dim=2)


def assert_same(
    fast: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Values and the gradient of every input agree in double precision."""
    bounds = [tolerance(of, DOUBLE) for of in ("product", "gradient")]
    agree(fast(*inputs), reference(*inputs), inputs, *bounds)


def assert_equals_reference(
    run: Callable[..., Tensor],
    inputs: list[Tensor],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = "triton",
) -> None:
    """``run(*inputs, backend=...)`` on inputs of ``dtype``: values, and the gradient of every input."""
    ours = [t.detach().to(dtype).requires_grad_() for t in inputs]
    truth = [t.detach().double().requires_grad_() for t in ours]
    got = run(*ours, backend=backend)
    expected = run(*truth, backend="reference")
    assert got.dtype == dtype
    assert_close(got, expected, "product", dtype)
    weight = torch.randn(got.shape, generator=generator).to(got)
    mine = torch.autograd.grad(got, ours, weight)
    theirs = torch.autograd.grad(expected, truth, weight.double())
    assert all(grad.dtype == dtype for grad in mine)
    assert_close(mine, theirs, "gradient", dtype)


def assert_close(got: Any, expected: Any, operation: str, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got, expected, check_dtype=False, **tolerance(operation, dtype)._asdict()
    )


def stencils(
    num_nodes: int,
    strides: Sequence[int],
    boundary: str,
    ptr: Tensor | None,
    like: Tensor,
) -> Tensor:
    """Return A_h of every stride h, with A_h x = x_left + x_right; row sums are 2, and Δ_h = A_h − 2I."""
    left, right = neighbours(num_nodes, strides, boundary, ptr, like.device)
    if num_nodes == 0:
        return like.new_zeros(len(strides), 0, 0)
    return (one_hot(left, num_nodes) + one_hot(right, num_nodes)).to(like.dtype)
