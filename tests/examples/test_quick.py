"""Every example has a `--quick`, a `--help` that prints what the script is for, and refuses numbers below one."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.unwatched

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "runs")
WRITTEN = {  # what is printed of the files that were made
    "energy_descent": "wrote runs/energy_descent.png",
    "inside": "runs/inside.png",
    "picture": "runs/pictures/energy.svg",
    "certified_blocks": "runs/certified_blocks.png",
    "gallery": "runs/plots.png",
    "attention": "runs/sfi_former_quick/CLUSTER-SFi-seed0.png",
    "pde_transformer": "runs/pde_transformer_quick/picture.png",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_is_for(script, capsys):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert module.__doc__.strip() in printed
    assert "--quick" in printed


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("cora", "--splits"),
        ("links", "--seeds"),
        ("pokec", "--epochs"),
        ("pde_transformer", "--epochs"),
        ("sfi_former", "--jobs"),
    ],
)
def test_numbers_below_one_are_refused(script, option, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main([option, "0"])
    assert ended.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("cora", ["/Cora/raw: missing ind.cora.x", "planetoid", "--download"]),
        ("pokec", ["soc-pokec-profiles.txt.gz", "snap.stanford.edu", "--synthetic"]),
    ],
)
def test_missing_files_say_what_to_do(script, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(script).main(["--root", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in [str(tmp_path), *said])


MARKS = {
    **dict.fromkeys(("pde_transformer", "inside", "picture"), pytest.mark.slow),
    **dict.fromkeys(("sfi_former", "attention", "pokec"), pytest.mark.exhaustive),
    **dict.fromkeys(("cora", "links", "certified_blocks"), pytest.mark.data),
}
QUICK = ["custom_layer", "data_parallel", "energy_descent", "gallery"]
QUICK += [pytest.param(script, marks=mark) for script, mark in MARKS.items()]


@pytest.mark.parametrize("script", QUICK)
def test_quick_is_a_first_look_in_an_empty_folder(
    script, tmp_path, monkeypatch, capsys, request
):
    monkeypatch.chdir(tmp_path)
    options = ["--quick"]
    folders = {"cora": "Planetoid", "links": "Planetoid", "certified_blocks": ""}
    if script in folders:
        root = request.getfixturevalue("data_root") / folders[script]
        options += ["--root", str(root)]
    assert not importlib.import_module(script).main(options)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 1
    assert WRITTEN.get(script, "") in printed
    for path in re.findall(r"runs/[\w/.-]+\.png", printed):
        assert Path(path).stat().st_size > 10_000


@pytest.mark.slow
def test_processes_share_the_parts():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "data_parallel.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"of 1,000 nodes right", ended.stdout)


def test_the_estimator_is_right_about_more_images_than_label_propagation(
    classifier, capsys
):
    classifier.main(["--quick"])
    *accuracies, last = capsys.readouterr().out.splitlines()
    propagated, ours = (float(re.search(r"([\d.]+) %", line)[1]) for line in accuracies)
    assert ours > propagated > 50
    assert last == "A new image, a noisy 0, is read as 0."


def test_states_energies_and_pairs_of_a_model(inside):
    data = inside.load_digits(5).subgraph(torch.arange(60))
    data.test_mask = torch.arange(60) > 30
    edges = set(map(tuple, data.edge_index.t().tolist()))
    for name, make in inside.MODELS.items():
        look = inside.look_inside(make(64, 10), data, 20)
        assert len(look.states) == len(look.energies) == 9, name
        source, target = look.pairs
        assert (source < target).all()
        assert not edges & set(map(tuple, look.pairs.t().tolist())), name
    assert all(
        before >= after
        for before, after in zip(look.energies, look.energies[1:], strict=False)
    )
