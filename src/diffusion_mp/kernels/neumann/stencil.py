"""Neighbours in sequences, the sums over them, and functions of −Σ_k α_k Δ_{h_k} by fast transforms.

The formula indexes by neighbours; the fast path sums bags of rows, cached by length or batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.checks import check_choice
from diffusion_mp.graph.ops import compress
from diffusion_mp.kernels.operation import empty_like, operation
from diffusion_mp.kernels.segments import by_size, gather, scatter
from diffusion_mp.runtime.cache import batch_cache, persistent
from diffusion_mp.runtime.precision import accumulating

Boundary = Literal["symmetric", "replicate", "drop", "periodic", "causal"]
"""How a sequence continues beyond its ends: see :func:`neighbours`.

Examples:
    >>> from typing import get_args
    >>> get_args(Boundary)
    ('symmetric', 'replicate', 'drop', 'periodic', 'causal')
"""


class Stencil(NamedTuple):
    """The strides h_k, the boundary condition, and the row boundaries of the sequences."""

    strides: Sequence[int]
    boundary: str
    ptr: Tensor | None


def positions(
    ptr: Tensor | None,
    num_nodes: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | int]:
    """Return the place of every row in its sequence, 0 … n − 1, and n: one number, or [N] for a ragged batch."""
    row = torch.arange(num_nodes, device=device)
    if ptr is None:
        return row, max(num_nodes, 1)
    lengths = ptr.diff().to(device)
    start = ptr[:-1].to(device).repeat_interleave(lengths, output_size=num_nodes)
    return row - start, lengths.repeat_interleave(lengths, output_size=num_nodes)


def neighbours(
    num_nodes: int,
    strides: Sequence[int],
    boundary: str,
    ptr: Tensor | None,
    device: torch.device,
) -> tuple[Int[Tensor, "K N"], Int[Tensor, "K N"]]:
    """Return the rows of the left and the right neighbours at every stride, in the same sequence, each [K, N].

    Args:
        num_nodes: N, the number of rows.
        strides: h_k ≥ 1, the K distances to the neighbours.
        boundary: how a sequence continues beyond its ends. ``"symmetric"`` reflects it with the end repeated (x₀ = x₁,
            x₋₁ = x₂, …). ``"replicate"`` stops at the end. ``"drop"`` takes the node itself for a missing neighbour.
            ``"periodic"`` wraps around. ``"causal"`` drops on the left, and takes the node itself for every right
            neighbour.
        ptr: row boundaries [B + 1] of several sequences; ``None`` is one sequence.
        device: device of the result.

    Examples:
        >>> left, right = neighbours(6, (1, 2), "symmetric", None, torch.device("cpu"))
        >>> left.tolist()
        [[0, 0, 1, 2, 3, 4], [1, 0, 0, 1, 2, 3]]
    """
    position, length = positions(ptr, num_nodes, device)
    left = torch.stack([position - stride for stride in strides])
    right = torch.stack([position + stride for stride in strides])
    if boundary == "symmetric":
        # The extension has the period 2n, also for strides longer than the sequence.
        left, right = (x % (2 * length) for x in (left, right))
        left, right = (torch.minimum(x, 2 * length - 1 - x) for x in (left, right))
    elif boundary == "replicate":
        left = left.clamp(min=0)
        # Not `clamp`, which takes one limit for all sequences.
        right = torch.where(right < length, right, length - 1)
    elif boundary == "periodic":
        left = left % length
        right = right % length
    else:
        check_choice(boundary, "boundary", get_args(Boundary))
        left = torch.where(left < 0, position, left)
        if boundary == "drop":
            right = torch.where(right < length, right, position)
        else:
            right = position.expand_as(right)
    # The same for all rows of a sequence: no neighbour can be in another one.
    start = torch.arange(num_nodes, device=device) - position
    return start + left, start + right


Sums = Callable[[Tensor, Tensor, int, Stencil, bool], Tensor]


def product(
    weighted_sums: Sums,
    v: Float[Tensor, "N H D"],
    alpha: Float[Tensor, "K H"],
    stencil: Stencil,
    transpose: bool,
) -> Float[Tensor, "N H D"]:
    """Return Σ_k α_k (v_left + v_right); with ``transpose`` every row is added to its neighbours instead."""
    (alpha, v), dtype = accumulating(alpha, v)
    terms = (
        weighted_sums(v, weight, stride, stencil, transpose)
        for stride, weight in zip(stencil.strides, alpha.unsqueeze(2), strict=True)
    )
    # In place of a stack of all strides, which takes K times the memory.
    out = next(terms)
    for term in terms:
        out.add_(term)
    return out.to(dtype)


def inner(
    weighted_sums: Sums,
    g: Float[Tensor, "N H D"],
    v: Float[Tensor, "N H D"],
    stencil: Stencil,
) -> Float[Tensor, "K H"]:
    """Return the inner products of g with v_left + v_right at every stride."""
    (g, v), _ = accumulating(g, v)
    terms = [weighted_sums(v, g, stride, stencil, False) for stride in stencil.strides]
    return torch.stack([term.sum((0, 2)) for term in terms])


def plain_sums(
    v: Tensor,
    weight: Tensor,
    stride: int,
    stencil: Stencil,
    transpose: bool,
) -> Tensor:
    """Return ``weight`` times v_left + v_right, or the transpose of these sums."""
    _, boundary, ptr = stencil
    (left,), (right,) = neighbours(v.size(0), (stride,), boundary, ptr, v.device)
    if transpose:
        moved = torch.zeros_like(v).index_add(0, left, v).index_add(0, right, v)
    elif ptr is None and boundary in ("symmetric", "periodic") and stride <= len(v):
        # Shifted copies, whose gradient ``torch.compile`` fuses, unlike the gradient of an index.
        ends = (v[-stride:], v[:stride])
        if boundary == "symmetric":
            ends = (v[:stride].flip(0), v[-stride:].flip(0))
        padded = torch.cat([ends[0], v, ends[1]])
        moved = padded[: len(v)] + padded[2 * stride :]
    else:
        moved = v[left] + v[right]
    return moved * weight


# Rows of the longest single sequence whose neighbours are cached: beyond, finding them is cheaper than reading them.
KEPT = 1 << 16
# Bounds [N+1] of the entries of every row, and the rows that are summed.
Bags = tuple[Tensor, Tensor]


def fast_sums(
    v: Tensor,
    weight: Tensor,
    stride: int,
    stencil: Stencil,
    transpose: bool,
) -> Tensor:
    """Return the same sums by bags of rows, in one pass over v."""
    if v.numel() == 0:
        return torch.zeros_like(v)
    bounds, rows = _bags(v.size(0), stride, stencil, transpose, v.device)
    # Detached, since torch would number the rows of every bag for a gradient that it is not asked for.
    flat = v.detach().reshape(v.size(0), -1)
    # Half the time of gathering both neighbours and adding them.
    moved = torch.embedding_bag(flat, rows, bounds, include_last_offset=True)[0]
    return moved.view_as(v).mul_(weight)


def _bags(
    num_nodes: int,
    stride: int,
    stencil: Stencil,
    transpose: bool,
    device: torch.device,
) -> Bags:
    _, boundary, ptr = stencil
    # The matrices of the other boundaries are symmetric: both directions share one entry of the cache.
    turned = transpose and boundary in ("replicate", "causal")
    key = (num_nodes, stride, boundary, turned, device)
    if ptr is not None:
        cache = batch_cache(ptr)
        if key not in cache:
            cache[key] = _find(*key, ptr)
        return cache[key]
    if num_nodes > KEPT:
        return _find(*key)
    return _find_once(*key)


def _find(
    num_nodes: int,
    stride: int,
    boundary: str,
    turned: bool,
    device: torch.device,
    ptr: Tensor | None = None,
) -> Bags:
    """Return the neighbours of every row or, if ``turned``, the rows of which the row is a neighbour."""
    (left,), (right,) = neighbours(num_nodes, (stride,), boundary, ptr, device)
    if turned:
        row = torch.arange(num_nodes, device=device).repeat(2)
        bounds, _, rows = compress(torch.cat([left, right]), row, num_nodes)
        return bounds, rows
    rows = torch.stack([left, right], 1).flatten()
    return torch.arange(0, rows.numel() + 1, 2, device=device), rows


@lru_cache(maxsize=64)
def _find_once(*arguments: Any) -> Bags:
    return persistent(partial(_find, *arguments))


def _transformed(v: Tensor, periodic: bool, inverse: bool) -> Tensor:
    """Return the orthonormal DCT-II along the third axis, the Fourier transform of the even extension, or its inverse.

    With ``periodic`` return the Hartley transform, Σ_i v_i (cos + sin)(2πmi/n)/√n, which is its own inverse.
    """
    if periodic:
        # Contiguous, since MKL of PyTorch 2.6 refuses expanded tensors, such as the gradient of a sum.
        spectrum = torch.fft.fft(v.contiguous(), dim=2, norm="ortho")
        return spectrum.real - spectrum.imag
    n = v.size(2)
    mode = torch.arange(n, dtype=v.dtype, device=v.device)
    # The constant mode has twice the square of the others.
    constant = (mode == 0).to(v)
    norm = (2 * n * (1 + constant)).sqrt()
    # The extension is even about −½, not 0: the phase shifts its cosines by half a sample.
    phase = mode * (math.pi / (2 * n))
    turn = torch.polar(norm, phase).unsqueeze(1)
    if inverse:
        extension = torch.fft.irfft(turn * v, n=2 * n, dim=2)
        return extension[:, :, :n]
    extension = torch.cat([v, v.flip(2)], 2)
    spectrum = torch.fft.rfft(extension, dim=2)[:, :, :n]
    return (spectrum / turn).real


def _transform_rows(
    v: Tensor,
    periodic: bool,
    inverse: bool,
    ptr: Tensor | None,
) -> Tensor:
    if not v.numel():
        return torch.zeros_like(v)
    # A transform pads nothing, so only sequences of one length are stacked.
    runs = list(by_size(ptr, v.size(0), v.device))
    parts = [_transformed(gather(v, rows), periodic, inverse) for rows in runs]
    return scatter(parts, runs)


@operation("neumann_transform", formula=_transform_rows, cpu=_transform_rows)
def _transform(v: Tensor, periodic: bool, inverse: bool, ptr: Tensor | None) -> Tensor:
    return empty_like(v)


# The transform is orthogonal: its transpose, by which gradients are taken, is its inverse.
_transform.derivatives(
    {
        "v": lambda grad, periodic, inverse, ptr: _transform(
            grad, periodic, not inverse, ptr
        )
    }
)


def neumann_function(
    function: Callable[[Tensor], Tensor],
    v: Float[Tensor, "N H D"],
    alpha: Float[Tensor, "K heads"],
    strides: Sequence[int],
    ptr: Tensor | None = None,
    *,
    periodic: bool = False,
) -> Float[Tensor, "N H D"]:
    r"""Apply a function of the sequence Laplacian, f(−Σ_k α_k Δ_{h_k}) v, in O(N D log n).

    Sequences are extended symmetrically, or periodically. The m-th eigenvalue of a sequence of length n, m = 0 … n − 1,
    is

        λ_m = Σ_k α_k 4 sin²(πmh_k/2n)

    in the basis of the DCT-II. With ``periodic`` it is Σ_k α_k 4 sin²(πmh_k/n), in the basis of the Hartley transform.
    The function computes in at least float32, and the result has the dtype of ``v``. It is as differentiable as f.

    Args:
        function: f, from eigenvalues [N, H] to factors of the same shape, element by element.
        v: values, with the rows of a sequence in order.
        alpha: α, the weight of every stride and head; one head serves all heads of v.
        strides: h_k ≥ 1, the K distances to the neighbours.
        ptr: row boundaries [B + 1] of several sequences, on the CPU. By default all rows are one sequence.
        periodic: whether sequences are extended periodically. The default is the symmetric extension.

    Shapes:
        v, output: [N, H, D].
        alpha: [K, H] or [K, 1].

    Examples:
        >>> v = torch.rand(6, 1, 4)
        >>> torch.allclose(neumann_function(torch.ones_like, v, torch.full((1, 1), 0.25), (1,)), v, atol=1e-6)
        True
    """
    (alpha, v), dtype = accumulating(alpha, v)
    position, length = positions(ptr, v.size(0), v.device)
    period = length if periodic else 2 * length
    # Broadcast to all rows by the first stride.
    eigenvalues = torch.zeros_like(alpha[0])
    for stride, weight in zip(strides, alpha, strict=True):
        # Reduced in integers: the sine of a large angle has lost its digits.
        phase = (position * stride % period).to(v.dtype) / period
        mode = 4 * (math.pi * phase).sin().square()
        eigenvalues = eigenvalues + mode.unsqueeze(1) * weight
    spectrum = _transform(v, periodic, False, ptr)
    filtered = function(eigenvalues).unsqueeze(2) * spectrum
    return _transform(filtered, periodic, True, ptr).to(dtype)
