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

from diffusion_mp.kernels.linear_attention import Terms
from diffusion_mp.kernels.linear_attention import triton as linear
from diffusion_mp.kernels.pairwise import triton as pairwise
from diffusion_mp.kernels.pairwise.scores import Weighting

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
        pairwise.attention(q, k, v, Weighting(None, None, None, score))
        for shift in (row, None):
            pairwise.product(q, k, v, Weighting(shift, shift, ptr, score))
        pairwise.backward(
            v, row, q, k, v, Weighting(row, None, ptr, score, loops=False)
        )


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]))
