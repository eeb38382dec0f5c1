"""The main job with tiny settings: table, report, pictures, and which command lines mean it."""

import json
import math

import pytest
import torch

from diffusion_mp.experiments.train import digits_job
from diffusion_mp.experiments.train.cli import main
from diffusion_mp.experiments.train.digits_report import summarise, table

METHODS = {"DIFFormer-s", "GCN", "MLP", "label propagation", "logistic regression"}


@pytest.mark.parametrize("start", [[], ["fit"], ["digits"]], ids=["bare", "fit", "digits"])
def test_command_lines_that_mean_the_main_job(start, monkeypatch):
    asked = []
    monkeypatch.setattr(digits_job, "run_digits", asked.append)
    assert main([*start, "--splits=3"]) == 0
    assert main(start) == 0
    assert [options.splits for options in asked] == [3, 5]


def test_main_job_writes_its_report(tmp_path, capsys):
    before = torch.get_rng_state()
    assert main(["--splits=1", "--epochs=4", "--out", str(tmp_path / "runs")]) == 0
    assert torch.equal(before, torch.get_rng_state())
    output = capsys.readouterr().out
    assert all(method in output for method in METHODS)
    assert "no ± can be given" in output
    report = (tmp_path / "runs" / "report.md").read_text()
    for part in ("5 training labels per class", "50 training, 500 validation, 1247 test", "torch", "seeds 0 to 0"):
        assert part in report
    numbers = json.loads((tmp_path / "runs" / "metrics.json").read_text())
    assert set(numbers["test_accuracy"]) == METHODS
    assert len(numbers["runs"]) == 5
    assert (tmp_path / "runs" / "metrics.csv").read_text().count("\n") == 6
    for picture in ("energy.png", "embedding.png"):
        assert (tmp_path / "runs" / picture).read_bytes().startswith(b"\x89PNG")


def test_label_propagation_sees_training_labels_only():
    data = digits_job.DigitsDataModule().data
    honest = digits_job.propagate_labels(data, 0)
    shuffled = data.clone()
    shuffled.y[~data.train_mask] = (data.y[~data.train_mask] + 1) % 10
    cheated = digits_job.propagate_labels(shuffled, 0)
    assert honest.test_acc > 0.8
    assert cheated.test_acc < 0.1


def test_logistic_regression_beats_chance():
    assert digits_job.regress(digits_job.DigitsDataModule().data, 0).test_acc > 0.7


def test_summary_is_over_splits():
    results = [digits_job.Result("a", split, 0.0, acc, "", 0.0) for split, acc in enumerate((0.5, 0.7))]
    mean, deviation = summarise(results)["a"]
    assert math.isclose(mean, 0.6)
    assert math.isclose(deviation, 0.1 * math.sqrt(2))
    text = table(results)
    assert "| a | 60.0 ± 14.1 | 50.0 | 70.0 |" in text
    assert "over 2 different random splits" in text
    assert math.isnan(summarise(results[:1])["a"][1])


@pytest.mark.parametrize("option", ["--splits", "--epochs", "--per-class"])
def test_options_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        digits_job.digits_parser().parse_args([option, "0"])
    assert "at least 1, got 0" in capsys.readouterr().err
