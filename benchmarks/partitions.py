"""Time and memory of cutting a large graph into random parts, for one epoch: the library and PyG.

    python benchmarks/partitions.py --parts 17 --cache runs/synthetic_pokec

Every way runs in a fresh process (see fresh.py), on a random graph of Pokec's size that the first process writes to
`--cache`. With edges only: the library's parts, and `torch_geometric.utils.subgraph` for every block of a permutation.
With features and labels: the library's loader, in memory and from memory maps, the same `subgraph` loop, and PyG's
`RandomNodeLoader`.

Memory is the memory of an epoch without the graph. Pages of a memory map count, though the system may take them back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fresh import in_fresh_process, measured
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.utils import subgraph

from diffusion_mp.data import RandomPartitionLoader
from diffusion_mp_experiments.graphs import synthetic_pokec


def blocks(data: Data, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The textbook's way: every block of a permutation, and the edges inside it."""
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    for n_id in order.tensor_split(parts):
        yield (
            n_id,
            subgraph(
                n_id, data.edge_index, relabel_nodes=True, num_nodes=data.num_nodes
            )[0],
        )


def blocks_with_features(data: Data, parts: int) -> Iterator[Data]:
    """The same blocks, with what training reads."""
    for n_id, edge_index in blocks(data, parts):
        yield Data(x=data.x[n_id], y=data.y[n_id], edge_index=edge_index)


def random_nodes(data: Data, parts: int) -> RandomNodeLoader:
    """PyG's loader, with a seed."""
    return RandomNodeLoader(
        data, parts, shuffle=True, generator=torch.Generator().manual_seed(0)
    )


# name → (data, parts) → what gives the batches of an epoch, each time it is called.
WAYS: dict[str, Callable[[Data, int], Callable[[], Iterable[Any]]]] = {
    "edges: library": lambda data, parts: (
        RandomPartitionLoader(data, parts).sampler.__iter__
    ),
    "edges: subgraph per batch": lambda data, parts: partial(blocks, data, parts),
    "batches: library": lambda data, parts: RandomPartitionLoader(data, parts).__iter__,
    "batches: library, memory-mapped": lambda data, parts: (
        RandomPartitionLoader(data, parts).__iter__
    ),
    "batches: library, halo": lambda data, parts: (
        RandomPartitionLoader(data, parts, halo=True).__iter__
    ),
    "batches: subgraph per batch": lambda data, parts: partial(
        blocks_with_features, data, parts
    ),
    "batches: RandomNodeLoader": lambda data, parts: random_nodes(data, parts).__iter__,
}


def epoch(start: Callable[[], Iterable[Any]]) -> None:
    """Go through all batches, and drop each before the next."""
    for _ in start():
        pass


def graph(folder: Path, mapped: bool) -> Data:
    """Return the cached graph, memory-mapped or in memory, without a copy on the way."""
    mode = "c" if mapped else None
    return Data(
        **{
            name: torch.from_numpy(np.load(folder / f"{name}.npy", mode))
            for name in ("x", "y", "edge_index")
        }
    )


def main() -> None:
    """Measure all ways in fresh processes and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1_632_803)
    parser.add_argument("--edges", type=int, default=30_622_564)
    parser.add_argument("--parts", type=int, default=17)
    parser.add_argument("--cache", type=Path, default=Path("runs/synthetic_pokec"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--run",
        choices=["make", *WAYS],
        help="measure one way in this process, print JSON",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run == "make":
        synthetic_pokec(args.nodes, args.edges, cache=args.cache)
        print("{}")
    elif args.run:
        data = graph(args.cache, "mapped" in args.run)
        print(
            json.dumps(
                measured(partial(epoch, WAYS[args.run](data, args.parts)), args.repeats)
            )
        )
    else:
        in_fresh_process(__file__, "make")
        found = {name: in_fresh_process(__file__, name) for name in WAYS}
        print(
            f"{args.nodes} nodes, {args.edges} edges, {args.parts} parts, {args.threads} threads\n"
        )
        print(
            "| an epoch | time, s | times the library's | memory, MiB |\n|---|---|---|---|"
        )
        for name, result in found.items():
            ratio = result["time"] / found[f"{name.split(':')[0]}: library"]["time"]
            print(
                f"| {name} | {result['time']:.2f} | {ratio:.1f} | {result['memory']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
