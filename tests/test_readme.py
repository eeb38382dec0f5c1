"""The Python examples of the README and of docs/certified.md run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def run(page: Path) -> dict[str, object]:
    """The names that a page's blocks leave behind: one story, except what is about a class of the reader's own."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    scope: dict[str, object] = {}
    for block in blocks:
        if "MyDiffusivity" not in block:
            exec(compile(block, str(page), "exec"), scope)
    return scope


def test_the_python_blocks_run_in_order(capsys):
    scope = run(README)
    assert scope["out"].shape == (100, 32)
    assert scope["energies"].shape == (9,)
    assert "Theorem 7 covers" in capsys.readouterr().out


def test_the_page_on_certified_networks():
    scope = run(README.parent / "docs" / "certified.md")
    assert scope["energies"].shape == (9,)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:configs|examples|docs)/\w+\.\w+|[A-Z]+\.md", README.read_text())))
)
def test_every_file_it_names_exists(path):
    assert (README.parent / path).exists()
