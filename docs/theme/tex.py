"""TeX of formulas in Unicode, which is how docstrings write them for a terminal and pages for an editor."""

import re
import unicodedata

TABLE = """½ tfrac12  ‖ Vert  ⟨ langle  ⟩ rangle  Σ sum  … dots  · cdot  × times  ∘ circ  ≤ le  ≥ ge  ≠ ne  ∝ propto
∈ in  ∞ infty  ∂ partial  ∇ nabla  ⪯ preceq  ⪰ succeq  → to  ← gets  𝓔 mathcal{E}"""
COMMANDS = dict(re.findall(r"(\S) (\S+)", TABLE))
ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵏⁿᵀ", [*"0123456789+-kn", r"\top"], strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
OPERATORS = "argmax|argmin|cos|diag|exp|inf|log|max|min|Proj|sigmoid|sin|softmax|tr"


def tex(formula: str) -> str:
    """Return a formula in TeX: ``√(σ_i²)`` becomes ``\\sqrt{\\sigma_{i}^{2}}``."""
    text = re.sub(
        r"\w", lambda letter: unicodedata.normalize("NFD", letter[0]), formula.strip()
    )
    text = re.sub(
        rf"(\w)([{''.join(ACCENTS)}])",
        lambda found: rf"\{ACCENTS[found[2]]}{{{found[1]}}}",
        text,
    )
    text = re.sub(
        rf"(?<![A-Za-z])({OPERATORS})(?![A-Za-z])", r"\\operatorname*{\1}", text
    )
    text = re.sub(r"√\(((?:[^()]|\([^()]*\))*)\)|√(\w+)", r"\\sqrt{\1\2}", text)
    text = re.sub(
        r"([_^])(\([^()]*\)|[-−]?½|\\bar\{\w\}|[A-Za-z0-9α-ω]+)", r"\1{\2}", text
    )
    text = re.sub(
        f"[{''.join(RAISED)}]+",
        lambda run: f"^{{{''.join(map(RAISED.get, run[0]))}}}",
        text,
    )
    text = re.sub(
        f"[{''.join(LOWERED)}]+",
        lambda run: f"_{{{''.join(map(LOWERED.get, run[0]))}}}",
        text,
    )
    text = re.sub(" {2,}", r" \\quad ", text)
    text = text.replace("−", "-").replace("′", "'")
    return re.sub(rf"[{''.join(COMMANDS)}α-ωΓ-Ω]", _command, text).strip()


def _command(found: re.Match[str]) -> str:
    character = found[0]
    letter = (
        unicodedata.name(character)
        .rsplit(" ", 1)[-1]
        .lower()
        .replace("lamda", "lambda")
        .replace("phi", "varphi")
    )
    return f"\\{COMMANDS.get(character) or (letter if character.islower() else letter.capitalize())} "
