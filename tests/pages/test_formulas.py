"""Every formula of the pages can be set by the site."""

from __future__ import annotations

import sys

import pytest

from .blocks import PAGES, ROOT

sys.path.insert(0, str(ROOT / "docs/theme"))
from hooks import CODE_OR_FORMULA
from inline import inline
from tex import tex


def test_formulas_become_tex():
    assert (
        tex("‖x_i − x̃_j‖² ≤ √(σ_i²)")
        == r"\Vert x_{i} - \tilde{x}_{j}\Vert ^{2} \le  \sqrt{\sigma _{i}^{2}}"
    )
    assert tex("D^-½AD^-½ᵀ") == r"D^{-\tfrac12 }AD^{-\tfrac12 }^{\top}"
    assert (
        tex("z* = ReLU(Z^(k+1)), 𝒮_block")
        == r"z^{*} = \operatorname*{ReLU}(Z^{(k+1)}), "
        r"\mathcal{S} _{\mathrm{block}}"
    )


def test_formulas_of_prose_stand_between_dollars():
    assert (
        inline("A node (see x_i = 2, or 3) keeps a, `h_i` and in_channels of W_V x.")
        == "A node (see $x_{i} = 2$, or 3) keeps a, `h_i` and in_channels of $W_{V} x$."
    )
    # A bracket of the sentence, the name of an author and a minus of its own.
    assert (
        inline("(Xu et al. 2019, with −α ≤ (1 + ε) I)")
        == r"(Xu et al. 2019, with $-\alpha  \le  (1 + \epsilon ) I$)"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_character_of_a_formula_has_a_command(page):
    formulas = [
        found["formula"]
        for found in CODE_OR_FORMULA.finditer(page.read_text())
        if found["formula"]
    ]
    assert not [formula for formula in formulas if not tex(formula).isascii()]
