"""Shared by the Triton kernels, without importing Triton: when they decline, and how rows are split into runs."""

import importlib.util
import os
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import Implementation
from diffusion_mp.runtime.cache import batch_cache

# The widest rows that fit into the registers of one program.
WIDEST = 256


def kernel(module: str, function: str, widest: float = WIDEST) -> Implementation:
    """Return ``function`` of a module that is imported when it runs; it supports rows up to ``widest``."""
    return Implementation(partial(_run, module, function), partial(_declines, widest))


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _run(module: str, function: str, *args: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args)


def _declines(widest: float, named: bool, *args: Any) -> str | None:
    """Return why the kernels do not support these arguments, or ``None``; the slow interpreter runs only if named."""
    # Nearly always on the CPU, and of a small graph the other questions would take as long as the product.
    if not named and args[0].is_cpu:
        return "the first tensor is on the CPU"
    # Named tuples of arguments hold tensors too.
    parts = chain.from_iterable(
        arg if isinstance(arg, tuple) else (arg,) for arg in args
    )
    tensors = [
        part for part in parts if isinstance(part, Tensor) and part.is_floating_point()
    ]
    if not (named and interpreted()) and not all(tensor.is_cuda for tensor in tensors):
        return "a tensor is not on a GPU, and TRITON_INTERPRET=1 is not set"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "its kernels use number formats of Nvidia's GPUs"
    if any(
        tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        for tensor in tensors
    ):
        return "its kernels accumulate in float32, and a tensor is neither float32 nor half precision"
    width = max((tensor.size(2) for tensor in tensors if tensor.dim() == 3), default=0)
    if width <= widest:
        return None
    return f"its rows have at most {widest} channels, and a tensor has {width}"


class Tiles(NamedTuple):
    """Runs of rows that together cover every graph; a graph without rows has an empty run."""

    number: int
    # [T, 5]: bounds of a run, bounds and number of its graph; or None; and the rows of all.
    bounds: tuple[Tensor | None, int]
    offset: Tensor | None  # [B+1]: the runs of every graph


def tiles(ptr: Tensor | None, num_nodes: int, rows: int, device: torch.device) -> Tiles:
    """Return runs of at most ``rows`` rows. Kernels know the runs of one graph; a batch has a cached table."""
    if ptr is None:
        return Tiles(max(1, -(-num_nodes // rows)), (None, num_nodes), None)
    cache = batch_cache(ptr)
    key = ("tiles", num_nodes, rows, device)
    # Kept with the boundaries, since every layer and both passes need the same runs.
    if key not in cache:
        count = torch.div(ptr.diff() + (rows - 1), rows, rounding_mode="floor").clamp(
            min=1
        )
        offset = torch.cat([count.new_zeros(1), count.cumsum(0)])
        graph = torch.arange(count.numel()).repeat_interleave(count)
        begin = ptr[graph]
        end = ptr[graph + 1]
        first = begin + (torch.arange(graph.numel()) - offset[graph]) * rows
        table = torch.stack(
            [first, (first + rows).minimum(end), begin, end, graph], dim=1
        )
        cache[key] = Tiles(len(table), (table.to(device), num_nodes), offset.to(device))
    return cache[key]


def padded(width: int) -> int:
    """Return the block for rows of this width: a power of two, and at least 16, as the matrix units need."""
    return max(16, 1 << (width - 1).bit_length())


def contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
