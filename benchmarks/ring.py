"""Attention to all nodes over ranks: time and memory of a rank, for a block of `RowAttention` without edges.

    torchrun --nproc-per-node 4 benchmarks/ring.py --nodes 100000
    torchrun --nproc-per-node 1 benchmarks/ring.py --nodes 20000 --train

Every rank prints the seconds of a call and how far it raises the peak memory of its process. A small call comes first,
which imports and allocates what later calls use again.
"""

from __future__ import annotations

import argparse
import time

import torch
from fresh import peak
from torch import distributed

from diffusion_mp import CertifiedTransformer
from diffusion_mp.distributed import ShardedGraph


def main() -> None:
    """Print a line for every rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--train", action="store_true", help="also take the gradients")
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ranks = distributed.get_world_size()
    # As many threads as one process would have, so that ranks compete for no core.
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    torch.manual_seed(0)
    options = {"graph": None, "attention": "all", "num_layers": 1}
    model = CertifiedTransformer(args.channels, args.channels, 5, **options)

    def call(nodes: int) -> None:
        graph = ShardedGraph(None, nodes)
        x = torch.randn(graph.num_nodes, args.channels)
        with torch.set_grad_enabled(args.train):
            out = model(x, graph)
        if args.train:
            out.square().mean().backward()

    call(1_000)
    before = peak()
    start = time.perf_counter()
    call(args.nodes)
    seconds = time.perf_counter() - start
    print(
        f"rank {rank} of {ranks}: {seconds:.1f} s, {peak() - before:.0f} MiB more than before"
    )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
