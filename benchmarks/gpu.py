"""Every operation on a GPU, compared with the textbook's code and with other libraries that do the same work.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --operation linear_attention --nodes 1000000 --dtype bfloat16

benchmarks/operations.py defines the operations. Times are medians between two events of the device, after runs that do
not count. A step is the forward and the backward pass. "Called" includes what the CPU does between launches; "replayed"
is a CUDA graph of the same launches.

The copy is the time that any code needs to read the inputs and write the results once, at the rate of a large copy on
this device: q, k, v → out, and for a step also q, k, v, out, grad → gradients. Memory is the most that torch allocates
at a time in a step, above the inputs.

Errors are measured against the library's reference in double precision, in units of its largest entry, at a size at
which dense matrices fit. "tf32" is float32 by ``torch.set_float32_matmul_precision("high")``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import torch
from operations import OPERATIONS
from torch import Tensor
from tqdm import tqdm

from diffusion_mp.graph import Graph
from kernels import Case

DEVICE = torch.device("cuda")

#: Large enough that a GPU is busy; pairs are as many as N².
SIZES = {
    "linear_attention": (2_708, 10_000, 100_000, 1_000_000),
    "linear_attention_4_heads": (10_000, 262_144),
    "sigmoid_attention": (4_096, 16_384, 65_536),
    "softmax_attention": (4_096, 16_384, 65_536),
    "nodeformer": (10_000, 100_000),
    "sparse_flow": (4_096, 16_384),
    "sequence_diffusion": (100_000, 1_000_000),
    "sparse_product": (10_000, 100_000),
}


DTYPES = ("float32", "tf32", "bfloat16")

#: Nodes at which errors are measured: the reference makes dense matrices.
SMALL = 4_096


def on_device(value: Any, dtype: torch.dtype) -> Any:
    """Move features and graphs to the GPU; row boundaries stay on the CPU, which reads them."""
    if isinstance(value, Graph):
        return value.to(DEVICE)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(DEVICE, dtype)
    return value


@contextmanager
def reference() -> Iterator[None]:
    """Compute the library's operations by plain torch."""
    os.environ["DIFFUSION_MP_BACKEND"] = "reference"
    try:
        yield
    finally:
        del os.environ["DIFFUSION_MP_BACKEND"]


def milliseconds(run: Callable[[], Any], budget: float = 200.0) -> float:
    """Return the median of as many runs as fit into ``budget`` milliseconds, and of at least three."""
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


def replayed(run: Callable[[], Any], called: float) -> float | None:
    """Return the milliseconds of one run in a CUDA graph of several, or ``None`` if the CPU takes part in the run."""
    graph = torch.cuda.CUDAGraph()
    times = max(1, min(20, int(20 / called)))
    try:
        with torch.cuda.graph(graph):
            for _ in range(times):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return milliseconds(graph.replay) / times


@cache
def copy_rate() -> float:
    """Return how many bytes a large copy reads and writes in a millisecond."""
    large = torch.empty(2**28, device=DEVICE)
    return 2 * large.nbytes / milliseconds(large.clone)


def measure(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Return the milliseconds of the forward pass and of a step, and the MiB of a step."""
    operation = OPERATIONS[case.operation]
    way = OPERATIONS[case.operation].ways[case.way]
    drawn = operation.inputs(case.nodes, torch.Generator().manual_seed(0))
    inputs = [on_device(value, dtype) for value in drawn]
    leaves = [
        tensor.requires_grad_(way.backward is None and way.trains)
        for tensor in inputs[: operation.leaves]
    ]

    @torch.no_grad()
    def forward() -> Any:
        return way.forward(*inputs)

    out = forward()
    # a capture that failed leaves the generator of the device unusable.
    grad = torch.randn(out.shape).to(out)

    def step() -> Any:
        if way.backward is None:
            return torch.autograd.grad(way.forward(*inputs), leaves, grad)
        forward()
        return way.backward(*inputs, grad)

    once = [*(tensor for tensor in inputs if isinstance(tensor, Tensor)), out]
    found: dict[str, Any] = {}
    passes = [("forward", forward, once), ("step", step, [*once, *once, grad, *leaves])]
    for name, run, moved in passes if way.trains else passes[:1]:
        found[name] = milliseconds(run)
        found[f"{name}, replayed"] = replayed(run, found[name])
        found[f"{name}, copy"] = sum(tensor.nbytes for tensor in moved) / copy_rate()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (step if way.trains else forward)()
    return found | {"memory": (torch.cuda.max_memory_allocated() - before) / 2**20}


def row(case: Case, found: dict[str, Any]) -> str:
    """Return a row in Markdown, with the times divided by the time of a copy."""
    cells = [case.operation, f"{case.nodes:,}", case.way]
    for name in ("forward", "step"):
        called, graph, copy = (
            found.get(f"{name}{part}") for part in ("", ", replayed", ", copy")
        )
        cells += [f"{ms:,.3f}" if ms is not None else "–" for ms in (called, graph)]
        best = graph if graph is not None else called
        cells.append(
            f"{best / copy:.1f}" if best is not None and copy is not None else "–"
        )
    return f"| {' | '.join([*cells, format(found['memory'], ',.1f')])} |"


HEAD = """
| operation | N | way | forward, ms | replayed | × copy | step, ms | replayed | × copy | MiB |
|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"""


def error(operation: str, dtype: torch.dtype) -> float:
    """Return the error of the library's result."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operation", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--nodes", type=int, nargs="+", help="instead of the sizes of this file"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU that torch can use here; benchmarks/kernels.py measures on the CPU."
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, operation in product(args.dtype, args.operation):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        sizes = args.nodes or SIZES[operation]
        cases = [
            Case(operation, way, nodes)
            for nodes, way in product(sizes, OPERATIONS[operation].ways)
            if nodes <= OPERATIONS[operation].ways[way].largest
        ]
        results = {}
        for case in tqdm(cases, f"{operation}, {name}", leave=False):
            try:
                results[case] = measure(case, dtype)
            except NotImplementedError as missing:
                print(f"\n{case}: {missing}")
        print(
            f"\n{name}, largest error at {SMALL:,} nodes: {error(operation, dtype):.1e}\n{HEAD}"
        )
        print(
            "\n".join(row(case, found) for case, found in results.items()), flush=True
        )


if __name__ == "__main__":
    main()
