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
from diffusion_mp_experiments.train.cli import main
from helpers import Payload
from training_runs import CONFIG, TINY

DAMAGED = [
    "a payload",
    "a pickle",
    "a truncated archive",
    "an empty archive",
    "text",
    "empty",
]
ELSEWHERE = [
    "http://example.org/x.ckpt",
    "https://example.org/x.ckpt",
    "s3://bucket/x.ckpt",
    "hf://owner/x.ckpt",
]
ABSENT = [
    "a folder",
    "missing",
    "best",
    "last",
    "hpc",
    "registry:model",
    "simplecache::file",
]


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


SMALL = ["--config", CONFIG, *TINY]
UNSET = [
    "--data=DigitsDataModule",
    "--model.model=diffusion_mp.models.DIFFormer",
    "--model.model.hidden_channels=8",
]
QUIET = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"]
KINDS = dict.fromkeys(DAMAGED, "or is damaged") | dict.fromkeys(
    ELSEWHERE, "of this machine only"
)
KINDS |= dict.fromkeys(ABSENT, "A checkpoint was expected")
COMMANDS = ["fit", "validate", "test", "predict"]


@pytest.fixture
def refused(capsys):
    """The sentence in which a command line is refused."""

    def run(command, *options):
        capsys.readouterr()
        assert main([command, *SMALL, *QUIET, *options]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
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
        "a pickle": pickle.dumps(payload),
        "a truncated archive": path.read_bytes()[:-200],
        "empty": b"",
    }
    contents |= {
        "an empty archive": b"PK\5\6" + bytes(18),
        "text": b"epoch 3, accuracy 0.8\n",
    }
    path.write_bytes(contents.get(kind, path.read_bytes()))
    path = {
        **dict.fromkeys(DAMAGED, path),
        "a folder": tmp_path,
        "missing": tmp_path / "none.ckpt",
    }.get(kind, kind)
    said = refused(command, "--ckpt_path", str(path))
    assert str(path) in said
    assert KINDS[kind] in said
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "runs").exists()


def test_predictions_need_a_trained_model(refused):
    assert "predict needs --ckpt_path" in refused("predict")


def test_settings_of_a_checkpoint_are_numbers_and_choices(capsys):
    """A file must not say which class is made, and what it says is checked as what is typed."""
    assert main(["fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--name=x"]) == 0
    path = Path("runs/x/version_0/checkpoints/last.ckpt")
    checkpoint = load_checkpoint(path)
    without_random_state = {
        key: value for key, value in checkpoint.items() if key != "random_state"
    }
    settings = {
        **checkpoint["hyper_parameters"],
        "model": {"class_path": "torch.nn.Identity"},
        "_class_path": "x.Y",
    }
    torch.save({**without_random_state, "hyper_parameters": settings}, path)
    assert main(["fit", *SMALL, *QUIET, "--name=x", "--ckpt_path", str(path)]) == 0
    torch.save({"weight": torch.ones(3)}, "weights.pt")
    assert main(["test", *SMALL, *QUIET, "--ckpt_path=weights.pt"]) == 2
    assert "holds no checkpoint of `diffusion-mp fit`" in capsys.readouterr().err
    torch.save({**checkpoint, "hyper_parameters": {"lr": "os.system"}}, path)
    with pytest.raises(SystemExit) as stopped:
        main(["test", *UNSET, "--ckpt_path", str(path)])
    assert stopped.value.code == 2
    assert "model.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--data.per_class=5000"],
            "Class 0 has 178 labelled nodes, fewer than per_class=5000",
        ),
        (["--data.per_class=150"], "lower per_class, num_val or num_test"),
        (["--model.lr=-1"], "lr must be finite and >= 0; got -1.0"),
        (["--model.lr=1e30"], "val_loss is nan in epoch 0: the training has diverged"),
        (["--out=/proc/runs"], "Nothing can be written to /proc/runs"),
        (["--weights_only=false"], "weights_only cannot be false"),
        (
            ["--early_stopping.monitor=x"],
            "conditioned on metric `x` which is not available",
        ),
        (["--trainer.accelerator=cuda", "--trainer.devices=64"], ""),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_settings_that_cannot_be(refused, options, sentence):
    assert sentence in refused("fit", *options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config=bad.yaml"], "did not find expected ',' or ']'"),
        (["--config", CONFIG, "--data=Nothing"], "Nothing"),
    ],
    ids=["bad", "unknown data"],
)
def test_configurations_that_cannot_be(arguments, sentence, capsys):
    """These jsonargparse refuses, and ends the process itself."""
    Path("bad.yaml").write_text("model: [1, 2\ndata: {")
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert "Traceback" not in message


@pytest.mark.unwatched
@pytest.mark.parametrize("option", ["--out", "--save"])
def test_a_table_looks_at_its_folders_first(tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "--splits=1",
                "--configs",
                str(Path(CONFIG).parent),
                option,
                str(tmp_path / "file"),
            ]
        )
        == 2
    )
    assert f"Nothing can be written to {tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_configuration_says_what_is_missing(command, capsys):
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert f"diffusion-mp {command} needs a model and data: --config digits_" in said
    assert "The table of the digits, diffusion-mp, needs neither." in said


def test_what_was_saved_before_the_disk_was_full_is_kept(tmp_path, monkeypatch, capsys):
    write = Path.write_bytes
    written = []

    def full(path, data):
        written.append(path)
        if len(written) > 2:  # the best and the last of the first epoch
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["fit", *SMALL, *QUIET, "--out", str(tmp_path), "--name=x"]) == 2
    last = tmp_path / "x" / "version_0" / "checkpoints" / "last.ckpt"
    message = capsys.readouterr().err
    assert "cannot be written: No space left on device" in message
    assert (
        f"Go on from the last complete epoch with\n  diffusion-mp fit --config {CONFIG}"
        in message
    )
    assert f"--ckpt_path {last}" in message
    # Nor anything about how this is made.
    for word in (
        "Traceback",
        "args parameter",
        "deprecated",
        "Warning",
    ):
        assert word not in message
    assert not list(tmp_path.rglob("*.part"))
    assert load_checkpoint(last)["epoch"] == 0
