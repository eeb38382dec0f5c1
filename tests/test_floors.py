"""The lowest versions that are allowed are those that `.ci/floors` tries."""

import re
import tomllib
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import diffusion_mp

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = Version("3.11.2")  # of Debian 12
# Not tried by .ci/floors: each GPU build of PyTorch asks for one version of Triton, and the tools only read the source.
TOOLS = {"ruff", "mypy", "pre-commit", "mkdocs-material", "mkdocstrings", "playwright"}
UNTRIED = {"diffusion-mp", "torch", "torch-scatter", "triton", *TOOLS}


def floors() -> dict[str, Version]:
    """The lowest version of every package that the library or the experiments ask for."""
    asked: list[Requirement] = []
    for folder in (ROOT, ROOT / "experiments"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        asked += map(
            Requirement,
            chain(project["dependencies"], *project["optional-dependencies"].values()),
        )
    return {
        requirement.name: Version(specifier.version)
        for requirement in asked
        if requirement.name not in UNTRIED
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def pinned(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        pin.name.lower().replace("_", "-"): Version(
            str(pin.specifier).removeprefix("==")
        )
        for pin in pins
    }


@pytest.mark.parametrize("package", sorted(floors()))
def test_the_floor_is_the_version_that_is_tried(package):
    """Up to the last number: the first release of a series may have been withdrawn."""
    floor = floors()[package]
    tried = pinned("constraints-floor.txt")[package]
    assert tried >= floor
    assert tried.release[:2] == (*floor.release, 0)[:2]


def test_what_is_installed_is_for_the_oldest_python_too():
    """Of pinned packages; .ci/run repeats it with the tools and those of the site, which the tests do not need."""
    pins = pinned("constraints.txt").keys() | pinned("constraints-floor.txt").keys()
    needed = {
        each.metadata["Name"]: each.metadata["Requires-Python"] or ""
        for each in distributions()
    }
    needed = {
        name: python
        for name, python in needed.items()
        if name.lower().replace("_", "-") in pins
    }
    assert len(needed) > 20
    refused = [
        f"{name} wants {python}"
        for name, python in needed.items()
        if OLDEST_PYTHON not in SpecifierSet(python)
    ]
    assert not refused


def test_conda_asks_for_the_same_version_and_floors():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "conda" / "meta.yaml").read_text()
    named = {"torch": "pytorch", "torch-geometric": "pytorch_geometric"}
    wanted = [
        (named.get(one.name, one.name), str(one.specifier))
        for one in map(Requirement, project["dependencies"])
    ]
    asked = (
        recipe.partition("  run:")[2].partition("test:")[0].splitlines()[2:]
    )  # after Python
    assert [tuple(line.strip(" -").split()) for line in asked if line] == wanted
    assert f'version = "{diffusion_mp.__version__}"' in recipe


def test_nothing_else_is_pinned_and_shapes_of_any_rank_are_text():
    assert pinned("constraints-floor.txt").keys() == {*floors(), "torch"}
    assert (
        pinned("constraints-floor.txt")["torch"] == pinned("constraints.txt")["torch"]
    )
    # jaxtyping reads a bare ellipsis from 0.3.11 on only.
    bare = [
        f"{path.relative_to(ROOT)}: {annotation}"
        for folder in ("src", "experiments", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for annotation in re.findall(
            r"(?:Shaped|Float|Int|Bool|Num)\d*\[[\w.]+, \.\.\.\]", path.read_text()
        )
    ]
    assert not bare, 'write " ..." for the shape'
