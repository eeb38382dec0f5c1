"""Nodes over ranks: the time of a training step of DIFFormer-s, and the constants of docs/performance.md.

    torchrun --nproc-per-node 2 benchmarks/node_parallel.py --nodes 200000 --edges 2000000

Rank 0 prints times in seconds and as rates: of a step; of a step on as many rows and edges that needs no other rank; of
the sparse product and of linear attention on this rank's rows; of an all-reduce as small as a layer's; and of fetching
a halo. Sources lie within ±--reach of their target, so that the cut is the cut of an ordered graph, not of a random
graph. With --nproc-per-node 1 the script prints the step of one process on the full graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median

import torch
from torch import distributed
from torch.nn.functional import cross_entropy

from diffusion_mp import DIFFormer, Graph
from diffusion_mp.couplings import LinearAttentionCoupling
from diffusion_mp.distributed import ShardedGraph, node_parallel
from diffusion_mp.kernels.spmm import spmm


def seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of an action that all ranks begin together."""
    times = []
    for _ in range(repeats + 1):
        distributed.barrier()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> None:
    """Print one line for each number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--reach", type=int, default=10_000)
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(args.nodes, (args.edges,), generator=generator)
    near = torch.randint(
        -args.reach, args.reach + 1, (args.edges,), generator=generator
    )
    graph = ShardedGraph(
        torch.stack([(target + near) % args.nodes, target]), args.nodes
    )
    x = torch.randn(graph.num_nodes, args.channels, generator=generator)
    y = torch.randint(2, (graph.num_nodes,), generator=generator)
    model = DIFFormer(args.channels, args.channels, 2, args.layers, transform=True)
    alone = deepcopy(model)
    here = Graph(graph.num_nodes, graph.edge_index % graph.num_nodes)
    node_parallel(model)

    def step(model: DIFFormer, graph: Graph) -> None:
        loss = cross_entropy(model(x, graph), y, reduction="sum") / args.nodes
        loss.backward()

    values = x.unsqueeze(1)
    fetched = graph.exchange(values)
    coupling = LinearAttentionCoupling(
        values, values, constant=1.0, unit=True, mutual=True
    )
    pattern = graph.extended.pattern
    weight = torch.ones(graph.extended.num_edges, 1)
    sums = torch.zeros((args.channels + 1) ** 2)
    halo = fetched.size(0) - graph.num_nodes
    rows = graph.num_nodes
    edges = graph.extended.num_edges
    width = args.channels

    def attend() -> torch.Tensor:
        return coupling.read(coupling.pool(values), values)

    with torch.no_grad():
        measured = {
            "attention on local rows": (seconds(attend), 4 * rows * width**2),
            "sparse product": (
                seconds(lambda: spmm(pattern, weight, fetched)),
                edges * width * 4,
            ),
            "all-reduce of a layer's sums": (
                seconds(lambda: distributed.all_reduce(sums)),
                sums.nbytes,
            ),
            "fetching the halo": (
                seconds(lambda: graph.exchange(values)),
                halo * width * 4,
            ),
        }
    together = seconds(lambda: step(model, graph), 3)
    alone_seconds = seconds(lambda: step(alone, here), 3)
    if distributed.get_rank() == 0:
        ranks = distributed.get_world_size()
        print(
            f"{ranks} ranks, {args.nodes:,} nodes, {args.edges:,} edges, halo {halo:,} of {rows:,} rows"
        )
        print(
            f"training step: {together:.2f} s, {alone_seconds:.2f} s on as many rows without other ranks"
        )
        for name, (time_, amount) in measured.items():
            unit = "FLOP" if name.startswith("attention") else "B"
            print(f"{name}: {1e3 * time_:.2f} ms, {amount / time_ / 1e9:.2f} G{unit}/s")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
