"""The main job with tiny settings: table, report, pictures, and which command lines mean it."""

import json
import math

import pytest
import torch

from diffusion_mp_experiments.train import digits_job, digits_report
from diffusion_mp_experiments.train.cli import main
from diffusion_mp_experiments.train.digits_report import FLAGSHIP, behind, summarise, table

NETWORKS = {FLAGSHIP, "DIFFormer-s", "MLP"}  # of those that are trained; one matrix of all pairs is diagonalised
METHODS = {*NETWORKS, "label propagation, kNN", "label propagation, pixels", "logistic regression"}


@pytest.mark.parametrize("start", [[], ["digits"]], ids=["bare", "digits"])
def test_command_lines_that_mean_the_main_job(start, monkeypatch):
    asked = []
    monkeypatch.setattr(digits_job, "run_digits", asked.append)
    assert main([*start, "--splits=3"]) == 0
    assert main(start) == 0
    assert [options.splits for options in asked] == [3, 4]


@pytest.mark.unwatched
def test_main_job_writes_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(digits_job, "RECIPES", {name: digits_job.RECIPES[name] for name in NETWORKS})
    monkeypatch.setattr(digits_job, "PIXEL_ALPHAS", (0.99,))
    monkeypatch.setattr(digits_report, "STEPS", 5)
    before = torch.get_rng_state()
    assert main(["--splits=1", "--epochs=2", "--jobs=1", "--out", str(tmp_path / "runs")]) == 0
    assert torch.equal(before, torch.get_rng_state())
    output = capsys.readouterr().out
    assert all(method in output for method in METHODS)
    assert "no ± can be given" in output
    report = (tmp_path / "runs" / "report.md").read_text()
    for part in ("5 training labels per class", "50 training, 500 validation, 1247 test", "torch", "seeds 0 to 0"):
        assert part in report
    numbers = json.loads((tmp_path / "runs" / "metrics.json").read_text())
    assert set(numbers["test_accuracy"]) == METHODS
    assert len(numbers["runs"]) == len(METHODS)
    assert (tmp_path / "runs" / "metrics.csv").read_text().count("\n") == 1 + len(METHODS)
    published, certified = (numbers["energy_per_layer"][name] for name in ("DIFFormer-s", FLAGSHIP))
    assert len(published["before"]) == len(published["after"]) == 4
    assert certified["before"][1:] == certified["after"][:-1]
    assert all(after < before for before, after in zip(certified["before"], certified["after"], strict=True))
    assert set(numbers["ahead"]) == METHODS - {FLAGSHIP}
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


def test_label_propagation_over_pixels_sees_training_labels_only(monkeypatch):
    monkeypatch.setattr(digits_job, "PIXEL_ALPHAS", (0.99,))
    data = digits_job.DigitsDataModule().data
    honest = digits_job.propagate_over_pixels(data, 0)
    shuffled = data.clone()
    shuffled.y[~data.train_mask] = (data.y[~data.train_mask] + 1) % 10
    assert honest.test_acc > 0.9
    assert digits_job.propagate_over_pixels(shuffled, 0).test_acc < 0.1


def test_logistic_regression_beats_chance():
    assert digits_job.regress(digits_job.DigitsDataModule().data, 0).test_acc > 0.7


def result(method, split, accuracy):
    return digits_job.Result(method, split, 0.0, accuracy, "", 0.0)


@pytest.mark.parametrize("method", digits_job.RECIPES)
def test_recipes_make_networks_of_the_digits(method):
    model = digits_job.RECIPES[method].make()
    assert sum(parameter.numel() for parameter in model.parameters()) > 64 * 10
    x, edges = torch.rand(30, 64), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    assert model(x, edges).shape == (30, 10)


def test_summary_is_over_splits():
    results = [result(FLAGSHIP, split, accuracy) for split, accuracy in enumerate((0.5, 0.7))]
    mean, deviation = summarise(results)[FLAGSHIP]
    assert math.isclose(mean, 0.6)
    assert math.isclose(deviation, 0.1 * math.sqrt(2))
    assert math.isnan(summarise(results[:1])[FLAGSHIP][1])


def test_differences_are_taken_split_by_split():
    accuracies = {FLAGSHIP: (0.5, 0.7, 0.9), "a": (0.4, 0.5, 0.9)}
    # In another order than that of the flagship: pairs are found by their split.
    results = [result(name, split, each[split]) for name, each in accuracies.items() for split in (2, 0, 1)]
    difference, error = behind(results)["a"]
    assert math.isclose(difference, 0.1)
    assert math.isclose(error, 0.1 / math.sqrt(3))
    text = table(results)
    assert "| a | 60.0 ± 26.5 | +10.0 ± 5.8 |" in text
    assert "over 3 different random splits" in text


@pytest.mark.parametrize("option", ["--splits", "--epochs", "--per-class", "--jobs"])
def test_options_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        digits_job.digits_parser().parse_args([option, "0"])
    assert "at least 1, got 0" in capsys.readouterr().err
