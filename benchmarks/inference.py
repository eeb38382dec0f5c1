"""Full-graph inference of DIFFormer-s by blocks: time, peak memory of the process, and distance from one forward pass.

    python benchmarks/inference.py                                             # Pokec's size
    python benchmarks/inference.py --nodes 100000 --edges 1875000 --compare    # and model(x, edge_index)

The graph is random. This is the worst case for the sparse product, which finds no two neighbours close in memory.
"""

from __future__ import annotations

import argparse
import time

import torch
from fresh import peak

from diffusion_mp import DIFFormer, full_graph_inference


def main() -> None:
    """Print one line, and one more with --compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1_632_803)
    parser.add_argument("--edges", type=int, default=30_622_564)
    parser.add_argument("--features", type=int, default=65)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=1 << 14)
    parser.add_argument(
        "--device", help="where blocks are computed; the CPU by default"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also run the model on everything at once",
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.nodes, args.features, generator=generator)
    edge_index = torch.randint(args.nodes, (2, args.edges), generator=generator)
    model = DIFFormer(args.features, args.hidden, 2, args.layers, transform=True).eval()

    start = time.perf_counter()
    logits = full_graph_inference(
        model, x, edge_index, block_size=args.block_size, device=args.device
    )
    seconds = time.perf_counter() - start
    print(
        f"{args.nodes:,} nodes, {args.edges:,} edges: {seconds:.1f} s, peak {peak() / 1024:.2f} GiB"
    )
    if args.compare:
        with torch.no_grad():
            expected = model(x, edge_index)
        difference = (logits - expected).norm() / expected.norm()
        print(
            f"relative distance from one forward pass: {difference:.1e}; its peak {peak() / 1024:.2f} GiB"
        )


if __name__ == "__main__":
    main()
