"""Every example has a `--quick`, and a `--help` that prints what the script is for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unwatched

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "runs")
WRITTEN = {  # what is said of the files that were made
    "energy_descent": "wrote runs/energy_descent.png",
    "inside": "runs/inside.png",
    "attention": "runs/sfi_former_quick/CLUSTER-SFi-seed0.png",
    "pde_transformer": "runs/pde_transformer_quick/picture.png",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_is_for(script, capsys):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert module.__doc__.strip() in said
    assert "--quick" in said


@pytest.mark.parametrize(
    "script",
    [
        "custom_layer",
        "energy_descent",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pde_transformer", "inside")),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sfi_former", "attention", "pokec")),
        "classifier",
        pytest.param("cora", marks=pytest.mark.data),
    ],
)
def test_quick_is_a_first_look_in_an_empty_folder(script, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    root = ["--root", str(request.getfixturevalue("data_root") / "Planetoid")] if script == "cora" else []
    assert not importlib.import_module(script).main(["--quick", *root])
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 1
    assert WRITTEN.get(script, "") in said
    for path in re.findall(r"runs/[\w/.-]+\.png", said):
        assert Path(path).stat().st_size > 10_000
