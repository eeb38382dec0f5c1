"""Losses that refuse the silent N × N broadcast behind Table 5 of DIFFormer."""

import torch.nn.functional as F
from torch import Tensor

from diffusion_mp.checks import (
    INTEGERS,
    check_device,
    check_has_values,
    check_kind,
    check_tensor,
    describe,
)


def node_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of node logits, −(1/N) Σ_i log softmax(logits_i)[y_i].

    Args:
        logits: scores of the C ≥ 2 classes for every node.
        target: the class of every node, integers in 0..C−1.

    Shapes:
        logits: [N, C].
        target: [N].
        output: a 0-dimensional tensor.

    Examples:
        >>> node_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1])).shape
        torch.Size([])
    """
    check_tensor(logits, "logits", "[N, C]")
    check_kind(target, "target", Tensor, "a tensor [N] of class numbers")
    if target.dim() == 2 and target.size(1) == 1 and logits.size(1) > 1:
        target = target.squeeze(1)  # classes in a column, as node sets of OGB have them
    if target.dtype not in INTEGERS:
        raise TypeError(
            f"target must hold class numbers (integers); got {describe(target)}."
        )
    check_device(target, "target", logits.device, "logits")
    if logits.dim() != 2 or target.dim() != 1 or logits.size(0) != target.size(0):
        raise ValueError(
            f"Expected logits [N, C] and target [N], got {list(logits.shape)} and {list(target.shape)}; "
            "squeeze the target to one dimension and select the same nodes from both."
        )
    if logits.size(1) < 2:
        way_out = "give two columns or more, or use mean_squared_error for one target per node"
        why = "have one column, so every node is class 0 and the loss is always 0"
        raise ValueError(f"logits {list(logits.shape)} {why}; {way_out}.")
    if target.numel() == 0:
        raise ValueError(
            "There is no node to average the loss over: the mask that selected them is empty."
        )
    check_has_values(target, "target")
    target = target.long()
    # Out of range `cross_entropy` would leave −100 out, and a GPU would end in an assertion.
    low = int(target.min())
    high = int(target.max())
    if low < 0 or high >= logits.size(1):
        raise ValueError(
            f"target must lie in 0..{logits.size(1) - 1} for {logits.size(1)} logits, got {low}..{high}; "
            "leave unlabelled nodes (−1) out with label_mask(y)."
        )
    return F.cross_entropy(logits, target)


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (ŷ − y)² over equal shapes.

    Args:
        prediction: ŷ.
        target: y, of the same shape. [N, 1] against [N] is refused, because it broadcasts to N × N.

    Examples:
        >>> mean_squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(2.)
    """
    check_tensor(prediction, "prediction", "[N, …]")
    check_tensor(target, "target", "[N, …]")
    check_device(target, "target", prediction.device, "prediction")
    if prediction.shape != target.shape:
        raise ValueError(
            f"prediction {list(prediction.shape)} and target {list(target.shape)} must have the same shape: broadcast, "
            "every node would be compared with every other; use prediction.squeeze(-1) or target.unsqueeze(-1)."
        )
    if target.numel() == 0:
        raise ValueError(
            "There is no node to average the loss over: prediction and target are empty."
        )
    return F.mse_loss(prediction, target)


def multi_label_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of several tasks at once.

        −(1/NT) Σ_it y_it log σ(l_it) + (1 − y_it) log σ(−l_it)

    Args:
        logits: l, a score for every row and task.
        target: y, labels of 0 and 1, numbers of any type.

    Shapes:
        logits, target: [N, T].
        output: a 0-dimensional tensor.

    Examples:
        >>> multi_label_loss(torch.zeros(3, 2), torch.ones(3, 2)).shape
        torch.Size([])
    """
    check_tensor(logits, "logits", "[N, T]")
    check_kind(target, "target", Tensor, "a tensor [N, T] of 0 and 1")
    check_device(target, "target", logits.device, "logits")
    if logits.dim() != 2 or logits.shape != target.shape or not target.numel():
        shapes = f"{list(logits.shape)} and {list(target.shape)}"
        if target.shape[1:] == (1,):
            way_out = " Class numbers must be [N]: use target.squeeze(1)."
        else:
            way_out = ""
        raise ValueError(
            f"Expected logits and target [N, T] of one shape, with an entry or more; got {shapes}.{way_out}"
        )
    check_has_values(target, "target")
    if not ((target == 0) | (target == 1)).all():
        raise ValueError(
            "target must hold 0 and 1 only, whether a task's answer is yes; leave out what is not known."
        )
    return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype))
