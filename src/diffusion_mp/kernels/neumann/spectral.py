"""Functions of −Σ_k α_k Δ_{h_k}: every stride is diagonal in one orthonormal basis, which a fast Fourier transform
reaches.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.neumann.stencil import column, positions
from diffusion_mp.kernels.operation import empty_like, operation
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.segments import by_size, gather


def dct(v: Tensor) -> Tensor:
    """The orthonormal DCT-II along the third axis, by the Fourier transform of the even extension (period 2n)."""
    n = v.size(2)
    return (torch.fft.rfft(torch.cat([v, v.flip(2)], dim=2), dim=2)[:, :, :n] / _turn(n, v)).real


def inverse_dct(v: Tensor) -> Tensor:
    """The transpose of `dct`, which is its inverse."""
    n = v.size(2)
    return torch.fft.irfft(_turn(n, v) * v, n=2 * n, dim=2)[:, :, :n]


def _turn(n: int, like: Tensor) -> Tensor:
    """√(2n) e^{iπm/2n}, √2 times that for m = 0: from cosines around x = −½ to those around x = 0, and to unit norm."""
    mode = torch.arange(n, dtype=like.dtype, device=like.device)
    size = torch.full_like(mode, math.sqrt(2 * n))
    size[0] = math.sqrt(4 * n)
    return torch.polar(size, mode * (math.pi / (2 * n))).unsqueeze(1)


def hartley(v: Tensor) -> Tensor:
    """The orthonormal Hartley transform along the third axis, Σ_i v_i (cos + sin)(2πmi/n)/√n: its own inverse."""
    spectrum = torch.fft.fft(v, dim=2, norm="ortho")
    return spectrum.real - spectrum.imag


def _transform_rows(v: Tensor, periodic: bool, inverse: bool, ptr: Tensor | None) -> Tensor:
    apply = hartley if periodic else inverse_dct if inverse else dct
    out = empty_like(v)
    for rows in by_size(ptr, v.size(0), v.device) if v.numel() else ():
        found = apply(gather(v, rows)).transpose(1, 2)
        out[rows] = found.squeeze(0) if isinstance(rows, slice) else found
    return out


@operation("neumann_transform", cpu=_transform_rows)
def _transform(v: Tensor, periodic: bool, inverse: bool, ptr: Tensor | None) -> Tensor:
    return empty_like(v)


_transform.derivatives(
    {"v": lambda grad, periodic, inverse, ptr: _transform(grad, periodic, not inverse, ptr)}  # it is orthogonal
)


def _modes_of_rows(v: Tensor, strides: Sequence[int], periodic: bool, ptr: Tensor | None) -> Tensor:
    place, length = positions(ptr, v.size(0), v.device)
    period = length if periodic else 2 * length
    phase = (place * column(strides, place) % period).to(v.dtype) / period
    return 4 * (math.pi * phase).sin().square()


@operation("neumann_modes", cpu=_modes_of_rows)
def _modes(v: Tensor, strides: Sequence[int], periodic: bool, ptr: Tensor | None) -> Tensor:
    return v.new_empty(len(strides), v.size(0))


def neumann_function(
    function: Callable[[Tensor], Tensor],
    v: Float[Tensor, "N H D"],
    alpha: Float[Tensor, "K heads"],
    strides: Sequence[int],
    ptr: Tensor | None = None,
    *,
    periodic: bool = False,
) -> Float[Tensor, "N H D"]:
    r"""f(−Σ_k α_k Δ_{h_k}) v for the symmetric extension, or for periodic sequences, in O(N D log n).

    The m-th eigenvalue of a sequence of length n is λ_m = Σ_k α_k 4 sin²(πmh_k/2n), m = 0 … n − 1, in the DCT-II basis;
    with period n it is Σ_k α_k 4 sin²(πmh_k/n), in that of the Hartley transform.

    Args:
        function: f, from eigenvalues [N, H] to factors of the same shape, element by element.
        v: values, the rows of a sequence in order.
        alpha: weight of every stride and head; one head serves all.
        strides: h_k ≥ 1.
        ptr: row boundaries [B+1] of several sequences, on the CPU; ``None`` is one sequence.
        periodic: which of the two.

    Differentiable any number of times where f is. At least float32; the result has the dtype of ``v``.

    Examples:
        >>> v = torch.rand(6, 1, 4)
        >>> torch.allclose(neumann_function(torch.ones_like, v, torch.full((1, 1), 0.25), (1,)), v, atol=1e-6)
        True
    """
    (alpha, v), dtype = accumulating(alpha, v)
    table = _modes(v.detach(), list(strides), periodic, ptr).unsqueeze(2)
    eigenvalues = sum((mode * weight for mode, weight in zip(table, alpha, strict=True)), torch.zeros_like(alpha[0]))
    factors = function(eigenvalues).unsqueeze(2)
    return _transform(factors * _transform(v, periodic, False, ptr), periodic, True, ptr).to(dtype)
