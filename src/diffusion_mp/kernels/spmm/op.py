"""Declaration: the product and the sampled product are each other's derivatives."""

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph.pattern import Pattern
from diffusion_mp.kernels.dispatch import Backend
from diffusion_mp.kernels.operation import Wide, operation
from diffusion_mp.kernels.spmm import compressed, reference
from diffusion_mp.kernels.spmm.entries import Entries


@operation("spmm", family="spmm", reference=reference.spmm, cpu=compressed.spmm, dtype="v")
def _spmm(entries: Entries, weight: Wide, v: Wide) -> Tensor:
    return v.new_empty(entries.rows, *v.shape[1:])


@operation("sddmm", family="spmm", reference=reference.sddmm, cpu=compressed.sddmm, dtype="b")
def _sddmm(entries: Entries, a: Wide, b: Wide) -> Tensor:
    return a.new_empty(entries.row.size(0), a.size(1))


def _by_weight(grad: Tensor, entries: Entries, weight: Tensor, v: Tensor, backend: str) -> Tensor:
    return _sddmm(entries, grad, v, backend=backend).sum_to_size(weight.shape)  # one weight for all heads, or one each


_spmm.derivatives(
    {
        "weight": _by_weight,
        "v": lambda grad, entries, weight, backend: _spmm(entries.T, weight, grad, backend=backend),
    }
)
_sddmm.derivatives(
    {
        "a": lambda grad, entries, b, backend: _spmm(entries, grad, b, backend=backend),
        "b": lambda grad, entries, a, backend: _spmm(entries.T, grad, a, backend=backend),
    }
)


def spmm(
    pattern: Pattern, weight: Float[Tensor, "E heads"], v: Float[Tensor, "C H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_e w_e v_col(e) over the entries e of row i; ``weight`` has H heads or one for all. O(E H D).

    Args:
        pattern: where the E entries are, in N rows and C columns.
        weight: w [E, H] or [E, 1].
        v: [C, H, D].
        backend: how it is computed; see `kernels.dispatch`.

    Returns:
        [N, H, D].

    Examples:
        >>> spmm(graph.pattern, torch.ones(12, 1), x.unsqueeze(1)).shape
        torch.Size([6, 1, 4])
    """
    entries = Entries.of(pattern, by_row=True, by_col=trained(v))
    return _spmm(entries, weight, v, backend=backend)


def sddmm(
    pattern: Pattern, a: Float[Tensor, "N H D"], b: Float[Tensor, "C H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "E H"]:
    """s_e = a_row(e)·b_col(e), the inner product of the two ends of every entry. O(E H D).

    Args:
        pattern: where the E entries are, in N rows and C columns.
        a, b: [N, H, D] and [C, H, D].
        backend: how it is computed; see `kernels.dispatch`.

    Returns:
        [E, H].

    Examples:
        >>> sddmm(graph.pattern, x.unsqueeze(1), x.unsqueeze(1)).shape  # one number per entry
        torch.Size([12, 1])
    """
    entries = Entries.of(pattern, by_row=trained(a), by_col=trained(b))
    return _sddmm(entries, a, b, backend=backend)


def trained(x: Tensor) -> bool:
    """Whether a gradient may be asked for, whose product needs the entries sorted; ``torch.jit.trace`` does not say."""
    return (x.requires_grad and torch.is_grad_enabled()) or torch._C._get_tracing_state() is not None
