"""Tuning and results never share a label."""

import pytest
import torch

from diffusion_mp.data import random_split_per_class
from diffusion_mp_experiments.graphs.node_sets import visible_labels

Y = torch.arange(400) % 4
Y[::10] = -1


def test_every_label_is_on_one_side():
    tuning, reported = visible_labels(Y, True, 0.25), visible_labels(Y, False, 0.25)
    assert ((tuning >= 0) ^ (reported >= 0))[Y >= 0].all()
    assert (tuning[Y < 0] == -1).all()
    assert (reported[Y < 0] == -1).all()
    assert torch.equal(torch.maximum(tuning, reported), Y)
    assert (tuning >= 0).sum() == 90
    assert torch.equal(visible_labels(Y, True, 0.25), tuning)


def test_splits_of_the_two_sides_have_no_node_in_common():
    def used(tuning, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(random_split_per_class(visible_labels(Y, tuning), 5, 20, None, generator)).any(0)

    tuned = torch.stack([used(True, seed) for seed in range(5)]).any(0)
    assert not any((used(False, seed) & tuned).any() for seed in range(5))


@pytest.mark.usefixtures("no_typecheck")
def test_refusals():
    for share in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="share must"):
            visible_labels(Y, True, share)
    with pytest.raises(TypeError, match="y must"):
        visible_labels(torch.rand(5), True)
