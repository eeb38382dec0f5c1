"""Where to add PDE diffusion in a Transformer: a plain encoder, the seven placements, and what theory predicts.

    python examples/pde_transformer.py --out runs/pde_transformer
    python examples/pde_transformer.py --task imdb --placement none P1 P7 --imdb data/aclImdb --out runs/pde_transformer

The script trains every placement of Zhang & Zhou's Table 1 and prints one Markdown table. It has the test accuracy and,
measured on the trained model, the relative roughness and the commutator with attention by layer. It also has the effect
of bypassing each diffusion layer with its estimate (Theorem 4.7, corrected).

A second table asks the paper's question: do the diagnostics rank the placements as their accuracies do? The diagnostics
are the commutator, and the damage of inserting diffusion of rate --alpha into the trained *plain* encoder at the places
of each placement, one at a time. picture.png shows the diagnostics by layer.

ListOps and the Pathfinder-like images are drawn here, and nothing is downloaded. IMDb is read from its archive or
folder. Every run keeps its checkpoints in --out; if it is interrupted, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from runs import chosen, count, go_on, grouped, needs, options, spread, train_all
from scipy.stats import spearmanr
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from diffusion_mp import PDEDiffusion1d, PDETransformer
from diffusion_mp.data import pad
from diffusion_mp.diagnostics import PlacementReport, diagnose, perturbation_bound

with needs("diffusion-mp-experiments"):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar

    from diffusion_mp_experiments.sequences import (
        IMDb,
        ListOps,
        Pathfinder,
        SequenceDataset,
    )
    from diffusion_mp_experiments.train import (
        CheckpointFiles,
        SequenceClassifier,
        check_writable,
        exit_code,
        load_checkpoint,
        replace_file,
        save_checkpoint,
    )

PLACEMENTS = ("none", "P1", "P2", "P3", "P4", "P5", "P6", "P7")
SITES = {  # the names of a placement's places in the plain encoder
    "P1": ("after_embedding",),
    "P2": ("after_mlp",),
    "P3": ("after_block",),
    "P4": ("before_attention_norm", "before_mlp_norm"),
    "P5": ("on_values",),
    "P6": ("on_heads",),
    "P7": ("after_attention",),
}
SIDE = 32  # pixels; an image is read as the sequence of its rows, so neighbours are neighbours in the image
# of its grey values in 0 … 1
MEAN = 0.03
DEVIATION = 0.13
PROBES = 4  # test sequences that the diagnostics look at


@dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of one run."""

    task: str
    placement: str
    seed: int
    items: int
    epochs: int
    batch_size: int
    channels: int
    layers: int
    heads: int
    alpha: float
    strides: tuple[int, ...]
    dropout: float
    lr: float

    @property
    def diffusion(self) -> dict[str, Any]:
        """Return the options of the diffusion; alpha is shared out evenly among the strides."""
        return {"strides": self.strides, "alpha": self.alpha / len(self.strides)}

    @property
    def name(self) -> str:
        return f"{self.task}-{self.placement}-seed{self.seed}"


@dataclass(frozen=True)
class Task:
    """A data set, how a model reads its tokens, and how long it trains by default."""

    make: Callable[[str, int, Path], Any]
    in_channels: int | list[int]
    classes: int
    max_length: int
    items: int
    epochs: int

    def collate(self, batch: list[Any]) -> tuple[Tensor, ...]:
        """Return tokens, mask and labels; for images, rows of standardised grey values and labels."""
        tokens, mask, labels = pad(batch)
        if isinstance(self.in_channels, list):
            return tokens, mask, labels
        return (
            tokens.unflatten(1, (-1, self.in_channels)) / 255 - MEAN
        ) / DEVIATION, labels


def listops(split: str, items: int, _: Path) -> SequenceDataset:
    return ListOps(
        split, num=items, min_length=8, max_length=64, max_depth=4, max_args=5
    )


def pathfinder(split: str, items: int, _: Path) -> SequenceDataset:
    return Pathfinder(split, num=items, size=SIDE, dashes=4, distractors=2)


def imdb(split: str, items: int, path: Path) -> Any:
    """Return reviews in an order drawn once; validation reviews are training reviews that training does not see."""
    reviews = IMDb(
        path,
        "test" if split == "test" else "train",
        max_length=TASKS["imdb"].max_length,
    )
    order = torch.randperm(
        len(reviews), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return Subset(reviews, order[-items:] if split == "val" else order[:items])


TASKS = {
    "listops": Task(
        listops, [ListOps.vocabulary], ListOps.classes, 64, items=20_000, epochs=5
    ),
    "pathfinder": Task(
        pathfinder, SIDE, Pathfinder.classes, SIDE, items=40_000, epochs=3
    ),
    "imdb": Task(imdb, [IMDb.vocabulary], IMDb.classes, 256, items=8_000, epochs=4),
}


def items(run: Run, split: str, out: Path, imdb_path: Path) -> list[Any]:
    """Return the items of a split, 8 : 1 : 1, made once and kept in --out."""
    size = run.items if split == "train" else max(1, run.items // 8)
    path = out / "data" / f"{run.task}-{split}-{size}.pt"
    if not path.exists():
        made = tqdm(
            TASKS[run.task].make(split, size, imdb_path), path.stem, size, leave=False
        )
        save_checkpoint(
            [(tokens.to(torch.int16), label) for tokens, label in made], path
        )
    return load_checkpoint(path)


def loaders(run: Run, out: Path, imdb_path: Path) -> dict[str, DataLoader[Any]]:
    """Return training, validation and test batches, from memory. Seed and epoch decide the order of the first."""
    collate = TASKS[run.task].collate
    found = {}
    for split in ("train", "val", "test"):
        kept = items(run, split, out, imdb_path)
        # Lightning tells the sampler the epoch; the one replica loads everything.
        order = (
            DistributedSampler(kept, 1, 0, seed=1000 * run.seed)
            if split == "train"
            else None
        )
        found[split] = DataLoader(
            kept, run.batch_size, sampler=order, collate_fn=collate
        )
    return found


def make_model(run: Run) -> PDETransformer:
    """Return a model with the same parameters for every placement; the diffusion's parameters draw no numbers."""
    placed = run.placement != "none"
    torch.manual_seed(run.seed)
    return PDETransformer(
        TASKS[run.task].in_channels,
        run.channels,
        TASKS[run.task].classes,
        run.layers,
        run.heads,
        max_length=TASKS[run.task].max_length,
        placement=run.placement if placed else None,
        diffusion=run.diffusion if placed else None,
        dropout=run.dropout,
    )


def train(
    run: Run, out: Path, imdb_path: Path, bar_at: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Train, or go on from the last epoch, or read the result of a run that is done."""
    folder = out / run.name
    settings = folder / "run.json"
    done = folder / "result.json"
    content = json.dumps(asdict(run))
    if settings.exists() and settings.read_text() != content:
        raise SystemExit(
            f"{folder} was made with other settings; use another --out or delete it."
        )
    replace_file(settings, content.encode())
    if done.exists():
        return json.loads(done.read_text())
    batches = loaders(run, out, imdb_path)
    labels = [int(label) for *_, label in batches["test"].dataset]
    module = SequenceClassifier(make_model(run), TASKS[run.task].classes, lr=run.lr)
    checkpoints = folder / "checkpoints"
    best = ModelCheckpoint(
        checkpoints, "best", monitor="val_acc", mode="max", enable_version_counter=False
    )
    last = ModelCheckpoint(checkpoints, "last", enable_version_counter=False)
    bar = (
        [TQDMProgressBar(refresh_rate=20, process_position=bar_at)] if progress else []
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=run.epochs,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[best, last, *bar],
        plugins=[CheckpointFiles()],
        enable_progress_bar=progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    start = time.perf_counter()
    resumed = checkpoints / "last.ckpt"
    trainer.fit(
        module,
        batches["train"],
        batches["val"],
        ckpt_path=str(resumed) if resumed.exists() else None,
    )
    seconds = time.perf_counter() - start
    state = load_checkpoint(best.best_model_path)
    module.load_state_dict(state["state_dict"])
    result = {
        "epoch": state["epoch"] + 1,
        "seconds": seconds,
        "majority": Counter(labels).most_common(1)[0][1] / len(labels),
        **{
            f"{stage}_acc": accuracy(module, batches[stage])
            for stage in ("train", "test")
        },
        **measure(run, module.model, next(iter(batches["test"]))),
    }
    replace_file(done, json.dumps(result).encode())
    return result


@torch.no_grad()
def accuracy(module: SequenceClassifier, batches: DataLoader[Any]) -> float:
    """Return the share of correct answers in evaluation mode."""
    module.eval()
    right = [(module(*inputs).argmax(1) == labels) for *inputs, labels in batches]
    return float(torch.cat(right).double().mean())


def measure(run: Run, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return the diagnostics of a trained model on a few test sequences, in double precision, with the same S.

    For the plain encoder return also the effect of inserting S at the places of each placement, one at a time.
    """
    model = model.double().eval()
    inputs = [tensor[:PROBES] for tensor in batch[:-1]]
    inputs = [
        tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs
    ]
    cheap = {"points": 2, "tol": 1e-2}
    smoothing = PDEDiffusion1d(run.channels, **run.diffusion).double()
    found = {"report": asdict(diagnose(model, *inputs, diffusion=smoothing, **cheap))}
    if run.placement == "none":
        across = PDEDiffusion1d(run.channels // run.heads, **run.diffusion).double()
        found["inserted"] = {place: {"truth": 0.0, "estimate": 0.0} for place in SITES}
        for place, (name, site) in product(SITES, model.named_modules()):
            if name.split(".")[-1] in SITES[place]:
                inserting = across if place == "P6" else smoothing
                effect = perturbation_bound(
                    model, site, *inputs, diffusion=inserting, **cheap
                )
                found["inserted"][place]["truth"] += effect.truth
                found["inserted"][place]["estimate"] += effect.estimate
    return found


def sizes(results: dict[Run, dict[str, Any]]) -> str:
    """Return what a task was trained on, and the accuracy of answering its most common class."""
    return " ".join(
        f"{run.task}: {run.items} items, {run.epochs} epochs, most common class {100 * results[run]['majority']:.1f}."
        for run in {run.task: run for run in results}.values()
    )


def table(results: dict[Run, dict[str, Any]]) -> str:
    """Return Markdown: one row per task and placement, means over the seeds."""
    lines = [
        "| task | placement | test | train | roughness by layer | commutator by layer | truth / estimate | s per run |",
        "|---|---|--:|--:|---|---|---|--:|",
    ]
    for (task, placement), found in grouped(results, "task", "placement"):
        reports = [result["report"] for result in found]
        effects = [
            f"{truth:.2g}/{estimate:.2g}"
            for truth, estimate in zip(
                *(
                    by_layer(reports, "insertion", column)
                    for column in ("truth", "estimate")
                ),
                strict=True,
            )
        ]
        cells = [
            task,
            placement,
            spread([100 * result["test_acc"] for result in found]),
            spread([100 * result["train_acc"] for result in found]),
            " ".join(
                f"{value:.2f}"
                for value in by_layer(reports, "attention", "relative_roughness")
            ),
            " ".join(
                f"{value:.3f}" for value in by_layer(reports, "attention", "commutator")
            ),
            " ".join(effects) or "none",
            f"{statistics.mean(result['seconds'] for result in found):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranking(results: dict[Run, dict[str, Any]]) -> str:
    """Return Markdown: predictors of the placements, accuracies of training with them, and their rank correlation.

    S is inserted into the trained *plain* encoder at each place. The table has norms of the change of the logits of the
    probed sequences, and their estimates, summed over a placement's places. The commutator is measured on the model
    trained with the placement, as a mean over its layers. The last row is the rank correlation of each column with the
    accuracy; less than -0.79 would be significant at 5 % for seven placements.
    """
    columns = ("change of the logits", "its estimate", "commutator")
    lines = [
        f"| task | placement | {' | '.join(columns)} | test |",
        "|---|---|--:|--:|--:|--:|",
    ]
    found = dict(grouped(results, "task", "placement"))
    for task in dict.fromkeys(run.task for run in results):
        rows: list[list[float]] = []
        for place in SITES:
            plain, trained = (
                found.get((task, placement), []) for placement in ("none", place)
            )
            if not plain or not trained:
                continue
            inserted = [result["inserted"][place] for result in plain]
            commutators = [
                statistics.mean(result["report"]["attention"]["commutator"])
                for result in trained
            ]
            damage = [
                statistics.mean(effect[name] for effect in inserted)
                for name in ("truth", "estimate")
            ]
            rows.append(
                [
                    *damage,
                    statistics.mean(commutators),
                    100 * statistics.mean(r["test_acc"] for r in trained),
                ]
            )
            truth, estimate, commutator, score = rows[-1]
            lines.append(
                f"| {task} | {place} | {truth:.3g} | {estimate:.3g} | {commutator:.3f} | {score:.2f} |"
            )
        if len(rows) > 2:
            *predictors, scores = zip(*rows, strict=True)
            ranks = [
                f"{spearmanr(predictor, scores).statistic:.2f}"
                for predictor in predictors
            ]
            lines.append(f"| {task} | rank correlation | {' | '.join(ranks)} | |")
    return "\n".join(lines)


def by_layer(reports: list[dict[str, Any]], part: str, column: str) -> list[float]:
    """Return the mean of a column over the reports, layer by layer."""
    return [
        statistics.mean(layer)
        for layer in zip(*(report[part][column] for report in reports), strict=True)
    ]


COLOURS = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
]


def draw(results: dict[Run, dict[str, Any]], path: Path) -> None:
    """Draw for every task roughness and commutator by layer, and every diffusion layer's reach with its estimate."""
    quantities = ("relative_roughness", "commutator", "estimate")
    tasks = list(dict.fromkeys(run.task for run in results))
    figure, axes = plt.subplots(
        len(tasks),
        len(quantities),
        figsize=(17, 4.2 * len(tasks)),
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat:  # the palette of Okabe and Ito, for colour-blind readers
        ax.set_prop_cycle(color=COLOURS)
    for (task, placement), found in grouped(results, "task", "placement"):
        report = PlacementReport(**found[0]["report"])
        for ax, quantity in zip(axes[tasks.index(task)], quantities, strict=True):
            if quantity != "estimate" or placement in ("P1", "P7"):
                report.plot(ax, quantity, label=placement)
            ax.set_title(task)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def strides(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 on, between commas."""
    return tuple(count(part) for part in text.split(","))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/pde_transformer"),
        help="keeps checkpoints and results",
    )
    parser.add_argument(
        "--task", nargs="+", choices=list(TASKS), default=["listops", "pathfinder"]
    )
    parser.add_argument(
        "--placement", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS)
    )
    parser.add_argument(
        "--imdb",
        type=Path,
        default=Path("data/aclImdb"),
        help="folder or archive of the reviews",
    )
    parser.add_argument(
        "--seeds",
        type=count,
        default=2,
        help="runs per placement; the data are the same for all",
    )
    parser.add_argument(
        "--items",
        type=count,
        help="to train on, an eighth more to validate and to test; else the task's",
    )
    parser.add_argument("--epochs", type=count, help="else the task's")
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--channels", type=count, default=64)
    parser.add_argument("--layers", type=count, default=2)
    parser.add_argument("--heads", type=count, default=4)
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.1,
        help="of the diffusion at the start; below 1/2",
    )
    parser.add_argument(
        "--strides",
        type=strides,
        default=(1,),
        help="of the diffusion, such as 1,4,16; alpha in all",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--jobs", type=count, default=2, help="runs at a time, each in one thread"
    )
    return options(
        parser,
        argv,
        out=Path("runs/pde_transformer_quick"),
        task=["listops"],
        placement=["none", "P1", "P7"],
        seeds=1,
        items=64,
        epochs=2,
        channels=8,
        heads=2,
        jobs=1,
    )


def lengths(args: argparse.Namespace, task: str) -> dict[str, int]:
    """Return how long a task trains: the command line, or the default of the task."""
    return {
        "items": args.items or TASKS[task].items,
        "epochs": args.epochs or TASKS[task].epochs,
    }


def main(argv: list[str] | None = None) -> int:
    """Train what is missing, print the tables and draw the picture; return the exit code."""
    return exit_code(partial(train_and_print, parse(argv)), go_on(argv))


def train_and_print(args: argparse.Namespace) -> int:
    check_writable(args.out)
    runs = [
        Run(
            **chosen(Run, args)
            | lengths(args, task)
            | {"task": task, "placement": placement, "seed": seed}
        )
        for seed, task, placement in product(
            range(args.seeds), args.task, args.placement
        )
    ]
    for task in args.task:  # the items, before two processes could make them at once
        loaders(next(run for run in runs if run.task == task), args.out, args.imdb)
    start = time.perf_counter()
    results = train_all(
        partial(train, out=args.out, imdb_path=args.imdb), runs, args.jobs
    )
    draw(results, args.out / "picture.png")
    seconds = time.perf_counter() - start
    print(
        f"\nAccuracy in %, mean ± standard deviation over {args.seeds} seeds; {args.layers} layers of {args.channels} "
        f"channels, {seconds:.0f} s with {args.jobs} jobs. {sizes(results)}\n\n{table(results)}\n\n{ranking(results)}"
        f"\n\n{args.out / 'picture.png'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
