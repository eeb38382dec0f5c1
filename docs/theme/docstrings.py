"""For mkdocs.yml: what docstrings write for a terminal, as the site writes it."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from tex import tex

REFERENCES = Path(__file__).parents[2] / "src/diffusion_mp/references.bib"
#: An indented paragraph that is not code: it holds a character of formulas that code has not.
FORMULA = re.compile(r"(?<=\n\n) {4}(?!- )[^\n]*[‖Σ∂τβκσ²][^\n]*(?=\n\n|\Z)")


def papers() -> dict[str, str]:
    """Return the addresses of papers on arXiv, by patterns of what docstrings cite: authors and year."""
    found: dict[str, str] = {}
    for entry in REFERENCES.read_text("utf-8").split("\n\n"):
        fields = dict(re.findall(r"(\w+)\s*= \{(.*?)\},?\n", entry, re.S))
        if "eprint" in fields:
            # An accented letter is a group of TeX; a pattern takes any letter for it.
            authors = re.sub(r"\{\\.\{?\w\}?\}", ".", fields["author"]).split(" and")
            *others, last = (author.split(",")[0].strip() for author in authors)
            cited = (
                f"{others[0]} et al."
                if len(others) > 2
                else " & ".join([*filter(None, [", ".join(others)]), last])
            )
            pattern = rf"{cited},? \(?{fields['year']}"
            found[f"{pattern}b" if pattern in found else pattern] = (
                f"https://arxiv.org/abs/{fields['eprint']}"
            )
    return found


PAPERS = {
    re.compile(rf"{pattern}(?![\w\]])"): address
    for pattern, address in papers().items()
}


class ForTheSite(griffe.Extension):
    """Replace roles of Sphinx by names, pages and cited papers by links, and formulas on lines of their own by TeX."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(
                r":(?:class|func|meth|mod|attr|obj):`~?", "`", obj.docstring.value
            )
            text = FORMULA.sub(lambda found: f"$$\n{tex(found[0])}\n$$", text)
            for paper, address in PAPERS.items():
                text = paper.sub(rf"[\g<0>]({address})", text, count=1)
            text = re.sub(
                r"docs/errata\.md,? ([A-Z]\d+)", r"[errata \1](../errata.md#\1)", text
            )
            obj.docstring.value = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)
