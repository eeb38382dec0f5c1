"""What `diffusion-mp` cannot do ends in a sentence and code 2, before training, and leaves the last checkpoint."""

import sys
from pathlib import Path

import pytest
import torch
from test_files import ABSENT, DAMAGED, ELSEWHERE, hostile

from diffusion_mp_experiments.train import load_checkpoint
from diffusion_mp_experiments.train.cli import main

CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "digits_difformer_s.yaml")
SMALL = ["--config", CONFIG, "--model.model.hidden_channels=8", "--model.model.num_layers=1"]
UNSET = ["--data=DigitsDataModule", "--model.model=diffusion_mp.models.DIFFormer", "--model.model.hidden_channels=8"]
QUIET = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"]
KINDS = [*DAMAGED, *ELSEWHERE, *ABSENT]
COMMANDS = ["fit", "validate", "test", "predict"]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """The sentence in which a command line is refused, in an empty folder."""
    monkeypatch.setattr(sys, "argv", ["diffusion-mp", "something"])
    monkeypatch.chdir(tmp_path)

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
def test_a_checkpoint_that_is_none(refused, tmp_path, command, kind):
    path = hostile(kind, tmp_path)
    assert str(path) in refused(command, "--ckpt_path", str(path))
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "runs").exists()


def test_settings_of_a_checkpoint_are_numbers_and_choices(tmp_path, monkeypatch, capsys):
    """A file must not say which class is made, and what it says is checked as what is typed."""
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *SMALL, *QUIET, "--trainer.max_epochs=1", "--name=x"]) == 0
    path = Path("runs/x/version_0/checkpoints/last.ckpt")
    checkpoint = load_checkpoint(path)
    without_random_state = {key: value for key, value in checkpoint.items() if key != "random_state"}
    settings = {**checkpoint["hyper_parameters"], "model": {"class_path": "torch.nn.Identity"}, "_class_path": "x.Y"}
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
        (["--data.per_class=5000"], "Class 0 has 178 labelled nodes, fewer than per_class=5000"),
        (["--data.per_class=150"], "lower per_class, num_val or num_test"),
        (["--model.lr=-1"], "lr must be finite and >= 0; got -1.0"),
        (["--model.lr=1e30"], "val_loss is nan in epoch 0: the training has diverged"),
        (["--out=/proc/runs"], "Nothing can be written to /proc/runs"),
        (["--weights_only=false"], "weights_only cannot be false"),
        (["--trainer.accelerator=cuda", "--trainer.devices=64"], ""),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_settings_that_cannot_be(refused, options, sentence):
    assert sentence in refused("fit", *options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config=none.yaml"], "File does not exist"),
        (["--config=bad.yaml"], "did not find expected ',' or ']'"),
        (["--config", CONFIG, "--data=Nothing"], "Nothing"),
    ],
    ids=["missing", "bad", "unknown data"],
)
def test_configurations_that_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    """These jsonargparse refuses, and ends the process itself."""
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("model: [1, 2\ndata: {")
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert "Traceback" not in message


@pytest.mark.unwatched
def test_a_table_looks_at_its_folder_first(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--splits=1", "--configs", str(Path(CONFIG).parent), "--out", str(tmp_path / "file")]) == 2
    assert f"Nothing can be written to {tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_configuration_says_what_is_missing(command, capsys):
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert f"diffusion-mp {command} needs a model and data: --config configs/" in said
    assert "The table of the digits, diffusion-mp, needs neither." in said


def test_what_was_saved_before_the_disk_was_full_is_kept(tmp_path, monkeypatch, capsys):
    write, written = Path.write_bytes, []

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
    assert f"Go on from the last complete epoch with\n  diffusion-mp fit --config {CONFIG}" in message
    assert f"--ckpt_path {last}" in message
    for word in ("Traceback", "args parameter", "deprecated", "Warning"):  # nor anything about how this is made
        assert word not in message
    assert not list(tmp_path.rglob("*.part"))
    assert load_checkpoint(last)["epoch"] == 0
