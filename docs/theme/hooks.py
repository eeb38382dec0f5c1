"""For mkdocs.yml: TeX of formulas, addresses of the entries of the errata and links to them, pictures by scheme."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

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
    markdown = re.sub(rf"\[({NUMBER})\]\(errata\.md\)", r"[\1](errata.md#\1)", markdown)
    markdown = re.sub(
        r"!\[(.+)\]\((\S+\.svg)\)", r"![\1](\2#only-light)![\1](\2#only-dark)", markdown
    )
    return CODE_OR_FORMULA.sub(_formula, markdown)


def _formula(found: re.Match[str]) -> str:
    mark, formula = found["mark"], found["formula"]
    return f"{mark}{tex(formula)}{mark}" if formula else found[0]
