"""DIFFormer-s on Pokec by random partitions (Wu, Wipf & Yan 2025), and simpler predictors.

    python examples/pokec.py --synthetic --epochs 1                    # a generated graph of Pokec's size
    python examples/pokec.py --root data/pokec --model constant linear gcn difformer-s
    python examples/pokec.py --root data/pokec --split 50/25/25
    torchrun --nproc-per-node 2 examples/pokec.py --root data/pokec --node-parallel

--root holds the files of SNAP or LINKX, or a sample of them; load_pokec says where to get them and finds out which they
are. Every epoch cuts the graph into new random
parts; a part of Pokec keeps 6 % of its edges (D12 in docs/errata.md). Validation and test accuracy come from the full
graph, block by block, at the epoch with the best validation accuracy. A run that was stopped or killed goes on from its
last checkpoint in --out, and ends with the weights that it would have had.

With --node-parallel there are no parts. Every process has a run of the nodes, and an epoch is one step on the full
graph with exact global attention. Activations of all nodes are kept for the backward pass, shared by the processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runs import chosen, count, go_on, needs, options, stored
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from tqdm import tqdm

from diffusion_mp import Graph
from diffusion_mp.data import RandomPartitionLoader, random_split
from diffusion_mp.distributed import RankLostError, ShardedGraph, node_parallel
from diffusion_mp.models import (
    CertifiedDIFFormer,
    CertifiedTransformer,
    DIFFormer,
    DiffusionGNN,
    LabelPropagation,
    full_graph_inference,
)

with needs("diffusion-mp-experiments"):
    from diffusion_mp_experiments.graphs import load_pokec, synthetic_pokec
    from diffusion_mp_experiments.train import (
        check_writable,
        exit_code,
        node_cross_entropy,
        save_checkpoint,
    )

SPLITS = {
    "10/10/80": (0.1, 0.1),
    "50/25/25": (0.5, 0.25),
}  # the paper's text, its released command
STAGES = ("sampling", "forward", "backward", "evaluation")


@dataclass(frozen=True)
class Run:
    """Everything that decides the weights after so many batches."""

    model: str
    source: str
    split: str
    nodes: int
    edges: int
    hidden: int
    layers: int
    dropout: float
    lr: float
    weight_decay: float
    batch_size: int
    degrees: str
    seed: int


def difformer(run: Run, channels: int) -> nn.Module:
    """Return DIFFormer-s: attention + graph (Eqs. 61-63), tau 1/2, with a value transformation."""
    return DIFFormer(
        channels,
        run.hidden,
        2,
        run.layers,
        tau=0.5,
        graph="sum",
        transform=True,
        layer_norm=True,
        dropout=run.dropout,
    )


def gcn(run: Run, channels: int) -> nn.Module:
    """Return Kipf & Welling's GCN, as deep and as wide."""
    return DiffusionGNN(
        channels, run.hidden, 2, run.layers, conv="gcn", dropout=run.dropout
    )


def certified(run: Run, channels: int) -> nn.Module:
    """Return certified steps on a graph and an attention in O(N) (Theorem T1 of docs/certified.md)."""
    return CertifiedDIFFormer(channels, run.hidden, 2, run.layers, dropout=run.dropout)


def certified_transformer(run: Run, channels: int) -> nn.Module:
    """Return blocks of two steps with a matrix between neighbours and an MLP (Theorem T11)."""
    return CertifiedTransformer(
        channels,
        run.hidden,
        2,
        num_layers=2,
        num_blocks=run.layers,
        dropout=run.dropout,
        layer_norm=True,
    )


def linear(run: Run, channels: int) -> nn.Module:
    """Return logistic regression on the features of a node."""
    return DiffusionGNN(channels, run.hidden, 2, 1, conv="mlp", dropout=0.0)


def constant(data: Data) -> Tensor:
    """Return the shares of the classes among the training nodes."""
    return data.y[data.train_mask].bincount(minlength=2).float().expand(len(data.y), 2)


def label_propagation(data: Data) -> Tensor:
    """Return labels by Zhou et al. (2004), who take neighbours to agree; in Pokec most do not."""
    return LabelPropagation()(data.y, Graph.from_data(data), mask=data.train_mask)


TRAINED = {
    "difformer-s": difformer,
    "certified": certified,
    "certified_transformer": certified_transformer,
    "gcn": gcn,
    "linear": linear,
}
UNTRAINED = {"constant": constant, "label-propagation": label_propagation}


class Clock:
    """Seconds spent in each stage."""

    def __init__(self, device: torch.device, spent: dict[str, float]) -> None:
        self.device = device
        self.spent = spent

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[stage] += time.perf_counter() - start

    def __str__(self) -> str:
        total = sum(self.spent.values()) or 1.0
        return ", ".join(
            f"{stage} {spent:.1f} s ({spent / total:.0%})"
            for stage, spent in self.spent.items()
        )


def accuracies(
    logits: Tensor, data: Data, total: Callable[[Tensor], Tensor] = torch.sum
) -> dict[str, float]:
    """Return the shares of right labels in percent; `total` also adds up over processes that share nodes."""
    right = logits.argmax(1) == data.y
    masks = {part: data[f"{part}_mask"] for part in ("train", "val", "test")}
    return {
        part: 100
        * float(total((right & mask).sum().double()) / total(mask.sum().double()))
        for part, mask in masks.items()
    }


class Training:
    """A model on its way through epochs of random parts: what a checkpoint holds, and how to go on from one."""

    def __init__(self, run: Run, data: Data, path: Path, device: torch.device) -> None:
        self.run = run
        self.data = data
        self.path = path
        self.device = device
        torch.manual_seed(run.seed)
        self.model = TRAINED[run.model](run, data.num_node_features).to(device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=run.lr, weight_decay=run.weight_decay
        )
        # what comes next
        self.epoch = 0
        self.batch = 0
        self.best: dict[str, float] = {"val": -1.0}
        self.clock = Clock(device, dict.fromkeys(STAGES, 0.0))
        if (state := stored(path, run)) is not None:
            self._restore(state)
        self.prepare()

    def prepare(self) -> None:
        """Make the graph in the form in which it is trained on and evaluated."""
        run = self.run
        self.loader = RandomPartitionLoader(
            self.data, batch_size=run.batch_size, degrees=run.degrees, seed=run.seed
        )
        self.graph = Graph.from_data(self.data, validate=False)

    def save(self) -> None:
        """Save everything that the rest of the run depends on. (Dropout draws from the global state.)"""
        cuda = (
            [torch.cuda.get_rng_state(self.device)]
            if self.device.type == "cuda"
            else []
        )
        state = {
            "run": asdict(self.run),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": [torch.get_rng_state(), *cuda],
            "next": [self.epoch, self.batch],
            "best": self.best,
            "spent": self.clock.spent,
        }
        save_checkpoint(state, self.path)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        cpu, *cuda = state["random"]
        torch.set_rng_state(cpu)
        for random in cuda:
            torch.cuda.set_rng_state(random, self.device)
        self.epoch, self.batch = state["next"]
        self.best = state["best"]
        self.clock.spent = state["spent"]

    def fit(self, epochs: int, checkpoint_every: int) -> None:
        """Train until so many epochs are done."""
        while self.epoch < epochs:
            self.model.train()
            self.one_epoch(checkpoint_every)
            self.model.eval()
            with self.clock("evaluation"):
                found = self.evaluate()
            self.epoch = self.epoch + 1
            self.batch = 0
            if found["val"] > self.best["val"]:
                self.best = {**found, "epoch": self.epoch}
            self.save()

    def one_epoch(self, checkpoint_every: int) -> None:
        """Take a step for every part of a new partition, except the parts that were done before the run was stopped."""
        self.loader.set_epoch(self.epoch)
        batches = iter(self.loader)
        bar = tqdm(
            range(len(self.loader)),
            f"{self.run.model}, epoch {self.epoch + 1}",
            disable=None,
        )
        for position in bar:
            with self.clock("sampling"):
                batch = next(batches)
            if position < self.batch:
                continue
            batch = batch.to(self.device)
            loss = self.step(batch, Graph.from_data(batch, validate=False))
            bar.set_postfix(loss=f"{loss:.3f}", edges=f"{batch.kept_edges:.0%}")
            self.batch = position + 1
            if self.batch % checkpoint_every == 0:
                self.save()

    def step(self, data: Data, graph: Graph) -> float:
        """Take one step of the optimiser; return the loss."""
        with self.clock("forward"):
            loss = self.loss(
                self.model(data.x, graph)[data.train_mask], data.y[data.train_mask]
            )
        with self.clock("backward"):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of a part's training nodes."""
        return node_cross_entropy(logits, y)

    def evaluate(self) -> dict[str, float]:
        """Return the accuracies on the full graph, block by block."""
        shown = sys.stderr.isatty()
        logits = full_graph_inference(
            self.model, self.data.x, self.graph, device=self.device, progress=shown
        )
        return accuracies(logits, self.data)


class NodeParallel(Training):
    """Training on several processes, each of which has a run of the nodes and the edges that arrive there."""

    def prepare(self) -> None:
        data = self.data
        self.graph = ShardedGraph(data.edge_index, data.num_nodes, device=self.device)
        here = {
            name: data[name][self.graph.rows]
            for name in ("x", "y", "train_mask", "val_mask", "test_mask")
        }
        self.rows = Data(**here).to(self.device)
        node_parallel(self.model)
        self.num_labels = self.graph.total(self.rows.train_mask.sum().double())

    def save(self) -> None:
        """Save on the first process, which has what all have, except random numbers: every epoch draws them anew."""
        if distributed.get_rank() == 0:
            super().save()

    def one_epoch(self, checkpoint_every: int) -> None:
        """Take one step on the full graph. Dropout must differ between processes."""
        torch.manual_seed(
            (self.run.seed << 40) + (self.epoch << 16) + distributed.get_rank()
        )
        self.step(self.rows, self.graph)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return this process's share of the mean over all training nodes."""
        return cross_entropy(logits, y, reduction="sum") / self.num_labels

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        return accuracies(
            self.model(self.rows.x, self.graph), self.rows, self.graph.total
        )


def load(args: argparse.Namespace) -> Data:
    """Return the graph with the masks of its split."""
    if args.source == "synthetic":
        data = synthetic_pokec(
            args.nodes, args.edges, seed=args.seed, cache=args.out / "synthetic"
        )
    else:
        # Beside the checkpoints, since the folder of the files may be read-only.
        data = load_pokec(args.root, args.source, cache=args.out / "graph")
    split = random_split(
        data.y, *SPLITS[args.split], torch.Generator().manual_seed(args.seed)
    )
    return split.apply_to(data)


def load_in_turn(args: argparse.Namespace) -> Data:
    """Load on the first process first: it makes the arrays, which the others then share."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    data = load(args) if rank == 0 else None
    if distributed.is_initialized():
        distributed.barrier()
    return load(args) if data is None else data


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("data/pokec"),
        help="holds the files of SNAP or LINKX, or a sample",
    )
    parser.add_argument(
        "--source",
        choices=["auto", "snap", "linkx"],
        default="auto",
        help="which files of --root to read; by default those that are there",
    )
    parser.add_argument(
        "--synthetic", dest="source", action="store_const", const="synthetic"
    )
    parser.add_argument(
        "--nodes", type=count, default=1_632_803, help="of the synthetic graph"
    )
    parser.add_argument(
        "--edges", type=count, default=30_622_564, help="of the synthetic graph"
    )
    parser.add_argument(
        "--split",
        choices=list(SPLITS),
        default="10/10/80",
        help="shares of the labelled users",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=[*UNTRAINED, *TRAINED],
        default=["constant", "difformer-s"],
    )
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument("--batch-size", type=count, default=100_000)
    parser.add_argument("--hidden", type=count, default=128)
    parser.add_argument("--layers", type=count, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-3,
        help="1e-2 stays at chance on the synthetic graph",
    )
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument(
        "--degrees",
        choices=["batch", "full"],
        default="batch",
        help="what the graph term divides by",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the weights and the partitions",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/pokec"),
        help="for checkpoints and the arrays of the graph",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=count,
        default=5,
        help="batches; and at the end of every epoch",
    )
    parser.add_argument(
        "--node-parallel",
        action="store_true",
        help="under torchrun: nodes over processes, no parts",
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return options(
        parser,
        argv,
        out=Path("runs/pokec_quick"),
        source="synthetic",
        nodes=2000,
        edges=30_000,
        batch_size=500,
        hidden=16,
        epochs=2,
    )


def report(args: argparse.Namespace) -> str:
    """Train, and return a table of how well and where the time went."""
    data = load_in_turn(args)
    kind, batch_size = (
        (NodeParallel, data.num_nodes)
        if args.node_parallel
        else (Training, args.batch_size)
    )
    rows = []
    clocks = []
    for name in args.model:
        if name in UNTRAINED:
            found = accuracies(UNTRAINED[name](data), data)
        else:
            here = {
                "model": name,
                "nodes": data.num_nodes,
                "edges": data.num_edges,
                "batch_size": batch_size,
            }
            run = Run(**{**chosen(Run, args), **here})
            path = args.out / f"{args.source}-{name}-seed{args.seed}.pt"
            training = kind(run, data, path, args.device)
            training.fit(args.epochs, args.checkpoint_every)
            found = training.best
            clocks.append(f"{name}: {training.clock}.")
        cells = [f"{found[part]:.2f}" for part in ("train", "val", "test")]
        rows.append(f"| {name} | {' | '.join(cells)} | {found.get('epoch', '-')} |")
    graph = "synthetic" if args.source == "synthetic" else args.root
    return "\n".join(
        [
            f"\n{graph}: {data.num_nodes} nodes, {data.num_edges} edges, split {args.split}, seed {args.seed}.",
            "Accuracy in %, one split and one initialisation; of the full graph at the best validation epoch.\n",
            "| model | train | validation | test | epoch |\n| --- | --- | --- | --- | --- |",
            *rows,
            "",
            *clocks,
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Print the report, on the first process; return the exit code."""
    args = parse(argv)
    if args.node_parallel and not distributed.is_torchelastic_launched():
        print(
            "--node-parallel needs several processes: torchrun --nproc-per-node 2 ...",
            file=sys.stderr,
        )
        return 2
    again = (
        "The same torchrun goes on where it stopped."
        if args.node_parallel
        else go_on(argv)
    )
    return exit_code(partial(train_and_print, args), again)


def train_and_print(args: argparse.Namespace) -> int:
    check_writable(args.out)
    if args.node_parallel:
        if args.device.type == "cuda":
            args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    try:
        printed = report(args)
    except FileNotFoundError as error:
        error.add_note("Or run this script with --synthetic.")
        raise
    except RankLostError as error:
        print(error, file=sys.stderr)
        return 1
    if not args.node_parallel or distributed.get_rank() == 0:
        print(printed)
    if args.node_parallel:
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
