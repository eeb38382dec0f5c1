"""SequenceClassifier: what it logs, how its learning rate moves, and that it learns."""

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from diffusion_mp import PDETransformer
from diffusion_mp.data import pad
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments.train import SequenceClassifier
from training_runs import quiet_trainer


class LearningRates(Callback):
    """Every learning rate that a step was taken with."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(module, batches, epochs, *callbacks):
    trainer = quiet_trainer(max_epochs=epochs, callbacks=list(callbacks))
    trainer.fit(module, batches, batches)
    return trainer


@pytest.fixture
def batches():
    """Is the first token a 1?  Sequences of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (64,), generator=generator).tolist()
    texts = [torch.randint(1, 3, (length,), generator=generator) for length in lengths]
    return DataLoader([(text, int(text[0] == 1)) for text in texts], batch_size=16, collate_fn=pad)


def test_it_learns_and_logs(batches):
    with seeded(0):
        module = SequenceClassifier(PDETransformer([3], 16, 2, 1, 2, max_length=6, placement="P1"), 2, lr=1e-2)
        trainer = fit(module, batches, 24)
    logged = trainer.callback_metrics
    assert set(logged) == {"train_loss", "train_acc", "val_loss", "val_acc"}
    assert logged["val_acc"] > 0.9
    (found,) = trainer.test(module, batches, verbose=False)
    assert found["test_acc"] == pytest.approx(float(logged["val_acc"]))


def test_the_rate_rises_and_falls_to_zero(batches):
    rates = LearningRates()
    with seeded(0):
        fit(SequenceClassifier(PDETransformer([3], 4, 2, 1, 1, max_length=6), 2, lr=0.5, warmup=0.5), batches, 2, rates)
    assert rates.seen[:5] == pytest.approx([0.125, 0.21875, 0.3125, 0.40625, 0.5])
    assert rates.seen[5:] == pytest.approx([0.5 * (1 + c) / 2 for c in (0.5**0.5, 0.0, -(0.5**0.5))], abs=1e-6)


def test_a_bad_warm_up():
    with pytest.raises(ValueError, match=r"warmup must lie in \[0, 1\), a share of the steps; got 1.0"):
        SequenceClassifier(nn.Identity(), 2, warmup=1.0)
