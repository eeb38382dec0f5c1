"""What one diffusion layer behind the embedding (P1) adds to a training step of a Transformer encoder.

    python benchmarks/pde_transformer.py --length 2048 --channels 128

Time: plain and P1 take turns in one process (see alternate.py), and the script prints the ratio of the medians. Memory:
the most that is allocated at a time in a step, by torch's own account; and the peak resident size in a fresh process
(see fresh.py), which varies by several percent from run to run. A step is the forward and the backward pass of the
loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from alternate import alternating
from fresh import allocated, in_fresh_process, measured
from torch.nn.functional import cross_entropy

from diffusion_mp import PDETransformer

VARIANTS = {"plain": None, "P1": "P1", "P1, strides 1 2 4": "P1"}


def step_of(variant: str, args: argparse.Namespace) -> Callable[[], None]:
    """Return a training step of one variant, with the same sequences and parameters for all variants."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 18, (args.batch, args.length), generator=generator)
    labels = torch.randint(10, (args.batch,), generator=generator)
    torch.manual_seed(0)
    placed = {
        "placement": VARIANTS[variant],
        "diffusion": {"strides": (1, 2, 4) if "strides" in variant else (1,)},
    }
    model = PDETransformer(
        [18],
        args.channels,
        10,
        args.layers,
        args.heads,
        max_length=args.length,
        **(placed if VARIANTS[variant] else {}),
    )

    def step() -> None:
        model.zero_grad()
        cross_entropy(model(tokens), labels).backward()

    return step


def ratios(args: argparse.Namespace) -> dict[str, float]:
    """Return the time of every variant divided by the time of the plain step."""
    steps = {variant: step_of(variant, args) for variant in VARIANTS}
    found = {}
    for variant in list(VARIANTS)[1:]:
        times, plain = alternating(steps[variant], steps["plain"], args.seconds)[
            "median"
        ]
        found[variant] = times / plain
    print(f"a plain step takes {plain:.2f} s\n")
    return found


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="that a variant and plain take turns",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--run",
        choices=VARIANTS,
        help="measure the memory of one variant here, print JSON",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run:
        step = step_of(args.run, args)
        resident = measured(step, 0)["memory"]
        print(json.dumps([allocated(step), resident]))
        return
    memory = {variant: in_fresh_process(__file__, variant) for variant in VARIANTS}
    print(
        f"L = {args.length:,}, C = {args.channels}, {args.layers} layers, {args.heads} heads, {args.batch} sequences, "
        f"float32, {args.threads} threads"
    )
    times = ratios(args)
    print("| variant | time of a step | allocated | resident |\n|---|---:|---:|---:|")
    print(
        f"| plain | 1 | {memory['plain'][0]:,.1f} MiB | {memory['plain'][1]:,.0f} MiB |"
    )
    for variant, found in times.items():
        changes = [
            found,
            *(a / b for a, b in zip(memory[variant], memory["plain"], strict=True)),
        ]
        print(
            f"| {variant} | {' | '.join(f'{100 * (change - 1):+.1f} %' for change in changes)} |"
        )


if __name__ == "__main__":
    main()
