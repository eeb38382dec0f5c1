"""README is short, its links lead somewhere, and its example runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

from pages.blocks import blocks

README = Path(__file__).resolve().parents[1] / "README.md"


def code(block: str) -> str:
    assert len([line for line in block.splitlines() if line]) <= 7
    return block


def test_the_lines_with_pyg_print_energies_that_fall(data_root, capsys):
    block = code(blocks(README)[0])
    folder = data_root / "Planetoid"
    scope: dict[str, Any] = {}
    exec(compile(block.replace('"data"', f'"{folder}"'), str(README), "exec"), scope)
    assert scope["logits"].shape == (2708, 7)
    energies = scope["model"].energies(scope["data"].x, scope["data"].edge_index)
    assert bool((energies.diff() <= 0).all())
    assert capsys.readouterr().out.startswith("tensor(")


def test_the_lines_with_scikit_learn_find_what_it_says(capsys):
    exec(compile(code(blocks(README)[1]), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert float(printed.removeprefix("right: ").partition("%")[0]) > 91
    assert re.search(r"It prints 9\d %", README.read_text())


def test_it_is_read_in_thirty_seconds():
    lines = README.read_text().splitlines()
    assert len(lines) <= 140
    assert not [
        line
        for line in lines
        if len(line) > 100 and not line.startswith(("python -m pip install", "| "))
    ]


def test_its_links_lead_somewhere():
    """To files, and to headings in them, by the names that GitHub gives headings."""
    for path, heading in re.findall(
        r"(?:\]\(|\]: )(?!https?:)([\w./-]+)(?:#([\w-]+))?", README.read_text()
    ):
        linked = README.parent / path
        assert linked.is_file(), path
        if heading:
            heads = re.findall(r"^#+ (.*)", linked.read_text(), re.M)
            assert heading in {
                re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads
            }, heading


def test_its_scores_stand_in_the_tables_that_it_links_to():
    text = README.read_text()
    links = dict(re.findall(r"^\[(\w+)\]: (docs/results/\S+\.md)$", text, re.M))
    claims = [
        (claim, name)
        for claim, name in re.findall(r"\[([^\]]*\d\.\d[^\]]*)\]\[(\w+)\]", text)
        if name in links
    ]
    assert len(claims) == 11
    for claim, name in claims:
        table = (README.parent / links[name]).read_text()
        scores = re.findall(r"^\| [^|]+ \| (\d+\.\d ± \d+\.\d) ", table, re.M)
        assert claim.removesuffix(" %") in scores


def test_every_table_of_results_has_its_page_on_the_site():
    folder = README.parent
    names = {path.stem for path in (folder / "results").glob("*.jsonl")}
    assert {path.stem for path in (folder / "docs" / "results").iterdir()} == names
    listed = re.findall(
        r"^ +- results/(\S+)\.md$", (folder / "mkdocs.yml").read_text(), re.M
    )
    assert listed == sorted(names)
    page = (folder / "docs" / "results.md").read_text()
    assert re.findall(r"\]\(results/(\S+)\.md\)", page) == sorted(names)


@pytest.mark.parametrize(
    "page",
    [README, *sorted((README.parent / "docs").rglob("*.md"))],
    ids=lambda page: page.name,
)
def test_every_file_it_names_exists(page):
    text = page.read_text()
    named = set(
        re.findall(
            r"(?<![\w/])(?:configs|examples|docs|tests|benchmarks|experiments|\.ci)/[\w/.*-]*\w",
            text,
        )
    )
    named |= set(re.findall(r"(?<![\w/])[A-Z]+\.md", text)) if page == README else set()
    missing = sorted(path for path in named if not any(README.parent.glob(path)))
    assert not missing, f"{page.name} names {missing}"
