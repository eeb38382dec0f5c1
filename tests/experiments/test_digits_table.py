"""`diffusion-mp` without arguments: the table of the digits, made with tiny settings."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from diffusion_mp_experiments.reproduce import command
from diffusion_mp_experiments.train.cli import main

CONFIGS = str(Path(__file__).resolve().parents[2] / "configs")
ROWS = ["certified", "certified_identity", "difformer_s", "label_propagation_pixels", "logistic_regression"]


@pytest.mark.parametrize("told", [[], ["--splits=3"]])
def test_without_a_subcommand_it_is_the_table_of_the_digits(told, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "run_reproduce", asked.append)
    assert main(told) == 0
    assert main(["reproduce", "digits", *told]) == 0
    assert asked == 2 * [["digits", *told]]


@pytest.mark.unwatched
def test_the_report_has_differences_and_pictures(tmp_path, capsys):
    options = ["--quick", "--epochs=2", "--jobs=1", "--configs", CONFIGS, "--out", str(tmp_path)]
    assert main([*options, "--only", *ROWS]) == 0
    folder, said = tmp_path / "digits-quick", capsys.readouterr().out
    report = (folder / "report.md").read_text()
    for text in (said, report):
        assert "| certified, attention |" in text
        assert "ahead of certified, attention | identity | uniform |" in text
    assert "*attention := identity*: the same networks" in report  # configs/digits/notes.md
    for ending in ("", "-energies", "-search"):
        assert f"](images/results-digits{ending}.png)" in report
        assert (folder / "images" / f"results-digits{ending}.png").read_bytes().startswith(b"\x89PNG")
    runs = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    found = {run["row"]: run for run in runs if run["kind"] == "run"}
    assert set(found) == set(ROWS)
    energies = found["certified"]["states"]["F"]
    assert len(energies) == 31
    assert all(after < before for before, after in pairwise(energies))
    assert set(found["difformer_s"]["ablated"]) == {"identity", "uniform"}
    assert not any(found[row]["ablated"] for row in ROWS if row != "difformer_s")
