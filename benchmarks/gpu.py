"""Every operation on a GPU, compared with the textbook's code and with other libraries that do the same work.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --operation linear_attention --nodes 1000000 --dtype bfloat16

The operations are those of benchmarks/operations.py, the tables those of benchmarks/kernels.py. Times are medians
between two events of the device, after runs that do not count; a step is the forward and the backward pass. Memory is
the most that torch allocates at a time in a step, above the inputs. Errors are those of the result against the
library's reference in double precision, in units of its largest entry, at a size at which dense matrices fit.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from operations import OPERATIONS
from torch import Tensor
from tqdm import tqdm

from diffusion_mp.graph import Graph
from kernels import Case, table

DEVICE = torch.device("cuda")

#: Large enough that a GPU is busy; pairs are as many as N².
SIZES = {
    "linear_attention": (10_000, 100_000, 1_000_000),
    "linear_attention_4_heads": (10_000, 262_144),
    "sigmoid_attention": (4_096, 16_384, 65_536),
    "softmax_attention": (4_096, 16_384, 65_536),
    "nodeformer": (10_000, 100_000),
    "sparse_flow": (4_096, 16_384),
    "sequence_diffusion": (100_000, 1_000_000),
    "sparse_product": (10_000, 100_000),
}


#: Nodes at which errors are measured: the reference makes dense matrices.
SMALL = 4_096


def on_device(value: Any, dtype: torch.dtype) -> Any:
    """Features and graphs go to the GPU; row boundaries are read by the CPU and stay there."""
    if isinstance(value, Graph):
        return value.to(DEVICE)
    return value.to(DEVICE, dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def reference() -> Iterator[None]:
    """The library's operations by plain torch."""
    os.environ["DIFFUSION_MP_BACKEND"] = "reference"
    try:
        yield
    finally:
        del os.environ["DIFFUSION_MP_BACKEND"]


def milliseconds(run: Callable[[], Any], budget: float = 300.0) -> float:
    """The median of as many runs as fit into ``budget`` milliseconds, three at least."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for turn in range(1000):
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end))
        if len(times) >= 3 and sum(times) > budget:
            break
    return statistics.median(times)


def measure(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of the forward pass and of a step, and MiB of a step."""
    operation, way = OPERATIONS[case.operation], OPERATIONS[case.operation].ways[case.way]
    drawn = operation.inputs(case.nodes, torch.Generator().manual_seed(0))
    inputs = [on_device(value, dtype) for value in drawn]
    leaves = [tensor.requires_grad_(way.backward is None and way.trains) for tensor in inputs[: operation.leaves]]

    @torch.no_grad()
    def forward() -> Any:
        return way.forward(*inputs)

    grad = torch.randn_like(forward())

    def step() -> Any:
        if way.backward is None:
            return torch.autograd.grad(way.forward(*inputs), leaves, grad)
        forward()
        return way.backward(*inputs, grad)

    found = {"forward": milliseconds(forward) / 1e3}
    if way.trains:
        found["step"] = milliseconds(step) / 1e3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (step if way.trains else forward)()
    return found | {"memory": (torch.cuda.max_memory_allocated() - before) / 2**20}


def error(operation: str, dtype: torch.dtype) -> float:
    """Of the library's result."""
    drawn = OPERATIONS[operation].inputs(SMALL, torch.Generator().manual_seed(0))
    inputs = [on_device(value, dtype) for value in drawn]
    run = OPERATIONS[operation].ways["library"].forward
    with torch.no_grad():
        got = run(*inputs).double()
        with reference():
            expected = run(*(on_device(value, torch.float64) for value in inputs))
    return float((got - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Measure the chosen operations and print a table for every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--nodes", type=int, nargs="+", help="instead of the sizes of this file")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU that torch can use here; benchmarks/kernels.py measures on the CPU.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, operation in product(args.dtype, args.operation):
        dtype, sizes = getattr(torch, name), args.nodes or SIZES[operation]
        cases = [
            Case(operation, way, nodes)
            for nodes, way in product(sizes, OPERATIONS[operation].ways)
            if nodes <= OPERATIONS[operation].ways[way].largest
        ]
        results = {case: measure(case, dtype) for case in tqdm(cases, f"{operation}, {name}", leave=False)}
        print(f"\n{name}, largest error at {SMALL:,} nodes: {error(operation, dtype):.1e}\n")
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
