"""The weighted accuracy of PATTERN and CLUSTER: accuracy per class, then the mean."""

import pytest
import torch

from diffusion_mp.experiments.train import weighted_accuracy


def logits_of(classes, num_classes):
    return torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


def test_classes_weigh_the_same_however_many_nodes_they_have():
    target = torch.tensor([0] * 90 + [1] * 10)
    assert weighted_accuracy(2)(torch.zeros_like(target), target) == pytest.approx(0.5)  # 0.9 by plain accuracy
    half = torch.tensor([0] * 95 + [1] * 5)
    assert weighted_accuracy(2)(half, target) == pytest.approx((1 + 0.5) / 2)


def test_logits_and_three_classes():
    target = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    logits = logits_of([0, 0, 0, 1, 1, 2, 2], 3)
    assert weighted_accuracy(3)(logits, target) == pytest.approx((3 / 4 + 1 / 2 + 1) / 3)


def test_batches_count_as_one():
    score = weighted_accuracy(2)
    score.update(torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]))
    score.update(torch.tensor([1]), torch.tensor([1]))
    assert score.compute() == pytest.approx((1 + 1 / 2) / 2)  # the mean of the batches would be (1/2 + 1)/2


@pytest.mark.parametrize("count", [0, 1])
def test_one_class_is_refused(count):
    with pytest.raises(ValueError, match="num_classes must be at least"):
        weighted_accuracy(count)
