"""Full-graph inference by blocks: time, peak memory of the process, and distance from one forward pass.

    python benchmarks/inference.py                                             # Pokec's size
    python benchmarks/inference.py --model certified_transformer --layers 2 --hidden 64
    python benchmarks/inference.py --nodes 100000 --edges 1875000 --compare    # and model(x, edge_index)

The first call also sorts the edges, which the graph keeps for the second.

The graph is random. This is the worst case for the sparse product, which finds no two neighbours close in memory.
"""

from __future__ import annotations

import argparse
import time

import torch
from fresh import peak

from diffusion_mp import Graph, full_graph_inference
from diffusion_mp.models import CertifiedTransformer, DIFFormer

MODELS = {
    "difformer-s": lambda *sizes: DIFFormer(*sizes, transform=True),
    # As many blocks as the others have layers, each of two steps.
    "certified_transformer": lambda *sizes: CertifiedTransformer(*sizes, 2),
}


def main() -> None:
    """Print a line for every call, and one more with --compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="difformer-s")
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
    model = MODELS[args.model](args.features, args.hidden, 2, args.layers).eval()
    graph = Graph(args.nodes, edge_index)

    print(f"{args.model}: {args.nodes:,} nodes, {args.edges:,} edges")
    for call in ("first", "second"):
        start = time.perf_counter()
        logits = full_graph_inference(
            model, x, graph, block_size=args.block_size, device=args.device
        )
        seconds = time.perf_counter() - start
        print(f"{call} call: {seconds:.1f} s, peak {peak() / 1024:.2f} GiB")
    if args.compare:
        with torch.no_grad():
            expected = model(x, graph)
        difference = (logits - expected).norm() / expected.norm()
        print(
            f"relative distance from one forward pass: {difference:.1e}; its peak {peak() / 1024:.2f} GiB"
        )


if __name__ == "__main__":
    main()
