"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
# One story told in several blocks; the last one is about a class of the reader's own.
BLOCKS = [
    block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "MyDiffusivity" not in block
]


def test_the_python_blocks_run_in_order(capsys):
    assert len(BLOCKS) >= 2
    scope: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["out"].shape == (100, 32)
    assert "Theorem 7 covers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:configs|examples|docs)/\w+\.\w+|[A-Z]+\.md", README.read_text())))
)
def test_every_file_it_names_exists(path):
    assert (README.parent / path).exists()
