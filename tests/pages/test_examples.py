"""The examples of docstrings run, and every public name stands on the page of names."""

import doctest
import warnings

import pytest
import torch
from torch_geometric.data import Data

import diffusion_mp

from . import names

EXAMPLES = [name for name in names.public_names() if ">>>" in name.documented]


def given() -> dict[str, object]:
    """What every example may use; docs/api/index.md says so."""
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    node = torch.arange(6)
    edges = torch.stack([node, (node + 1) % 6])
    edge_index = torch.cat([edges, edges.flip(0)], 1)
    q, k = torch.rand(2, 6, 2, 3, generator=torch.Generator().manual_seed(1))
    of_the_library = (
        name
        for name in names.public_names()
        if "experiments" not in name.package.__name__
    )
    public = {name.name: name.value for name in of_the_library}
    graph = diffusion_mp.Graph(6, edge_index)
    return public | {
        "torch": torch,
        "Data": Data,
        "x": x,
        "node": node,
        "edge_index": edge_index,
        "graph": graph,
        "q": q,
        "k": k,
    }


@pytest.mark.parametrize(
    "name", EXAMPLES, ids=lambda name: f"{name.package.__name__}.{name.name}"
)
def test_the_example_of(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    scope = (
        given()
        | {"folder": tmp_path}
        | {public: getattr(name.package, public) for public in name.package.__all__}
    )
    found = doctest.DocTestParser().get_doctest(
        name.documented, scope, name.name, None, 0
    )
    report: list[str] = []
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(0)
        outcome = doctest.DocTestRunner(
            verbose=False, optionflags=doctest.ELLIPSIS
        ).run(found, out=report.append)
    assert outcome.attempted
    assert not outcome.failed, "".join(report)


def test_the_page_of_names_is_up_to_date():
    assert names.PAGE.read_text() == names.page(), "run `python -m tests.pages.names`"


def test_a_line_says_what_a_name_is():
    name = names.Name(diffusion_mp, "given", given)
    given.__doc__ = "Say :func:`~a.b`, with s_ij of docs/errata.md.\n\nMore."
    assert name.summary == r"Say `a.b`, with s\_ij of [errata](../errata.md)."
    assert not [
        name.name
        for name in names.public_names()
        if not name.summary.endswith((".", ")", "`"))
    ]


@pytest.mark.parametrize("what", names.PROPERTIES)
def test_every_public_name_is(what):
    missing = [
        f"{name.package.__name__}.{name.name}"
        for name in names.public_names()
        if not getattr(name, what)
    ]
    assert not missing, f"{what} is missing for {', '.join(missing)}"


def test_formulas_of_docstrings_are_readable_where_nobody_sets_them():
    """Neither a terminal nor the site, which loads no scripts from elsewhere, draws LaTeX."""
    assert not [
        name.name for name in names.public_names() if ".. math::" in name.documented
    ]
