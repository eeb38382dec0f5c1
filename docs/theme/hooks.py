"""For mkdocs.yml: TeX of formulas, addresses of the entries of the errata and links to them, pictures by scheme."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from inline import VERBATIM, inline
from tex import tex

NUMBER = r"[A-Z]\d+"
CODE_OR_FORMULA = re.compile(
    r"```.*?```|`[^`\n]*`|(?P<mark>\$\$?)(?P<formula>[^$]+)(?P=mark)", re.S
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page as the site renders it. Formulas of the pages are written in Unicode, between dollars."""
    if page.file.src_uri == "errata.md":
        markdown = re.sub(
            rf"^({NUMBER})\. ", r'\n<span id="\1"></span>**\1.** ', markdown, flags=re.M
        )
    # The first lines of docstrings, whose formulas stand between no dollars.
    if page.file.src_uri == "api/index.md":
        markdown = re.sub(r"(?<=\): ).+", _summary, markdown)
    markdown = re.sub(rf"\[({NUMBER})\]\(errata\.md\)", r"[\1](errata.md#\1)", markdown)
    markdown = re.sub(
        r"!\[(.+)\]\((\S+\.svg)\)", r"![\1](\2#only-light)![\1](\2#only-dark)", markdown
    )
    return CODE_OR_FORMULA.sub(_formula, markdown)


def _summary(found: re.Match[str]) -> str:
    """Return a line with dollars around its formulas, in which no underscore need be escaped."""
    text = inline(found[0].replace(r"\_", "_"), str)
    kept = [match[0] for match in VERBATIM.finditer(text)]
    escaped = [part.replace("_", r"\_") for part in VERBATIM.split(text)]
    return "".join(map("".join, zip(escaped, [*kept, ""], strict=True)))


def _formula(found: re.Match[str]) -> str:
    mark, formula = found["mark"], found["formula"]
    return f"{mark}{tex(formula)}{mark}" if formula else found[0]
