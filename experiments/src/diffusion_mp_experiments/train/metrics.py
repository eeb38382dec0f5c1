"""Scores of benchmarks, as torchmetrics."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric
from torchmetrics.classification import MulticlassRecall
from torchmetrics.functional import (
    classification,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
)
from torchmetrics.utilities import dim_zero_cat

from diffusion_mp.checks import check_choice, check_counts


class TaskMetric(Metric):
    """A score over all examples since the last reset, however they were cut into batches.

    - "acc": the share of right classes. Logits [N, C], labels [N].
    - "macro_f1": F₁ of each class, averaged over classes. Logits [N, C], labels [N].
    - "roc_auc", "ap": area under the ROC curve, and average precision, of each class against all others, or of each of
      several tasks. They are averaged over the classes or tasks that have both positive and negative examples (Hu et
      al. 2020). Logits [N, C] and labels [N] of C classes, or logits [N, T] and labels [N, T] of 0 and 1.
    - "mse", "mae", "r2": mean squared error, mean absolute error, and R², the share of the variance that is explained.
      Numbers of one shape.

    Args:
        metric: name of the score, one of these.

    Examples:
        >>> TaskMetric("acc").metric
        'acc'
    """

    full_state_update = False
    outputs: list[Tensor]
    targets: list[Tensor]

    def __init__(self, metric: str = "acc") -> None:
        super().__init__()
        check_choice(metric, "metric", _SCORES)
        self.metric = metric
        self.add_state("outputs", [], "cat")
        self.add_state("targets", [], "cat")

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return self.metric not in ("mse", "mae")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.shape[1:] == (1,) and outputs.dim() == 2 and outputs.size(1) > 1:
            targets = targets.squeeze(1)  # classes in a column, as OGB has them
        if self.metric in ("acc", "macro_f1") and targets.dim() != 1:
            raise ValueError(
                f"metric {self.metric!r} takes targets [N]; got {list(targets.shape)}; 'ap' takes tasks."
            )
        # All of them are kept, since areas under curves do not add up over batches.
        self.outputs.append(outputs.detach())
        self.targets.append(targets)

    def compute(self) -> Tensor:
        return _SCORES[self.metric](
            dim_zero_cat(self.outputs), dim_zero_cat(self.targets)
        )


def _per_column(
    measure: Callable[..., Tensor], logits: Tensor, labels: Tensor
) -> Tensor:
    """Return the mean of a binary measure over the classes or tasks that have positive and negative examples."""
    several = labels.dim() == 2
    truth = labels.long() if several else one_hot(labels.long(), logits.size(1))
    # In double precision, or confident predictions would tie at one.
    share = logits.double().sigmoid() if several else logits.double().softmax(1)
    # Without both kinds of examples a column has no curve.
    both = (truth.amin(0) == 0) & (truth.amax(0) == 1)
    if not both.any():
        raise ValueError(
            "Every class or task has only positive or only negative examples; no curve can be drawn."
        )
    return torch.stack(
        [measure(share[:, c], truth[:, c]) for c in both.nonzero().flatten()]
    ).mean()


_SCORES: dict[str, Callable[..., Tensor]] = {
    "acc": lambda logits, y: classification.multiclass_accuracy(
        logits, y, logits.size(1), average="micro"
    ),
    "macro_f1": lambda logits, y: classification.multiclass_f1_score(
        logits, y, logits.size(1), average="macro"
    ),
    "roc_auc": partial(_per_column, classification.binary_auroc),
    "ap": partial(_per_column, classification.binary_average_precision),
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
    "r2": r2_score,
}


def weighted_accuracy(num_classes: int) -> MulticlassRecall:
    """Return the score of PATTERN and CLUSTER (Dwivedi et al. 2023): accuracy within each class, averaged over classes.

    Guessing the largest class scores 1/C, however uneven the C classes are. Nodes of all batches are counted together,
    whereas the released code averages the scores of batches.

    Args:
        num_classes: C.

    Shapes:
        prediction: logits [N, C] or classes [N].
        labels: [N] in 0..C − 1.

    Examples:
        >>> weighted_accuracy(3)(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
        tensor(1.)
    """
    check_counts(2, num_classes=num_classes)
    return MulticlassRecall(num_classes, average="macro")
