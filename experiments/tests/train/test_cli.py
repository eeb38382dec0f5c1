"""The console script: every configuration, fit, resume, best checkpoint, messages."""

import csv
import operator
import re
from pathlib import Path

import fsspec
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import diffusion_mp
from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.training import made
from diffusion_mp_experiments.train import DigitsDataModule
from diffusion_mp_experiments.train.cli import main
from training_runs import CONFIG


class Unmeasured(pl.LightningDataModule):
    def train_dataloader(self):
        nodes = torch.arange(8)
        every = torch.ones(8, dtype=torch.bool)
        masks = {"train_mask": every, "val_mask": every, "test_mask": every}
        data = Data(
            torch.ones(8, 3),
            torch.stack([nodes, (nodes + 1) % 8]),
            y=nodes % 2,
            **masks,
        )
        return DataLoader([data], collate_fn=operator.itemgetter(0))

    val_dataloader = test_dataloader = train_dataloader


class Ring(Unmeasured):
    """The same, with what a model has to know."""

    num_features = 3
    num_classes = 2


REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = sorted(configs_folder().glob("*.yaml"))


@pytest.fixture
def fit(tmp_path):
    """Fits on the digits for two epochs by default; returns the folder of that run."""

    def run(*arguments, epochs=2):
        options = [
            "--config",
            CONFIG,
            "--out",
            str(tmp_path),
            f"--trainer.max_epochs={epochs}",
        ]
        assert main(["fit", *options, *arguments]) == 0
        return max(
            (tmp_path / "digits_difformer_s").iterdir(), key=lambda folder: folder.name
        )

    return run


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration_parses_and_its_model_runs(config, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(config), "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["name"] == config.stem
    model = printed["model"]["model"]
    model["init_args"] |= {"in_channels": 5, "out_channels": 3}
    ring = torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
    assert made(nn.Module, model)(torch.ones(9, 5), ring).shape == (9, 3)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_loggers_that_the_documentation_names_are_found_with_their_options(
    package, capsys
):
    page = (REPOSITORY / "docs/training.md").read_text()
    (options,) = re.findall(rf"`([^`]+Logger[^`]*)` \(`pip install {package}`\)", page)
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config=digits_certified", *options.split(), "--print_config"])
    logger = yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]
    assert logger["class_path"] in options
    assert logger["init_args"].get("project", "NAME") == "NAME"


def test_fit_leaves_checkpoint_logs_and_configuration(fit, capsys):
    options = [
        "--model.lr=0.5",
        "--model.model.num_layers=1",
        "--data.per_class=2",
        "--trainer.logger=true",
    ]
    folder = fit(*options)
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    assert "val_acc" in header
    assert "train_loss" in header
    assert list(folder.glob("events.out.tfevents.*"))
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (
        written["model"]["lr"],
        written["model"]["model"]["init_args"]["num_layers"],
    ) == (
        0.5,
        1,
    )
    assert written["data"]["init_args"]["per_class"] == 2
    output = capsys.readouterr().out
    assert "test_acc" in output
    assert str(best) in output
    assert torch.load(best, weights_only=True)["hyper_parameters"]["lr"] == 0.5


def test_predict_writes_a_row_for_every_prediction(fit, tmp_path, capsys):
    """From fit to resume, test and predict; Lightning's announcements are not printed."""
    folder = fit()
    last = folder / "checkpoints" / "last.ckpt"
    resumed = fit("--ckpt_path", str(last), epochs=3)
    printed = capsys.readouterr()
    assert not re.search(
        "Seed|GPU|TPU|Tip|workers|Restoring|Warning", printed.out + printed.err
    )
    with (resumed / "metrics.csv").open() as file:
        # 3: the test after the last epoch.
        assert {row["epoch"] for row in csv.DictReader(file)} == {
            "2",
            "3",
        }
    # They stay in one folder, so that the best one is that of all epochs.
    assert not (resumed / "checkpoints").exists()
    assert torch.load(last, weights_only=True)["epoch"] == 2
    assert len(list(last.parent.glob("best-*.ckpt"))) == 1
    trained = ["--config", str(folder / "config.yaml"), "--ckpt_path", str(last)]
    assert main(["test", *trained]) == 0
    accuracy = float(
        re.search(r"test_acc\D+([\d.]+)", capsys.readouterr().out).group(1)
    )
    assert main(["predict", *trained]) == 0
    written = Path(capsys.readouterr().out.strip().removeprefix("Predictions: "))
    assert written.parent.parent == tmp_path / "digits_difformer_s"
    with written.open() as file:
        header, *rows = csv.reader(file)
    data = DigitsDataModule().data
    assert header == ["row", "prediction"]
    assert [int(number) for number, _ in rows] == list(range(data.num_nodes))
    predicted = torch.tensor([int(label) for _, label in rows])
    assert (predicted == data.y)[
        data.test_mask
    ].double().mean().item() == pytest.approx(accuracy)


def test_without_a_logger_everything_is_in_the_folder_of_the_run(
    fit, tmp_path, monkeypatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    folder = fit("--trainer.logger=false", epochs=1)
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.yaml"}
    assert fit("--trainer.logger=false", epochs=1) != folder
    assert not list((tmp_path / "work").iterdir())


def test_the_best_checkpoint_is_named_after_the_metric(fit):
    folder = fit("--model.metric=macro_f1", epochs=1)
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    (score,) = re.findall(r"^best-epoch=0-val_macro_f1=(0\.\d+)\.ckpt$", best.name)
    assert float(score) > 0


def test_any_data_module_trains_that_says_how_wide_its_data_are(fit):
    folder = fit(f"--data={__name__}.Ring", epochs=1)
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)[
        "state_dict"
    ]


def test_data_without_a_width_or_files_are_a_message_and_code_two(capsys):
    assert main(["fit", "--config", CONFIG, f"--data={__name__}.Unmeasured"]) == 2
    assert (
        "Give the data module the properties num_features and num_classes"
        in capsys.readouterr().err
    )
    assert main(["fit", "--config=cora_gcn", "--data.root=."]) == 2
    assert capsys.readouterr().err.startswith(
        "Cora is not at Cora/raw: missing ind.cora.x"
    )


def test_a_folder_may_begin_with_the_sign_of_the_home(tmp_path, monkeypatch, fit):
    """Shells leave the sign as it is in --out=~/runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fit("--out=~").parent.parent == tmp_path
    fit(
        "--out=~",
        "--ckpt_path=~/digits_difformer_s/version_0/checkpoints/last.ckpt",
        epochs=3,
    )
    assert not Path("~").exists()


def test_help_version_and_unknown_subcommand(capsys):
    assert main(["--help"]) == 0
    assert "fit --config" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diffusion-mp {diffusion_mp.__version__}\n"
    assert main(["train"]) == 2
    assert "no subcommand 'train'" in capsys.readouterr().err
    assert {
        "cora_difformer_s",
        "cora_nodeformer",
        "cora_sgformer",
        "digits_difformer_s",
    } <= {c.stem for c in CONFIGS}


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_a_configuration_is_never_read_from_an_address(joined, capsys):
    """It names classes to import, and Lightning would fetch it."""
    address = "http://127.0.0.1:9/config.yaml"
    option = [f"--config={address}"] if joined else ["--config", address]
    assert main(["fit", *option]) == 2
    assert (
        f"--config must be a file of this machine; got the address {address}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("option", "content"), [("--model", "lr: 0.125"), ("--trainer", "max_epochs: 3")]
)
def test_no_part_of_a_configuration_is_read_from_an_address(option, content, capsys):
    """fsspec's memory stands for any address that can be read."""
    with fsspec.open("memory://part.yaml", "w") as file:
        file.write(content)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "fit",
                "--config",
                CONFIG,
                f"{option}=memory://part.yaml",
                "--print_config",
            ]
        )
    assert ended.value.code == 2
    assert "memory://part.yaml" in capsys.readouterr().err
