"""The pairs that are timed compute the same, the harness says what is below its target, and a stopped run goes on."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

# Where Python looks when it runs a script there.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ratios
from pairs import Side


def make(target):
    """A pair that computes the same twice, with a target for its times."""

    def sides():
        x = torch.randn(60, 60, requires_grad=True)
        return Side(lambda: x @ x, [x]), Side(lambda: x @ x, [x])

    return ratios.Pair(
        "product", "N = 60", "itself", sides, dict.fromkeys(("forward", "step"), target)
    )


def test_layers_and_models_compute_the_same_as_the_others():
    """Operations are compared in test_operations.py."""
    measured = [
        pair
        for pair in ratios.pairs()
        if not pair.nodes and "100,000" not in pair.where and pair.same
    ]
    assert len(measured) > 10
    for pair in measured:
        if "PROTEINS" not in pair.where:
            assert ratios.difference(*pair.sides()) < ratios.TOLERANCE, pair.name


def test_names_tell_all_pairs_apart():
    names = [pair.name for pair in ratios.pairs()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("target", "flags"), [(1e6, 2), (1e-6, 0)])
def test_what_is_below_its_target_is_flagged(target, flags):
    pair = make(target)
    measured = {pair: ratios.measure(pair, 0.01)}
    assert measured[pair]["difference"] == 0
    assert len(ratios.flagged(measured)) == flags
    assert ratios.table(measured).count("⚑") == flags


def test_another_result_stops_the_run():
    def sides():
        mine, other = make(1.0).sides()
        return mine, type(other)(lambda: 2 * other.call(), other.leaves)

    with pytest.raises(AssertionError, match="differ by"):
        ratios.measure(ratios.Pair("product", "", "twice", sides), 0.01)


def test_a_stopped_run_goes_on(tmp_path, monkeypatch, capsys):
    times = {"low": [1.0, 4.0], "median": [1.0, 4.0]}
    unfinished = {"forward": times, "step": times, "memory": [1.0, 4.0]}
    threads = torch.get_num_threads()
    pair = dataclasses.replace(make(1.0), nodes=60)
    (tmp_path / f"unfinished_{threads}_2.json").write_text(
        json.dumps({pair.name: unfinished})
    )
    monkeypatch.setattr(ratios, "pairs", lambda: [pair])
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--out", str(tmp_path)])
    ratios.main()
    assert "No ratio is below its target" in capsys.readouterr().out
    assert (tmp_path / "ratios.png").exists()
    assert [path.name for path in tmp_path.glob("*.json")] == ["ratios.json"]
