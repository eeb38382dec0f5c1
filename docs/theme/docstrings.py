"""For mkdocs.yml: what docstrings write for a terminal, as the site writes it."""

import re
from typing import Any

import griffe


class ForTheSite(griffe.Extension):
    """Roles of Sphinx become names, and pages that a docstring names become links."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":(?:class|func|meth|mod|attr|obj):`~?", "`", obj.docstring.value)
            text = re.sub(r"docs/errata\.md,? ([A-Z]\d+)", r"[errata \1](../errata.md#\1)", text)
            obj.docstring.value = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)
