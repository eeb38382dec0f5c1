"""Compiles the GPU kernels as their first calls would, for an H100 and without one; run by `test_triton_kernels.py`.

Prints a line for every kernel: its name and the bytes of shared memory that a program takes.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diffusion_mp.kernels import sparse_flow as flow
from diffusion_mp.kernels.linear_attention import Terms
from diffusion_mp.kernels.linear_attention import triton as linear
from diffusion_mp.kernels.neumann import triton as neumann
from diffusion_mp.kernels.neumann.stencil import Stencil
from diffusion_mp.kernels.pairwise import triton as pairwise
from diffusion_mp.kernels.pairwise.scores import Weighting
from diffusion_mp.kernels.sparse_flow import Features, RowTerms
from diffusion_mp.kernels.sparse_flow import triton as sparse_flow

#: What a driver has to say for a kernel to be compiled.
H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda _: 0,
)
compiled = JITFunction.run


def compile_only(self: JITFunction, *args: Any, **options: Any) -> None:
    kernel = compiled(self, *args, **{**options, "warmup": True})
    assert "cubin" in kernel.asm
    print(self.__name__, kernel.metadata.shared)


def main(dtype: torch.dtype, width: int) -> None:
    driver.set_active(H100)
    JITFunction.run = compile_only
    n = 3000
    q, k, v = (torch.zeros(n, 2, width, dtype=dtype) for _ in range(3))
    row = torch.zeros(n, 2)
    ptr = torch.tensor([0, 1000, n])
    for terms in (Terms(ptr, 1.0, 0.5, True), Terms(None, 1.0)):
        out = linear.forward(q, k, v, terms._replace(own=0.0))
        linear.backward(v, q, k, v, out, terms)
    for score in ("sigmoid", "exp"):
        pairwise.attention(q, k, v, None, score, True, False, True)
        for shift in (row, None):
            pairwise.product(q, k, v, Weighting(shift, shift, ptr, score))
        pairwise.backward(v, row, q, k, v, Weighting(row, None, ptr, score, loops=False))
    if width <= flow.WIDEST:
        features = Features(q, k, q, k)
        terms = RowTerms(row, row, row, row, row, row, row.long())
        solution = sparse_flow.potentials(features, row, row, ptr)
        sparse_flow.potentials_backward(*5 * [row], features, row, row, solution, ptr)
        for transpose in (False, True):
            sparse_flow.product(features, v, terms, ptr, transpose)
            sparse_flow.product_backward(v, features, v, terms, ptr, transpose)
    for boundary in ("symmetric", "replicate", "drop", "periodic", "causal"):
        neumann.product(v, torch.zeros(2, 2), Stencil([1, 4], boundary, ptr), True)
    neumann.inner(v, v, Stencil([1, 4], "symmetric", ptr))


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]))
