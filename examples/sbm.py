"""SFi-Former, DFi-Former, GPS with plain softmax, and GatedGCN alone on PATTERN and CLUSTER, in a plain PyTorch loop.

    python examples/sbm.py --out runs/sbm

Prints one Markdown table: test weighted accuracy, the train-test gap, and the measured density of the attention, layer
by layer. The graphs are drawn here (no download), 500/100/200 of them by default: the whole table of 2 data sets,
4 models and 2 seeds is made to take about an hour on two cores. Every model gets the same number of parameters (its
width is what fits), layers, encodings of position, and training: AdamW, linear warm-up, cosine decay to zero. The test
accuracy is that of the epoch with the best validation accuracy; so are the gap and the density.

Every run keeps a checkpoint in --out. Interrupted, the same command goes on where it stopped, to the same numbers.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from diffusion_mp import GPS, Coupling, DFiFormer, GatedGCN, SFiFormer
from diffusion_mp.data import AddLaplacianPE, SBMDataset
from diffusion_mp.train import weighted_accuracy

MODELS: dict[str, type[nn.Module]] = {"SFi": SFiFormer, "DFi": DFiFormer, "GPS": GPS, "GatedGCN": GatedGCN}
EIGENVECTORS, PE_CHANNELS, HEADS = 10, 8, 4


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


@dataclass
class Result:
    """What the table shows; accuracies in [0, 1], densities by layer (none without attention)."""

    parameters: int
    epoch: int
    train: float
    test: float
    majority: float
    density: list[float]
    seconds: float


def make_model(run: Run, in_channels: int, num_classes: int) -> nn.Module:
    """The widest model within the budget of parameters."""

    def at(width: int) -> nn.Module:
        options: dict[str, Any] = {"pe_channels": PE_CHANNELS, "dropout": run.dropout}
        if run.model != "GatedGCN":
            inner = {"head_channels": max(1, width // HEADS)}
            options |= {"heads": HEADS, "attention": inner, "attention_dropout": run.attention_dropout}
        return MODELS[run.model](in_channels, width, num_classes, run.layers, **options)

    width = PE_CHANNELS + 1
    if count(at(width)) > run.parameters:
        raise SystemExit(f"{run.model} of {run.layers} layers does not fit into {run.parameters} parameters.")
    while count(at(width + 1)) <= run.parameters:
        width += 1
    torch.manual_seed(run.seed)
    return at(width).to(run.device)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load(run: Run, split: str, out: Path) -> SBMDataset:
    """One split, with positions; training, validation and test graphs stand 5 : 1 : 2."""
    num_graphs = max(1, run.graphs * {"train": 5, "val": 1, "test": 2}[split] // 5)
    position = AddLaplacianPE(EIGENVECTORS)
    return SBMDataset(out / "data", run.dataset, split, num_graphs=num_graphs, pre_transform=position, log=False)


def batches(graphs: SBMDataset, run: Run, **options: Any) -> Iterator[Data]:
    return (data.to(run.device) for data in DataLoader(graphs, run.batch_size, **options))


def predict(model: nn.Module, data: Data, **options: Any) -> Any:
    position = (data.laplacian_eigenvectors, data.laplacian_eigenvalues, data.laplacian_mask)
    return model(data.x, data.edge_index, batch=data.batch, pe=position, **options)


@torch.no_grad()
def evaluate(model: nn.Module, graphs: SBMDataset, run: Run) -> float:
    """Weighted accuracy over all nodes of the split."""
    model.eval()
    metric = weighted_accuracy(graphs.num_classes).to(run.device)
    for data in batches(graphs, run):
        metric.update(predict(model, data), data.y)
    return float(metric.compute())


@torch.no_grad()
def densities(model: nn.Module, graphs: SBMDataset, run: Run) -> list[float]:
    """Fraction of the pairs of nodes of a graph that attend, by layer, over all heads; empty without attention."""
    model.eval()
    total, pairs = torch.zeros(run.layers), 0
    if run.model == "GatedGCN":
        return []
    for data in batches(graphs, run):
        couplings = predict(model, data, return_coupling=True)[1]
        size = int(data.ptr.diff().square().sum())
        total += size * torch.tensor([density(coupling) for coupling in couplings])
        pairs += size
    return (total / pairs).tolist()


def density(coupling: Coupling) -> float:
    """Of the attention in a step; softmax attention leaves no pair out."""
    attention = getattr(coupling, "attention", coupling)
    return float(attention.density().mean()) if hasattr(attention, "density") else 1.0


def schedule(steps: int) -> Callable[[int], float]:
    """Linear warm-up over a twentieth of the steps, then half a cosine down to zero."""
    warm = max(1, steps // 20)
    return lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))


def class_weights(graphs: SBMDataset) -> Tensor:
    """1 - share of the class, the weights of the benchmark's loss, over the whole training set."""
    share = torch.bincount(torch.as_tensor(graphs.y), minlength=graphs.num_classes) / len(graphs.y)
    return 1 - share


def train(run: Run, out: Path, bar_at: int = 0, quiet: bool = False) -> Result:
    """Trains, or goes on from the checkpoint, or reads the result of a run that is done."""
    path = out / f"{run.name}.pt"
    state = torch.load(path, map_location=run.device, weights_only=True) if path.exists() else None
    if state is not None and state["run"] != asdict(run):
        changed = [key for key, value in asdict(run).items() if state["run"].get(key) != value]
        raise SystemExit(f"{path} was made with other settings ({', '.join(changed)}); use another --out or delete it.")
    if state is not None and "result" in state:
        return Result(**state["result"])
    graphs = {split: load(run, split, out) for split in ("train", "val", "test")}
    with torch.random.fork_rng(devices=[]):
        model = make_model(run, graphs["train"].num_features, graphs["train"].num_classes)
        weights = class_weights(graphs["train"]).to(run.device)
        steps = run.epochs * math.ceil(len(graphs["train"]) / run.batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(steps))
        if state is None:
            state = {"run": asdict(run), "epoch": 0, "best": -1.0, "seconds": 0.0}
        else:
            for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
                part.load_state_dict(state[name])
        epochs = range(state["epoch"], run.epochs)
        bar = tqdm(epochs, run.name, run.epochs, initial=epochs.start, position=bar_at, disable=quiet, leave=False)
        for epoch in bar:
            start = time.perf_counter()
            loss = one_epoch(model, optimizer, scheduler, graphs["train"], weights, run, epoch)
            val = evaluate(model, graphs["val"], run)
            if val > state["best"]:
                best = {key: value.clone() for key, value in model.state_dict().items()}
                state |= {"best": val, "best_epoch": epoch + 1, "best_model": best}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}
            state["seconds"] += time.perf_counter() - start
            save(state, path)
            bar.set_postfix(loss=f"{loss:.3f}", val=f"{val:.3f}", best=f"{state['best']:.3f}")
        model.load_state_dict(state["best_model"])
        result = Result(
            parameters=count(model),
            epoch=state["best_epoch"],
            train=evaluate(model, graphs["train"], run),
            test=evaluate(model, graphs["test"], run),
            majority=1 / graphs["test"].num_classes,
            density=densities(model, graphs["test"], run),
            seconds=state["seconds"],
        )
    save({"run": asdict(run), "result": asdict(result), "best_model": state["best_model"]}, path)
    return result


def one_epoch(
    model: nn.Module, optimizer: Any, scheduler: Any, graphs: SBMDataset, weights: Tensor, run: Run, epoch: int
) -> float:
    """One pass in an order, and with a dropout, that only seed and epoch decide; the mean loss."""
    seed = 1000 * run.seed + epoch
    torch.manual_seed(seed)
    model.train()
    losses = []
    order = torch.Generator().manual_seed(seed)
    for data in batches(graphs, run, shuffle=True, generator=order):
        optimizer.zero_grad()
        loss = F.cross_entropy(predict(model, data), data.y, weights)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return statistics.mean(losses)


def save(state: dict[str, Any], path: Path) -> None:
    """The file is complete or absent."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def table(results: dict[Run, Result]) -> str:
    """Markdown: one row per data set and model, means over the seeds ± standard deviation."""
    lines = [
        "| data set | model | parameters | test | train - test | density by layer | s per run |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for (dataset, model), found in grouped(results):
        test = spread([100 * r.test for r in found])
        gap = spread([100 * (r.train - r.test) for r in found])
        layers = [f"{statistics.mean(layer):.3f}" for layer in zip(*(r.density for r in found), strict=True)]
        seconds = statistics.mean(r.seconds for r in found)
        cells = [dataset, model, f"{found[0].parameters:,}", test, gap, " ".join(layers) or "none"]
        lines.append(f"| {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines)


def grouped(results: dict[Run, Result]) -> Iterator[tuple[tuple[str, str], list[Result]]]:
    for key in dict.fromkeys((run.dataset, run.model) for run in results):
        yield key, [result for run, result in results.items() if (run.dataset, run.model) == key]


def spread(values: list[float]) -> str:
    """Mean and, for several values, standard deviation."""
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def job(run: Run, out: Path, bar_at: int) -> Result:
    """A run in a process of its own, in one thread."""
    torch.set_num_threads(1)
    return train(run, out, bar_at)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sbm"), help="holds the graphs and the checkpoints")
    parser.add_argument("--dataset", nargs="+", choices=["PATTERN", "CLUSTER"], default=["PATTERN", "CLUSTER"])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=2, help="runs per model; the graphs are the same for all")
    parser.add_argument("--graphs", type=int, default=500, help="training graphs; a fifth for validation, two to test")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=45_000, help="at most so many per model")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention-dropout", type=float, default=0.2, help="on the values that attention propagates")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--device", default="cpu", help="cuda, to train at the published sizes")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each in one thread")
    args = parser.parse_args(argv)
    for name in ("seeds", "graphs", "epochs", "batch_size", "layers", "parameters", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Trains what is missing and prints the table; returns the exit code."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shared = {
        key: value for key, value in vars(args).items() if key not in ("out", "dataset", "model", "seeds", "jobs")
    }
    runs = [
        Run(dataset, model, seed, **shared)
        for seed, dataset, model in product(range(args.seeds), args.dataset, args.model)
    ]
    for dataset in args.dataset:  # the graphs, before two processes could make them at once
        for split in ("train", "val", "test"):
            load(next(run for run in runs if run.dataset == dataset), split, args.out)
    start = time.perf_counter()
    if args.jobs == 1:
        found = [train(run, args.out) for run in runs]
    else:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(job, runs, [args.out] * len(runs), [k % args.jobs for k in range(len(runs))]))
    results = dict(zip(runs, found, strict=True))
    sizes = f"{args.graphs}/{max(1, args.graphs // 5)}/{max(1, 2 * args.graphs // 5)} graphs"
    guesses = sorted({f"{100 * result.majority:.1f} ({run.dataset})" for run, result in results.items()})
    print(
        f"\nWeighted accuracy in %, mean ± standard deviation over {args.seeds} seeds; {sizes}, {args.layers} layers, "
        f"{args.epochs} epochs, {time.perf_counter() - start:.0f} s with {args.jobs} jobs. "
        f"One class for all nodes scores {', '.join(guesses)}.\n\n{table(results)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
