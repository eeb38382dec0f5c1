"""The console script: every configuration, fit, resume, best checkpoint, messages."""

import csv
import re
from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from torch import nn

import diffusion_mp
from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.training import build
from diffusion_mp_experiments.train import DigitsDataModule
from training_runs import CONFIG

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = sorted(configs_folder().glob("*.yaml"))


@pytest.fixture
def fit(tmp_path, typed):
    """Fits on the digits for two epochs by default; returns the folder of that run, and what was said."""

    def run(line="", epochs=2):
        said = typed(
            f"fit --config {CONFIG} --out {tmp_path} --trainer.max_epochs={epochs} {line}"
        )
        return max((tmp_path / "digits_difformer_s").iterdir()), said

    return run


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration_parses_and_its_model_runs(config, typed):
    printed = yaml.safe_load(typed(f"fit --config {config} --print_config"))
    assert printed["name"] == config.stem
    model = printed["model"]["model"]
    model["init_args"] |= {"in_channels": 5, "out_channels": 3}
    ring = torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
    assert build(nn.Module, model)(torch.ones(9, 5), ring).shape == (9, 3)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_loggers_that_the_documentation_names_are_found_with_their_options(
    package, typed
):
    page = (REPOSITORY / "docs/training.md").read_text()
    (options,) = re.findall(rf"`([^`]+Logger[^`]*)` \(`pip install {package}`\)", page)
    said = typed(f"fit --config=digits_certified {options} --print_config")
    logger = yaml.safe_load(said)["trainer"]["logger"]
    assert logger["class_path"] in options
    assert logger["init_args"].get("project", "NAME") == "NAME"


def test_fit_leaves_checkpoint_logs_and_configuration(fit):
    folder, said = fit(
        "--model.lr=0.5 --model.model.num_layers=1 --data.per_class=2 --trainer.logger=true"
    )
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    assert "val_acc" in header
    assert "train_loss" in header
    assert list(folder.glob("events.out.tfevents.*"))
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["model"]["lr"] == 0.5
    assert written["model"]["model"]["init_args"]["num_layers"] == 1
    assert written["data"]["init_args"]["per_class"] == 2
    assert "test_acc" in said
    assert str(best) in said
    assert torch.load(best, weights_only=True)["hyper_parameters"]["lr"] == 0.5


def test_predict_writes_a_row_for_every_prediction(fit, tmp_path, typed):
    """From fit to resume, test and predict; Lightning's announcements are not printed."""
    folder, said = fit()
    last = folder / "checkpoints" / "last.ckpt"
    resumed, again = fit(f"--ckpt_path {last}", epochs=3)
    assert not re.search("Seed|GPU|TPU|Tip|workers|Restoring|Warning", said + again)
    with (resumed / "metrics.csv").open() as file:
        # 3: the test after the last epoch.
        assert {row["epoch"] for row in csv.DictReader(file)} == {"2", "3"}
    # They stay in one folder, so that the best one is that of all epochs.
    assert not (resumed / "checkpoints").exists()
    assert torch.load(last, weights_only=True)["epoch"] == 2
    assert len(list(last.parent.glob("best-*.ckpt"))) == 1
    trained = f"--config {folder / 'config.yaml'} --ckpt_path {last}"
    said = typed(f"test {trained}")
    accuracy = float(re.search(r"test_acc\D+([\d.]+)", said).group(1))
    said = typed(f"predict {trained}")
    written = Path(said.strip().removeprefix("Predictions: "))
    assert written.parent.parent == tmp_path / "digits_difformer_s"
    with written.open() as file:
        header, *rows = csv.reader(file)
    data = DigitsDataModule().data
    assert header == ["row", "prediction"]
    assert [int(number) for number, _ in rows] == list(range(data.num_nodes))
    predicted = torch.tensor([int(label) for _, label in rows])
    right = (predicted == data.y)[data.test_mask]
    assert right.double().mean().item() == pytest.approx(accuracy)


def test_without_a_logger_everything_is_in_the_folder_of_the_run(
    fit, tmp_path, monkeypatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    folder, _ = fit("--trainer.logger=false", epochs=1)
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.yaml"}
    assert fit("--trainer.logger=false", epochs=1)[0] != folder
    assert not list((tmp_path / "work").iterdir())


def test_the_best_checkpoint_is_named_after_the_metric(fit):
    folder, _ = fit("--model.metric=macro_f1", epochs=1)
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    (score,) = re.findall(r"^best-epoch=0-val_macro_f1=(0\.\d+)\.ckpt$", best.name)
    assert float(score) > 0


def test_data_without_files_are_a_message_and_code_two(typed):
    said = typed("fit --config=cora_gcn --data.root=.", code=2)
    assert said.startswith("Cora is not at Cora/raw: missing ind.cora.x")


def test_a_folder_may_begin_with_the_sign_of_the_home(tmp_path, monkeypatch, fit):
    """Shells leave the sign as it is in --out=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fit("--out=~")[0].parent.parent == tmp_path
    last = "~/digits_difformer_s/version_0/checkpoints/last.ckpt"
    fit(f"--out=~ --ckpt_path={last}", epochs=3)
    assert not Path("~").exists()


def test_help_version_and_unknown_subcommand(typed):
    assert "fit --config" in typed("--help")
    assert typed("--version") == f"diffusion-mp {diffusion_mp.__version__}\n"
    assert "no subcommand 'train'" in typed("train", code=2)


@pytest.mark.parametrize("option", ["--config=", "--config "])
def test_a_configuration_is_never_read_from_an_address(option, typed):
    """It names classes to import, and Lightning would fetch it."""
    address = "http://127.0.0.1:9/config.yaml"
    said = typed(f"fit {option}{address}", code=2)
    assert f"--config must be a file of this machine; got the address {address}" in said


@pytest.mark.parametrize(
    ("option", "content"), [("--model", "lr: 0.125"), ("--trainer", "max_epochs: 3")]
)
def test_no_part_of_a_configuration_is_read_from_an_address(option, content, typed):
    """fsspec's memory stands for any address that can be read."""
    with fsspec.open("memory://part.yaml", "w") as file:
        file.write(content)
    part = f"{option}=memory://part.yaml"
    said = typed(f"fit --config {CONFIG} {part} --print_config", code=2)
    assert "memory://part.yaml" in said
