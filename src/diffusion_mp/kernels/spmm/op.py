"""Declaration: the product and the sampled product are each other's derivatives."""

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Pattern
from diffusion_mp.kernels.dispatch import Backend
from diffusion_mp.kernels.operation import Wide, empty_like, operation
from diffusion_mp.kernels.spmm import compressed, reference


@operation("spmm", family="spmm", reference=reference.spmm, cpu=compressed.spmm, dtype="v")
def _spmm(pattern: Pattern, weight: Wide, v: Wide) -> Tensor:
    return empty_like(v)


@operation("sddmm", family="spmm", reference=reference.sddmm, cpu=compressed.sddmm, dtype="b")
def _sddmm(pattern: Pattern, a: Wide, b: Wide) -> Tensor:
    return a.new_empty(pattern.row.size(0), a.size(1))


def _by_weight(grad: Tensor, pattern: Pattern, weight: Tensor, v: Tensor, backend: str) -> Tensor:
    return _sddmm(pattern, grad, v, backend=backend).sum_to_size(weight.shape)  # one weight for all heads, or one each


_spmm.derivatives(
    {
        "weight": _by_weight,
        "v": lambda grad, pattern, weight, backend: _spmm(pattern.T, weight, grad, backend=backend),
    }
)
_sddmm.derivatives(
    {
        "a": lambda grad, pattern, b, backend: _spmm(pattern, grad, b, backend=backend),
        "b": lambda grad, pattern, a, backend: _spmm(pattern.T, grad, a, backend=backend),
    }
)


def spmm(
    pattern: Pattern, weight: Float[Tensor, "E heads"], v: Float[Tensor, "N H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_e w_e v_col(e) over the entries e of row i; ``weight`` has H heads or one for all. O(E H D)."""
    return _spmm(pattern, weight, v, backend=backend)


def sddmm(
    pattern: Pattern, a: Float[Tensor, "N H D"], b: Float[Tensor, "N H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "E H"]:
    """s_e = a_row(e)·b_col(e), the inner product of the two ends of every entry. O(E H D)."""
    return _sddmm(pattern, a, b, backend=backend)
