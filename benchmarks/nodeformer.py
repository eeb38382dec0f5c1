"""Peak memory and time of one training step of NodeFormer's attention: the library against the textbook's einsums.

    python benchmarks/nodeformer.py --nodes 200000 --heads 4 --channels 32 --features 32 --samples 10

Every formulation runs in a fresh process (see fresh.py). A step is the forward pass from q, k and v to the values and
the backward pass to all three.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from fresh import in_fresh_process, measured
from operations import nodeformer as library
from textbook import nodeformer as textbook
from torch import Tensor

FORMULATIONS = {"textbook": textbook, "library": library}


def inputs(
    args: argparse.Namespace, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return q, k and v of norm about one, directions, noise and the gradient of the values."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.nodes, args.heads, args.channels)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)
    )
    q, k = (t.div_(math.sqrt(args.channels)) for t in (q, k))
    projection = torch.randn(
        args.features, args.channels, generator=generator, dtype=dtype
    )
    noise = (
        torch.empty(*shape[:2], args.samples, dtype=dtype)
        .exponential_(generator=generator)
        .log_()
        .neg_()
    )
    return [*(t.requires_grad_() for t in (q, k, v)), projection, noise, grad]


def step(formulation: str, tensors: list[Tensor], tau: float) -> list[Tensor]:
    """Return the values, and the gradients of q, k and v."""
    *arguments, grad = tensors
    out = FORMULATIONS[formulation](*arguments, tau)
    return [out, *torch.autograd.grad(out, arguments[:3], grad)]


def check(args: argparse.Namespace) -> None:
    """Check that both formulations give the same values and gradients, in double, for 300 nodes."""
    small = inputs(argparse.Namespace(**{**vars(args), "nodes": 300}), torch.float64)
    for mine, theirs in zip(
        step("library", small, args.tau), step("textbook", small, args.tau), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def main() -> None:
    """Measure both in fresh processes and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=32, help="channels of a head")
    parser.add_argument("--features", type=int, default=32, help="random features m")
    parser.add_argument(
        "--samples", type=int, default=10, help="samples K of the noise"
    )
    parser.add_argument("--tau", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--run",
        choices=FORMULATIONS,
        help="measure one formulation in this process, print JSON",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run:
        tensors = inputs(args)
        print(
            json.dumps(
                measured(lambda: step(args.run, tensors, args.tau), args.repeats)
            )
        )
        return
    check(args)
    results = {name: in_fresh_process(__file__, name) for name in FORMULATIONS}
    print(
        f"N = {args.nodes:,}, H = {args.heads}, d = {args.channels}, m = {args.features}, K = {args.samples}, "
        f"tau = {args.tau}, float32, {args.threads} threads\n"
    )
    print("| formulation | peak memory | time of a step |\n|---|---:|---:|")
    for name, result in results.items():
        print(f"| {name} | {result['memory']:,.0f} MiB | {result['time']:.3f} s |")
    memory, seconds = (
        results["textbook"][key] / results["library"][key] for key in ("memory", "time")
    )
    print(f"| textbook / library | {memory:.1f} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
