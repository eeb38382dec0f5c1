"""DIFFormer-s on Pokec by random partitions (Wu, Wipf & Yan 2025), beside simpler predictors.

    python examples/pokec.py --synthetic --epochs 1                    # a generated graph of Pokec's size
    python examples/pokec.py --root data/pokec --model constant linear gcn difformer-s
    python examples/pokec.py --root data/pokec --source linkx --split 50/25/25

--root holds the files of SNAP or LINKX; load_pokec says where to get them. Every epoch cuts the graph into new random
parts; a part of Pokec keeps 6 % of its edges (ERRATA D12). Validation and test accuracy come from the whole graph,
block by block, and are those of the epoch with the best validation accuracy. A run that was stopped or killed goes on
from its last checkpoint in --out; on one process it ends with the weights that it would have had.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from runs import chosen, count, save
from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm import tqdm

from diffusion_mp import Graph
from diffusion_mp.data import RandomPartitionLoader, load_pokec, random_split, synthetic_pokec
from diffusion_mp.models import DIFFormer, DiffusionGNN, LabelPropagation
from diffusion_mp.train import node_cross_entropy

SPLITS = {"10/10/80": (0.1, 0.1), "50/25/25": (0.5, 0.25)}  # the paper's text and its released command (ERRATA D13)
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
    """Attention + graph (Eqs. 61-63), tau 1/2, with a value transformation."""
    return DIFFormer(channels, run.hidden, 2, run.layers, tau=0.5, graph="sum", transform=True, dropout=run.dropout)


def gcn(run: Run, channels: int) -> nn.Module:
    """Kipf & Welling's, as deep and as wide."""
    return DiffusionGNN(channels, run.hidden, 2, run.layers, conv="gcn", dropout=run.dropout)


def linear(run: Run, channels: int) -> nn.Module:
    """Logistic regression on the features of a node."""
    return DiffusionGNN(channels, run.hidden, 2, 1, conv="mlp", dropout=0.0)


def constant(data: Data) -> Tensor:
    """The shares of the classes among the training nodes."""
    return data.y[data.train_mask].bincount(minlength=2).float().expand(len(data.y), 2)


def label_propagation(data: Data) -> Tensor:
    """Zhou et al. (2004): neighbours are taken to agree, which those in Pokec do less often than not."""
    return LabelPropagation()(data.y, Graph.from_data(data), mask=data.train_mask)


TRAINED = {"difformer-s": difformer, "gcn": gcn, "linear": linear}
UNTRAINED = {"constant": constant, "label-propagation": label_propagation}


class Clock:
    """Seconds spent in each stage."""

    def __init__(self, device: torch.device, spent: dict[str, float]) -> None:
        self.device, self.spent = device, spent

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[stage] += time.perf_counter() - start

    def __str__(self) -> str:
        total = sum(self.spent.values()) or 1.0
        return ", ".join(f"{stage} {spent:.1f} s ({spent / total:.0%})" for stage, spent in self.spent.items())


def accuracies(logits: Tensor, data: Data) -> dict[str, float]:
    """Shares of nodes whose label is right, in percent."""
    right = (logits.argmax(1) == data.y).float()
    return {part: 100 * right[data[f"{part}_mask"]].mean().item() for part in ("train", "val", "test")}


class Training:
    """A model on its way: what a checkpoint holds, and how to go on from one."""

    def __init__(self, run: Run, data: Data, path: Path, device: torch.device) -> None:
        self.run, self.data, self.path, self.device = run, data, path, device
        torch.manual_seed(run.seed)
        self.model = TRAINED[run.model](run, data.num_node_features).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
        self.epoch, self.batch = 0, 0  # what comes next
        self.best: dict[str, float] = {"val": -1.0}
        self.clock = Clock(device, dict.fromkeys(STAGES, 0.0))
        self.loader = RandomPartitionLoader(data, batch_size=run.batch_size, degrees=run.degrees, seed=run.seed)
        if path.exists():
            self._restore(torch.load(path, map_location="cpu", weights_only=True))

    def save(self) -> None:
        """Everything that the rest of the run depends on. (Dropout draws from the global state.)"""
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        state = {
            "run": asdict(self.run),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": [torch.get_rng_state(), *cuda],
            "next": [self.epoch, self.batch],
            "best": self.best,
            "spent": self.clock.spent,
        }
        save(state, self.path)

    def _restore(self, state: dict[str, Any]) -> None:
        others = [name for name, value in asdict(self.run).items() if state["run"].get(name) != value]
        if others:
            sys.exit(f"{self.path} is of other settings ({', '.join(others)}); use another --out or delete it.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        cpu, *cuda = state["random"]
        torch.set_rng_state(cpu)
        for random in cuda:
            torch.cuda.set_rng_state(random, self.device)
        self.epoch, self.batch = state["next"]
        self.best, self.clock.spent = state["best"], state["spent"]

    def fit(self, epochs: int, checkpoint_every: int) -> None:
        """Trains until so many epochs are done."""
        while self.epoch < epochs:
            self._one_epoch(checkpoint_every)
            with self.clock("evaluation"):
                found = accuracies(self.predict(), self.data)
            self.epoch, self.batch = self.epoch + 1, 0
            if found["val"] > self.best["val"]:
                self.best = {**found, "epoch": self.epoch}
            self.save()

    def _one_epoch(self, checkpoint_every: int) -> None:
        self.model.train()
        self.loader.set_epoch(self.epoch)
        batches = iter(self.loader)
        bar = tqdm(range(len(self.loader)), f"{self.run.model}, epoch {self.epoch + 1}", disable=None)
        for position in bar:
            with self.clock("sampling"):
                batch = next(batches)
            if position < self.batch:  # done before the run was stopped
                continue
            loss = self._step(batch.to(self.device))
            bar.set_postfix(loss=f"{loss:.3f}", edges=f"{batch.kept_edges:.0%}")
            self.batch = position + 1
            if self.batch % checkpoint_every == 0:
                self.save()

    def _step(self, batch: Data) -> float:
        with self.clock("forward"):
            logits = self.model(batch.x, Graph.from_data(batch, validate=False))
            loss = node_cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])
        with self.clock("backward"):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def predict(self) -> Tensor:
        """The logits of every node, from the whole graph."""
        self.model.eval()
        return self.model(self.data.x, Graph.from_data(self.data, validate=False))


def load(args: argparse.Namespace) -> Data:
    """The graph with the masks of its split."""
    if args.source == "synthetic":
        data = synthetic_pokec(args.nodes, args.edges, seed=args.seed, cache=args.out / "synthetic")
    else:
        data = load_pokec(args.root, args.source)
    split = random_split(data.y, *SPLITS[args.split], torch.Generator().manual_seed(args.seed))
    return split.apply_to(data)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data/pokec"), help="holds the files of SNAP or LINKX")
    parser.add_argument("--source", choices=["snap", "linkx"], default="snap")
    parser.add_argument("--synthetic", dest="source", action="store_const", const="synthetic")
    parser.add_argument("--nodes", type=count, default=1_632_803, help="of the synthetic graph")
    parser.add_argument("--edges", type=count, default=30_622_564, help="of the synthetic graph")
    parser.add_argument("--split", choices=list(SPLITS), default="10/10/80", help="shares of the labelled users")
    parser.add_argument("--model", nargs="+", choices=[*UNTRAINED, *TRAINED], default=["constant", "difformer-s"])
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument("--batch-size", type=count, default=100_000)
    parser.add_argument("--hidden", type=count, default=128)
    parser.add_argument("--layers", type=count, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--degrees", choices=["batch", "full"], default="batch", help="what the graph term divides by")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the partitions")
    parser.add_argument("--out", type=Path, default=Path("runs/pokec"), help="for checkpoints and the synthetic graph")
    parser.add_argument("--checkpoint-every", type=count, default=5, help="batches; and at the end of every epoch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Prints a table of accuracies and where the time went; returns the exit code."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        data = load(args)
    except FileNotFoundError as error:
        print(f"{error}\nOr run this script with --synthetic.", file=sys.stderr)
        return 2

    rows, clocks = [], []
    for name in args.model:
        if name in UNTRAINED:
            found = accuracies(UNTRAINED[name](data), data)
        else:
            run = Run(**{**chosen(Run, args), "model": name, "nodes": data.num_nodes, "edges": data.num_edges})
            training = Training(run, data, args.out / f"{args.source}-{name}-seed{args.seed}.pt", args.device)
            training.fit(args.epochs, args.checkpoint_every)
            found = training.best
            clocks.append(f"{name}: {training.clock}.")
        cells = [f"{found[part]:.2f}" for part in ("train", "val", "test")]
        rows.append(f"| {name} | {' | '.join(cells)} | {found.get('epoch', '-')} |")

    print(f"\n{args.source}: {data.num_nodes} nodes, {data.num_edges} edges, split {args.split} with seed {args.seed}.")
    print("Accuracy in %, one split and one initialisation; of the whole graph at the best validation epoch.\n")
    print("| model | train | validation | test | epoch |\n| --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    print("\n" + "\n".join(clocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
