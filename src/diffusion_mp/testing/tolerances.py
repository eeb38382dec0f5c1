"""How close is close: one table per operation and dtype, for our tests and for users' own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_mp.errors import check_kind


class Tolerance(NamedTuple):
    """|got − expected| ≤ atol + rtol · |expected|, elementwise.

    Examples:
        >>> torch.allclose(x, x + 1e-6, **Tolerance(rtol=1e-4, atol=1e-5)._asdict())
        True
    """

    rtol: float
    atol: float


_SINGLE = Tolerance(1e-4, 1e-5)
# Eight bits of mantissa are lost in the inputs, the scores and the result; the sum itself is taken in float32.
_BRAIN = Tolerance(4e-2, 4e-2)
_HALF = Tolerance(1e-2, 1e-2)


def _row(double: Tolerance, single: Tolerance = _SINGLE) -> dict[torch.dtype, Tolerance]:
    return {torch.float64: double, torch.float32: single, torch.bfloat16: _BRAIN, torch.float16: _HALF}


TOLERANCES: dict[str, dict[torch.dtype, Tolerance]] = {
    # a coupling against its dense matrix
    "product": _row(Tolerance(1e-10, 1e-10)),
    "degree": _row(Tolerance(1e-10, 1e-10)),
    "entries": _row(Tolerance(1e-12, 1e-12)),
    "dirichlet": _row(Tolerance(1e-9, 1e-9), Tolerance(1e-3, 1e-4)),
    "gradient": _row(Tolerance(1e-8, 1e-9), Tolerance(1e-3, 1e-4)),
    # the same numbers computed in another arrangement: permuted, batched, doubled
    "rearranged": _row(Tolerance(1e-10, 1e-11)),
    # a layer or an update against its formula or another library
    "layer": _row(Tolerance(1e-9, 1e-10)),
    "parity": _row(Tolerance(1e-10, 1e-10)),
    # iterative solvers and matrix functions against dense linear algebra
    "solve": _row(Tolerance(1e-8, 1e-8)),
    # an energy may rise by rounding only
    "energy": _row(Tolerance(1e-10, 1e-12)),
    # float32 modules under autocast
    "autocast": _row(Tolerance(4e-2, 4e-2), Tolerance(4e-2, 4e-2)),
}
"""By operation and dtype; see :func:`tolerance`.

Examples:
    >>> TOLERANCES["product"][torch.float64]
    Tolerance(rtol=1e-10, atol=1e-10)
"""


def tolerance(operation: str, dtype: torch.dtype) -> Tolerance:
    """The tolerance of an operation at a dtype.

    Raises `KeyError` when the table has no such row or column.

    Examples:
        >>> tolerance("product", torch.float64).rtol < 1e-8
        True
    """
    check_kind(operation, "operation", str, "the name of an operation")
    check_kind(dtype, "dtype", torch.dtype, "a torch.dtype")
    if operation not in TOLERANCES:
        raise KeyError(f"no tolerance for the operation {operation!r}; the table has {sorted(TOLERANCES)}")
    if dtype not in TOLERANCES[operation]:
        raise KeyError(f"no tolerance for {operation!r} at {dtype}; dtype must be one of {list(TOLERANCES[operation])}")
    return TOLERANCES[operation][dtype]
