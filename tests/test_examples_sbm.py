"""The block-model example: equal budgets, runs that resume to the same numbers, and its table."""

import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "sbm.py"
SMALL = ["--graphs", "5", "--layers", "2", "--parameters", "9000", "--batch-size", "2", "--seeds", "1", "--jobs", "1"]


@pytest.fixture(scope="module")
def sbm():
    """The script as a module, so that no test pays for a new interpreter."""
    spec = importlib.util.spec_from_file_location("examples_sbm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def _own_randomness():
    with torch.random.fork_rng():
        yield


def a_run(sbm, **changes):
    args = sbm.parse(SMALL)
    known = {name: getattr(args, name) for name in sbm.Run.__dataclass_fields__ if hasattr(args, name)}
    return replace(sbm.Run(**{**known, "dataset": "CLUSTER", "model": "SFi", "seed": 0, "epochs": 3}), **changes)


def test_the_table(sbm, tmp_path, capsys):
    options = [*SMALL, "--out", str(tmp_path), "--epochs", "1", "--dataset", "PATTERN"]
    assert sbm.main([*options, "--model", "SFi", "GatedGCN"]) == 0
    printed = capsys.readouterr().out
    assert "over 1 seeds; 5/1/2 graphs, 2 layers, 1 epochs" in printed
    assert "One class for all nodes scores 50.0 (PATTERN)." in printed
    header, rule, first, second = printed.splitlines()[-4:]
    assert header.startswith("| data set | model | parameters | test | train - test | density by layer |")
    assert rule.count("|") == first.count("|") == second.count("|") == header.count("|")
    cells = [cell.strip() for cell in first.split("|")]
    assert cells[1:3] == ["PATTERN", "SFi"]
    assert len(cells[6].split()) == 2
    assert "| none |" in second
    assert sbm.main([*options, "--model", "GatedGCN", "SFi"]) == 0  # nothing is trained again
    again = capsys.readouterr().out.splitlines()
    assert again[-1] == first
    assert again[-2] == second


@pytest.mark.parametrize("model", ["SFi", "DFi", "GPS", "GatedGCN"])
def test_models_fill_the_same_budget(sbm, tmp_path, model):
    count = sbm.count(sbm.make_model(a_run(sbm, model=model, parameters=45_000, layers=3), 7, 6))
    assert 42_000 < count <= 45_000


def test_a_run_that_stopped_goes_on_to_the_same_numbers(sbm, tmp_path, monkeypatch):
    run = a_run(sbm, attention_dropout=0.5, dropout=0.1, epochs=4)
    one_epoch, losses, stop_at = sbm.one_epoch, [], []

    def recorded(*arguments):
        if [arguments[-1]] == stop_at:
            stop_at.clear()
            raise KeyboardInterrupt
        losses.append(one_epoch(*arguments))
        return losses[-1]

    monkeypatch.setattr(sbm, "one_epoch", recorded)
    for out in ("whole", "stopped"):
        (tmp_path / out).mkdir()
    whole = sbm.train(run, tmp_path / "whole", quiet=True)
    stop_at.append(2)
    with pytest.raises(KeyboardInterrupt):
        sbm.train(run, tmp_path / "stopped", quiet=True)
    assert len(losses) == 6
    resumed = sbm.train(run, tmp_path / "stopped", quiet=True)
    assert losses[4:] == losses[:4]  # the third and fourth epoch after the stop, too
    assert replace(resumed, seconds=0) == replace(whole, seconds=0)


def test_a_checkpoint_of_other_settings_is_not_continued(sbm, tmp_path):
    sbm.train(a_run(sbm, epochs=1, model="GatedGCN"), tmp_path, quiet=True)
    with pytest.raises(SystemExit, match=r"other settings \(lr\); use another --out or delete it"):
        sbm.train(a_run(sbm, epochs=1, model="GatedGCN", lr=0.5), tmp_path, quiet=True)


def test_the_learning_rate_warms_up_and_falls_to_zero(sbm):
    rate = sbm.schedule(100)
    values = [rate(step) for step in range(101)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=0.02)
    assert values[100] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(values[5:]))


@pytest.mark.parametrize("option", ["--seeds", "--epochs", "--jobs"])
def test_nonsense_numbers(sbm, option, capsys):
    with pytest.raises(SystemExit) as stopped:
        sbm.main([option, "0"])
    assert stopped.value.code == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_a_budget_that_is_too_small(sbm, tmp_path):
    with pytest.raises(SystemExit, match="SFi of 2 layers does not fit into 100 parameters"):
        sbm.make_model(a_run(sbm, parameters=100), 7, 6)


def test_a_model_learns(sbm, tmp_path):
    run = a_run(sbm, graphs=20, epochs=12, lr=5e-3, model="GPS", dataset="PATTERN")
    result = sbm.train(run, tmp_path, quiet=True)
    assert result.test > 0.65  # one class for all nodes scores 0.5
