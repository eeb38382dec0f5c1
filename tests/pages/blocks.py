"""The Python blocks of a page."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: Path) -> list[str]:
    """What stands between ```python and ```, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
