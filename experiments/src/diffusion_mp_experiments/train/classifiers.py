"""Classification of nodes, graphs and sequences, and forecasts, as LightningModules."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal, cast

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch_geometric.data import Data
from torch_geometric.utils import negative_sampling
from torchmetrics import Metric

from diffusion_mp.checks import (
    check_choice,
    check_counts,
    check_kind,
    check_number,
    check_positive,
    describe,
)
from diffusion_mp.diffusivities import auxiliary_loss
from diffusion_mp_experiments.train.losses import (
    mean_squared_error,
    multi_label_loss,
    node_cross_entropy,
)
from diffusion_mp_experiments.train.metrics import TaskMetric
from diffusion_mp_experiments.train.resume import FiniteLoss, Resumable

OptimizerName = Literal["adam", "adamw"]
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Supervised(LightningModule):
    """Base class: a model trained on examples, in batches with `y` unless a subclass defines `compared`.

    Runs can be resumed. A loss of NaN ends a run with FloatingPointError. These are logged once an epoch, here for the
    metric "acc":

    - train_loss, train_acc, val_loss, val_acc, test_loss, test_acc;
    - train_aux_loss, the sum of what modules record for `auxiliary_loss`;
    - val_score, which checkpoints and early stopping watch: val_acc, with ties broken by the lower val_loss. It is
      negative for metrics that should be low.

    Args:
        model: any module with the forward that the subclass calls.
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        optimizer: "adam" or "adamw".
        metric: a name of `TaskMetric`, such as "acc" or "roc_auc".
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        optimizer: OptimizerName = "adam",
        metric: str = "acc",
    ) -> None:
        super().__init__()
        check_kind(model, "model", nn.Module, "a module")
        check_positive(lr, "lr", allow_zero=True)
        check_positive(weight_decay, "weight_decay", allow_zero=True)
        check_choice(optimizer, "optimizer", _OPTIMIZERS)
        self.model = model
        self.lr = lr
        self.weight_decay = weight_decay
        self.optimizer = optimizer
        self.metric = metric
        # One each: a validation within an epoch must not reset what training has counted.
        self.train_metric, self.val_metric, self.test_metric = (
            TaskMetric(metric) for _ in range(3)
        )
        self._val_losses: list[tuple[Tensor, int]] = []
        # Without the module a checkpoint holds plain types only and loads with weights_only=True.
        self.save_hyperparameters(ignore=["model"])

    def in_dtype(self, batch: Any) -> Any:
        """Convert a `Data` to the dtype of the parameters: Lightning's `precision` converts plain tensors only."""
        dtype = next((each.dtype for each in self.model.parameters()), None)
        if dtype is None or not isinstance(batch, Data):
            return batch
        others = {
            name: value.to(dtype)
            for name, value in batch.to_dict().items()
            if isinstance(value, Tensor) and value.is_floating_point()
            if value.dtype != dtype
        }
        # Otherwise the same object, with which layers have cached what they compute from a graph.
        return copy(batch).update(others) if others else batch

    def compared(self, batch: Any, stage: str) -> tuple[Tensor, Tensor]:
        outputs = self(batch)
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"The model must return a tensor of outputs; got {describe(outputs)}."
            )
        check_kind(
            batch.y,
            "data.y",
            Tensor,
            "a tensor of labels, a row for every node, or for every graph of a batch",
        )
        # A number is a single output.
        if (
            batch.y.is_floating_point()
            and outputs.shape[1:] == (1,) != batch.y.shape[1:]
        ):
            outputs = outputs.squeeze(1)
        return outputs, batch.y

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of numbers [N], the cross-entropy of classes [N], or of labels [N, T]."""
        # Several outputs are scores of classes, and the cross-entropy refuses numbers in place of classes.
        if targets.is_floating_point() and outputs.dim() == 1:
            return mean_squared_error(outputs, targets)
        several = targets.dim() == 2 and (targets.size(1) > 1 or outputs.size(1) == 1)
        return (multi_label_loss if several else node_cross_entropy)(outputs, targets)

    def configure_callbacks(self) -> list[Callback]:
        """Return `Resumable` and `FiniteLoss`, unless they are there: Lightning asks in every stage."""
        present = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return [kind() for kind in (Resumable, FiniteLoss) if kind not in present]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, plus what the model's modules recorded (`auxiliary_loss`)."""
        loss, count = self._evaluate(batch, "train")
        auxiliary = auxiliary_loss(self.model)
        # A model without such losses has a zero without a gradient.
        if auxiliary.requires_grad:
            self._log("train_aux_loss", auxiliary, count)
        return loss + auxiliary

    def on_validation_epoch_start(self) -> None:
        self._val_losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._val_losses.append(self._evaluate(batch, "val"))

    def on_validation_epoch_end(self) -> None:
        score = self.val_metric.compute()
        count = sum(count for _, count in self._val_losses)
        # By examples, or the examples of a small last batch would weigh more than others.
        loss = sum(loss * (part / count) for loss, part in self._val_losses)
        # One more right answer is worth 1/N; the loss may decide below half of that only.
        score = (score if self.val_metric.higher_is_better else -score) - loss / (
            1 + loss
        ) / (2 * count)
        self.log("val_score", score)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        make: Callable[..., torch.optim.Optimizer] = _OPTIMIZERS[self.optimizer]
        dtypes = [each.dtype for each in self.parameters() if each.is_floating_point()]
        return make(
            self.parameters(),
            lr=self.lr,
            weight_decay=self.weight_decay,
            # Adam's 1e-8 is zero in float16, and a first step would divide by zero.
            eps=max([1e-8, *(torch.finfo(dtype).smallest_normal for dtype in dtypes)]),
        )

    def _evaluate(self, batch: Any, stage: str) -> tuple[Tensor, int]:
        outputs, targets = self.compared(self.in_dtype(batch), stage)
        loss = self.loss(outputs, targets)
        metric = getattr(self, f"{stage}_metric")
        metric.update(outputs, targets)
        self._log(f"{stage}_loss", loss, len(targets))
        self._log(f"{stage}_{self.metric}", metric, len(targets), prog_bar=True)
        return loss, len(targets)

    def _log(
        self, name: str, value: Metric | Tensor, count: int, prog_bar: bool = False
    ) -> None:
        self.log(
            name,
            value,
            prog_bar=prog_bar,
            on_step=False,
            on_epoch=True,
            batch_size=count,
        )


class NodeClassifier(Supervised):
    """Train `model(x, edge_index, edge_weight)` on the labelled nodes of one graph, transductively.

    A step sees all nodes. train_mask, val_mask and test_mask, bool [N] or indices of nodes, select the logits. A model
    need not take weights if the data have none. A model of the library with `edge_dim` also gets `edge_attr`.
    `Supervised` says what is logged.

    Args:
        model: any module with PyG's forward, returning logits [N, C].
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        options: of `Supervised`: optimizer, "adam" (the default) or "adamw"; metric, a name of `TaskMetric` such as
            "acc" (the default) or "roc_auc".

    Examples:
        >>> module = NodeClassifier(DIFFormer(4, 16, 3), lr=0.01)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        **options: Any,
    ) -> None:
        super().__init__(model, lr, weight_decay, **options)

    def forward(self, data: Data) -> Tensor:
        check_kind(data, "data", Data, "a torch_geometric Data")
        # A model would say it in its own words, about `NoneType`.
        if data.x is None:
            raise ValueError(
                "data must have x, the features [N, channels] of its nodes; got None."
            )
        inputs = [data.x, data.edge_index, data.edge_weight]
        features = _edge_features(self.model, data)
        if data.edge_weight is None and _misfit(self.model, inputs, features):
            inputs.pop()  # a model of (x, edge_index) need not take weights if the data have none
        return _called(self.model, *inputs, **features)

    def compared(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        logits, labels = super().compared(batch, stage)
        if logits.shape[:1] != (batch.num_nodes,):
            must = "it must return one row of logits per node"
            raise ValueError(
                f"The model returned {list(logits.shape)} for {batch.num_nodes} nodes; {must}."
            )
        if len(labels) != len(logits):
            raise ValueError(
                f"data.y must have a row for each of {len(logits)} nodes; got {describe(labels)}."
            )
        mask = _selection(batch, f"{stage}_mask")
        return logits[mask], labels[mask]

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(self.in_dtype(batch)).argmax(dim=-1)


class GraphClassifier(Supervised):
    """Train `model(x, graph)` on batches of graphs, such as `ToDiffusionGraph` makes.

    The model returns logits [B, C], a row for each graph, as models of the library do with `task="graph"`. A model of
    the library with `edge_dim` also gets `edge_attr`. `Supervised` says what is logged.

    Args:
        model: any module that returns logits [B, C].
        lr: learning rate.
        weight_decay: L2 penalty of "adam", decoupled decay of "adamw".
        optimizer: "adam" or "adamw".
        metric: a name of `TaskMetric`, such as "acc" or "roc_auc".

    Examples:
        >>> module = GraphClassifier(GPS(4, 16, 3, task="graph"), lr=0.001)
    """

    def forward(self, batch: Data) -> Tensor:
        _check_batch(batch, "graph")
        return _called(
            self.model, batch.x, batch.graph, **_edge_features(self.model, batch)
        )


class Forecaster(Supervised):
    """Train `model(x, graph)` to correct a forecast of snapshots: ŷ = base + g · model(x, A), g = 0 at the start.

    So training starts exactly at the base (as in Bachlechner et al. 2021). The loss is the mean of (ŷ − y)² over all
    nodes of all snapshots, as in PyG Temporal.

    Args:
        model: any module that returns a number [N, 1] for every node.
        lr: learning rate.
        metric: "mse", as in PyG Temporal, or "mae".
        options: weight_decay and optimizer of `Supervised`.

    Examples:
        >>> module = Forecaster(DiffusionGNN(4, 16, 1), lr=0.01)
    """

    def __init__(
        self, model: nn.Module, lr: float = 0.01, metric: str = "mse", **options: Any
    ) -> None:
        super().__init__(model, lr, metric=metric, **options)
        # Only the factor is zero: with zeros in the model, too, no gradient would move either.
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Data) -> Tensor:
        _check_batch(batch, "graph", "base")
        correction = _called(self.model, batch.x, batch.graph)
        if correction.shape != (len(batch.base), 1):
            raise ValueError(
                f"The model returned {list(correction.shape)} for {len(batch.base)} nodes; it must return one number "
                "per node, [N, 1]: give it out_channels=1."
            )
        return batch.base + self.gain * correction.squeeze(-1)


class LinkPredictor(Supervised):
    """Train a model with `task="link"` to tell the edges of a graph from other pairs of nodes.

    Batches are graphs with `edge_label_index` and `edge_label`, as PyG's ``RandomLinkSplit`` makes them. In training
    edge_label_index holds edges, and every step draws as many other pairs.

    Args:
        model: a model of the library with ``task="link"``.
        lr: learning rate.
        options: of `Supervised`; the metric is "roc_auc" by default.

    Examples:
        >>> module = LinkPredictor(DiffusionGNN(4, 16, 8, task="link"))
    """

    def __init__(self, model: nn.Module, lr: float = 0.01, **options: Any) -> None:
        options.setdefault("metric", "roc_auc")
        super().__init__(model, lr, **options)

    def forward(self, batch: Data, pairs: Tensor) -> Tensor:
        inputs = [batch.x, batch.edge_index, batch.edge_weight]
        return _called(self.model, *inputs, edge_label_index=pairs)

    def compared(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        pairs = batch.edge_label_index
        labels = batch.edge_label
        if stage == "train":
            others = negative_sampling(batch.edge_index, batch.num_nodes, pairs.size(1))
            pairs = torch.cat([pairs, others], 1)
            labels = torch.cat([labels, labels.new_zeros(others.size(1))])
        # One task, in a column.
        return self(batch, pairs).view(-1, 1), labels.view(-1, 1)


def _called(model: nn.Module, *inputs: Any, **features: Any) -> Tensor:
    if (misfit := _misfit(model, inputs, features)) is not None:
        passed = [*(describe(each) for each in inputs), *features]
        raise ValueError(
            f"{type(model).__name__} cannot be called with {', '.join(passed)}: {misfit}. Its forward must take what "
            "PyG's models take, (x, edge_index, edge_weight) for nodes; write a module that calls it so."
        )
    return cast("Tensor", model(*inputs, **features))


def _misfit(
    model: nn.Module, inputs: Sequence[Any], features: Mapping[str, Any]
) -> str | None:
    """Return what is wrong with these arguments of a model, in the words of Python; None if the model takes them."""
    try:
        # Before the call, since a TypeError from within a model is a fault that needs its traceback.
        inspect.signature(model.forward).bind(*inputs, **features)
    except TypeError as error:
        return str(error)
    return None


def _selection(data: Data, name: str) -> Tensor:
    """Return the mask of that name, bool [N] or integers."""
    mask = data.get(name)
    if mask is None:
        raise ValueError(
            f"data has no {name}, which says which nodes to use. Split.apply_to of diffusion_mp.data gives it the "
            "three masks, from random_split_per_class(data.y, 20) for instance."
        )
    selects = isinstance(mask, Tensor) and mask.dim() == 1
    if (
        not selects
        or mask.is_floating_point()
        or (mask.dtype == torch.bool and len(mask) != data.num_nodes)
    ):
        what = f"True or False for each of {data.num_nodes} nodes, or indices of nodes"
        raise ValueError(
            f"data.{name} must be a tensor with {what}; got {describe(mask)}."
        )
    return mask


def _edge_features(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Return `edge_attr` for a model that reads it; its rows are in the order of `edge_index`, and so of `graph`."""
    reads = (
        "edge_attr" in getattr(model, "reads", ())
        and getattr(model, "edge_encoder", model) is not None
    )
    return {"edge_attr": data.edge_attr} if reads and data.edge_attr is not None else {}


def _check_batch(batch: Data, *parts: str) -> None:
    what = f"a torch_geometric Data or Batch with {' and '.join(parts)}"
    check_kind(batch, "batch", Data, what)
    missing = [part for part in parts if part not in batch]
    if missing:
        raise ValueError(
            f"batch has no {' and no '.join(missing)}; ToDiffusionGraph gives it a graph, last of all."
        )


class SequenceClassifier(Supervised):
    """Train `model(*inputs)` on batches (*inputs, labels), such as `diffusion_mp.data.pad` makes.

    The optimiser is AdamW with β = (0.9, 0.98). The learning rate warms up linearly, then falls along half a cosine to
    zero at the trainer's last step (Zhang & Zhou, Table 4). No val_score is logged, since the last epoch is the one to
    take.

    Args:
        model: any module that returns logits [B, classes].
        classes: number of classes.
        lr: learning rate after the warm-up.
        weight_decay: decoupled weight decay.
        warmup: share of the steps that warm up, in [0, 1).

    Examples:
        >>> module = SequenceClassifier(PDETransformer([20], 16, 2, heads=2, max_length=10), classes=2)
    """

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        lr: float = 1e-3,
        weight_decay: float = 1e-5,
        warmup: float = 0.1,
    ) -> None:
        check_counts(classes=classes)
        super().__init__(model, lr, weight_decay, "adamw")
        check_number(
            warmup,
            "warmup",
            lambda share: 0 <= share < 1,
            "lie in [0, 1), a share of the steps",
        )
        self.warmup = warmup

    def forward(self, *inputs: Tensor) -> Tensor:
        return _called(self.model, *inputs)

    def compared(self, batch: tuple[Tensor, ...], stage: str) -> tuple[Tensor, Tensor]:
        *inputs, labels = batch
        return self(*inputs), labels

    def on_validation_epoch_end(self) -> None:
        """Log no val_score: after the last step the learning rate is zero."""

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.lr,
            betas=(0.9, 0.98),
            weight_decay=self.weight_decay,
        )
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        # LinearLR divides by the number of its steps.
        rising = max(1, round(self.warmup * steps))
        warmup = LinearLR(optimizer, 1 / rising, total_iters=rising)
        falling = max(1, steps - rising)
        schedule = SequentialLR(
            optimizer,
            [warmup, CosineAnnealingLR(optimizer, falling)],
            milestones=[rising],
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
