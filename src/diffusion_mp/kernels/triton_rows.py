"""Shared by Triton kernels, one program per run of ``gpu.tiles`` and head: the rows of a program, loads and stores."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from diffusion_mp.kernels.gpu import interpreted, precision


def operands(dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Return the bytes per number in a tile that is multiplied, and the options of kernels for such tiles.

    With bfloat16 values weights and flows are bfloat16, which the interpreter cannot multiply. Float16 lacks the range.
    """
    short = dtype == torch.bfloat16 and not interpreted()
    options = {"PRECISION": precision(dtype), "OPERAND": tl.bfloat16 if short else tl.float32}
    return 2 if short else 4, options


@triton.jit
@no_type_check
def own_rows(table, H, BLOCK_M: tl.constexpr):
    """Return the program's head, its rows and which of them exist, and the bounds of their graph."""
    program = tl.program_id(0).to(tl.int64)
    head, run = program % H, table + 5 * (program // H)
    row = tl.load(run) + tl.arange(0, BLOCK_M)
    return head, row, row < tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)


@triton.jit
@no_type_check
def load(x, row, inside, head, stride_n, stride_h, column, width, DTYPE: tl.constexpr):
    """Rows of x [N, H, width]; zeros outside."""
    mask = inside[:, None] & (column[None, :] < width)
    return tl.load(x + row[:, None] * stride_n + head * stride_h + column[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
@no_type_check
def store(out, row, inside, head, H, column, width, value):
    """Rows of ``out`` [N, H, width], which is contiguous."""
    mask = inside[:, None] & (column[None, :] < width)
    tl.store(out + (row[:, None] * H + head) * width + column[None, :], value, mask=mask)
