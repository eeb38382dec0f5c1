"""A core installation: the library is imported without extras and experiments, and whatever needs them says so."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diffusion_mp.checks import needed_by
from subrun import run_program

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def without_extras() -> dict[str, Any]:
    """What without_extras.py found in a process of its own; that it ended well means that all imports were possible."""
    program = str(Path(__file__).with_name("without_extras.py"))
    found: dict[str, Any] = json.loads(run_program(program, TRITON_INTERPRET="0"))
    return found


PLOT = "'diffusion-mp[plot]'"
SKLEARN = "'diffusion-mp[sklearn]'"
EXPERIMENTS = "diffusion-mp-experiments"
#: What needs an optional package, which one, and what pip is to install.
FUNCTIONS = {
    **dict.fromkeys(
        ["plot_attention", "EnergyTrace.plot", "PlacementReport.plot", "plot.energies"],
        ("matplotlib", PLOT),
    ),
    **dict.fromkeys(
        ["knn_graph", "KNNGraph", "DiffusionClassifier"], ("sklearn", SKLEARN)
    ),
    "find_clusters": ("pymetis", "'diffusion-mp[metis]'"),
    "save_pretrained": ("huggingface_hub", "'diffusion-mp[hub]'"),
}
EXAMPLES = {
    "energy_descent.py": PLOT,
    "classifier.py": SKLEARN,
    "gallery.py": "'diffusion-mp[plot,sklearn]'",
    **{
        f"{name}.py": EXPERIMENTS
        for name in (
            "attention",
            "cora",
            "inside",
            "pde_transformer",
            "pokec",
            "sfi_former",
        )
    },
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.unwatched
def test_a_function_names_its_extra(without_extras, function):
    package, install = FUNCTIONS[function]
    assert package in without_extras["functions"][function]
    assert f"pip install {install}" in without_extras["functions"][function]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_says_what_to_install_and_fails(without_extras, example):
    status, written = without_extras["examples"][example]
    assert status == 2
    assert written.startswith("This example needs ")
    assert written.endswith(f"pip install {EXAMPLES[example]}.\n")
    assert written.count("\n") == 1


def test_what_needs_none_starts_and_says_nothing(without_extras):
    assert without_extras["examples"]["custom_layer.py"][0] == 0
    with needed_by("This test", "diffusion-mp[test]"):
        import json  # noqa: F401
    with (
        pytest.raises(ImportError, match="cannot import name 'nothing'"),
        needed_by("This test", "diffusion-mp[test]"),
    ):
        from json import nothing  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    "project", [ROOT, ROOT / "experiments"], ids=["library", "experiments"]
)
def test_a_wheel_has_every_file_of_the_package_and_the_licence(project, tmp_path):
    """Built by pip, which fetches the build backend."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(project),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    files = (
        path
        for path in (project / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    assert {str(path.relative_to(project / "src")) for path in files} == {
        name for name in names if "dist-info" not in name
    }
