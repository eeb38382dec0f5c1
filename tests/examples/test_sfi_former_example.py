"""The SFi-Former example: equal budgets, runs that resume to the same numbers, and its table."""

from dataclasses import replace
from itertools import pairwise

import pytest
from runs import chosen

pytestmark = pytest.mark.unwatched

SMALL = [
    "--graphs",
    "5",
    "--layers",
    "2",
    "--parameters",
    "9000",
    "--batch-size",
    "2",
    "--seeds",
    "1",
    "--jobs",
    "1",
]


def a_run(sfi_former, **changes):
    options = chosen(sfi_former.Run, sfi_former.parse(SMALL))
    run = {"dataset": "CLUSTER", "model": "SFi", "seed": 0, "epochs": 3}
    return sfi_former.Run(**options | run | changes)


def test_the_table(sfi_former, tmp_path, capsys):
    options = [*SMALL, "--out", str(tmp_path), "--epochs", "1", "--dataset", "PATTERN"]
    assert sfi_former.main([*options, "--model", "SFi", "GatedGCN"]) == 0
    printed = capsys.readouterr().out
    assert "over 1 seeds; 5/1/2 graphs, 2 layers, 1 epochs" in printed
    assert "A guess that knows nothing scores 50.0 (PATTERN)." in printed
    header, rule, first, second = printed.splitlines()[-4:]
    assert header.startswith(
        "| data set | model | parameters | test | train - test | density by layer |"
    )
    assert rule.count("|") == first.count("|") == second.count("|") == header.count("|")
    cells = [cell.strip() for cell in first.split("|")]
    assert cells[1:3] == ["PATTERN", "SFi"]
    assert len(cells[6].split()) == 2
    assert "| none |" in second
    # Nothing is trained again.
    assert sfi_former.main([*options, "--model", "GatedGCN", "SFi"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[-1] == first
    assert again[-2] == second


@pytest.mark.parametrize("model", ["SFi", "DFi", "GPS", "GatedGCN"])
def test_models_fill_the_same_budget(sfi_former, tmp_path, model):
    run = a_run(sfi_former, model=model, parameters=45_000, layers=3)
    count = sfi_former.size_of(
        sfi_former.make_model(run, sfi_former.Blocks(run, tmp_path, tmp_path))
    )
    assert 42_000 < count <= 45_000


def test_a_run_that_stopped_goes_on_to_the_same_numbers(
    sfi_former, tmp_path, monkeypatch
):
    run = a_run(sfi_former, attention_dropout=0.5, dropout=0.1, epochs=4)
    one_epoch = sfi_former.one_epoch
    losses = []
    stop_at = []

    def recorded(*arguments):
        if [arguments[-1]] == stop_at:
            stop_at.clear()
            raise KeyboardInterrupt
        losses.append(one_epoch(*arguments))
        return losses[-1]

    monkeypatch.setattr(sfi_former, "one_epoch", recorded)
    for out in ("straight", "stopped"):
        (tmp_path / out).mkdir()
    straight = sfi_former.train(run, tmp_path / "straight", quiet=True)
    stop_at.append(2)
    with pytest.raises(KeyboardInterrupt):
        sfi_former.train(run, tmp_path / "stopped", quiet=True)
    assert len(losses) == 6
    resumed = sfi_former.train(run, tmp_path / "stopped", quiet=True)
    assert losses[4:] == losses[:4]  # the third and fourth epoch after the stop, too
    assert replace(resumed, seconds=0) == replace(straight, seconds=0)


def test_a_checkpoint_of_other_settings_is_not_continued(sfi_former, tmp_path):
    run = a_run(sfi_former, epochs=1, model="GatedGCN")
    sfi_former.train(run, tmp_path, quiet=True)
    with pytest.raises(
        SystemExit, match=r"other settings \(lr\); use another --out or delete it"
    ):
        sfi_former.train(replace(run, lr=0.5), tmp_path, quiet=True)


def test_the_learning_rate_warms_up_and_falls_to_zero(sfi_former):
    rate = sfi_former.schedule(100)
    values = [rate(step) for step in range(101)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=0.02)
    assert values[100] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(values[5:]))


def test_a_budget_that_is_too_small(sfi_former, tmp_path):
    with pytest.raises(
        SystemExit, match="SFi of 2 layers does not fit into 100 parameters"
    ):
        sfi_former.train(a_run(sfi_former, parameters=100), tmp_path, quiet=True)


def test_a_model_learns(sfi_former, tmp_path):
    run = a_run(
        sfi_former, graphs=20, epochs=12, lr=5e-3, model="GPS", dataset="PATTERN"
    )
    result = sfi_former.train(run, tmp_path, quiet=True)
    assert result.test > 0.65  # one class for all nodes scores 0.5


@pytest.mark.data
def test_peptides(sfi_former, data_root, tmp_path, capsys):
    reason = "pip install 'diffusion-mp-experiments[molecules]'"
    pytest.importorskip("rdkit", reason=reason)
    run = [
        "--epochs",
        "1",
        "--graphs",
        "10",
        "--parameters",
        "20000",
        "--dataset",
        "peptides",
    ]
    peptides = data_root / "peptides-functional"
    paths = [f"--out={tmp_path}", f"--peptides={peptides}"]
    models = ["--model", "SFi", "GatedGCN"]
    assert sfi_former.main([*SMALL, *run, *paths, *models]) == 0
    printed = capsys.readouterr().out
    assert "10/2/4 graphs" in printed
    assert printed.count("| peptides |") == 2


def test_the_picture_of_a_trained_sfi_former(sfi_former, attention, tmp_path, capsys):
    run = a_run(sfi_former, epochs=1)
    other = a_run(sfi_former, epochs=1, model="GatedGCN")
    for each in (run, other):
        sfi_former.train(each, tmp_path, quiet=True)
    assert attention.main([str(tmp_path / f"{run.name}.pt")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:2]] == ["layer 1", "layer 2"]
    assert (tmp_path / f"{run.name}.png").stat().st_size > 10_000
    assert printed[2] == str(tmp_path / f"{run.name}.png")
    with pytest.raises(SystemExit, match="is no trained SFi-Former"):
        attention.main([str(tmp_path / f"{other.name}.pt")])
    with pytest.raises(SystemExit):
        attention.main([str(tmp_path / "none.pt")])
    assert "there is no checkpoint" in capsys.readouterr().err
