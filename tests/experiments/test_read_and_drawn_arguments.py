"""Folders of files, and what tasks are drawn from: arguments that are something else are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs import load_ogb, load_pokec, synthetic_pokec
from diffusion_mp_experiments.sequences import IMDb, ListOps, Pathfinder

pytestmark = pytest.mark.usefixtures("no_typecheck")  # our own sentences, not the test run's shape checks


@pytest.mark.parametrize("path", [None, 5, ["a"]])
def test_paths(path):
    readers = (IMDb, load_pokec)
    for read in (*readers, lambda path: load_ogb(path, "ogbn-arxiv")):
        with pytest.raises(TypeError, match=r"(path|root) must be a path, a str or a pathlib\.Path; got"):
            read(path)
    if path is not None:
        with pytest.raises(TypeError, match="cache must be a path"):
            synthetic_pokec(10, 10, 3, cache=path)
    assert as_path("~/data", "root") == Path.home() / "data"


def test_options_of_drawn_tasks():
    with pytest.raises(TypeError, match="operators must be a list of names; got 'MAX'"):
        ListOps(operators="MAX")
    with pytest.raises(TypeError, match="distractors must be a whole number; got"):
        Pathfinder(distractors=2.5)
