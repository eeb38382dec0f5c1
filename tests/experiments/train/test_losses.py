"""The losses refuse every shape that would broadcast."""

import pytest
import torch
import torch.nn.functional as F

from diffusion_mp_experiments.train import mean_squared_error, multi_label_loss, node_cross_entropy


def test_values(generator):
    logits, target = torch.randn(7, 3, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    assert node_cross_entropy(logits, target) == F.cross_entropy(logits, target)
    guess = torch.randn(7, 1, generator=generator)
    assert torch.isclose(mean_squared_error(guess, torch.zeros(7, 1)), guess.square().mean())


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        ((5, 1), (5,), "one column, so every node is class 0"),
        ((5, 3), (5, 1), r"got \[5, 3\] and \[5, 1\]; squeeze"),
        ((5, 3), (4,), r"got \[5, 3\] and \[4\]"),
        ((5,), (5,), r"got \[5\] and \[5\]"),
        ((0, 3), (0,), "mask that selected them is empty"),
    ],
)
def test_cross_entropy_refuses(logits, target, message):
    with pytest.raises(ValueError, match=message):
        node_cross_entropy(torch.zeros(logits), torch.zeros(target, dtype=torch.long))
    with pytest.raises(ValueError, match=r"0\.\.2 for 3 logits, got -1\.\.3"):
        node_cross_entropy(torch.zeros(2, 3), torch.tensor([-1, 3]))
    with pytest.raises(ValueError, match="target must have values"):
        node_cross_entropy(torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"))


def test_one_column_against_a_vector_is_refused():
    """What DIFFormer's Table 5 measured (ERRATA D15): under the broadcast the mean beats a perfect forecast."""
    y = torch.linspace(-1, 1, 50)
    assert ((y[:, None] - y) ** 2).mean() > ((y.mean() - y) ** 2).mean()
    with pytest.raises(ValueError, match=r"\[50, 1\] and target \[50\] must have the same shape"):
        mean_squared_error(y[:, None], y)
    with pytest.raises(ValueError, match="no node to average"):
        mean_squared_error(y[:0], y[:0])


def test_the_loss_of_several_labels(generator):
    logits = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    target = torch.randint(2, (7, 3), generator=generator)
    share = logits.sigmoid()
    expected = -(target * share.log() + (1 - target) * (1 - share).log()).mean()
    torch.testing.assert_close(multi_label_loss(logits, target), expected)
    for wrong in (target[:, :2], target[:, 0], torch.ones(0, 3)):
        with pytest.raises(ValueError, match=r"Expected logits and target \[N, T\] of one shape"):
            multi_label_loss(logits, wrong)
    with pytest.raises(ValueError, match="target must hold 0 and 1 only"):
        multi_label_loss(logits, target * 2)
