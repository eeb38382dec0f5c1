"""For mkdocs.yml: every entry of the errata is a paragraph with an address, and links with its number lead there."""

import re
from typing import Any

NUMBER = r"[A-Z]\d+"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "errata.md":
        return re.sub(rf"^({NUMBER})\. ", r'\n<span id="\1"></span>**\1.** ', markdown, flags=re.M)
    return re.sub(rf"\[({NUMBER})\]\(errata\.md\)", r"[\1](errata.md#\1)", markdown)
