"""Time and memory of one layer over the number of nodes, and over the number of edges: exponents, and bytes of each.

    python benchmarks/scale.py --channels 16

A `DIFFormerConv` (attention between all pairs, and the graph) takes a training step, forward and backward, in a fresh
process for every size (see fresh.py). Over the nodes there are four edges a node; over the edges there are 100 000
nodes. Exponents are slopes of log time over log size from a hundred thousand on. Memory is the resident size that the
first step adds, in which the graph is made. Bytes per node and edge are a least-squares fit of the memory over sizes
from a million on.

At last come an epoch of such steps on the largest graph in random parts, and its memory in addition to the graph.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from fresh import in_fresh_process, measured
from torch_geometric.data import Data

import diffusion_mp as mp
from diffusion_mp.data import RandomPartitionLoader

FIXED = 100_000  # nodes beside a varying number of edges
SIZES = [10**k for k in range(3, 8)]
OVER = {"nodes": [(n, 4 * n) for n in SIZES], "edges": [(FIXED, e) for e in SIZES]}


def run(nodes: int, edges: int, parts: int, channels: int) -> dict[str, float]:
    """Return the seconds and MiB of a step, or of an epoch of several parts."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    x = torch.randn(nodes, channels, generator=generator, requires_grad=True)
    torch.manual_seed(0)
    layer = mp.DIFFormerConv(channels, channels)
    if parts == 1:
        return measured(lambda: layer(x, edge_index).sum().backward(), 3)
    loader = RandomPartitionLoader(
        Data(x=x.detach(), edge_index=edge_index), num_parts=parts
    )
    return measured(
        lambda: [
            layer(part.x.requires_grad_(), part.edge_index).sum().backward()
            for part in loader
        ],
        1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument(
        "--largest", type=int, default=SIZES[-1], help="of either number"
    )
    parser.add_argument("--parts", type=int, default=100)
    # One case, in the process that in_fresh_process starts.
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(*map(int, args.run.split("/")), args.channels)))
        return
    print("| N | E | a step | memory |\n|--:|--:|--:|--:|")
    rows: list[tuple[float, float, float]] = []
    for over, cases in OVER.items():
        kept: list[tuple[float, float]] = []
        for nodes, edges in cases:
            size = nodes if over == "nodes" else edges
            if size > args.largest:
                continue
            found = in_fresh_process(__file__, f"{nodes}/{edges}/1")
            print(
                f"| {nodes:,} | {edges:,} | {1e3 * found['time']:,.1f} ms | {found['memory']:,.0f} MiB |",
                flush=True,
            )
            if size >= FIXED:
                kept.append((np.log(size), np.log(found["time"])))
            if max(nodes, edges) >= 10**6:
                rows.append((nodes, edges, found["memory"] * 2**20))
        if len(kept) > 1:
            print(
                f"\nTime over {over}: exponent {np.polyfit(*np.transpose(kept), 1)[0]:.2f}\n"
            )
    if len(rows) > 1:
        table = np.array(rows)
        per_node, per_edge = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
        print(
            f"Memory: {per_node:.0f} bytes a node and {per_edge:.0f} bytes an edge, beyond features and edges"
        )
    nodes = args.largest
    edges = 4 * args.largest
    found = in_fresh_process(__file__, f"{nodes}/{edges}/{args.parts}")
    print(
        f"An epoch of {nodes:,} nodes in {args.parts} parts: {found['time']:.1f} s, {found['memory']:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
