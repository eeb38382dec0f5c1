"""For mkdocs.yml: what docstrings write for a terminal, as the site writes it."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from inline import inline
from tex import tex

REFERENCES = Path(__file__).parents[2] / "src/diffusion_mp/references.bib"
#: An indented paragraph, of code or of formulas.
BLOCK = re.compile(
    r"(?<=\n\n)(?: {4}(?!- |>>>)[^\n]+(?:\n(?= {4})|(?=\n\n|\Z)))+(?=\n\n|\Z)"
)
#: The options behind ``**options`` are parameters like the others, so they get the heading that griffe knows.
OPTIONS = re.compile(r"^Options:$", re.M)
#: A section of shapes, and its entries: ``name: shape``, or the same as an item of a list.
SHAPES = re.compile(r"^Shapes?:\n((?: {4}[^\n]*(?:\n|\Z)|\n(?= {4}))+)", re.M)
#: A line, and before its text the name of an entry in a section.
ENTRY = re.compile(r"^( +(?:- )?\w[\w, *]*(?: \(.*?\))?: | *)(.+)$", re.M)
SHAPE = re.compile(r"^ {4}(?:- )?([^\s:][^:\n]*): ", re.M)
#: Methods and attributes that modules of the library call on each other, and that no user needs.
INTERNAL = {
    "AuxiliaryLoss": "lacks_gradient",
    "Certificate": "of_step refused",
    "CertifiedBlock": "attention by_head limit measured returned start states",
    "CertifiedConv": "attention",
    "Coupling": "both received whole",
    "DiffusionConv": "why_uncertified",
    "Energy": "checked",
    "Graph": "centre derived first_node total",
    "KernelizedSoftmaxDiffusivity": "scaled_queries_and_keys",
    "LogLowRankCoupling": "terms",
    "PairTerm": "projected",
    "PenaltyDiffusivity": "penalty_of reads_the_state",
    "SparseFlowDiffusivity": "friction_features resistance_features",
    "SumCoupling": "ptr row_stochastic",
    "TermModule": "draw_uniform",
}


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
    re.compile(pattern.replace(" ", r"\s+") + r"(?![\w\]])"): address
    for pattern, address in papers().items()
}


class ForTheSite(griffe.Extension):
    """Replace roles of Sphinx by names, pages and cited papers by links, and formulas on lines of their own by TeX.

    Sections of options and shapes become lists, and what is `INTERNAL` is left out.
    """

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        for name in INTERNAL.get(cls.name, "").split():
            # An alias of a class does not ask whether the member it stands for is public.
            cls.del_member(name)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(
                r":(?:class|func|meth|mod|attr|obj):`~?", "`", obj.docstring.value
            )
            text = BLOCK.sub(_displayed, text)
            text = _with_formulas(text)
            text = OPTIONS.sub("Keyword Args: Options:", text)
            text = SHAPES.sub(_shapes, text)
            for paper, address in PAPERS.items():
                text = paper.sub(rf"[\g<0>]({address})", text, count=1)
            text = re.sub(
                r"docs/errata\.md,?\s+([A-Z]\d+)", r"[errata \1](../errata.md#\1)", text
            )
            obj.docstring.value = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)


def _with_formulas(text: str) -> str:
    """Return a docstring with dollars around formulas, except for its examples and the names of entries."""
    prose, examples, code = text.partition("\nExamples:\n")
    # Every other part stands between two pairs of dollars.
    parts = prose.split("$$")
    parts[::2] = [ENTRY.sub(_marked, part) for part in parts[::2]]
    return "$$".join(parts) + examples + code


def _marked(found: re.Match[str]) -> str:
    return found[1] + inline(found[2])


def _displayed(found: re.Match[str]) -> str:
    """Return the lines of a formula, each set on its own; code, which is ASCII, as it is."""
    if found[0].replace("…", "").isascii():
        return found[0]
    return "\n\n".join(f"$$\n{tex(line)}\n$$" for line in found[0].splitlines())


def _shapes(found: re.Match[str]) -> str:
    """Return a section of shapes as a heading and a list."""
    entries = SHAPE.sub(r"- `\1`: ", found[1])
    return f'<span class="doc-section-title">Shapes:</span>\n\n{entries}'
