"""One run of a table: a fresh model on one split, its epoch chosen on validation, as a line of numbers."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import Metric

from diffusion_mp.errors import ConvergenceError, SingularSystemError
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp_experiments.reproduce.networks import ABLATIONS, without_attention
from diffusion_mp_experiments.reproduce.states import measured
from diffusion_mp_experiments.train.many_runs import quiet_lightning, versions

#: A LightningDataModule that has `num_features`, `num_classes` and, as `trains`, the LightningModule for its data.
DataModule = Any
#: Of a network at rest, what is looked at of the way.
STEPS = 30
_DIVERGED = (ArithmeticError, ConvergenceError, SingularSystemError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def train(config: dict[str, Any], metric: str, split: int, seed: int, tuning: bool) -> dict[str, Any]:
    """What came out of one run.

    Args:
        config: as `Table.config` makes it.
        metric: the name under which the module logs it.
        split, seed, tuning: the split of the data module; initial weights and dropout are drawn from split and seed.

    Returns:
        validation and, but for tuning, test metric of the epoch with the best validation score; that epoch, how many
        there were and why no more; the test metric with the attention of the trained model replaced, where it has one;
        measures of its states (`MEASURES`) and, of a certified one, the energy F at every state;
        hash of the data, versions, seconds and peak memory of the process in MB.
    """
    start = time.perf_counter()
    _forget_peak()
    with quiet_lightning(), isolate_rng():
        pl.seed_everything(1000 * split + seed, workers=True, verbose=False)
        data = _data(json.dumps(config["data"], sort_keys=True), split, tuning)
        module = made_module(config, data)
        scores, result = Scores(module), {}
        if "predictor" in config["module"]:
            predictor: Any = module.model
            predictor.fit(data)
        else:
            result = _fit(module, data, scores, config["epochs"], config["patience"])
        if result.get("epoch") == 0:  # no epoch had a score
            result |= {"validation": None, "test": None, "ablated": {}}
        else:
            result |= _measured(module, data, scores, metric, tuning)
        result["data"] = data_hash(data)
    return {**result, "versions": versions(), "seconds": round(time.perf_counter() - start, 3), "memory": _peak()}


def made_module(config: dict[str, Any], data: DataModule) -> pl.LightningModule:
    """The LightningModule that `data` is trained by, around the model or predictor of the configuration."""
    told = deepcopy(config["module"])
    model = told.pop("model", None) or told.pop("predictor")
    if "model" in config["module"]:
        model.setdefault("init_args", {}).update(in_channels=data.num_features, out_channels=data.num_classes)
    network = made(nn.Module, model)
    if "attention" in config and not without_attention(network, config["attention"]):
        raise ValueError(f"{model['class_path']} has no attention over pairs that could be the {config['attention']}.")
    return type(data).trains(network, **told)


def made(kind: type, config: dict[str, Any]) -> Any:
    """The object that `class_path` and `init_args` say, of a class that must be of this kind."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=kind)
    return parser.instantiate(parser.parse_object({"it": config})).it


@lru_cache(4)
def _data(config: str, split: int, tuning: bool) -> DataModule:
    """A process trains many models on few splits, which need not be read each time."""
    told = json.loads(config)
    told["init_args"] = {**told.get("init_args", {}), "split": split, "tuning": tuning}
    data = made(pl.LightningDataModule, told)
    data.prepare_data()
    data.setup("fit")
    return data


class Scores:
    """Takes the place of a module's `log`, which costs as much as an epoch of a small graph: last values, by name."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.values: dict[str, Metric | Tensor] = {}
        module.log = self.log  # type: ignore[method-assign, assignment]
        module.configure_callbacks = list  # type: ignore[method-assign]  # nothing is resumed, `Best` sees what diverges

    def log(self, name: str, value: Metric | Tensor, **how: Any) -> None:
        """What modules call; numbers that are not metrics are only read where there is one batch."""
        self.values[name] = value

    def take(self, name: str) -> float:
        """The value of that name; all metrics begin anew."""
        value = self.values[name]
        number = float(value.compute() if isinstance(value, Metric) else value)
        for each in self.values.values():
            if isinstance(each, Metric):
                each.reset()
        return number


class Best(Callback):
    """Keeps the weights of the epoch with the best val_score, the first of equals, and ends what no longer improves.

    It validates by itself: Lightning's loop costs as much as a step on a small graph.
    """

    def __init__(self, scores: Scores, batches: Iterable[Any], patience: int) -> None:
        self.scores, self.batches, self.patience = scores, batches, patience
        self.score, self.epoch, self.ended = -math.inf, 0, "epochs"
        self.state: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validates, and looks at the score."""
        pl_module.eval()
        with torch.no_grad():
            pl_module.on_validation_epoch_start()
            for number, batch in enumerate(self.batches):
                pl_module.validation_step(batch, number)
            pl_module.on_validation_epoch_end()
        pl_module.train()
        score, epoch = self.scores.take("val_score"), trainer.current_epoch + 1
        if score > self.score:
            self.score, self.epoch = score, epoch
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        if not math.isfinite(score):
            self.ended = "diverged"
        elif epoch - self.epoch >= self.patience:
            self.ended = "patience"
        trainer.should_stop = self.ended != "epochs"


def _trainer(**options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    return pl.Trainer(
        accelerator="cpu", devices=1, enable_model_summary=False, num_sanity_val_steps=0, **quiet, **options
    )


def _fit(module: pl.LightningModule, data: DataModule, scores: Scores, epochs: int, patience: int) -> dict[str, Any]:
    """Trains, and puts the best weights into the module."""
    best = Best(scores, data.val_dataloader(), patience)
    trainer = _trainer(max_epochs=epochs, limit_val_batches=0, callbacks=[best])
    try:
        trainer.fit(module, datamodule=data)
    except _DIVERGED as error:
        best.ended = f"diverged: {error}"
    if best.state:
        module.load_state_dict(best.state)
    return {"epoch": best.epoch, "epochs": trainer.current_epoch, "ended": best.ended}


def _measured(
    module: pl.LightningModule, data: DataModule, scores: Scores, metric: str, tuning: bool
) -> dict[str, Any]:
    def value(stage: str) -> float | None:
        """None for what is no number, of which JSON has none."""
        try:
            getattr(_trainer(), {"val": "validate"}.get(stage, stage))(module, datamodule=data, verbose=False)
        except _DIVERGED:
            return None
        number = scores.take(f"{stage}_{metric}")
        return number if math.isfinite(number) else None

    result: dict[str, Any] = {"validation": value("val")}
    if not tuning:
        trained: Any = module.model
        with measured(trained) as states:
            result["test"] = value("test")
        result["states"] = {name: [round(each, 6) for each in found] for name, found in states.items() if found}
        if isinstance(trained, CertifiedDIFFormer) and states["energy"]:
            result["states"]["F"] = _energies(trained, data.data)
        result["ablated"] = {}
        for ablation in () if hasattr(trained, "fit") else ABLATIONS:  # what is fitted has its scores already
            module.model = model = deepcopy(trained)
            if without_attention(model, ablation):
                result["ablated"][ablation] = value("test")
        module.model = trained
    return result


def _energies(model: CertifiedDIFFormer, nodes: Data) -> list[float]:
    """F at every state; of a network at rest, on the first steps of the way there."""
    steps, model.num_layers = model.num_layers, model.num_layers or STEPS
    try:
        return model.energies(nodes.x, nodes.edge_index).tolist()
    finally:
        model.num_layers = steps


def data_hash(data: DataModule) -> str:
    """Twelve letters that differ wherever anything does in what validates and tests, masks included."""
    known = getattr(data, "_hash", None)
    if known is None:
        digest = hashlib.sha256()
        for loader in (data.val_dataloader(), data.test_dataloader()):
            for batch in loader:
                for tensor in _tensors(batch):
                    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
                    digest.update(tensor.contiguous().numpy().tobytes())
        known = data._hash = digest.hexdigest()[:12]
    return known


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor) and batch.layout is torch.strided:
        yield batch.detach().cpu()
    elif isinstance(batch, Tensor):
        batch = batch.to_sparse_csr()
        yield from _tensors([batch.crow_indices(), batch.col_indices(), batch.values()])
    elif isinstance(batch, Data):
        yield from _tensors([value for _, value in sorted(batch.to_dict().items())])
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part)


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _forget_peak() -> None:
    """Linux can measure from here on; elsewhere a peak is that of the whole process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def _peak() -> int:
    """The most memory that this process has had at once, in MB."""
    if _STATUS.is_file():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
