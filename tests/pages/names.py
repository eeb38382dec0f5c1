"""The table of public names: which are documented, have an example that is run, and are tested.

python -m tests.pages.names      # from the root: writes the table into docs/api/index.md anew
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import diffusion_mp

from .blocks import ROOT, blocks

PAGE = ROOT / "docs/api/index.md"
MARK = "<!-- what follows is written by `python -m tests.pages.names` -->"
STORIES = ["index", "concepts", "training", "large-graphs"]
SCRIPTS = ["getting-started", "write-your-own"]
RUN = ["README.md", "CONTRIBUTING.md", *(f"docs/{page}.md" for page in ["certified", *SCRIPTS, *STORIES])]


class Name(NamedTuple):
    """A public name, where it is exported (the deepest package), and what it is."""

    package: ModuleType
    name: str
    value: Any

    @property
    def documented(self) -> bool:
        """A docstring of its own; of an alias or a constant, a comment or a string beside its definition."""
        if isinstance(self.value, dict | tuple) or not hasattr(self.value, "__dict__") or _alias(self.value):
            return bool(re.search(rf"^#:[^\n]*\n{self.name}\b[^\n]*=", _sources(), re.M))
        text = str(vars(self.value).get("__doc__") or getattr(self.value, "__doc__", "") or "")
        inherited = inspect.isclass(self.value) and "__doc__" not in vars(self.value)
        return bool(text) and not inherited and not text.startswith(f"{self.name}(")  # as dataclasses say by themselves

    @property
    def example(self) -> str:
        """Where an example of it is run: its docstring or a page."""
        if ">>>" in (self.value.__doc__ or "") and self.documented:
            return "docstring"
        return next((page for page in RUN if self.name in _words(ROOT / page)), "")

    @property
    def address(self) -> str:
        """Where the site has it. What is lazy, or has a module's name, stands there by its own path."""
        package = self.package.__name__
        page = f"{package.split('.')[1] if '.' in package else 'diffusion_mp'}.md"
        if not (inspect.isroutine(self.value) or inspect.isclass(self.value) or hasattr(self.value, "derivatives")):
            return page
        hidden = hasattr(self.package, "__getattr__") or find_spec(f"{package}.{self.name}")
        return f"{page}#{self.value.__module__ if hidden else package}.{self.name}"

    @property
    def tested(self) -> bool:
        return self.name in _tested()


def packages() -> Iterator[ModuleType]:
    """Those with public names, the deepest last."""
    yield diffusion_mp
    for found in pkgutil.walk_packages(diffusion_mp.__path__, "diffusion_mp."):
        if found.ispkg:
            package = importlib.import_module(found.name)
            if hasattr(package, "__all__"):
                yield package


def public_names() -> list[Name]:
    """Every one once, in the order of packages and of the alphabet."""
    found: dict[tuple[int, str], Name] = {}
    for package in packages():
        for name in package.__all__:
            value = getattr(package, name)
            if not isinstance(value, ModuleType):
                found[id(value), name] = Name(package, name, value)
    return sorted(found.values(), key=lambda name: (name.package.__name__, name.name.lower()))


def table() -> str:
    """Counts, and a row per name."""
    names = public_names()
    counts = [sum(bool(getattr(name, what)) for name in names) for what in ("documented", "example", "tested")]
    lines = [
        f"{len(names)} public names: {counts[0]} documented, {counts[1]} with an executed example, {counts[2]} tested.",
        "",
        "| name | package | documented | example | tested |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        package = name.package.__name__
        row = [f"[`{name.name}`]({name.address})", f"`{package}`"]
        row += ["yes" if name.documented else "–", name.example or "–", "yes" if name.tested else "–"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as it should be."""
    head, _, _ = PAGE.read_text().partition(MARK)
    return f"{head}{MARK}\n\n{table()}"


@cache
def _words(page: Path) -> set[str]:
    return set(re.findall(r"\w+", "\n".join(blocks(page))))


@cache
def _tested() -> set[str]:
    paths = (
        path for path in (ROOT / "tests").rglob("*.py") if not {"fuzz", "pages"} & set(path.relative_to(ROOT).parts)
    )
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@cache
def _sources() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def _alias(value: object) -> bool:
    return hasattr(value, "__origin__")


if __name__ == "__main__":
    PAGE.write_text(page())
