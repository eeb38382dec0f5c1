"""Losses and scores against their formulas, however the examples are cut into batches."""

import pytest
import sklearn.metrics as sklearn
import torch
import torch.nn.functional as F
from torch import zeros

from diffusion_mp_experiments import train
from helpers import refuses


def test_classes_weigh_the_same_however_many_nodes_they_have(generator):
    target = torch.tensor([0] * 90 + [1] * 10)
    # 0.9 by plain accuracy.
    assert train.weighted_accuracy(2)(
        torch.zeros_like(target), target
    ) == pytest.approx(0.5)
    score = train.weighted_accuracy(2)
    score.update(torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]))
    score.update(torch.tensor([1]), torch.tensor([1]))
    # The mean of the batches would be (1/2 + 1)/2.
    assert score.compute() == pytest.approx((1 + 1 / 2) / 2)
    logits = torch.randn(40, 4, generator=generator)
    labels = torch.randint(2, (40, 4), generator=generator)
    labels[:, 1] = 0
    labels[:, 2] = 1
    expected = sklearn.roc_auc_score(labels[:, [0, 3]], logits[:, [0, 3]])
    assert train.TaskMetric("roc_auc")(logits, labels) == pytest.approx(expected)
    assert train.TaskMetric("ap")(logits, labels) < 1
    for metric in ("acc", "macro_f1"):  # of one class for every example
        with pytest.raises(
            ValueError, match=rf"metric '{metric}' takes targets \[N\]; got \[40, 4\]"
        ):
            train.TaskMetric(metric)(logits, labels)
    logits = torch.tensor([[3.0], [2.0], [1.0], [0.0]])
    assert train.TaskMetric("ap")(
        logits, torch.tensor([[1], [0], [1], [0]])
    ) == pytest.approx((1 + 2 / 3) / 2)


def test_accuracy_f1_and_errors(generator):
    logits = torch.randn(50, 3, generator=generator)
    labels = torch.randint(3, (50,), generator=generator)
    guess = logits.argmax(1)
    x, y, _ = logits.T
    for name, (outputs, targets), expected in (
        ("acc", (logits, labels), sklearn.accuracy_score(labels, guess)),
        (
            "macro_f1",
            (logits, labels),
            sklearn.f1_score(labels, guess, average="macro"),
        ),
        ("mse", (x, y), sklearn.mean_squared_error(y, x)),
        ("mae", (x, y), sklearn.mean_absolute_error(y, x)),
    ):
        assert train.TaskMetric(name)(outputs, targets) == pytest.approx(expected)
    logits = torch.randn(60, 2, generator=generator)
    labels = torch.randint(2, (60,), generator=generator)
    # The second could be taken for probabilities.
    for scores in (logits, logits.sigmoid() * torch.tensor([0.5, 1.0])):
        expected = sklearn.roc_auc_score(labels, scores[:, 1] - scores[:, 0])
        assert train.TaskMetric("roc_auc")(scores, labels) == pytest.approx(expected)
    # Confident answers do not tie.
    logits = torch.tensor([[0.0, 20.0], [0.0, 21.0], [0.0, 22.0], [0.0, 23.0]])
    assert train.TaskMetric("roc_auc")(
        logits, torch.tensor([0, 1, 0, 1])
    ) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["acc", "macro_f1", "roc_auc", "ap", "mse", "mae"])
def test_however_it_is_cut(name, generator):
    """Batches are one, a reset begins anew, and the direction is that of a random guess to a perfect one."""
    if name in ("mse", "mae"):
        outputs, targets = torch.randn(2, 30, generator=generator)
        perfect = targets
    else:
        outputs = torch.randn(30, 3, generator=generator)
        targets = torch.randint(3, (30,), generator=generator)
        perfect = 9.0 * F.one_hot(targets, 3)
    score = train.TaskMetric(name)
    together = score(outputs, targets)
    score.reset()
    for part in (slice(0, 7), slice(7, 30)):
        score.update(outputs[part], targets[part])
    assert score.compute() == pytest.approx(float(together))
    score.reset()
    assert (score(perfect, targets) > together) == score.higher_is_better


def test_values_of_the_losses(generator):
    logits = torch.randn(7, 3, generator=generator)
    target = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    assert train.node_cross_entropy(logits, target) == F.cross_entropy(logits, target)
    guess = torch.randn(7, 1, generator=generator)
    assert torch.isclose(
        train.mean_squared_error(guess, torch.zeros(7, 1)), guess.square().mean()
    )


def entropy(logits, *target):
    return train.node_cross_entropy(
        torch.zeros(logits), torch.zeros(target, dtype=torch.long)
    )


test_losses_refuse = refuses(
    (lambda: entropy((5, 1), 5), "one column, so every node is class 0"),
    (lambda: entropy((5, 3), 5, 2), r"got \[5, 3\] and \[5, 2\]; squeeze"),
    (lambda: entropy((5, 3), 4), r"got \[5, 3\] and \[4\]"),
    (lambda: entropy((5,), 5), r"got \[5\] and \[5\]"),
    (lambda: entropy((0, 3), 0), "mask that selected them is empty"),
    (
        lambda: train.node_cross_entropy(zeros(2, 3), torch.tensor([-1, 3])),
        r"0\.\.2 for 3 logits, got -1\.\.3",
    ),
    (
        lambda: train.node_cross_entropy(
            zeros(2, 3).to("meta"), zeros(2).long().to("meta")
        ),
        "target must have values",
    ),
    (
        lambda: train.mean_squared_error(zeros(5, 1), zeros(5)),
        r"\[5, 1\] and target \[5\] must have the same shape",
    ),
    (lambda: train.mean_squared_error(zeros(0, 1), zeros(0, 1)), "no node to average"),
    *(
        (
            lambda target=target: train.multi_label_loss(zeros(7, 3), zeros(*target)),
            r"Expected logits and target \[N, T\] of one shape",
        )
        for target in ((7, 2), (7,), (0, 3))
    ),
    (
        lambda: train.multi_label_loss(zeros(7, 3), zeros(7, 3) + 2),
        "target must hold 0 and 1 only",
    ),
    (
        lambda: train.TaskMetric("roc_auc")(zeros(7, 3), torch.ones(7, 3)),
        "only positive or only negative examples",
    ),
    error=ValueError,
)


def test_the_loss_of_several_labels(generator):
    logits = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    target = torch.randint(2, (7, 3), generator=generator)
    share = logits.sigmoid()
    expected = -(target * share.log() + (1 - target) * (1 - share).log()).mean()
    torch.testing.assert_close(train.multi_label_loss(logits, target), expected)
