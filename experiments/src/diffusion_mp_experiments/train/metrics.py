"""Scores of benchmarks, as torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric
from torchmetrics.classification import MulticlassRecall
from torchmetrics.functional import mean_absolute_error, mean_squared_error
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_accuracy,
    multiclass_f1_score,
)

from diffusion_mp.errors import check_choice, check_counts


class Score(Metric):
    """A score over all that was seen since the last reset, however it was cut into batches.

    - "acc": the share of right classes; "macro_f1": F₁ within each class, averaged over classes. Logits [N, C], labels
      [N].
    - "roc_auc", "ap": area under the ROC curve, and average precision, of each class against all others, or of each
      task of several, averaged over those that have both positive and negative examples (as ogbn-proteins asks for,
      Hu et al. 2020). Logits [N, C] and labels [N] of C classes, or logits [N, T] and T labels [N, T] of 0 and 1.
    - "mrr": the mean of 1/rank of the right one of several candidates, where half of those with the same score are
      before it. Scores [N, candidates], and which is right [N].
    - "mse", "mae": mean squared and mean absolute error. Numbers of one shape.

    Args:
        metric: which one.

    Examples:
        >>> Score("acc").metric
        'acc'
    """

    full_state_update = False
    outputs: list[Tensor]
    targets: list[Tensor]

    def __init__(self, metric: str = "acc") -> None:
        super().__init__()
        check_choice(metric, "metric", _SCORES)
        self.metric = metric
        for state in ("outputs", "targets"):
            self.add_state(state, [], "cat")

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """Its direction."""
        return self.metric not in ("mse", "mae")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Takes notice of what a model said and what is true."""
        self.outputs.append(outputs.detach())
        self.targets.append(targets)

    def compute(self) -> Tensor:
        """The score of all of it."""
        outputs, targets = (
            torch.cat(part) if isinstance(part, list) else part for part in (self.outputs, self.targets)
        )
        return _SCORES[self.metric](outputs, targets)


def _per_column(measure: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of a measure of yes and no over classes or tasks that have both."""

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        several = labels.dim() == 2
        truth = labels.long() if several else one_hot(labels.long(), logits.size(1))
        # In double precision, or confident predictions would tie at one.
        share = logits.double().sigmoid() if several else logits.double().softmax(1)
        both = (truth.amin(0) == 0) & (truth.amax(0) == 1)
        if not both.any():
            raise ValueError("Every class or task has only positive or only negative examples; no curve can be drawn.")
        return torch.stack([measure(share[:, c], truth[:, c]) for c in both.nonzero().flatten()]).mean()

    return mean


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return multiclass_accuracy(logits, labels, logits.size(1), average="micro")


def _macro_f1(logits: Tensor, labels: Tensor) -> Tensor:
    return multiclass_f1_score(logits, labels, logits.size(1), average="macro")


def _mrr(scores: Tensor, right: Tensor) -> Tensor:
    best = scores.gather(1, right.unsqueeze(1))
    rank = (scores > best).sum(1) + ((scores == best).sum(1) + 1) / 2
    return rank.reciprocal().mean()


_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "acc": _accuracy,
    "macro_f1": _macro_f1,
    "roc_auc": _per_column(binary_auroc),
    "ap": _per_column(binary_average_precision),
    "mrr": _mrr,
    "mse": cast("Callable[[Tensor, Tensor], Tensor]", mean_squared_error),
    "mae": cast("Callable[[Tensor, Tensor], Tensor]", mean_absolute_error),
}


def weighted_accuracy(num_classes: int) -> MulticlassRecall:
    """The score of PATTERN and CLUSTER (Dwivedi et al. 2023): accuracy within each class, averaged over classes.

    Guessing the larger class scores 1/C, however uneven the classes. Counted over all nodes that the metric has seen;
    the released code averages the scores of batches instead, which depends on how they were cut.

    Args:
        num_classes: C.

    Shapes: update and forward take logits [N, C] or classes [N], and labels [N] in 0..C − 1.

    Raises:
        TypeError, ValueError: less than two classes.

    Examples:
        >>> weighted_accuracy(3)(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
        tensor(1.)
    """
    check_counts(num_classes=num_classes)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, and two logits stand for two classes; got {num_classes}.")
    return MulticlassRecall(num_classes, average="macro")
