"""The Python examples of the README, of docs/certified.md and of docs/released.md run as they stand."""

import re
from pathlib import Path

import pytest

from diffusion_mp.testing.laws import seeded
from pages.blocks import blocks

README = Path(__file__).resolve().parents[1] / "README.md"


def run(page: Path) -> dict[str, object]:
    """The names that a page's blocks leave behind: one story, except what is about a class of the reader's own."""
    scope: dict[str, object] = {}
    for block in blocks(page):
        if "MyDiffusivity" not in block:
            exec(compile(block, str(page), "exec"), scope)
    return scope


def test_the_python_blocks_run_in_order(capsys):
    scope = run(README)
    assert scope["out"].shape == (100, 32)
    assert scope["energies"].shape == (9,)
    printed = capsys.readouterr().out
    assert "Theorem 7 covers" in printed
    assert "Theorem T1 covers" in printed


def test_the_page_on_certified_networks(capsys):
    scope = run(README.parent / "docs" / "certified.md")
    assert scope["energies"].shape == (9,)
    assert "ExplicitEuler" in capsys.readouterr().out


def test_the_page_on_released_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with seeded(0):
        assert float(run(README.parent / "docs" / "released.md")["difference"].detach().abs().max()) < 1e-5


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_file_it_names_exists(page):
    text = page.read_text()
    named = set(re.findall(r"\b(?:configs|examples|docs|tests|benchmarks|\.ci)/[\w/.*-]*\w", text))
    named |= set(re.findall(r"(?<![\w/])[A-Z]+\.md", text)) if page == README else set()
    missing = sorted(path for path in named if not any(README.parent.glob(path)))
    assert not missing, f"{page.name} names {missing}"
