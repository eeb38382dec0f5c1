"""A run that goes on from its checkpoint is the run that was not stopped, bit by bit, with dropout."""

import random
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from diffusion_mp_experiments import train
from diffusion_mp_experiments.train.cli import main
from diffusion_mp_experiments.train.resume import random_state, set_random_state
from training_runs import TINY, quiet_trainer, same

# The checker of shapes draws from Python's random state, which is among what is compared.
pytestmark = [pytest.mark.usefixtures("no_typecheck"), pytest.mark.unwatched]

DIFFORMER = ["--model.model=diffusion_mp.models.DIFFormer", "--model.model.dropout=0.5"]
NODEFORMER = [
    DIFFORMER[0].replace("DIFFormer", "NodeFormer"),
    "--model.model.num_features=4",
    DIFFORMER[1],
]
SMALL = ["--data=DigitsDataModule", *TINY]
STILL = ["--model.lr=0", "--model.weight_decay=0"]  # so the first epoch stays the best
QUIET = [
    "--trainer.enable_progress_bar=false",
    "--trainer.logger=false",
    "--checkpoint.filename=best-{epoch}",
]


@pytest.fixture
def fit():
    """`diffusion-mp fit` in an empty folder, with the relative --out that is the default; the checkpoints by name."""

    def run(name, epochs, *options, model=DIFFORMER, code=0):
        folder = Path("runs", name, "checkpoints")
        line = f"fit --name {name} --trainer.max_epochs={epochs}"
        line += f" --checkpoint.dirpath={folder} --last.dirpath={folder}"
        assert main([*line.split(), *model, *SMALL, *QUIET, *options]) == code
        return {
            path.name: train.load_checkpoint(path) for path in folder.glob("*.ckpt")
        }

    return run


def assert_same_runs(checkpoints, others):
    assert checkpoints.keys() == others.keys()
    for name, checkpoint in checkpoints.items():
        for part in (
            "state_dict",
            "optimizer_states",
            "random_state",
            "loops",
            "epoch",
            "global_step",
        ):
            assert same(checkpoint[part], others[name][part]), (name, part)


SPARSE = ["--trainer.check_val_every_n_epoch=2", "--checkpoint.save_top_k=2"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(DIFFORMER, [], id="DIFFormer"),
        pytest.param(NODEFORMER, [], id="NodeFormer", marks=pytest.mark.slow),
        pytest.param(
            DIFFORMER,
            SPARSE,
            id="validation every second epoch, two best",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_fit_is_bit_equal(fit, model, options):
    straight = fit("straight", 8, *options, model=model)
    fit("part", 4, *options, model=model)
    part = fit(
        "part", 8, "--ckpt_path=runs/part/checkpoints/last.ckpt", *options, model=model
    )
    assert_same_runs(part, straight)


def test_the_best_is_that_of_the_whole_run(typed):
    """The default: the folder of the logger is relative, that of --ckpt_path is not."""
    words = [*DIFFORMER, *SMALL, *STILL, "--trainer.enable_progress_bar=false"]
    typed("fit --trainer.max_epochs=2", *words)
    checkpoints = Path("runs/fit/version_0/checkpoints")
    resume = f"--ckpt_path={checkpoints}/last.ckpt"
    said = typed(f"fit --trainer.max_epochs=4 {resume}", *words)
    (best,) = checkpoints.glob("best-epoch=0*")
    assert [*checkpoints.glob("best*")] == [best]
    assert f"Best checkpoint: {best}" in said


def test_a_run_that_had_stopped_early_stays_stopped(fit):
    stop = [*STILL, "--early_stopping.patience=2"]
    resume = "--ckpt_path=runs/run/checkpoints/last.ckpt"
    ended = fit("run", 9, *stop)
    assert ended["last.ckpt"]["epoch"] == 2
    assert_same_runs(fit("run", 9, *stop, resume), ended)
    longer = fit(
        "run", 9, *stop, "--early_stopping.patience=4", resume
    )  # the command line wins
    assert longer["last.ckpt"]["epoch"] == 4


def test_the_command_line_wins_over_the_checkpoint_which_wins_over_defaults(fit):
    resume = "--ckpt_path=runs/run/checkpoints/last.ckpt"
    fit("run", 1, "--model.lr=0.25", "--model.weight_decay=0.125")
    actual = fit("run", 2, "--model.lr=0.5", resume)["last.ckpt"]
    group = actual["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.125)
    settings = actual["hyper_parameters"]
    assert (settings["lr"], settings["weight_decay"]) == (0.5, 0.125)


def test_what_a_run_cannot_go_on_with_is_refused(fit, capsys):
    """Another optimiser, another model, a checkpoint of weights alone: and the checkpoint stays as it is."""
    path = Path("runs/run/checkpoints/last.ckpt")
    before = fit("run", 1)
    fit("run", 2, "--model.optimizer=adamw", f"--ckpt_path={path}", code=2)
    assert (
        "optimizer was 'adam' in the run of this checkpoint, and cannot become 'adamw'"
        in capsys.readouterr().err
    )
    after = fit(
        "run", 2, "--model.model.hidden_channels=4", f"--ckpt_path={path}", code=2
    )
    assert "Error(s) in loading state_dict" in capsys.readouterr().err
    assert_same_runs(before, after)
    del before["last.ckpt"]["optimizer_states"]
    train.save_checkpoint(before["last.ckpt"], path)
    fit("run", 2, f"--ckpt_path={path}", code=2)
    assert "holds weights alone" in capsys.readouterr().err


def classified(folder, epochs, resumed=False, **options):
    """SequenceClassifier with a loader that shuffles by the global state, and numbers from numpy in its collation."""
    pl.seed_everything(0, verbose=False)
    x = torch.randn(24, 4)

    def noisy(rows):
        noise = torch.from_numpy(np.random.randn(len(rows), 4)).float()  # noqa: NPY002
        return torch.stack([row for row, _ in rows]) + noise, torch.tensor(
            [label for _, label in rows]
        )

    data = DataLoader(
        list(zip(x, (x[:, 0] > 0).long(), strict=True)),
        6,
        shuffle=True,
        collate_fn=noisy,
    )
    last = ModelCheckpoint(folder, "last", enable_version_counter=False)
    plugins = {
        "callbacks": [last],
        "plugins": [train.CheckpointFiles()],
        "enable_checkpointing": True,
    }
    trainer = quiet_trainer(max_epochs=epochs, **plugins)
    module = train.SequenceClassifier(
        nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2)), 2, **options
    )
    trainer.fit(
        module, data, data, ckpt_path=str(folder / "last.ckpt") if resumed else None
    )
    return train.load_checkpoint(folder / "last.ckpt")


def test_batches_in_random_order_with_noise_from_numpy(tmp_path, monkeypatch):
    straight = classified(tmp_path / "straight", 4)
    with monkeypatch.context() as patch:
        patch.setattr(
            train.SequenceClassifier,
            "on_train_epoch_start",
            lambda module: 1 / (2 - module.current_epoch),
        )
        with pytest.raises(ZeroDivisionError):
            classified(tmp_path / "part", 4)
    part = classified(tmp_path / "part", 4, resumed=True)
    assert_same_runs({"last": part}, {"last": straight})
    assert same(part["lr_schedulers"], straight["lr_schedulers"])
    with pytest.raises(
        ValueError,
        match=r"lr was 0\.001 in the run of this checkpoint, and cannot become 0\.5",
    ):
        classified(tmp_path / "part", 5, resumed=True, lr=0.5)


def test_random_states_are_plain_and_come_back(tmp_path):
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002 - half a pair of normal numbers is left over
    train.save_checkpoint(random_state(), tmp_path / "state")

    def draw():
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.randn(),  # noqa: NPY002
            torch.rand(3).tolist(),
        ]

    first = draw()
    set_random_state(train.load_checkpoint(tmp_path / "state"))
    assert draw() == first
    model = train.NodeClassifier(nn.Identity())
    model.trainer = trainer = quiet_trainer(callbacks=[EarlyStopping("val_score")])
    first = model.configure_callbacks()
    assert [type(callback) for callback in first] == [train.Resumable, train.FiniteLoss]
    trainer.callbacks += first
    assert model.configure_callbacks() == []
