"""Formulas within the prose of docstrings, which a terminal shows as they are typed, set as TeX."""

import re
import unicodedata
from collections.abc import Callable

from tex import LOWERED, RAISED, tex

#: What is code, a link or a formula already.
VERBATIM = re.compile(r"``.+?``|`[^`\n]+`|\$[^$\n]+\$|\]\([^)]*\)|<[^>\n]+>", re.S)
FUNCTION = re.compile(
    "argmax|argmin|cos|diag|exp|inf|log|max|min|softmax|sin|tanh|tr|BN|GN|LN|MLP|Proj|ReLU"
)
#: Words that are as short as the names of variables.
ENGLISH = re.compile(
    "Eqs?|Or|Wu|Xu|a|al|am|an|as|at|be|by|do|et|go|he|if|in|is|it|me|my|no|of|on|or|so|to|up|us|we"
)
#: A character that only formulas have, or an index behind a single letter.
SIGN = re.compile(
    rf"[α-ωΓ-Ω‖√Σ∂⟨⟩½∘′\u0302-\u0304{''.join(RAISED)}{''.join(LOWERED)}]"
    r"|(?<![^\W\d_])[^\W\d_]\u0303?[_^](?!_|[A-Za-z]{4})|\d\^\("
)
INDEX = re.compile(r"[_^](?:\{[^}]*\}|\([^()]*\)|[-−]?½|\w{1,3}(?!\w))")
CHARACTERS = re.compile(r"[\w()\[\]{}⟨⟩‖|√Σ∂½=+−/≤≥<>∈←→×·∘≠∝∞′*,.;:…⁻⁺⁽⁾ᵀ-]+")
OPERATORS = "=+−/≤≥<>∈←→×·∘≠∝ "
BRACKETS = dict(zip(")]}⟩", "([{⟨", strict=True))


def inline(line: str, convert: Callable[[str], str] = tex) -> str:
    """Return a line of prose with its formulas between dollars, each of them converted."""
    parts = []
    end = 0
    for found in VERBATIM.finditer(line):
        parts += [_marked(line[end : found.start()], convert), found[0]]
        end = found.end()
    return "".join([*parts, _marked(line[end:], convert)])


def _marked(prose: str, convert: Callable[[str], str]) -> str:
    words = prose.split(" ")
    marked = []
    while words:
        count = _length(words)
        run = " ".join(words[:count])
        if _has_sign(run):
            marked.append(_between_dollars(run, convert))
        else:
            count = 1
            marked.append(words[0])
        words = words[count:]
    return " ".join(marked)


def _length(words: list[str]) -> int:
    """Return how many words at the beginning are one formula: up to prose, or to punctuation outside of brackets."""
    depth = 0
    for number, word in enumerate(words):
        if not _may_belong_to_a_formula(word):
            return number
        depth += sum(map(word.count, "([{⟨")) - sum(map(word.count, ")]}⟩"))
        if depth <= 0 and word.endswith((",", ";", ":", ".")):
            return number + 1
    return len(words)


def _may_belong_to_a_formula(word: str) -> bool:
    """Return whether all letters of a word are single ones, indices or names of functions."""
    plain = re.sub(r"[\u0302-\u0304]", "", unicodedata.normalize("NFD", word))
    # A name of a variable, such as log_q, may have indices too.
    if re.search("[a-z]{2}_[a-z]+_", plain):
        return False
    plain = INDEX.sub("", plain)
    if ENGLISH.fullmatch(plain.strip("(),;:.")) or not CHARACTERS.fullmatch(plain):
        return False
    runs = re.findall("[A-Za-z]+", plain)
    # D^-½AD^-½ is a product of three.
    product = "½" in word
    return all(product or len(run) < 3 or FUNCTION.fullmatch(run) for run in runs)


def _between_dollars(run: str, convert: Callable[[str], str]) -> str:
    """Return a formula between dollars. Punctuation and brackets of the sentence around the formula stay outside."""
    start = 0
    end = len(run)
    while run[start:end] and (
        run[start] == " "
        or (run[start] in OPERATORS and run[start + 1 : start + 2] == " ")
        or (run[start] in "([" and not _is_balanced(run[start:end]))
    ):
        start += 1
    while run[start:end] and (
        run[end - 1] in f",;:.{OPERATORS}"
        or (run[end - 1] in BRACKETS and not _is_balanced(run[start:end]))
    ):
        end -= 1
    formula = run[start:end]
    if not _has_sign(formula) or not _is_balanced(formula):
        return run
    return f"{run[:start]}${convert(formula)}${run[end:]}"


def _has_sign(text: str) -> bool:
    return bool(SIGN.search(unicodedata.normalize("NFD", text)))


def _is_balanced(text: str) -> bool:
    opened = [""]
    for character in text:
        if character in BRACKETS.values():
            opened.append(character)
        elif character in BRACKETS and opened.pop() != BRACKETS[character]:
            return False
    # Behind a space, it joins what stands on both sides.
    norms = text.count("‖") - len(re.findall(r" ‖(?=[ _])", text))
    return opened == [""] and norms % 2 == 0
