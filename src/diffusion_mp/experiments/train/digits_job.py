"""The main job: DIFFormer-s on the digits, five labels per class, beside four baselines on the same random splits."""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, LambdaCallback, ModelCheckpoint
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn
from torch_geometric.data import Data
from tqdm import tqdm

from diffusion_mp.experiments.train.checkpoints import check_writable, load_checkpoint
from diffusion_mp.experiments.train.classifiers import NodeClassifier
from diffusion_mp.experiments.train.datamodules import DigitsDataModule
from diffusion_mp.experiments.train.digits_report import Result, summarise, table, write_report
from diffusion_mp.models import DIFFormer, DiffusionGNN, LabelPropagation

PIXELS, CLASSES = 64, 10
VALIDATE_EVERY = 2  # epochs; half the time of a run is validation


@dataclass(frozen=True)
class Recipe:
    """A network and how it is trained; the epoch is chosen on validation, the rest is the same on every split."""

    make: Callable[[], nn.Module]
    lr: float
    weight_decay: float


# The best on validation of 2 × 2 × 2 settings each: dropout 0.2 or 0.5, weight decay 5e-4 or 5e-3, and 2 or 4 layers
# (DIFFormer-s) or 2 or 3 (the others), at lr 1e-2, 120 epochs, on splits 100 to 102, which are not reported.
RECIPES: dict[str, Recipe] = {
    "DIFFormer-s": Recipe(lambda: DIFFormer(PIXELS, 64, CLASSES, num_layers=4, dropout=0.2), 0.01, 5e-3),
    "GCN": Recipe(lambda: DiffusionGNN(PIXELS, 64, CLASSES, num_layers=3, conv="gcn", dropout=0.5), 0.01, 5e-4),
    "MLP": Recipe(lambda: DiffusionGNN(PIXELS, 64, CLASSES, num_layers=2, conv="mlp", dropout=0.2), 0.01, 5e-3),
}
ALPHAS = (0.5, 0.8, 0.9, 0.95, 0.99)
INVERSE_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)


def digits_parser(add_help: bool = True) -> argparse.ArgumentParser:
    """Options of the main job."""
    parser = argparse.ArgumentParser("diffusion-mp digits", description=__doc__, add_help=add_help)
    parser.add_argument("--splits", type=_positive, default=5, help="number of different random splits")
    parser.add_argument("--per-class", type=_positive, default=5, help="training labels of each class")
    parser.add_argument("--epochs", type=_positive, default=80, help="epochs of every network")
    parser.add_argument("--seed", type=int, default=0, help="split i and its initialisations use seed + i")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder of the report")
    return parser


def run_digits(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Trains, prints the table, writes the report; returns mean and standard deviation of test accuracy per method."""
    check_writable(options.out)
    start = time.perf_counter()
    results: list[Result] = []
    total = options.splits * options.epochs * len(RECIPES)
    with _quiet_lightning(), _one_thread(), isolate_rng(), tqdm(total=total, unit="epoch") as bar:
        tick = LambdaCallback(on_train_epoch_end=lambda trainer, module: bar.update())
        for split in range(options.seed, options.seed + options.splits):
            data_module = DigitsDataModule(per_class=options.per_class, seed=split)
            for method, recipe in RECIPES.items():
                bar.set_description(f"split {split - options.seed + 1}/{options.splits} {method}")
                results.append(train_network(method, recipe, data_module, split, options.epochs, tick))
            results.append(propagate_labels(data_module.data, split))
            results.append(regress(data_module.data, split))
    seconds = time.perf_counter() - start
    print(f"\nDigits, {options.per_class} labels per class, kNN graph over pixels. Test accuracy in %:\n")
    print(table(results))
    written = write_report(options.out, results, data_module.data, options, seconds)
    print(f"\n{seconds:.0f} s. Report: {written}")
    return summarise(results)


def train_network(
    method: str, recipe: Recipe, data_module: DigitsDataModule, seed: int, epochs: int, *callbacks: Callback
) -> Result:
    """One network on one split, with the weights of its best validation epoch."""
    start = time.perf_counter()
    pl.seed_everything(seed, workers=True, verbose=False)
    classifier = NodeClassifier(recipe.make(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, "{epoch}", monitor="val_score", mode="max", save_weights_only=True)
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=[best, *callbacks],
            check_val_every_n_epoch=VALIDATE_EVERY,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(classifier, datamodule=data_module)
        checkpoint = load_checkpoint(best.best_model_path)
    classifier.load_state_dict(checkpoint["state_dict"])
    (val,) = trainer.validate(classifier, datamodule=data_module, verbose=False)
    (test,) = trainer.test(classifier, datamodule=data_module, verbose=False)
    chosen = f"epoch {checkpoint['epoch'] + 1} of {epochs}"
    seconds = time.perf_counter() - start
    return Result(method, seed, val["val_acc"], test["test_acc"], chosen, seconds, classifier.model.eval())


def propagate_labels(data: Data, split: int) -> Result:
    """Label propagation over the same graph, alpha chosen on validation."""
    start = time.perf_counter()
    tried = []
    for alpha in ALPHAS:
        with torch.no_grad():
            scores = LabelPropagation(num_layers=50, alpha=alpha)(data.y, data.edge_index, mask=data.train_mask)
        tried.append((*_accuracies(scores.argmax(dim=-1), data), f"alpha {alpha}"))
    val, test, chosen = max(tried, key=lambda trial: trial[0])
    return Result("label propagation", split, val, test, chosen, time.perf_counter() - start)


def regress(data: Data, split: int) -> Result:
    """Scikit-learn's logistic regression on the pixels, its penalty chosen on validation; no graph."""
    from sklearn.linear_model import LogisticRegression

    start = time.perf_counter()
    x, y, train = data.x.numpy(), data.y.numpy(), data.train_mask.numpy()
    tried = []
    for c in INVERSE_PENALTIES:
        model = LogisticRegression(C=c, max_iter=1000).fit(x[train], y[train])
        tried.append((*_accuracies(torch.from_numpy(model.predict(x)), data), f"C {c}"))
    val, test, chosen = max(tried, key=lambda trial: trial[0])
    return Result("logistic regression", split, val, test, chosen, time.perf_counter() - start)


def _accuracies(predicted: torch.Tensor, data: Data) -> tuple[float, float]:
    correct = (predicted == data.y).double()
    return float(correct[data.val_mask].mean()), float(correct[data.test_mask].mean())


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and lose much on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Lightning announces hardware, limits and tips once per trainer; fifteen trainers need none of it."""
    import logging

    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric|torch_geometric)\b")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
