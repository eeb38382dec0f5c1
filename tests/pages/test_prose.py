"""What a reader can rely on in the prose: short sentences, few words to learn, formulas that the site can set."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from . import names
from .blocks import PAGES, ROOT

sys.path.insert(0, str(ROOT / "docs/theme"))
from hooks import CODE_OR_FORMULA
from tex import tex

NEW_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.|\w+: )\s*)|\|")
LONGEST = 35


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than `LONGEST` words; code and formulas count as one word each."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "\n\n", text, flags=re.S)
    text = re.sub(r"\$[^$]*\$|`+[^`]*`+", "N", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    found = []
    for block in NEW_BLOCK.split(text):
        if not block.lstrip().startswith(">>>"):
            sentences = re.split(r"(?<=[.!?])[)\"*_]*\s+", block)
            found += [line for line in sentences if len(re.findall(r"\S*[A-Za-z]\S*", line)) > LONGEST]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_of_a_page_are_short(page):
    assert not long_sentences(page.read_text())


def test_sentences_of_docstrings_are_short():
    texts = [inspect.cleandoc(name.documented) for name in names.public_names()]
    assert not [found for text in texts if (found := long_sentences(text))]


def test_a_long_sentence_is_found():
    assert long_sentences(f"Short. {'word ' * 35}word. Short.")
    assert not long_sentences(f"{'word ' * 20}`code {'word ' * 20}`.")


def test_the_glossary_has_few_words():
    words = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "docs/concepts.md").read_text(), re.M)
    assert 20 <= len(words) == len(set(words)) <= 30


def test_formulas_become_tex():
    assert tex("‖x_i − x̃_j‖² ≤ √(σ_i²)") == r"\Vert x_{i} - \tilde{x}_{j}\Vert ^{2} \le  \sqrt{\sigma _{i}^{2}}"
    assert tex("D^-½AD^-½ᵀ") == r"D^{-\tfrac12 }AD^{-\tfrac12 }^{\top}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_character_of_a_formula_has_a_command(page):
    formulas = [found["formula"] for found in CODE_OR_FORMULA.finditer(page.read_text()) if found["formula"]]
    assert not [formula for formula in formulas if not tex(formula).isascii()]
