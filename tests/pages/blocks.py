"""The pages of prose, and their Python blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/results").glob("*.md")),
    *TUTORIALS,
]


def blocks(page: Path) -> list[str]:
    """What stands between ```python and ```, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
