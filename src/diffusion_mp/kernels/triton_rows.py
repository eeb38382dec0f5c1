"""Shared by Triton kernels, one program per run of ``gpu.tiles`` and head: the rows of a program, loads and stores."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from diffusion_mp.kernels.gpu import interpreted

# Older versions of Triton and the interpreter lack products of bfloat16 parts.
HALVES = "bf16x6" in CUDAOptions.allowed_dot_input_precisions and not interpreted()


def precision(dtype: torch.dtype, narrowest: int) -> str:
    """Return how the matrix units multiply float32 tiles that have at least ``narrowest`` columns.

    Float32 inputs take three products of TF32 numbers or, faster, six products of bfloat16 parts, which are read
    transposed. Both are right to about 2⁻²¹. Half precision takes one product, of ten bits, and so does float32 where
    ``torch.set_float32_matmul_precision("high")`` allows it.
    """
    # Since torch 2.9 allow_tf32 cannot be read if a program set fp32_precision.
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        allowed = matmul.fp32_precision == "tf32"
    else:
        allowed = matmul.allow_tf32
    if dtype != torch.float32 or allowed:
        return "tf32"
    # In narrower tiles the products of parts that Triton 3.6 compiles read memory outside of them on an H200.
    return "bf16x6" if HALVES and narrowest >= 64 else "tf32x3"


def operands(dtype: torch.dtype, narrowest: int = 0) -> tuple[int, dict[str, Any]]:
    """Return the bytes per number in a tile that is multiplied, and the options of kernels for such tiles.

    With bfloat16 values weights and flows are bfloat16, which the interpreter cannot multiply. Float16 lacks the range.
    """
    short = dtype == torch.bfloat16 and not interpreted()
    options = {
        "PRECISION": precision(dtype, narrowest),
        "OPERAND": tl.bfloat16 if short else tl.float32,
    }
    return 2 if short else 4, options


@triton.jit
@no_type_check
def run(table, tile, nodes, rows):
    """Return the bounds of a run of rows, the bounds of its graph, and the number of the graph."""
    # One graph needs no table, whose numbers would be read from memory.
    if table is None:
        first = tile * rows
        return (
            first,
            tl.minimum(first + rows, nodes),
            tile * 0,
            tile * 0 + nodes,
            tile * 0,
        )
    else:
        at = table + 5 * tile
        return (
            tl.load(at),
            tl.load(at + 1),
            tl.load(at + 2),
            tl.load(at + 3),
            tl.load(at + 4),
        )


@triton.jit
@no_type_check
def own_rows(table, nodes, H, BLOCK_M: tl.constexpr):
    """Return the program's head, its rows and which of them exist, and the bounds of their graph."""
    # In 64 bits: numbers of entries go beyond 2³¹ for large graphs.
    program = tl.program_id(0).to(tl.int64)
    first, last, begin, end, _ = run(table, program // H, nodes, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)
    return program % H, row, row < last, begin, end


@triton.jit
@no_type_check
def load(x, row, inside, head, H, column, width, DTYPE: tl.constexpr):
    """Return rows of x [N, H, width], which is contiguous; zeros outside."""
    mask = inside[:, None] & (column[None, :] < width)
    at = x + (row[:, None] * H + head) * width + column[None, :]
    return tl.load(at, mask=mask, other=0.0).to(DTYPE)


@triton.jit
@no_type_check
def store(out, row, inside, head, H, column, width, value):
    """Write rows of ``out`` [N, H, width], which is contiguous."""
    mask = inside[:, None] & (column[None, :] < width)
    tl.store(
        out + (row[:, None] * H + head) * width + column[None, :], value, mask=mask
    )
