"""Classification of nodes and of sequences as LightningModules."""

from __future__ import annotations

from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch_geometric.data import Data
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from diffusion_mp.diffusivities import auxiliary_loss
from diffusion_mp.errors import check_counts, check_kind, check_number, check_positive
from diffusion_mp.experiments.train.losses import node_cross_entropy
from diffusion_mp.experiments.train.resume import FiniteLoss, Resumable

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class _Classifier(pl.LightningModule):
    """What both have: a model whose accuracies are counted, and runs that can be resumed and stop at NaN.

    Logged once an epoch: train_loss, train_acc, val_loss, val_acc, test_loss, test_acc.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, classes: int | None = None) -> None:
        super().__init__()
        check_kind(model, "model", nn.Module, "a module")
        check_positive(lr, "lr", allow_zero=True)
        check_positive(weight_decay, "weight_decay", allow_zero=True)
        self.model, self.lr, self.weight_decay = model, lr, weight_decay
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(classes, average="micro") for _ in range(3)
        )

    def configure_callbacks(self) -> list[Callback]:
        """Those that are not there yet, of `Resumable` and `FiniteLoss`; Lightning asks again in every stage."""
        present = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return [kind() for kind in (Resumable, FiniteLoss) if kind not in present]

    def _record(self, stage: str, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        accuracy = getattr(self, f"{stage}_accuracy")
        accuracy(logits, labels)
        self._log(f"{stage}_loss", loss, len(labels))
        self._log(f"{stage}_acc", accuracy, len(labels), prog_bar=True)

    def _log(self, name: str, value: Metric | Tensor, count: int, prog_bar: bool = False) -> None:
        self.log(name, value, prog_bar=prog_bar, on_step=False, on_epoch=True, batch_size=count)


class NodeClassifier(_Classifier):
    """Trains `model(x, edge_index, edge_weight)` on the labelled nodes of one graph, transductively.

    A step sees the whole graph; train_mask, val_mask and test_mask say which logits are read. Logged beside losses and
    accuracies: train_aux_loss (the sum of what modules record for `auxiliary_loss`, where one does), and val_score,
    which is val_acc with ties broken by the lower val_loss (what checkpoints and early stopping watch).

    Args:
        model: any module with PyG's forward, returning logits [N, C].
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        optimizer: "adam" or "adamw".

    Raises:
        ValueError: logits and labels that do not fit (see `node_cross_entropy`), an unknown optimizer, lr < 0 or
            weight_decay < 0.
        FloatingPointError: while training, when a loss is no finite number.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        optimizer: Literal["adam", "adamw"] = "adam",
    ) -> None:
        super().__init__(model, lr, weight_decay)
        if not isinstance(optimizer, str) or optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(_OPTIMIZERS)}, got {optimizer!r}.")
        # The module itself stays out: a checkpoint then holds plain types only and loads with weights_only=True.
        self.save_hyperparameters(ignore=["model"])
        self.optimizer = optimizer

    def forward(self, data: Data) -> Tensor:
        """Logits [N, C] of every node."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        logits: Tensor = self.model(data.x, data.edge_index, data.edge_weight)
        return logits

    def _evaluate(self, data: Data, stage: str) -> tuple[Tensor, int]:
        """The loss over the nodes of a stage, and their number."""
        mask, logits = data[f"{stage}_mask"], self(data)
        if logits.shape[:1] != mask.shape:
            raise ValueError(
                f"The model returned {list(logits.shape)} for {mask.numel()} nodes; "
                "it must return one row of logits per node."
            )
        loss = node_cross_entropy(logits[mask], data.y[mask])
        self._record(stage, logits[mask], data.y[mask], loss)
        return loss, int(mask.sum())

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Cross-entropy over the training nodes, plus what the model's modules recorded (`auxiliary_loss`)."""
        loss, count = self._evaluate(batch, "train")
        auxiliary = auxiliary_loss(self.model)
        if auxiliary.requires_grad:
            self._log("train_aux_loss", auxiliary, count)
        return loss + auxiliary

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Loss and accuracy over the validation nodes, and the score that chooses the epoch."""
        loss, count = self._evaluate(batch, "val")
        # One more correct node is worth 1/N; the loss may decide below half of that only.
        score = self.val_accuracy.compute() - loss / (1 + loss) / (2 * count)
        self._log("val_score", score, count)

    def test_step(self, batch: Data, batch_idx: int) -> None:
        """Loss and accuracy over the test nodes."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """The predicted class [N] of every node."""
        return self(batch).argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer named in the constructor, over all parameters."""
        arguments: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        return _OPTIMIZERS[self.optimizer](self.parameters(), **arguments)


class SequenceClassifier(_Classifier):
    """Trains `model(*inputs)` on batches (*inputs, labels), such as `diffusion_mp.data.pad` makes.

    AdamW with β = (0.9, 0.98), linear warm-up, then half a cosine down to zero at the trainer's last step (Zhang &
    Zhou, Table 4).

    Args:
        model: any module that returns logits [B, classes].
        classes: how many.
        lr: the learning rate after the warm-up.
        weight_decay: decoupled.
        warmup: share of the steps.

    Raises:
        ValueError: a warm-up outside [0, 1), lr < 0 or weight_decay < 0.
        FloatingPointError: while training, when a loss is no finite number.
    """

    def __init__(
        self, model: nn.Module, classes: int, lr: float = 1e-3, weight_decay: float = 1e-5, warmup: float = 0.1
    ) -> None:
        check_counts(classes=classes)
        super().__init__(model, lr, weight_decay, classes)
        check_number(warmup, "warmup")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), a share of the steps; got {warmup}.")
        self.save_hyperparameters(ignore=["model"])  # as in NodeClassifier
        self.warmup = warmup

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits [B, classes]."""
        logits: Tensor = self.model(*inputs)
        return logits

    def _evaluate(self, batch: tuple[Tensor, ...], stage: str) -> Tensor:
        *inputs, labels = batch
        logits = self(*inputs)
        loss = cross_entropy(logits, labels)
        self._record(stage, logits, labels, loss)
        return loss

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return self._evaluate(batch, "train")

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Loss and accuracy."""
        self._evaluate(batch, "test")

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
