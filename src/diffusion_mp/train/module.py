"""Full-batch node classification as a LightningModule."""

from __future__ import annotations

from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from diffusion_mp.diffusivities import auxiliary_loss
from diffusion_mp.errors import check_kind, check_positive

from .guards import guards
from .losses import node_cross_entropy

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class NodeClassifier(pl.LightningModule):
    """Trains `model(x, edge_index, edge_weight)` on the labelled nodes of one graph, transductively.

    A step sees the whole graph; train_mask, val_mask and test_mask say which logits are read. Logged: train_loss,
    train_acc, train_aux_loss (the sum of what modules record for `auxiliary_loss`, where one does), val_loss, val_acc,
    test_loss, test_acc, and val_score, which is val_acc with ties broken by the lower val_loss (what checkpoints and
    early stopping watch).

    Args:
        model: any module with PyG's forward, returning logits [N, C].
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        optimizer: "adam" or "adamw".

    Errors: ValueError when logits and labels do not fit (see `node_cross_entropy`) or an optimizer is unknown, and for
    lr < 0 or weight_decay < 0; FloatingPointError while training, when a loss is no finite number.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        optimizer: Literal["adam", "adamw"] = "adam",
    ) -> None:
        super().__init__()
        check_kind(model, "model", nn.Module, "a module")
        if not isinstance(optimizer, str) or optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(_OPTIMIZERS)}, got {optimizer!r}.")
        check_positive(lr, "lr", allow_zero=True)
        check_positive(weight_decay, "weight_decay", allow_zero=True)
        # The module itself stays out: a checkpoint then holds plain types only and loads with weights_only=True.
        self.save_hyperparameters(ignore=["model"])
        self.model = model
        self.lr, self.weight_decay, self.optimizer = lr, weight_decay, optimizer
        self.train_accuracy = MulticlassAccuracy(average="micro")
        self.val_accuracy = MulticlassAccuracy(average="micro")
        self.test_accuracy = MulticlassAccuracy(average="micro")

    def configure_callbacks(self) -> list[Callback]:
        """Random states in checkpoints, and a stop at NaN, with every Trainer (see `Resumable` and `FiniteLoss`)."""
        return guards(self)

    def forward(self, data: Data) -> Tensor:
        """Logits [N, C] of every node."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        logits: Tensor = self.model(data.x, data.edge_index, data.edge_weight)
        return logits

    def _evaluate(self, data: Data, stage: str, accuracy: MulticlassAccuracy) -> tuple[Tensor, Tensor]:
        mask = data[f"{stage}_mask"]
        logits = self(data)
        if logits.shape[:1] != mask.shape:
            raise ValueError(
                f"The model returned {list(logits.shape)} for {mask.numel()} nodes; "
                "it must return one row of logits per node."
            )
        loss = node_cross_entropy(logits[mask], data.y[mask])
        accuracy(logits[mask], data.y[mask])
        self._log(f"{stage}_loss", loss, mask)
        self._log(f"{stage}_acc", accuracy, mask, prog_bar=True)
        return loss, mask

    def _log(self, name: str, value: Metric | Tensor, mask: Tensor, prog_bar: bool = False) -> None:
        self.log(name, value, prog_bar=prog_bar, on_step=False, on_epoch=True, batch_size=int(mask.sum()))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Cross-entropy over the training nodes, plus what the model's modules recorded (`auxiliary_loss`)."""
        loss, mask = self._evaluate(batch, "train", self.train_accuracy)
        auxiliary = auxiliary_loss(self.model)
        if auxiliary.requires_grad:
            self._log("train_aux_loss", auxiliary, mask)
        return loss + auxiliary

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Loss and accuracy over the validation nodes, and the score that chooses the epoch."""
        loss, mask = self._evaluate(batch, "val", self.val_accuracy)
        # One more correct node is worth 1/N; the loss may decide below half of that only.
        score = self.val_accuracy.compute() - loss / (1 + loss) / (2 * mask.sum())
        self._log("val_score", score, mask)

    def test_step(self, batch: Data, batch_idx: int) -> None:
        """Loss and accuracy over the test nodes."""
        self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """The predicted class [N] of every node."""
        return self(batch).argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer named in the constructor, over all parameters."""
        arguments: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        return _OPTIMIZERS[self.optimizer](self.parameters(), **arguments)
