"""DIFFormer-s on random parts of a large graph, shared by the processes of DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/data_parallel.py
    python examples/data_parallel.py --nodes 10000000 --steps 10       # one process, ten parts of ten million nodes
    torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/data_parallel.py

Every epoch cuts the graph into new random parts, the same on all processes. Each process takes its share of the parts,
and gradients are averaged. The last command is for sixteen hosts with eight GPUs each; run it once on each host. To
spread one graph with exact attention over the processes instead, see examples/pokec.py --node-parallel.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from runs import count, options
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from tqdm import tqdm

from diffusion_mp import DIFFormer
from diffusion_mp.data import RandomPartitionLoader


def drawn(nodes: int, degree: int, classes: int = 4) -> Data:
    """Draw a random graph; features are noisy labels, and three of four neighbours have the same label."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (nodes,), generator=generator)
    order = y.argsort()
    source = torch.randint(nodes, (nodes * degree,), generator=generator)
    near = (source + torch.randint(1, 50, source.shape, generator=generator)) % nodes
    other = torch.randint(nodes, source.shape, generator=generator)
    target = torch.where(
        torch.rand(source.shape, generator=generator) < 0.75, near, other
    )
    x = nn.functional.one_hot(y, classes) + 2 * torch.randn(
        nodes, classes, generator=generator
    )
    return Data(x=x, y=y, edge_index=order[torch.stack([source, target])])


def main(argv: list[str] | None = None) -> int:
    """Train for some epochs, or some steps, and print how long they took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=count, default=200_000)
    parser.add_argument("--degree", type=count, default=5)
    parser.add_argument("--batch-size", type=count, default=50_000)
    parser.add_argument("--epochs", type=count, default=3)
    parser.add_argument("--steps", type=count, help="stop an epoch after so many steps")
    parser.add_argument("--hidden", type=count, default=32)
    args = options(parser, argv, nodes=2_000, batch_size=500, epochs=2)
    parallel = distributed.is_torchelastic_launched()
    gpu = torch.cuda.is_available()
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    else:
        device = torch.device("cpu")
    if parallel:
        distributed.init_process_group("nccl" if gpu else "gloo")
    first = not parallel or distributed.get_rank() == 0

    data = drawn(args.nodes, args.degree)
    torch.manual_seed(0)
    model: nn.Module = DIFFormer(data.x.size(1), args.hidden, 4, num_layers=2).to(
        device
    )
    model = (
        DistributedDataParallel(model, [device] if gpu else None) if parallel else model
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = RandomPartitionLoader(data, batch_size=args.batch_size)
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        start = time.perf_counter()
        seen = 0
        right = 0
        steps = min(args.steps or len(loader), len(loader))
        for _, part in zip(
            range(steps),
            tqdm(loader, f"epoch {epoch + 1}", steps, disable=not first),
            strict=False,
        ):
            part = part.to(device)
            out = model(part.x, part.edge_index)
            optimizer.zero_grad()
            cross_entropy(out, part.y).backward()
            optimizer.step()
            seen = seen + part.num_nodes
            right = right + int((out.argmax(1) == part.y).sum())
        if first:
            taken = time.perf_counter() - start
            print(
                f"epoch {epoch + 1}: {right / seen:.1%} of {seen:,} nodes right, {taken:.1f} s on this process"
            )
    if parallel:
        distributed.barrier()
        del (
            model
        )  # the exchange of its gradients may hang the process if it outlives the group
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
