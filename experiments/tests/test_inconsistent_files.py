"""Files that can be read, and whose parts do not belong together: each is refused by its name."""

import numpy as np
import pytest

from diffusion_mp_experiments import graphs
from hostile import FORMATS
from small_sets import make_chickenpox, make_series, profile, rows_of

# What is changed in a small valid set, and a word of the sentence that must follow.
HETEROPHILOUS = [
    ({"edges": np.array([[0, 6]])}, "edges"),
    ({"edges": np.array([0, 1])}, "edges"),
    ({"node_labels": np.array([0, 1])}, "labels"),
    ({"node_labels": np.array([0.0] * 6)}, "node_labels"),
    ({"node_features": np.array([[np.nan]] * 6)}, "node_features"),
    ({"node_features": np.ones(6)}, "features"),
    ({"val_masks": np.ones((3, 6), bool)}, "masks"),
    ({"val_masks": np.ones((2, 6), bool)}, "two parts of a split"),
    ({"train_masks": np.array(["a"] * 6)}, "TypeError"),
    ({"edges": np.array([{}], dtype=object)}, "allow_pickle"),
]
FACEBOOK = [
    ({"local_info": np.ones((6, 1), np.uint16)}, "local_info"),
    ({"local_info": np.ones((6, 4))}, "local_info"),
    ({"local_info": np.ones((5, 4), np.uint16)}, "5 people"),
    ({"A": np.eye(6)}, "A is"),
    ({"local_info": np.full((6, 4), 3, np.uint16)}, "gender"),
]
MOLECULES = [
    ({"num_nodes": np.array([2, 3, 2])}, ""),
    ({"num_nodes": np.array([6, 0, 0])}, ""),
    ({"y": np.array([0, 1])}, ""),
    ({"y": np.array([0, 1, 2])}, "y must"),
    ({"edge_index_local": np.full((2, 6), 2)}, "edge_index_local"),
    ({"edge_feat": np.full((6, 5), np.inf)}, "edge_feat"),
    ({"edge_feat": np.zeros((6, 3_000_000), np.float32)}, "unpack into 720"),
    ({"test_index": np.array([0])}, "twice"),
    ({"atom_type": np.array([0, 2, 1, 1, 0, 64])}, "atom_type"),
]
SERIES = [
    ({"FX": [[1.0, float("nan"), 2.0]]}, "series"),
    ({"FX": [[1.0], [1.0, 2.0]]}, ""),
    ({"edges": [[0, 3]]}, "ends of edges"),
    ({"edges": [[0, 1, 2]]}, "edges"),
]
TU = [({"A": "1, 2\n2, 9\n"}, "")]
LINKX = [
    ({"node_feat": np.array([[1.0, np.nan]] * 6)}, "node_feat"),
    ({"edge_index": np.array([[0, 6], [1, 2]])}, "edge_index"),
    ({"edge_index": np.array([[0, -1], [1, 2]])}, "edge_index"),
    ({"edge_index": np.array([[0, 0.5], [1, 2]])}, "edge_index"),
    ({"edge_index": np.array([[0, np.nan], [1, 2]])}, "edge_index"),
    ({"edge_index": np.zeros((3, 2))}, "edge_index"),
    ({"label": np.zeros((1, 4))}, "labels"),
    ({"node_feat": "text"}, "node_feat"),
]
ARXIV = [
    ("raw/edge", "0,1\n3,4\n", "line 2: the nodes"),
    ("raw/node-label", "0\n40\n1\n2\n", "line 2: the labels"),
    ("raw/node_year", "2013\n" * 3, "4 rows"),
    ("raw/node-feat", rows_of([[1] * 128] * 5), "4 rows"),
    ("raw/node-feat", ("1," * 127 + "inf\n") * 4, "line 1: the numbers"),
    ("split/time/test", "", "names none"),
    ("split/time/test", "-1\n", "line 1: the nodes"),
    ("split/time/test", "0\n", "in a split already"),
    ("split/time/test", "2\n2\n", "in a split already"),
]
PROTEINS = [("raw/edge-feat", rows_of([[0.5] * 8] * 3), "5 rows")]
HEADER = "user_id,gender,region_large,region_small,age\n"
DATE = "2012-05-25 11:20:00.0"
SNAP = [
    ([profile(0), "1\t1\n"], "0\t0\n", "line 2: expected 59 columns"),
    ([profile(0, gender="2")], "0\t0\n", "gender"),
    ([profile(0, age="old")], "0\t0\n", "old"),
    ([profile("x")], "0\t0\n", "must be numbers"),
    ([profile("null")], "0\t0\n", "must be numbers"),
    ([profile(0), profile(0)], "0\t0\n", "every user once"),
    ([profile(0)], "0\t5\n", "user 5"),
    ([profile(0, age="inf")], "0\t0\n", "inf"),
    ([profile(0, age="nan")], "0\t0\n", "nan"),
    ([profile(0, completion="1e300")], "0\t0\n", "1e300"),
    ([profile(0, public="-1")], "0\t0\n", "-1"),
    ([profile(0, age="1" * 100)], "0\t0\n", "does not lie"),
    ([profile(0).replace(DATE, "today")], "0\t0\n", "today"),
    ([profile(0).replace(DATE, "NaT")], "0\t0\n", "NaT"),
    ([], "0\t0\n", "is empty"),
    ([profile(0)], "0\t0\nx\t0\n", "line 1"),
    ([profile(0)], "0\t0\n0\n", "line 1"),
    ([profile(0)], "0\n0\n", "rows of 2 numbers"),
    ([profile(0)], "0\t0\n\n0\t0\n", "blank"),
    ([HEADER, "0,1,a,b\n"], "0\t0\n", "line 2: expected the columns user_id"),
    ([HEADER, "0,1,a,b,old\n"], "0\t0\n", "users 1 to 1: .*old"),
    ([HEADER], "0\t0\n", "is empty"),
]


def files(rows):
    return [({f"{file}.csv.gz": text}, said) for file, text, said in rows]


CASES = {
    "heterophilous": HETEROPHILOUS,
    "facebook": FACEBOOK,
    "synmol": MOLECULES,
    "chickenpox": SERIES,
    "pokec-mat": LINKX,
    "pokec": [({"profiles": a, "pairs": b}, said) for a, b, said in SNAP],
    "tu": TU,
    "ogbn-arxiv": files(ARXIV),
    "ogbn-proteins": files(PROTEINS),
}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [(name, *row) for name, rows in CASES.items() for row in rows],
)
def test_refused_by_name_and_no_cache_is_left(tmp_path, name, content, said):
    FORMATS[name].make(tmp_path, **content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{said}"):
        FORMATS[name].load(tmp_path)
    assert not [path for path in tmp_path.rglob("processed/*") if path.is_dir()]


def test_lags_that_a_series_has_not(tmp_path):
    make_chickenpox(tmp_path, FX=make_series(3))
    with pytest.raises(ValueError, match="lags"):
        graphs.load_snapshots(tmp_path, "chickenpox")
