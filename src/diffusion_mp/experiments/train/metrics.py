"""Scores of benchmarks, as torchmetrics."""

from __future__ import annotations

from torchmetrics.classification import MulticlassRecall

from diffusion_mp.errors import check_counts


def weighted_accuracy(num_classes: int) -> MulticlassRecall:
    """The score of PATTERN and CLUSTER (Dwivedi et al. 2023): accuracy within each class, averaged over classes.

    Guessing the larger class scores 1/C, however uneven the classes. Counted over all nodes that the metric has seen;
    the released code averages the scores of batches instead, which depends on how they were cut.

    Shapes: update and forward take logits [N, C] or classes [N], and labels [N] in 0..C − 1.

    Raises:
        TypeError, ValueError: less than two classes.
    """
    check_counts(num_classes=num_classes)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, and two logits stand for two classes; got {num_classes}.")
    return MulticlassRecall(num_classes, average="macro")
