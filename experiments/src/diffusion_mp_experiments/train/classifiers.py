"""Classification of nodes, of graphs and of sequences, and forecasts, as LightningModules."""

from __future__ import annotations

from typing import cast

import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch_geometric.data import Data

from diffusion_mp.errors import check_counts, check_kind, check_number
from diffusion_mp_experiments.train.losses import mean_squared_error, multi_label_loss, node_cross_entropy
from diffusion_mp_experiments.train.supervised import OptimizerName, Supervised


class _Classifier(Supervised):
    """Cross-entropy of classes [N], or of several labels [N, T] of 0 and 1."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `node_cross_entropy` and `multi_label_loss`."""
        return (multi_label_loss if targets.dim() == 2 else node_cross_entropy)(outputs, targets)


class NodeClassifier(_Classifier):
    """Trains `model(x, edge_index, edge_weight)` on the labelled nodes of one graph, transductively.

    A step sees the whole graph; train_mask, val_mask and test_mask say which logits are read. What is logged:
    `Supervised`.

    Args:
        model: any module with PyG's forward, returning logits [N, C].
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        optimizer: "adam" or "adamw".
        metric: a name of `Score`, "acc" or "roc_auc" say.

    Raises:
        ValueError: logits and labels that do not fit (see `node_cross_entropy`), an unknown optimizer or metric, lr < 0
            or weight_decay < 0.
        FloatingPointError: while training, when a loss is no finite number.

    Examples:
        >>> module = NodeClassifier(DIFFormer(4, 16, 3), lr=0.01)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        optimizer: OptimizerName = "adam",
        metric: str = "acc",
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, metric)
        # The module itself stays out: a checkpoint then holds plain types only and loads with weights_only=True.
        self.save_hyperparameters(ignore=["model"])

    def forward(self, data: Data) -> Tensor:
        """Logits [N, C] of every node."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        logits: Tensor = self.model(data.x, data.edge_index, data.edge_weight)
        return logits

    def compared(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the nodes of a stage."""
        mask, logits = batch[f"{stage}_mask"], self(batch)
        if logits.shape[:1] != mask.shape:
            raise ValueError(
                f"The model returned {list(logits.shape)} for {mask.numel()} nodes; "
                "it must return one row of logits per node."
            )
        return logits[mask], batch.y[mask]

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """The predicted class [N] of every node."""
        return self(batch).argmax(dim=-1)


class GraphClassifier(_Classifier):
    """Trains `model(x, graph)` on batches of graphs, such as `ToDiffusionGraph` makes of a list of them.

    The model reads a whole graph, as with `task="graph"`, and returns a row of logits for each. What is logged:
    `Supervised`.

    Args:
        model: returns logits [B, C].
        lr, weight_decay, optimizer, metric: as in `NodeClassifier`.

    Raises:
        ValueError: as in `NodeClassifier`.
        FloatingPointError: while training, when a loss is no finite number.

    Examples:
        >>> module = GraphClassifier(GPS(4, 16, 3, task="graph"), lr=0.001)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        optimizer: OptimizerName = "adam",
        metric: str = "acc",
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, metric)
        self.save_hyperparameters(ignore=["model"])

    def forward(self, batch: Data) -> Tensor:
        """Logits [B, C] of every graph."""
        _check_batch(batch, "graph")
        logits: Tensor = self.model(batch.x, batch.graph)
        return logits

    def compared(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of all graphs."""
        return self(batch), batch.y


class Forecaster(Supervised):
    """Trains `model(x, graph)` to correct a forecast of snapshots: ŷ = base + g · model(x, A), g = 0 in the beginning.

    So training starts at the base exactly (Bachlechner et al. 2021 start layers that way), and a base that is zero
    leaves the model alone. The loss is the mean of (ŷ − y)² over all nodes of all snapshots, as in PyG Temporal, whose
    examples take the mean over the nodes of a snapshot and then over snapshots. What is logged: `Supervised`.

    Args:
        model: returns a number [N, 1] for every node.
        lr, weight_decay, optimizer: as in `NodeClassifier`.
        metric: "mse" or "mae".

    Raises:
        ValueError: what the model returns does not fit, or as in `NodeClassifier`.
        FloatingPointError: while training, when a loss is no finite number.

    Examples:
        >>> module = Forecaster(DiffusionGNN(4, 16, 1), lr=0.01)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: OptimizerName = "adam",
        metric: str = "mse",
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, metric)
        self.save_hyperparameters(ignore=["model"])
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Data) -> Tensor:
        """ŷ [N]."""
        _check_batch(batch, "graph", "base")
        correction: Tensor = self.model(batch.x, batch.graph)
        if correction.shape != (len(batch.base), 1):
            raise ValueError(
                f"The model returned {list(correction.shape)} for {len(batch.base)} nodes; it must return one number "
                "per node, [N, 1]: give it out_channels=1."
            )
        forecast: Tensor = batch.base + self.gain * correction.squeeze(-1)
        return forecast

    def compared(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        """Forecasts and values of all nodes."""
        return self(batch), batch.y

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `mean_squared_error`."""
        return mean_squared_error(outputs, targets)


def _check_batch(batch: object, *parts: str) -> None:
    """Raise unless a batch of graphs has these attributes."""
    check_kind(batch, "batch", Data, f"a torch_geometric Data or Batch with {' and '.join(parts)}")
    missing = [part for part in parts if part not in cast("Data", batch)]
    if missing:
        raise ValueError(f"batch has no {' and no '.join(missing)}; ToDiffusionGraph gives it a graph, last of all.")


class SequenceClassifier(_Classifier):
    """Trains `model(*inputs)` on batches (*inputs, labels), such as `diffusion_mp.data.pad` makes.

    AdamW with β = (0.9, 0.98), linear warm-up, then half a cosine down to zero at the trainer's last step (Zhang &
    Zhou, Table 4). No score chooses an epoch.

    Args:
        model: any module that returns logits [B, classes].
        classes: how many.
        lr: the learning rate after the warm-up.
        weight_decay: decoupled.
        warmup: share of the steps.

    Raises:
        ValueError: a warm-up outside [0, 1), lr < 0 or weight_decay < 0.
        FloatingPointError: while training, when a loss is no finite number.

    Examples:
        >>> module = SequenceClassifier(PDETransformer([20], 16, 2, heads=2, max_length=10), classes=2)
    """

    def __init__(
        self, model: nn.Module, classes: int, lr: float = 1e-3, weight_decay: float = 1e-5, warmup: float = 0.1
    ) -> None:
        check_counts(classes=classes)
        super().__init__(model, lr, weight_decay)
        check_number(warmup, "warmup")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), a share of the steps; got {warmup}.")
        self.save_hyperparameters(ignore=["model"])
        self.warmup = warmup

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits [B, classes]."""
        logits: Tensor = self.model(*inputs)
        return logits

    def compared(self, batch: tuple[Tensor, ...], stage: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of all sequences."""
        *inputs, labels = batch
        return self(*inputs), labels

    def on_validation_epoch_end(self) -> None:
        """Nothing: the learning rate has come down to zero in the last epoch, which is the one to take."""

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
