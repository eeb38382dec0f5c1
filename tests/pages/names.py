"""The page of public names by task; and which names are documented, shown, tested and used.

python -m tests.pages.names      # from the root: writes docs/api/index.md anew
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import diffusion_mp
import diffusion_mp_experiments
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import EnergyTerm

from .blocks import PAGES, ROOT, blocks

PAGE = ROOT / "docs/api/index.md"
#: What every name has to be; see `Name`.
PROPERTIES = ("documented", "example", "tested", "used")
#: Folders with code that uses names.
FOLDERS = ("src", "experiments/src", "examples", "benchmarks")
MARK = "<!-- what follows is written by `python -m tests.pages.names` -->"
END = "<!-- end -->"
#: Headings of the page for readers, and patterns of the names below them, of which the longest that fits counts.
TASKS = {
    "Train a whole model": "models.* estimators.*",
    "Put a layer into your own model": "layers.*",
    "Choose a diffusivity": "diffusivities.*",
    "Choose an update": "updates.*",
    "Choose an energy": "energies.*",
    "Certify an energy": "energies.[Cc]ertif* energies.*ounds energies.theorem*",
    "Look inside a trained model": "diagnostics.*",
    "Prepare data": "data.* graph.*",
    "Work on large graphs, or in several processes": "distributed.* data.RandomPartitionLoader data.find_clusters "
    "data.PartOf models.full_graph_inference diffusion_mp.show_progress",
    "Convert weights, export, cite": "export.* layers.from_pyg models.released_state_dict diffusion_mp.cite "
    "diffusion_mp.load",
    "Compute with couplings": "couplings.*",
    "Test what you have written": "testing.*",
    "Handle errors": "diffusion_mp.*",
    "Load data sets of papers": "diffusion_mp_experiments.graphs.* diffusion_mp_experiments.sequences.*",
    "Compare models on your own data": "diffusion_mp_experiments.compare.*",
    "Train with Lightning": "diffusion_mp_experiments.train.*",
    "Call the operations below the couplings": "kernels.*",
}


class Name(NamedTuple):
    """A public name, where it is exported (the deepest package), and what it is."""

    package: ModuleType
    name: str
    value: Any

    @property
    def documented(self) -> str:
        """Its own docstring, not an inherited one; of an alias or a constant, the string below its definition."""
        if not (
            inspect.isclass(self.value)
            or inspect.isroutine(self.value)
            or hasattr(self.value, "derivatives")
        ):
            return _strings().get(self.name, "")
        if inspect.isclass(self.value):
            text = vars(self.value).get("__doc__")
        else:
            text = self.value.__doc__
        # as dataclasses say by themselves
        if not text or text.startswith(f"{self.name}("):
            return ""
        return text

    @property
    def summary(self) -> str:
        """The first line of its docstring, or the first paragraph where a sentence goes on, in Markdown."""
        paragraph = inspect.cleandoc(self.documented).partition("\n\n")[0]
        line = paragraph.partition("\n")[0]
        text = line if line.endswith(".") else paragraph.replace("\n", " ")
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
        text = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)
        return re.sub(
            r"(`+)[^`]*\1|_", lambda found: "\\_" if found[0] == "_" else found[0], text
        )

    @property
    def task(self) -> str:
        path = f"{self.package.__name__.removeprefix('diffusion_mp.')}.{self.name}"
        fits = [
            (len(each), task)
            for task, all_ in TASKS.items()
            for each in all_.split()
            if fnmatch(path, each)
        ]
        return max(fits)[1]

    @property
    def example(self) -> bool:
        """Whether the examples of its docstring, which the tests run, use it."""
        code = "".join(
            example.source
            for example in doctest.DocTestParser().get_examples(self.documented)
        )
        return self.name in {
            node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)
        }

    @property
    def address(self) -> str:
        """Where the site has it. What is lazy, or has a module's name, stands there by its own path."""
        package = self.package.__name__
        top, _, below = package.partition(".")
        page = f"{'experiments' if top.endswith('experiments') else below.partition('.')[0] or top}.md"
        # At the top only what __all__ leaves out is.
        lazy = below and hasattr(self.package, "__getattr__")
        hidden = lazy or find_spec(f"{package}.{self.name}")
        return f"{page}#{self.value.__module__ if hidden else package}.{self.name}"

    @property
    def tested(self) -> bool:
        return self.name in _tested()

    @property
    def used(self) -> bool:
        """Whether code other than its own definition and the tests has work for it.

        Couplings and terms of energies are there for users to compose, and need no user here.
        """
        if isinstance(self.value, type) and issubclass(
            self.value, (Coupling, EnergyTerm)
        ):
            return True
        own = getattr(self.value, "__name__", self.name) == self.name and getattr(
            self.value, "__module__", None
        )
        return any(
            self.name in names and home != (own, self.name) for home, names in _uses()
        )


def packages() -> Iterator[ModuleType]:
    """Those with public names, the deepest last."""
    yield diffusion_mp
    for top in (diffusion_mp, diffusion_mp_experiments):
        for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
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
    return sorted(
        found.values(), key=lambda name: (name.package.__name__, name.name.lower())
    )


def by_task() -> str:
    names = public_names()
    parts = []
    for task in TASKS:
        found = [
            f"- [`{name.name}`]({name.address}): {name.summary}"
            for name in names
            if name.task == task
        ]
        parts.append("\n".join([f"## {task}", "", *found, ""]))
    return "\n".join(parts)


def page() -> str:
    """Return the text of the page, of which the part below the mark is computed."""
    head, _, below = PAGE.read_text().partition(MARK)
    _, end, tail = below.partition(END)
    return f"{head}{MARK}\n\n{by_task()}" + (f"\n{end}{tail}" if end else "")


@cache
def _tested() -> set[str]:
    """What tests import from the library, or from its modules."""
    found: set[str] = set()
    for path in [
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "experiments/tests").rglob("*.py"),
    ]:
        if {"fuzz", "pages"} & set(path.relative_to(ROOT).parts):
            continue
        modules = {"diffusion_mp"}
        attributes = []
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "diffusion_mp"
            ):
                names = {name.name for name in node.names}
                found |= _named(tree) if "*" in names else names
                modules |= {name.asname or name.name for name in node.names}
            elif isinstance(node, ast.Import):
                modules |= {
                    name.asname or name.name
                    for name in node.names
                    if name.name == "diffusion_mp"
                }
            elif isinstance(node, ast.Attribute):
                # mp.package.name
                if isinstance(node.value, ast.Attribute):
                    module = node.value.value
                else:
                    module = node.value
                if isinstance(module, ast.Name):
                    attributes.append((module.id, node.attr))
        found |= {attribute for module, attribute in attributes if module in modules}
    return found


@cache
def _uses() -> list[tuple[tuple[str, str], set[str]]]:
    """Home (module, definition) and names of every top-level definition of a script, or of any other file.

    The `__init__` of a package hands names on, which is no use of them.
    """
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            for node in (
                ast.parse(path.read_text()).body if path.name != "__init__.py" else []
            ):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    found.append(((module, getattr(node, "name", "")), _named(node)))
    for path in (ROOT / "experiments/src/diffusion_mp_experiments/configs").rglob(
        "*.yaml"
    ):
        found.append((("", ""), set(re.findall(r"\w+", path.read_text()))))
    for page in PAGES:
        code = (
            block for block in blocks(page) if not block.startswith(" ")
        )  # no fragments
        found += [(("", ""), _named(ast.parse(block))) for block in code]
    return found


def _named(code: ast.AST) -> set[str]:
    """Names and attributes that a piece of code reads, and classes of ours that it gives the path of."""
    found = set()
    for node in ast.walk(code):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)) if re.match(r"diffusion_mp\w*\.", text):
                found.add(text.rpartition(".")[2])
    return found


@cache
def _strings() -> dict[str, str]:
    """The strings below definitions of modules, by the defined name."""
    found = {}
    for path in sorted(
        path
        for folder in ("src", "experiments/src")
        for path in (ROOT / folder).rglob("*.py")
    ):
        for definition, below in pairwise(ast.parse(path.read_text()).body):
            match definition, below:
                case (
                    ast.Assign(targets=[ast.Name(id=name), *_])
                    | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    found[name] = str(text)
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
