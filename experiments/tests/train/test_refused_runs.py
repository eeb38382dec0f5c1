"""What is no checkpoint and what `diffusion-mp` cannot do end in a sentence, and leave the last checkpoint."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from diffusion_mp_experiments.train import (
    check_writable,
    load_checkpoint,
    replace_file,
    save_checkpoint,
)
from helpers import Payload
from training_runs import CONFIG, TINY

DAMAGED = (
    "a payload",
    "a pickle",
    "a truncated archive",
    "an empty archive",
    "text",
    "empty",
)
ELSEWHERE = (
    "http://example.org/x.ckpt",
    "https://example.org/x.ckpt",
    "s3://bucket/x.ckpt",
    "hf://owner/x.ckpt",
)
# Lightning takes the last ones for places of its own.
ABSENT = (
    "a folder",
    "missing",
    "best",
    "last",
    "hpc",
    "registry:model",
    "simplecache::file",
)


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "state.pt"
    save_checkpoint({"epoch": 1}, path)
    write = Path.write_bytes

    def half(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(
        OSError,
        match=r"state\.pt cannot be written: No space left on device\. What stood there is as",
    ):
        save_checkpoint({"epoch": 2}, path)
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_writable_or_a_sentence(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            OSError, match=f"Nothing can be written to {folder}: .*Give another folder"
        ):
            check_writable(folder)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device\. Give another"):
        check_writable(tmp_path)


SMALL = f"--config {CONFIG} {' '.join(TINY)}"
UNSET = "--data=DigitsDataModule --model.model=diffusion_mp.models.DIFFormer --model.model.hidden_channels=8"
QUIET = "--trainer.max_epochs=2 --trainer.enable_progress_bar=false"
KINDS = dict.fromkeys(DAMAGED, "or is damaged") | dict.fromkeys(
    ELSEWHERE, "of this machine only"
)
KINDS |= dict.fromkeys(ABSENT, "A checkpoint was expected")
COMMANDS = ["fit", "validate", "test", "predict"]


@pytest.fixture
def refused(typed):
    """The sentence in which a command line is refused."""

    def run(command, *options):
        message = typed(f"{command} {SMALL} {QUIET}", *options, code=2)
        assert "args parameter" not in message
        return message

    return run


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(command, kind, marks=[] if i == j else pytest.mark.slow)
        for j, command in enumerate(COMMANDS)
        for i, kind in enumerate(KINDS)
    ],
)
def test_nothing_but_checkpoints_is_read_and_nothing_runs(
    refused, tmp_path, command, kind
):
    path = tmp_path / "checkpoint.ckpt"
    payload = Payload(tmp_path / "executed")
    torch.save(
        {"state_dict": {"weight": torch.randn(64, 64)}, "payload": payload}, path
    )
    contents = {
        "a payload": path.read_bytes(),
        "a pickle": pickle.dumps(payload),
        "a truncated archive": path.read_bytes()[:-200],
        "an empty archive": b"PK\5\6" + bytes(18),
        "text": b"epoch 3, accuracy 0.8\n",
        "empty": b"",
    }
    if kind in DAMAGED:
        path.write_bytes(contents[kind])
    else:
        others = {"a folder": tmp_path, "missing": tmp_path / "none.ckpt"}
        path = others.get(kind, kind)
    said = refused(command, "--ckpt_path", path)
    assert str(path) in said
    assert KINDS[kind] in said
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "runs").exists()


def test_predictions_need_a_trained_model(refused):
    assert "predict needs --ckpt_path" in refused("predict")


def test_settings_of_a_checkpoint_are_numbers_and_choices(typed, refused):
    """A file must not say which class is made, and what it says is checked as what is typed."""
    typed(f"fit {SMALL} {QUIET} --trainer.max_epochs=1 --name=x")
    path = Path("runs/x/version_0/checkpoints/last.ckpt")
    checkpoint = load_checkpoint(path)
    del checkpoint["random_state"]
    settings = {
        **checkpoint["hyper_parameters"],
        "model": {"class_path": "torch.nn.Identity"},
        "_class_path": "x.Y",
    }
    torch.save({**checkpoint, "hyper_parameters": settings}, path)
    typed(f"fit {SMALL} {QUIET} --name=x --ckpt_path {path}")
    torch.save({"weight": torch.ones(3)}, "weights.pt")
    said = refused("test", "--ckpt_path=weights.pt")
    assert "holds no checkpoint of `diffusion-mp fit`" in said
    torch.save({**checkpoint, "hyper_parameters": {"lr": "os.system"}}, path)
    assert "model.lr" in typed(f"test {UNSET} --ckpt_path {path}", code=2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--data.per_class=5000",
            "Class 0 has 178 labelled nodes, fewer than per_class=5000",
        ),
        ("--data.per_class=150", "lower per_class, num_val or num_test"),
        ("--model.lr=-1", "lr must be finite and >= 0; got -1.0"),
        ("--model.lr=1e30", "val_loss is nan in epoch 0: the training has diverged"),
        ("--out=/proc/runs", "Nothing can be written to /proc/runs"),
        ("--weights_only=false", "weights_only cannot be false"),
        (
            "--early_stopping.monitor=x",
            "conditioned on metric `x` which is not available",
        ),
        ("--trainer.accelerator=cuda --trainer.devices=64", ""),
        ("--config=bad.yaml", "did not find expected ',' or ']'"),
        ("--data=Nothing", "Nothing"),
    ],
)
def test_settings_that_cannot_be(typed, options, sentence):
    Path("bad.yaml").write_text("model: [1, 2\ndata: {")
    assert sentence in typed(f"fit {SMALL} {QUIET} {options}", code=2)


@pytest.mark.unwatched
@pytest.mark.parametrize("option", ["--out", "--save"])
def test_a_table_looks_at_its_folders_first(typed, option):
    Path("file").write_text("")
    said = typed(f"--splits=1 {option} file", code=2)
    assert "Nothing can be written to file" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_configuration_says_what_is_missing(command, typed):
    said = typed(command, code=2)
    assert f"diffusion-mp {command} needs a model and data: --config digits_" in said
    assert "The table of the digits, diffusion-mp, needs neither." in said


def test_what_was_saved_before_the_disk_was_full_is_kept(
    tmp_path, monkeypatch, refused
):
    write = Path.write_bytes
    written = []

    def full(path, data):
        written.append(path)
        if len(written) > 2:  # the best and the last of the first epoch
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    message = refused("fit", "--out", tmp_path, "--name=x")
    last = tmp_path / "x" / "version_0" / "checkpoints" / "last.ckpt"
    assert "cannot be written: No space left on device" in message
    assert (
        f"Go on from the last complete epoch with\n  diffusion-mp fit --config {CONFIG}"
        in message
    )
    assert f"--ckpt_path {last}" in message
    # Nor anything about how this is made.
    assert "deprecated" not in message
    assert "Warning" not in message
    assert not list(tmp_path.rglob("*.part"))
    assert load_checkpoint(last)["epoch"] == 0
