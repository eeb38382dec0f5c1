"""For mkdocs.yml: what docstrings write for a terminal, as the site writes it."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from tex import tex

#: An indented paragraph that is not code: it holds a character of formulas that code has not.
FORMULA = re.compile(r"(?<=\n\n) {4}(?!- )[^\n]*[‖Σ∂τβκσ²][^\n]*(?=\n\n|\Z)")


class ForTheSite(griffe.Extension):
    """Replace roles of Sphinx by names, pages by links, and formulas on lines of their own by TeX."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":(?:class|func|meth|mod|attr|obj):`~?", "`", obj.docstring.value)
            text = FORMULA.sub(lambda found: f"$$\n{tex(found[0])}\n$$", text)
            text = re.sub(r"docs/errata\.md,? ([A-Z]\d+)", r"[errata \1](../errata.md#\1)", text)
            obj.docstring.value = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)
