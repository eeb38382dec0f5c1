"""TeX of formulas in Unicode, which is how docstrings write them for a terminal and pages for an editor."""

import re
import unicodedata

TABLE = """½ tfrac12  ‖ Vert  ⟨ langle  ⟩ rangle  Σ sum  … dots  · cdot  × times  ∘ circ  ≤ le  ≥ ge  ≠ ne  ∝ propto
∈ in  ∫ int  ∞ infty  ∂ partial  ∇ nabla  ⪯ preceq  ⪰ succeq  → to  ← gets  𝓔 mathcal{E}  𝒮 mathcal{S}  𝒜 mathcal{A}"""
COMMANDS = dict(re.findall(r"(\S) (\S+)", TABLE))
ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}
RAISED = dict(
    zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ʲᵏⁿᵖᵗᵀ", [*"0123456789+-()jknpt", r"\top"], strict=True)
)
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
#: Words of three letters are operators too, and not products of three variables.
OPERATORS = "BN|GN|LN|PE|tr|[A-Za-z]{3,}"


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
    # Names of methods come as code.
    text = re.sub(r"`?\b([a-z]{3,})_([a-z]{3,})\b`?", r"\\operatorname*{\1\\_\2}", text)
    text = text.replace("`", "")
    text = re.sub(
        rf"(?<![A-Za-z_^\\])(?<!\\begin\{{)(?<!\\end\{{)(?<!\*\{{)({OPERATORS})(?!_?[A-Za-z]{{2}}|[A-Za-z])",
        r"\\operatorname*{\1}",
        text,
    )
    # An index of three letters may be three indices.
    text = re.sub(r"(?<=[^\\]_)([A-Za-z]{4,})(?![A-Za-z_])", r"{\\mathrm{\1}}", text)
    text = re.sub(r"(?<=\w)\*(?=[\s,)/]|\Z)", "^{*}", text)
    text = re.sub(r"√\(((?:[^()]|\([^()]*\))*)\)|√(\w+)", r"\\sqrt{\1\2}", text)
    text = re.sub(
        r"(?<!\\)([_^])(\([^()]*\)|[-−]?½|\\bar\{\w\}|[A-Za-z0-9]+|[α-ω]+)",
        r"\1{\2}",
        text,
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
