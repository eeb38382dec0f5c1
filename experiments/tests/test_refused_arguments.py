"""Arguments that readers, generators and modules refuse by their name; the fuzz tries all others."""

from functools import partial
from pathlib import Path

import pytest
from torch import ones

from diffusion_mp_experiments import graphs, sequences, train
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs.node_sets import visible_labels

sbm = partial(graphs.SBMDataset, "none")
pokec = partial(graphs.synthetic_pokec, 10, 10)
REFUSED = [
    (lambda: sequences.ListOps(min_length=3, max_length=9), ValueError, "lengths"),
    (lambda: sequences.ListOps(min_length=10, max_length=9), ValueError, "lengths"),
    (lambda: sequences.ListOps(max_args=1), ValueError, "max_args"),
    (lambda: sequences.ListOps(max_depth=1), ValueError, "max_depth"),
    (lambda: sequences.ListOps(operators=()), ValueError, "operators"),
    (lambda: sequences.ListOps(operators="MAX"), TypeError, "operators"),
    (lambda: sequences.ListOps(operators=("MIN", "PM")), ValueError, "operators"),
    (lambda: sequences.Pathfinder(size=23), ValueError, "size"),
    (lambda: sequences.IMDb(5), TypeError, "path"),
    (lambda: sbm("CLUSTER", seed=-1), ValueError, "seed"),
    (lambda: sbm("CLUSTER", seed=2**30), ValueError, "seed"),
    (lambda: sbm("CLUSTER", pattern_sizes=(5, 34)), ValueError, "pattern_sizes"),
    (lambda: sbm("PATTERN", pattern_sizes=(9, 8)), ValueError, "pattern_sizes"),
    (lambda: graphs.synthetic_pokec(num_nodes=1), ValueError, "num_nodes"),
    (lambda: pokec(spread=1e6), ValueError, "spread"),
    (lambda: pokec(seed=2**70), ValueError, "seed"),
    (lambda: pokec(cache=5), TypeError, "cache"),
    (lambda: graphs.load_pokec(5), TypeError, "root"),
    (lambda: graphs.load_ogb(5, "ogbn-arxiv"), TypeError, "root"),
    (lambda: graphs.load_newsgroups("none", groups="sci.med"), TypeError, "groups"),
    (lambda: graphs.load_digits(1797), ValueError, "k"),
    (lambda: graphs.fit_forecast("last", []), ValueError, "snapshots"),
    (lambda: visible_labels(ones(5) / 2, True), TypeError, "y"),
    (lambda: as_path("a\0b", "root"), ValueError, "root"),
    (lambda: train.PlanetoidDataModule(split="full"), ValueError, "split"),
    (lambda: train.PlanetoidDataModule(tuning=True), ValueError, "tuning"),
    (lambda: train.SnapshotDataModule(split=4, tuning=True), ValueError, "split"),
]


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(("make", "error", "name"), REFUSED)
def test_refused_before_anything_is_made(tmp_path, monkeypatch, make, error, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"\b{name}\b"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_expanded():
    assert as_path("~/data", "root") == Path.home() / "data"
