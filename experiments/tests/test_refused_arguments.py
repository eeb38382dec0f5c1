"""Arguments that readers, generators and modules refuse, each in a sentence that names it; types are for the fuzz."""

from pathlib import Path

import pytest
from torch import ones

from diffusion_mp_experiments import graphs, sequences, train
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs.node_sets import visible_labels

KNN = "num_neighbors must be between 1 and 1796"
LIST_OPS = [
    ({"min_length": 3, "max_length": 9}, r"at least 4, .*; got \(3, 9\)"),
    ({"min_length": 10, "max_length": 9}, r"in order .*; got \(10, 9\)"),
    ({"max_args": 1}, "max_args must be at least 2; got 1"),
    ({"max_depth": 1}, "max_depth must be at least 2; got 1"),
    ({"operators": ()}, "operators must name at least one"),
    ({"operators": ("MIN", "PM")}, "operators must be one of 'MIN', .*; got 'PM'"),
]
PATHFINDER = [({"size": 23}, "size must be at least 24 pixels for two paths; got 23")]
BLOCK_MODELS = [
    ({"seed": -1}, "seed must lie in 0"),
    ({"seed": 2**30}, "seed must lie in 0"),
    ({"pattern_sizes": (5, 34)}, "belong to PATTERN"),
    (
        {"name": "PATTERN", "pattern_sizes": (9, 8)},
        r"1 <= smallest <= largest; got \(9, 8\)",
    ),
]
POKEC = [
    ({"num_nodes": 1}, "num_nodes must be at least 2"),
    ({"spread": 1e6}, r"spread must be at most 100, .* got 1000000\.0"),
    ({"seed": 2**70}, "seed must fit into 64 bits"),
]
OTHERS = [
    (lambda: graphs.load_digits(1797), KNN),
    (
        lambda: graphs.load_mnist("none", 60_001),
        "num_images must be at most 60000, got 60001",
    ),
    (lambda: graphs.fit_forecast("last", []), "at least one snapshot to learn from"),
    *(
        (lambda share=share: visible_labels(ones(5), True, share), "share must")
        for share in (0, 1, -0.1, float("nan"))
    ),
    (lambda: as_path("a\0b", "root"), "root must be a path that a file can have"),
    (
        lambda: train.PlanetoidDataModule(split="full"),
        '"random" or "public", got \'full\'',
    ),
    (
        lambda: train.PlanetoidDataModule(tuning=True),
        "tuning needs a number as split, .* got 'random'",
    ),
    (
        lambda: train.SnapshotDataModule(split=4, tuning=True),
        r"split must lie in 0\.\.3, a window",
    ),
]


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *((sequences.ListOps, *row) for row in LIST_OPS),
        *((sequences.Pathfinder, *row) for row in PATHFINDER),
        *(
            (
                lambda name="CLUSTER", **more: graphs.SBMDataset("none", name, **more),
                *row,
            )
            for row in BLOCK_MODELS
        ),
        *(
            (
                graphs.synthetic_pokec,
                {"num_nodes": 10, "num_edges": 10, **options},
                said,
            )
            for options, said in POKEC
        ),
        *((make, {}, message) for make, message in OTHERS),
    ],
)
def test_refused_before_anything_is_made(tmp_path, monkeypatch, make, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make(**options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_typecheck")
def test_types_that_the_fuzz_does_not_try():
    for path in (5, ["a"], None):
        for read in (
            sequences.IMDb,
            graphs.load_pokec,
            lambda path: graphs.load_ogb(path, "ogbn-arxiv"),
        ):
            with pytest.raises(
                TypeError,
                match=r"(path|root) must be a path, a str or a pathlib\.Path; got",
            ):
                read(path)
    for make, message in [
        (lambda: graphs.synthetic_pokec(10, 10, 3, cache=5), "cache must be a path"),
        (
            lambda: sequences.ListOps(operators="MAX"),
            "operators must be a list of names; got 'MAX'",
        ),
        (
            lambda: graphs.load_newsgroups("none", groups="sci.space"),
            r"names of newsgroups; got 'sci\.space'",
        ),
        (lambda: visible_labels(ones(5) / 2, True), "y must"),
    ]:
        with pytest.raises(TypeError, match=message):
            make()
    assert as_path("~/data", "root") == Path.home() / "data"
