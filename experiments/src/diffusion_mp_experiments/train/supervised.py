"""What all LightningModules here have in common: a model, what is compared, a loss and a score."""

from __future__ import annotations

from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import Metric

from diffusion_mp.diffusivities import auxiliary_loss
from diffusion_mp.errors import check_kind, check_positive
from diffusion_mp_experiments.train.metrics import Score
from diffusion_mp_experiments.train.resume import FiniteLoss, Resumable

OptimizerName = Literal["adam", "adamw"]
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class Supervised(pl.LightningModule):
    """A model that is trained on examples; a subclass writes `compared` and `loss`.

    Runs can be resumed and stop at NaN. Logged once an epoch, with the metric "acc" say: train_loss, train_acc,
    val_loss, val_acc, test_loss, test_acc; train_aux_loss (the sum of what modules record for `auxiliary_loss`, where
    one does); and val_score, which is val_acc with ties broken by the lower val_loss, or minus what should be low. It
    is what checkpoints and early stopping watch.
    """

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, optimizer: str = "adam", metric: str = "acc"
    ) -> None:
        super().__init__()
        check_kind(model, "model", nn.Module, "a module")
        check_positive(lr, "lr", allow_zero=True)
        check_positive(weight_decay, "weight_decay", allow_zero=True)
        if not isinstance(optimizer, str) or optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(_OPTIMIZERS)}, got {optimizer!r}.")
        self.model, self.lr, self.weight_decay, self.optimizer, self.metric = model, lr, weight_decay, optimizer, metric
        self.train_metric, self.val_metric, self.test_metric = (Score(metric) for _ in range(3))
        self._val_losses: list[tuple[Tensor, int]] = []

    def compared(self, batch: Any, stage: str) -> tuple[Tensor, Tensor]:
        """What the model says in a stage, and what is true."""
        raise NotImplementedError(f"{type(self).__name__} must define compared(batch, stage).")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is minimised."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(outputs, targets).")

    def configure_callbacks(self) -> list[Callback]:
        """Those that are not there yet, of `Resumable` and `FiniteLoss`; Lightning asks again in every stage."""
        present = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return [kind() for kind in (Resumable, FiniteLoss) if kind not in present]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, plus what the model's modules recorded (`auxiliary_loss`)."""
        loss, count = self._evaluate(batch, "train")
        auxiliary = auxiliary_loss(self.model)
        if auxiliary.requires_grad:
            self._log("train_aux_loss", auxiliary, count)
        return loss + auxiliary

    def on_validation_epoch_start(self) -> None:
        """No batch has been seen."""
        self._val_losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and metric over what validates."""
        self._val_losses.append(self._evaluate(batch, "val"))

    def on_validation_epoch_end(self) -> None:
        """The score that chooses the epoch."""
        score, count = self.val_metric.compute(), sum(count for _, count in self._val_losses)
        loss = sum(loss * (part / count) for loss, part in self._val_losses)
        # One more right answer is worth 1/N; the loss may decide below half of that only.
        score = (score if self.val_metric.higher_is_better else -score) - loss / (1 + loss) / (2 * count)
        self.log("val_score", score)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and metric over what tests."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        """The optimizer named in the constructor, over all parameters."""
        arguments: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        return _OPTIMIZERS[self.optimizer](self.parameters(), **arguments)

    def _evaluate(self, batch: Any, stage: str) -> tuple[Tensor, int]:
        """The loss over the examples of a stage, and their number."""
        outputs, targets = self.compared(batch, stage)
        loss, metric = self.loss(outputs, targets), getattr(self, f"{stage}_metric")
        metric.update(outputs, targets)
        self._log(f"{stage}_loss", loss, len(targets))
        self._log(f"{stage}_{self.metric}", metric, len(targets), prog_bar=True)
        return loss, len(targets)

    def _log(self, name: str, value: Metric | Tensor, count: int, prog_bar: bool = False) -> None:
        self.log(name, value, prog_bar=prog_bar, on_step=False, on_epoch=True, batch_size=count)
