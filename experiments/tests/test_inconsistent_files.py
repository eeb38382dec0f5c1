"""Files that can be read, and whose parts do not belong together: each is refused by its name."""

import numpy as np
import pytest

import small_sets as small
from diffusion_mp_experiments import graphs
from small_sets import make_series, profile, rows_of

HETEROPHILOUS = [
    (
        {"edges": np.array([[0, 6]])},
        r"small\.npz: edges must lie in 0..5, got up to 6.*heterophilous-graphs",
    ),
    ({"edges": np.array([0, 1])}, "do not go with 6 nodes"),
    ({"node_labels": np.array([0, 1])}, r"node_labels \[2\]"),
    ({"node_labels": np.array([0.0] * 6)}, "node_labels must be integers"),
    ({"node_features": np.array([[np.nan]] * 6)}, "must be finite numbers"),
    ({"val_masks": np.ones((3, 6), bool)}, r"val_masks must be bools \[splits, 6\]"),
    ({"val_masks": np.ones((2, 6), bool)}, "a node is in two parts of a split"),
    (
        {"train_masks": np.array(["a"] * 6)},
        "TypeError: can't convert np.ndarray of type numpy.str_",
    ),
    (
        {"edges": np.array([{}], dtype=object)},
        "Object arrays cannot be loaded when allow_pickle=False",
    ),
]
FACEBOOK = [
    ({"local_info": np.ones((6, 1), np.uint16)}, "is no table of whole numbers"),
    ({"local_info": np.ones((6, 4))}, "its local_info is no table of whole numbers"),
    ({"local_info": np.ones((5, 4), np.uint16)}, r"a matrix \(6, 6\) of 5 people"),
    ({"A": np.eye(6)}, "A is no sparse matrix"),
    ({"local_info": np.full((6, 4), 3, np.uint16)}, "column of gender must hold 0"),
]
MOLECULES = [
    ({"num_nodes": np.array([2, 3, 2])}, "do not add up to 6 nodes"),
    ({"num_nodes": np.array([6, 0, 0])}, "do not add up"),
    ({"y": np.array([0, 1])}, r"num_nodes is \[3\] for"),
    ({"y": np.array([0, 1, 2])}, r"y must lie in 0\.\.1, got up to 2"),
    ({"edge_index_local": np.full((2, 6), 2)}, "the number of its graph's nodes - 1"),
    ({"edge_feat": np.full((6, 5), np.inf)}, "must be finite numbers"),
    (
        {"edge_feat": np.zeros((6, 3_000_000), np.float32)},
        "unpack into 720[0-9]{5} bytes, more than 67108864",
    ),
    ({"test_index": np.array([0])}, "a molecule is twice"),
    ({"atom_type": np.array([0, 2, 1, 1, 0, 64])}, r"atom_type must lie in 0\.\.63"),
]
SERIES = [
    ({"FX": [[1.0, float("nan"), 2.0]]}, "must be finite numbers"),
    ({"FX": [[1.0], [1.0, 2.0]]}, "expected sequence"),
    ({"edges": [[0, 3]]}, r"the ends of edges must lie in 0\.\.2"),
    ({"edges": [[0, 1, 2]]}, r"edges \[1, 3\]"),
    ({"FX": make_series(3)}, r"lags must lie in 1\.\.2"),
]
TU = [({"A": "1, 2\n2, 9\n"}, "raw: ")]
LINKX = [
    (
        {"node_feat": np.array([[1.0, np.nan]] * 6)},
        "node_feat must be finite; 6 of its 12 entries",
    ),
    (
        {"edge_index": np.array([[0, 6], [1, 2]])},
        "edge_index must lie in 0..5, got up to 6",
    ),
    ({"edge_index": np.array([[0, -1], [1, 2]])}, "down to -1"),
    ({"edge_index": np.array([[0, 0.5], [1, 2]])}, "edge_index must hold integers"),
    ({"edge_index": np.array([[0, np.nan], [1, 2]])}, "edge_index must hold integers"),
    ({"edge_index": np.zeros((3, 2))}, r"edge_index is \(3, 2\)"),
    ({"label": np.zeros((1, 4))}, "4 labels go with 6 rows of node_feat"),
    ({"node_feat": "text"}, "node_feat is no matrix of real numbers"),
]
ARXIV = [
    (
        "raw/edge",
        "0,1\n3,4\n",
        r"edge\.csv\.gz, line 2: the nodes must lie in 0\.\.3; got 0\.\.4",
    ),
    (
        "raw/node-label",
        "0\n40\n1\n2\n",
        r"node-label\.csv\.gz, line 2: the labels must lie in 0\.\.39",
    ),
    (
        "raw/node_year",
        "2013\n" * 3,
        r"node_year\.csv\.gz must have 4 rows, one for each node .* got 3",
    ),
    (
        "raw/node-feat",
        rows_of([[1] * 128] * 5),
        r"node-feat\.csv\.gz must have 4 rows, one for each node .* got 5",
    ),
    (
        "raw/node-feat",
        ("1," * 127 + "inf\n") * 4,
        r"node-feat\.csv\.gz, line 1: the numbers must be finite",
    ),
    (
        "split/time/test",
        "",
        r"test\.csv\.gz must name the nodes of a split, one each line; it names none",
    ),
    (
        "split/time/test",
        "-1\n",
        r"test\.csv\.gz, line 1: the nodes must lie in 0\.\.3; got -1",
    ),
    (
        "split/time/test",
        "0\n",
        r"test\.csv\.gz, from line 1 on: node 0 is in a split already",
    ),
    (
        "split/time/test",
        "2\n2\n",
        r"test\.csv\.gz, from line 1 on: node 2 is in a split already",
    ),
]
OGB = [("ogbn-arxiv", *row) for row in ARXIV]
OGB += [
    (
        "ogbn-proteins",
        "raw/edge-feat",
        rows_of([[0.5] * 8] * 3),
        "must have 5 rows, .* got 3",
    )
]
SNAP = [
    (
        [profile(0), "1\t1\n"],
        "0\t0\n",
        r"line 2: expected 59 columns between tabs.*got 2",
    ),
    (
        [profile(0, gender="2")],
        "0\t0\n",
        r"lines 1 to 1:.*gender b'2' is neither 0, 1 nor null",
    ),
    ([profile(0, age="old")], "0\t0\n", r"columns 1, 2, 3 and 8 must be numbers.*old"),
    ([profile("x")], "0\t0\n", "must be numbers"),
    ([profile("null")], "0\t0\n", "null in all but the first; .*null"),
    (
        [profile(0).replace("2012-05-25", "yesterday!")],
        "0\t0\n",
        "dates such as 2012-05-25",
    ),
    (
        [profile(0), profile(0)],
        "0\t0\n",
        "must name every user once; 2 lines name fewer",
    ),
    (
        [profile(0)],
        "0\t5\n",
        "user 5 has no line in the profiles, nor have 0 other ends among these 1 lines",
    ),
    ([profile(0, age="inf")], "0\t0\n", r"b'inf' does not lie in 0 \.\. 1000000"),
    ([profile(0, age="nan")], "0\t0\n", r"b'nan' does not lie in 0 \.\. 1000000"),
    (
        [profile(0, completion="1e300")],
        "0\t0\n",
        r"b'1e300' does not lie in 0 \.\. 1000000",
    ),
    ([profile(0, public="-1")], "0\t0\n", "b'-1' does not lie in 0"),
    ([profile(0, age="1" * 100)], "0\t0\n", r"of column 8 has 100 bytes"),
    (
        [profile(0).replace("2012-05-25 11:20:00.0", "today")],
        "0\t0\n",
        "b'today' is no date",
    ),
    (
        [profile(0).replace("2012-05-25 11:20:00.0", "NaT")],
        "0\t0\n",
        "b'NaT' is no date",
    ),
    (
        [],
        "0\t0\n",
        r"soc-pokec-profiles\.txt must have a line for every user; it is empty",
    ),
    ([profile(0)], "0\t0\nx\t0\n", "from line 1 on: could not convert string 'x'"),
    ([profile(0)], "0\t0\n0\n", "from line 1 on: .*number of columns changed"),
    ([profile(0)], "0\n0\n", "expected 2 rows of 2 numbers; got 2 of 1"),
    (
        [profile(0)],
        "0\t0\n\n0\t0\n",
        "line 2: a line with others after it must not be blank",
    ),
]
LINKX_SAYS = r"pokec\.mat: .*{}.*\. It must be LINKX's pokec\.mat"


@pytest.mark.parametrize(
    ("make", "load", "name", "content", "said"),
    [
        *(
            (small.make_heterophilous, "load_heterophilous", "small", *row)
            for row in HETEROPHILOUS
        ),
        *((small.make_facebook, "load_facebook", "small", *row) for row in FACEBOOK),
        *((small.make_synmol, "load_synmol", "train", *row) for row in MOLECULES),
        *(
            (small.make_chickenpox, "load_snapshots", "chickenpox", *row)
            for row in SERIES
        ),
        *(
            (small.make_mat, "load_pokec", "linkx", row, LINKX_SAYS.format(said))
            for row, said in LINKX
        ),
        *(
            (small.make_pokec, "load_pokec", "snap", {"profiles": a, "pairs": b}, said)
            for a, b, said in SNAP
        ),
        *((small.make_tu, "load_tu", "SMALL", *row) for row in TU),
        *(
            (small.make_ogb(name), "load_ogb", name, {f"{file}.csv.gz": rows}, said)
            for name, file, rows, said in OGB
        ),
    ],
)
def test_refused_by_name_and_no_cache_is_left(
    tmp_path, make, load, name, content, said
):
    make(tmp_path, **content)
    with pytest.raises(ValueError, match=said):
        getattr(graphs, load)(tmp_path, name)
    assert not [
        path
        for place in tmp_path.rglob("processed")
        for path in place.iterdir()
        if path.is_dir()
    ]
