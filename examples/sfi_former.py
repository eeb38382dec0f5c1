"""SFi-Former, DFi-Former, GPS with plain softmax, and GatedGCN alone on three benchmarks, in a plain PyTorch loop.

    python examples/sfi_former.py --out runs/sfi_former
    python examples/sfi_former.py --dataset peptides --peptides data/peptides-functional --model SFi GatedGCN

The script prints one Markdown table: the test score, the train-test gap, and the measured density of the attention,
layer by layer. PATTERN and CLUSTER are drawn here (no download), by default 500/100/200 graphs of each: the full table
of 2 data sets, 4 models and 2 seeds is meant to take about an hour on two cores. Peptides-func is read from its SMILES
strings.

Every model gets the same number of parameters (its width is what fits), layers, encodings of position, and training:
AdamW, linear warm-up, cosine decay to zero. The test score, the gap and the density are taken at the epoch with the
best validation score.

Every run keeps a checkpoint in --out. If it is interrupted, the same command goes on where it stopped, to the same
numbers. examples/attention.py draws the attention of a trained model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from runs import (
    chosen,
    count,
    go_on,
    grouped,
    needs,
    options,
    spread,
    stored,
    train_all,
)
from torch import Tensor, nn
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.utils.smiles import e_map, x_map
from tqdm import tqdm

from diffusion_mp import GPS, Coupling, DFiFormer, GatedGCN, SFiFormer
from diffusion_mp.data import AddLaplacianPE

with needs("diffusion-mp-experiments"):
    from torchmetrics import Metric
    from torchmetrics.classification import MultilabelAveragePrecision

    from diffusion_mp_experiments.graphs import PeptidesFunctional, SBMDataset
    from diffusion_mp_experiments.train import (
        check_writable,
        exit_code,
        save_checkpoint,
        weighted_accuracy,
    )

MODELS: dict[str, type[nn.Module]] = {
    "SFi": SFiFormer,
    "DFi": DFiFormer,
    "GPS": GPS,
    "GatedGCN": GatedGCN,
}
EIGENVECTORS = 10
PE_CHANNELS = 8
HEADS = 4


@dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of one run."""

    dataset: str
    model: str
    seed: int
    graphs: int
    epochs: int
    batch_size: int
    layers: int
    parameters: int
    dropout: float
    attention_dropout: float
    lr: float
    weight_decay: float
    device: str

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.model}-seed{self.seed}"

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of graphs by split, 5 : 1 : 2."""
        return {
            split: max(1, self.graphs * part // 5)
            for split, part in (("train", 5), ("val", 1), ("test", 2))
        }


@dataclass
class Result:
    """What the table shows: scores in [0, 1], and densities by layer (none without attention)."""

    parameters: int
    epoch: int
    train: float
    test: float
    guess: float
    density: list[float]
    seconds: float


class Benchmark(Protocol):
    """What data sets differ in; made from a run, the folder to keep graphs in, and the folder of Peptides' files."""

    splits: dict[str, InMemoryDataset]
    inputs: tuple[Any, int]
    options: dict[str, Any]

    def __init__(self, run: Run, out: Path, source: Path) -> None: ...

    def loss(self, logits: Tensor, y: Tensor) -> Tensor: ...

    def metric(self) -> Metric: ...

    def guess(self) -> float:
        """Return the score of a prediction that knows nothing."""


class Blocks(Benchmark):
    """PATTERN and CLUSTER: the community of every node, by accuracy within each class, averaged."""

    def __init__(self, run: Run, out: Path, source: Path) -> None:
        self.splits = {
            split: SBMDataset(
                out / "data",
                run.dataset,
                split,
                num_graphs=size,
                pre_transform=AddLaplacianPE(EIGENVECTORS),
            )
            for split, size in run.sizes.items()
        }
        train = self.splits["train"]
        self.classes = train.num_classes
        self.inputs = (train.num_features, self.classes)
        self.options: dict[str, Any] = {}
        # 1 - share of the class, the weights of the benchmark's loss, over the training set.
        self.weights = 1 - torch.bincount(
            torch.as_tensor(train.y), minlength=self.classes
        ) / len(train.y)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, self.weights.to(logits))

    def metric(self) -> Metric:
        return weighted_accuracy(self.classes)

    def guess(self) -> float:
        return 1 / self.classes


class Peptides(Benchmark):
    """Peptides-func: ten functions of a molecule, by the average precision of each, averaged."""

    def __init__(self, run: Run, out: Path, source: Path) -> None:
        self.splits = {
            split: PeptidesFunctional(
                source,
                out / "data",
                split,
                num_graphs=size,
                pre_transform=AddLaplacianPE(EIGENVECTORS),
            )
            for split, size in run.sizes.items()
        }
        self.inputs = ([len(values) for values in x_map.values()], 10)
        self.options = {
            "edge_dim": [len(values) for values in e_map.values()],
            "task": "graph",
        }

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, y)

    def metric(self) -> Metric:
        return MultilabelAveragePrecision(10)

    def guess(self) -> float:
        return float(torch.as_tensor(self.splits["test"].y).mean())


BENCHMARKS: dict[str, type[Benchmark]] = {
    "PATTERN": Blocks,
    "CLUSTER": Blocks,
    "peptides": Peptides,
}


def make_model(run: Run, benchmark: Benchmark) -> nn.Module:
    """Return the widest model within the budget of parameters."""
    in_channels, out_channels = benchmark.inputs

    def at(width: int) -> nn.Module:
        options: dict[str, Any] = {
            "pe_channels": PE_CHANNELS,
            "dropout": run.dropout,
            **benchmark.options,
        }
        if run.model != "GatedGCN":
            inner = {"head_channels": max(1, width // HEADS)}
            options |= {
                "heads": HEADS,
                "attention": inner,
                "attention_dropout": run.attention_dropout,
            }
        return MODELS[run.model](
            in_channels, width, out_channels, run.layers, **options
        )

    width = PE_CHANNELS + 1
    if size_of(at(width)) > run.parameters:
        raise SystemExit(
            f"{run.model} of {run.layers} layers does not fit into {run.parameters} parameters."
        )
    while size_of(at(width + 1)) <= run.parameters:
        width += 1
    torch.manual_seed(run.seed)
    return at(width).to(run.device)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batches(graphs: InMemoryDataset, run: Run, **options: Any) -> Iterator[Data]:
    return (
        data.to(run.device) for data in DataLoader(graphs, run.batch_size, **options)
    )


def predict(model: nn.Module, data: Data, **options: Any) -> Any:
    position = (
        data.laplacian_eigenvectors,
        data.laplacian_eigenvalues,
        data.laplacian_mask,
    )
    return model(
        data.x,
        data.edge_index,
        batch=data.batch,
        edge_attr=data.edge_attr,
        pe=position,
        **options,
    )


@torch.no_grad()
def evaluate(model: nn.Module, benchmark: Benchmark, split: str, run: Run) -> float:
    """Return the score over a split."""
    model.eval()
    metric = benchmark.metric().to(run.device)
    for data in batches(benchmark.splits[split], run):
        metric.update(predict(model, data), data.y.long())
    return float(metric.compute())


@torch.no_grad()
def densities(model: nn.Module, graphs: InMemoryDataset, run: Run) -> list[float]:
    """Return the fraction of the pairs of a graph that attend, by layer, over all heads; empty without attention."""
    model.eval()
    total = torch.zeros(run.layers)
    pairs = 0
    if run.model == "GatedGCN":
        return []
    for data in batches(graphs, run):
        couplings = predict(model, data, return_coupling=True)[1]
        size = int(data.ptr.diff().square().sum())
        total += size * torch.tensor([density(coupling) for coupling in couplings])
        pairs += size
    return (total / pairs).tolist()


def density(coupling: Coupling) -> float:
    """Return the density of the attention in a step; softmax attention leaves no pair out."""
    attention = getattr(coupling, "attention", coupling)
    return float(attention.density().mean()) if hasattr(attention, "density") else 1.0


def schedule(steps: int) -> Callable[[int], float]:
    """Return a linear warm-up over a twentieth of the steps, then half a cosine down to zero."""
    warm = max(1, steps // 20)
    return lambda step: min(
        (step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))
    )


def train(
    run: Run, out: Path, source: Path = Path(), bar_at: int = 0, quiet: bool = False
) -> Result:
    """Train, or go on from the checkpoint, or read the result of a run that is done."""
    path = out / f"{run.name}.pt"
    state = stored(path, run)
    if state is not None and "result" in state:
        return Result(**state["result"])
    benchmark = BENCHMARKS[run.dataset](run, out, source)
    with torch.random.fork_rng(devices=[]):
        model = make_model(run, benchmark)
        steps = run.epochs * math.ceil(run.sizes["train"] / run.batch_size)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=run.lr, weight_decay=run.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(steps))
        if state is None:
            state = {"run": asdict(run), "epoch": 0, "best": -1.0, "seconds": 0.0}
        else:
            for name, part in (
                ("model", model),
                ("optimizer", optimizer),
                ("scheduler", scheduler),
            ):
                part.load_state_dict(state[name])
        epochs = range(state["epoch"], run.epochs)
        bar = tqdm(
            epochs,
            run.name,
            run.epochs,
            initial=epochs.start,
            position=bar_at,
            disable=quiet,
            leave=False,
        )
        for epoch in bar:
            start = time.perf_counter()
            loss = one_epoch(model, optimizer, scheduler, benchmark, run, epoch)
            val = evaluate(model, benchmark, "val", run)
            if val > state["best"]:
                best = {key: value.clone() for key, value in model.state_dict().items()}
                state |= {"best": val, "best_epoch": epoch + 1, "best_model": best}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}
            state["seconds"] += time.perf_counter() - start
            save_checkpoint(state, path)
            bar.set_postfix(
                loss=f"{loss:.3f}", val=f"{val:.3f}", best=f"{state['best']:.3f}"
            )
        model.load_state_dict(state["best_model"])
        result = Result(
            parameters=size_of(model),
            epoch=state["best_epoch"],
            train=evaluate(model, benchmark, "train", run),
            test=evaluate(model, benchmark, "test", run),
            guess=benchmark.guess(),
            density=densities(model, benchmark.splits["test"], run),
            seconds=state["seconds"],
        )
    save_checkpoint(
        {
            "run": asdict(run),
            "result": asdict(result),
            "best_model": state["best_model"],
        },
        path,
    )
    return result


def one_epoch(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    benchmark: Benchmark,
    run: Run,
    epoch: int,
) -> float:
    """Train for one pass, in an order and with a dropout that only seed and epoch decide; return the mean loss."""
    seed = 1000 * run.seed + epoch
    torch.manual_seed(seed)
    model.train()
    losses = []
    order = torch.Generator().manual_seed(seed)
    for data in batches(benchmark.splits["train"], run, shuffle=True, generator=order):
        optimizer.zero_grad()
        loss = benchmark.loss(predict(model, data), data.y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return statistics.mean(losses)


def table(results: dict[Run, Result]) -> str:
    """Return Markdown: one row per data set and model, means over the seeds ± standard deviation."""
    lines = [
        "| data set | model | parameters | test | train - test | density by layer | s per run |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for (dataset, model), found in grouped(results, "dataset", "model"):
        test = spread([100 * r.test for r in found])
        gap = spread([100 * (r.train - r.test) for r in found])
        layers = [
            f"{statistics.mean(layer):.3f}"
            for layer in zip(*(r.density for r in found), strict=True)
        ]
        seconds = statistics.mean(r.seconds for r in found)
        cells = [
            dataset,
            model,
            f"{found[0].parameters:,}",
            test,
            gap,
            " ".join(layers) or "none",
        ]
        lines.append(f"| {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sfi_former"),
        help="holds the graphs and the checkpoints",
    )
    parser.add_argument(
        "--dataset", nargs="+", choices=list(BENCHMARKS), default=["PATTERN", "CLUSTER"]
    )
    parser.add_argument(
        "--peptides",
        type=Path,
        default=Path("data/peptides-functional"),
        help="files of Peptides-func",
    )
    parser.add_argument(
        "--model", nargs="+", choices=list(MODELS), default=list(MODELS)
    )
    parser.add_argument(
        "--seeds",
        type=count,
        default=2,
        help="runs per model; the graphs are the same for all",
    )
    parser.add_argument(
        "--graphs",
        type=count,
        default=500,
        help="training graphs; a fifth for validation, two to test",
    )
    parser.add_argument("--epochs", type=count, default=30)
    parser.add_argument("--batch-size", type=count, default=8)
    parser.add_argument("--layers", type=count, default=3)
    parser.add_argument(
        "--parameters", type=count, default=45_000, help="at most so many per model"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--attention-dropout",
        type=float,
        default=0.2,
        help="on the values that attention propagates",
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument(
        "--device", default="cpu", help="cuda, to train at the published sizes"
    )
    parser.add_argument(
        "--jobs", type=count, default=2, help="runs at a time, each in one thread"
    )
    return options(
        parser,
        argv,
        out=Path("runs/sfi_former_quick"),
        dataset=["CLUSTER"],
        model=["SFi", "GatedGCN"],
        seeds=1,
        graphs=10,
        epochs=2,
        layers=2,
        parameters=9000,
        jobs=1,
    )


def main(argv: list[str] | None = None) -> int:
    """Train what is missing and print the table; return the exit code."""
    return exit_code(partial(train_and_print, parse(argv)), go_on(argv))


def train_and_print(args: argparse.Namespace) -> int:
    if "peptides" in args.dataset:
        with needs("diffusion-mp-experiments[molecules]"):
            import_module("rdkit")
    check_writable(args.out)
    runs = [
        Run(dataset, model, seed, **chosen(Run, args))
        for seed, dataset, model in product(range(args.seeds), args.dataset, args.model)
    ]
    for (
        dataset
    ) in args.dataset:  # the graphs, before two processes could make them at once
        BENCHMARKS[dataset](
            next(run for run in runs if run.dataset == dataset), args.out, args.peptides
        )
    start = time.perf_counter()
    results = train_all(
        partial(train, out=args.out, source=args.peptides), runs, args.jobs
    )
    guesses = sorted(
        {f"{100 * result.guess:.1f} ({run.dataset})" for run, result in results.items()}
    )
    print(
        f"\nWeighted accuracy (peptides: average precision) in %, mean ± standard deviation over {args.seeds} seeds; "
        f"{'/'.join(map(str, runs[0].sizes.values()))} graphs, {args.layers} layers, {args.epochs} epochs, "
        f"{time.perf_counter() - start:.0f} s with {args.jobs} jobs. "
        f"A guess that knows nothing scores {', '.join(guesses)}.\n\n{table(results)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
