"""Classification of sequences as a LightningModule."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from diffusion_mp.errors import check_counts, check_kind, check_number, check_positive

from .guards import guards


class SequenceClassifier(pl.LightningModule):
    """Trains `model(*inputs)` on batches (*inputs, labels), such as `diffusion_mp.data.pad` makes.

    AdamW with β = (0.9, 0.98), linear warm-up, then half a cosine down to zero at the trainer's last step (Zhang &
    Zhou, Table 4). Logged: train_loss, train_acc, val_loss, val_acc, test_loss, test_acc.

    Args:
        model: any module that returns logits [B, classes].
        classes: how many.
        lr: the learning rate after the warm-up.
        weight_decay: decoupled.
        warmup: share of the steps.

    Errors: ValueError for a warm-up outside [0, 1), lr < 0 or weight_decay < 0; FloatingPointError while training, when
    a loss is no finite number.
    """

    def __init__(
        self, model: nn.Module, classes: int, lr: float = 1e-3, weight_decay: float = 1e-5, warmup: float = 0.1
    ) -> None:
        super().__init__()
        check_kind(model, "model", nn.Module, "a module")
        check_counts(classes=classes)
        check_number(warmup, "warmup")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), a share of the steps; got {warmup}.")
        check_positive(lr, "lr", allow_zero=True)
        check_positive(weight_decay, "weight_decay", allow_zero=True)
        # The module itself stays out: a checkpoint then holds plain types only and loads with weights_only=True.
        self.save_hyperparameters(ignore=["model"])
        self.model = model
        self.lr, self.weight_decay, self.warmup = lr, weight_decay, warmup
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(classes, average="micro") for _ in range(3)
        )

    def configure_callbacks(self) -> list[Callback]:
        """Random states in checkpoints, and a stop at NaN, with every Trainer (see `Resumable` and `FiniteLoss`)."""
        return guards(self)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits [B, classes]."""
        logits: Tensor = self.model(*inputs)
        return logits

    def _evaluate(self, batch: tuple[Tensor, ...], stage: str, accuracy: Metric) -> Tensor:
        *inputs, labels = batch
        logits = self(*inputs)
        loss = cross_entropy(logits, labels)
        accuracy(logits, labels)
        shared: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": len(labels)}
        self.log(f"{stage}_loss", loss, **shared)
        self.log(f"{stage}_acc", accuracy, prog_bar=True, **shared)
        return loss

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return self._evaluate(batch, "train", self.train_accuracy)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate(batch, "test", self.test_accuracy)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, and a learning rate that changes with every step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.98), weight_decay=self.weight_decay)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        rising = max(1, round(self.warmup * steps))
        schedule = SequentialLR(
            optimizer,
            [LinearLR(optimizer, 1 / rising, total_iters=rising), CosineAnnealingLR(optimizer, max(1, steps - rising))],
            milestones=[rising],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
