"""The LightningModules and DataModules without the command line."""

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from diffusion_mp import PDETransformer
from diffusion_mp.data import pad
from diffusion_mp.diffusivities import AuxiliaryLoss
from diffusion_mp.models import DiffusionGNN
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments.train import (
    DigitsDataModule,
    NodeClassifier,
    PlanetoidDataModule,
    SequenceClassifier,
)
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule
from helpers import randn, refuses
from training_runs import quiet_trainer


class Toy(FullGraphDataModule):
    def load(self):
        generator = torch.Generator().manual_seed(0)
        node = torch.arange(12)
        x = torch.randn(12, 4, generator=generator)
        edges = torch.randint(12, (2, 30), generator=generator)
        masks = {
            f"{stage}_mask": node % 3 == k
            for k, stage in enumerate(("train", "val", "test"))
        }
        return Data(x=x, edge_index=edges, y=node % 2, **masks)


class Fixed(nn.Module):
    """Logits that do not depend on the input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x, edge_index=None, edge_weight=None):
        return self.logits


def test_metrics_read_their_own_mask_and_the_loss_breaks_ties_alone():
    data = Toy().data
    logits = torch.zeros(12, 2)
    wrong = data.val_mask | (data.test_mask & (torch.arange(12) < 6))
    logits[torch.arange(12), torch.where(wrong, 1 - data.y, data.y)] = 5.0
    model = NodeClassifier(Fixed(logits))
    trainer = quiet_trainer()
    toy = Toy()
    (val,) = trainer.validate(model, datamodule=toy, verbose=False)
    (test,) = trainer.test(model, datamodule=toy, verbose=False)
    assert val["val_acc"] == 0
    assert test["test_acc"] == 0.5
    assert -1 / 8 < val["val_score"] < 0
    (predicted,) = trainer.predict(model, datamodule=toy)
    assert torch.equal(predicted, logits.argmax(dim=1))
    toy = Toy()
    right = nn.functional.one_hot(toy.data.y, 2).float()

    def score(logits):
        module = NodeClassifier(Fixed(logits))
        (val,) = quiet_trainer().validate(module, datamodule=toy, verbose=False)
        return val["val_score"]

    one_wrong_badly = right * 0.01
    one_wrong_badly[1] = 1e4 * (1 - right[1])
    two_wrong_hardly = right * 100
    two_wrong_hardly[[1, 4]] = 0.001 * (1 - right[[1, 4]])
    better_and_better = [two_wrong_hardly, one_wrong_badly, right, right * 5]
    scores = list(map(score, better_and_better))
    assert scores == sorted(set(scores))
    # Nothing of before counts.
    (again,) = trainer.validate(model, datamodule=toy, verbose=False)
    assert again["val_score"] == pytest.approx(val["val_score"], abs=1e-7)


def test_learns():
    network = DiffusionGNN(4, 16, 2, conv="mlp", dropout=0.0)
    model = NodeClassifier(network, lr=0.05, optimizer="adamw")
    assert type(model.configure_optimizers()) is torch.optim.AdamW
    trainer = quiet_trainer(max_epochs=60)
    trainer.fit(model, datamodule=Toy())
    assert trainer.callback_metrics["train_acc"] == 1


def test_a_loss_that_is_not_finite_ends_a_training_without_validation():
    loader = DataLoader([Toy().data], batch_size=None)
    trainer = quiet_trainer(max_epochs=9)
    with pytest.raises(
        FloatingPointError,
        match=r"train_loss is \S+ in epoch \d: .* diverged\. Lower the",
    ):
        trainer.fit(
            NodeClassifier(DiffusionGNN(4, 8, 2, conv="gcn", dropout=0.0), lr=3e37),
            loader,
        )


class Regularised(Fixed):
    """Records three times the mean square of its logits while it trains."""

    def __init__(self, logits):
        super().__init__(logits)
        self.auxiliary = AuxiliaryLoss()

    def forward(self, x, edge_index=None, edge_weight=None):
        self.auxiliary.value = (
            3 * self.logits.square().mean() if self.training else None
        )
        return self.logits


@pytest.mark.parametrize("model", [Fixed, Regularised])
def test_auxiliary_losses_are_added_and_logged_apart(model):
    data = Toy().data
    logits = randn(12, 2).float().requires_grad_()
    module = NodeClassifier(model(logits.detach().clone()), lr=0.0, weight_decay=0.0)
    gradients = []
    trainer = quiet_trainer(max_epochs=1)
    module.model.logits.register_hook(gradients.append)
    trainer.fit(module, datamodule=Toy())
    mine = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    extra = 3 * logits.square().mean() if model is Regularised else torch.zeros(())
    torch.testing.assert_close(trainer.callback_metrics["train_loss"], mine)
    assert ("train_aux_loss" in trainer.callback_metrics) == (model is Regularised)
    torch.testing.assert_close(
        trainer.callback_metrics.get("train_aux_loss", torch.zeros(())), extra
    )
    torch.testing.assert_close(
        gradients, list(torch.autograd.grad(mine + extra, logits))
    )


def step(*shape, **changes):
    return NodeClassifier(Fixed(torch.zeros(shape))).training_step(
        Toy().data.update(changes), 0
    )


test_wrong_logits_and_data_without_labels_are_refused = refuses(
    (lambda: step(12, 1), ValueError, "one column"),
    (lambda: step(5, 2), ValueError, "one row of logits per node"),
    (
        lambda: step(12, 2, y=None),
        TypeError,
        r"data\.y must be a tensor of labels, a row for every node.*got None",
    ),
)


def test_digits_module():
    module = DigitsDataModule(per_class=3, num_val=100, seed=1)
    assert (module.num_features, module.num_classes) == (64, 10)
    assert int(module.data.train_mask.sum()) == 30
    assert int(module.data.test_mask.sum()) == 1797 - 130
    other = DigitsDataModule(per_class=3, num_val=100, seed=2)
    assert not torch.equal(module.data.train_mask, other.data.train_mask)
    (batch,) = module.val_dataloader()
    assert batch is module.data


@pytest.mark.data
def test_planetoid_module_and_numbered_splits_keep_the_labels_of_tuning_apart(
    data_root,
):
    root = str(data_root / "Planetoid")
    used = {}
    for tuning in (True, False):
        splits = [
            PlanetoidDataModule(root, split=split, tuning=tuning).data
            for split in range(3)
        ]
        assert not torch.equal(splits[0].train_mask, splits[1].train_mask)
        assert all(data.val_mask.sum() == 500 for data in splits)
        used[tuning] = sum(
            data.train_mask | data.val_mask | data.test_mask for data in splits
        ).bool()
    assert not (used[True] & used[False]).any()
    assert PlanetoidDataModule(root, split=0).data.test_mask.sum() == 1000
    public = PlanetoidDataModule(root, split="public")
    assert (public.num_features, public.num_classes) == (1433, 7)
    assert public.data.train_mask[:140].all()
    first, second = (PlanetoidDataModule(root, seed=seed).data for seed in (0, 1))
    assert torch.bincount(first.y[first.train_mask]).tolist() == [20] * 7
    assert not torch.equal(first.test_mask, second.test_mask)
    sparse = PlanetoidDataModule(root, sparse=True)
    assert sparse.data.x.layout == torch.sparse_csr
    assert torch.equal(sparse.data.x.to_dense(), first.x)
    assert sparse.num_features == 1433


class LearningRates(Callback):
    def __init__(self):
        self.observed = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.observed.append(trainer.optimizers[0].param_groups[0]["lr"])


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
    return DataLoader(
        [(text, int(text[0] == 1)) for text in texts], batch_size=16, collate_fn=pad
    )


def test_it_learns_and_logs_and_the_rate_rises_and_falls_to_zero(batches):
    with seeded(0):
        module = SequenceClassifier(
            PDETransformer([3], 16, 2, 1, 2, max_length=6, placement="P1"), 2, lr=1e-2
        )
        trainer = fit(module, batches, 24)
    logged = trainer.callback_metrics
    assert set(logged) == {"train_loss", "train_acc", "val_loss", "val_acc"}
    assert logged["val_acc"] > 0.9
    (actual,) = trainer.test(module, batches, verbose=False)
    assert actual["test_acc"] == pytest.approx(float(logged["val_acc"]))
    rates = LearningRates()
    with seeded(0):
        fit(
            SequenceClassifier(
                PDETransformer([3], 4, 2, 1, 1, max_length=6), 2, lr=0.5, warmup=0.5
            ),
            batches,
            2,
            rates,
        )
    assert rates.observed[:5] == pytest.approx([0.125, 0.21875, 0.3125, 0.40625, 0.5])
    assert rates.observed[5:] == pytest.approx(
        [0.5 * (1 + c) / 2 for c in (0.5**0.5, 0.0, -(0.5**0.5))], abs=1e-6
    )
