"""The readers of Pokec: SNAP's text files and LINKX's matrices."""

import csv
import gzip
import hashlib
import json

import numpy as np
import pytest
import torch
from peak_memory import at_most
from small_sets import make_mat, make_pokec, profile

from diffusion_mp_experiments.graphs import load_pokec
from diffusion_mp_experiments.graphs.pokec import FEATURES

REGIONS = ["kraj a, x", "kraj a, y", "Kraj A, z", "kraj b", "null", "kraj c, x", "kraj d", "kraj e", "kraj f"]


def load(root, profiles, pairs="0\t1\n", **options):
    make_pokec(root, profiles, pairs, **options)
    return load_pokec(root)


def column(data, name):
    return data.x[:, FEATURES.index(name)].tolist()


@pytest.mark.parametrize("zipped", [False, True])
def test_users_labels_edges(tmp_path, zipped):
    """Sparse ids in any order: an edge finds its ends by id."""
    lines = [
        profile(1000, gender="0", age="30", texts=(9, 59)),
        profile(7, gender="1", age="0"),
        profile(12, gender="null", age="null", end="\t"),
        profile(3, gender="1", age="10", public="0"),
    ]
    data = load(tmp_path, lines, "7\t1000\n12\t3\n3\t12", zipped=zipped)
    assert data.user_id.tolist() == [1000, 7, 12, 3]
    assert data.y.tolist() == [0, 1, -1, 1]
    assert data.edge_index.tolist() == [[1, 2, 3], [0, 3, 2]]
    assert data.x.shape == (4, 65) == (4, len(set(FEATURES)))
    assert data.x.dtype == torch.float32
    assert column(data, "age") == [1, 0, 0, -1]  # 30 and 10 are stated: mean 20, deviation 10
    assert column(data, "age_unknown") == [0, 1, 1, 0]
    assert column(data, "column_9_filled") == column(data, "column_59_filled") == [1, 0, 0, 0]
    assert column(data, "column_10_filled") == [0, 0, 0, 0]
    assert column(data, "public") == pytest.approx([1 / 3**0.5] * 3 + [-(3**0.5)])
    assert column(data, "completion") == column(data, "last_login") == [0] * 4  # all the same
    data.validate()


def test_regions_by_frequency(tmp_path):
    lines = [profile(i, region=region) for i, region in enumerate(REGIONS)]
    data = load(tmp_path, lines)
    assert column(data, "region_1") == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert column(data, "region_2") == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert column(data, "region_unknown") == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    places = [FEATURES.index(f"region_{k}") for k in range(1, 6)]
    assert data.x[-1, places].sum() == 0  # the sixth


def test_dates_are_days(tmp_path):
    lines = [profile(i) for i in range(3)]
    lines[0] = lines[0].replace("2005-04-03", "2005-04-01")
    lines[1] = lines[1].replace("2005-04-03 00:00:00.0", "null")
    data = load(tmp_path, lines)
    assert column(data, "registration") == [-1, 0, 1]
    assert column(data, "dates_unknown") == [0, 1, 0]


def test_many_blocks_are_one(tmp_path, monkeypatch):
    """Blocks of lines, and of bytes that end within a line."""
    lines = [profile(i, age=str(18 + i), texts=(9 + i,), gender=str(i % 2)) for i in range(20)]
    pairs = "".join(f"{i}\t{(7 * i + 3) % 20}\n" for i in range(20))
    whole = load(tmp_path, lines, pairs)
    monkeypatch.setattr("diffusion_mp_experiments.graphs.pokec._USERS", 3)
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BLOCK", 5)
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BYTES", 7)
    blocks = load_pokec(tmp_path, cache=tmp_path / "blocks")
    for name in ("x", "y", "edge_index", "user_id"):
        assert torch.equal(whole[name], blocks[name])


def test_the_cache_records_what_was_read(tmp_path):
    load(tmp_path, [profile(0), profile(1)])
    record = json.loads((tmp_path / "processed" / "pokec-snap" / "sources.json").read_text())
    for name, entry in record["files"].items():
        assert entry["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        (tmp_path / name).unlink()
    assert load_pokec(tmp_path).num_nodes == 2  # the cache is enough


@pytest.mark.parametrize(
    ("profiles", "pairs", "message"),
    [
        ([profile(0), "1\t1\n"], "0\t0\n", r"line 2: expected 59 columns between tabs.*got 2"),
        ([profile(0, gender="2")], "0\t0\n", r"lines 1 to 1:.*gender b'2' is neither 0, 1 nor null"),
        ([profile(0, age="old")], "0\t0\n", r"columns 1, 2, 3 and 8 must be numbers.*old"),
        ([profile("x")], "0\t0\n", "must be numbers"),
        ([profile("null")], "0\t0\n", "null in all but the first; .*null"),
        ([profile(0).replace("2012-05-25", "yesterday!")], "0\t0\n", "dates such as 2012-05-25"),
        ([profile(0), profile(0)], "0\t0\n", "must name every user once; 2 lines name fewer"),
        ([profile(0)], "0\t5\n", "user 5 has no line in the profiles, nor have 0 other ends among these 1 lines"),
        ([profile(0, age="inf")], "0\t0\n", r"b'inf' does not lie in 0 \.\. 1000000"),
        ([profile(0, age="nan")], "0\t0\n", r"b'nan' does not lie in 0 \.\. 1000000"),
        ([profile(0, completion="1e300")], "0\t0\n", r"b'1e300' does not lie in 0 \.\. 1000000"),
        ([profile(0, public="-1")], "0\t0\n", "b'-1' does not lie in 0"),
        ([profile(0, age="1" * 100)], "0\t0\n", r"of column 8 has 100 bytes"),
        ([profile(0).replace("2012-05-25 11:20:00.0", "today")], "0\t0\n", "b'today' is no date"),
        ([profile(0).replace("2012-05-25 11:20:00.0", "NaT")], "0\t0\n", "b'NaT' is no date"),
        ([], "0\t0\n", r"soc-pokec-profiles\.txt must have a line for every user; it is empty"),
        ([profile(0)], "0\t0\nx\t0\n", "from line 1 on: could not convert string 'x'"),
        ([profile(0)], "0\t0\n0\n", "from line 1 on: .*number of columns changed"),
        ([profile(0)], "0\n0\n", "expected 2 rows of 2 numbers; got 2 of 1"),
        ([profile(0)], "0\t0\n\n0\t0\n", "expected 3 rows of 2 numbers; got 2 of 2"),
    ],
)
def test_other_formats_are_refused(tmp_path, profiles, pairs, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, profiles, pairs)
    assert not (tmp_path / "processed" / "pokec-snap").exists()


@pytest.mark.usefixtures("no_typecheck")
def test_missing_files_and_unknown_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing soc-pokec-profiles.txt.gz, soc-pokec-.*snap\.stanford"):
        load_pokec(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"missing pokec\.mat.*github\.com/CUAI.*synthetic_pokec"):
        load_pokec(tmp_path, "linkx")
    with pytest.raises(ValueError, match="source must be one of 'snap', 'linkx'"):
        load_pokec(tmp_path, "kaggle")


def test_linkx(tmp_path, generator):
    x = torch.randn(5, 65, generator=generator, dtype=torch.float64)
    edges = torch.randint(5, (2, 9), generator=generator)
    make_mat(tmp_path, node_feat=x.numpy(), edge_index=edges.numpy(), label=np.array([[0, 1, 1, -1, 0]]))
    data = load_pokec(tmp_path, "linkx")
    assert torch.equal(data.x, x.float())
    assert torch.equal(data.edge_index, edges)
    assert data.edge_index.is_contiguous()
    assert data.y.tolist() == [0, 1, 1, -1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": np.array([[0, 6], [1, 2]])}, "edge_index must lie in 0..5, got up to 6"),
        ({"edge_index": np.array([[0, -1], [1, 2]])}, "down to -1"),
        ({"edge_index": np.array([[0, 0.5], [1, 2]])}, "edge_index must hold integers"),
        ({"edge_index": np.array([[0, np.nan], [1, 2]])}, "edge_index must hold integers"),
        ({"edge_index": np.zeros((3, 2))}, r"edge_index is \(3, 2\)"),
        ({"label": np.zeros((1, 4))}, "4 labels go with 6 rows of node_feat"),
        ({"node_feat": "text"}, "node_feat is no matrix of real numbers"),
    ],
)
def test_variables_that_do_not_agree_are_refused(tmp_path, change, message):
    make_mat(tmp_path, **change)
    with pytest.raises(ValueError, match=rf"pokec\.mat: .*{message}.*\. It must be LINKX's pokec\.mat"):
        load_pokec(tmp_path, "linkx")
    assert [path.name for path in (tmp_path / "processed").iterdir() if path.is_dir()] == []


@pytest.mark.data
def test_the_real_format(data_root, tmp_path):
    for name in ("profiles.sample500.txt", "relationships.sample500.txt.gz"):
        source = data_root / "pokec" / f"soc-pokec-{name}"
        (tmp_path / source.name.replace(".sample500", "")).write_bytes(source.read_bytes())
    data = load_pokec(tmp_path)
    assert (data.num_nodes, data.num_edges) == (500, 2913)
    assert data.y.bincount().tolist() == [264, 236]
    assert sum(column(data, "age_unknown")) == 112
    assert sum(column(data, "region_unknown")) == 0
    assert data.x[:, FEATURES.index("column_9_filled") :].sum() == 0  # the texts of the sample are blanked
    assert data.x.isfinite().all()
    first = data.user_id[data.edge_index[:, :3]]
    assert first.tolist() == [[1, 1, 1], [13, 11, 6]]


@pytest.mark.data
def test_twenty_thousand_real_users(data_root, tmp_path):
    """Ids are not line numbers: matched by id 44.4 % of friendships join one gender, by line 50.0 %."""
    with gzip.open(data_root / "pokec" / "nodes_20k.csv.gz", "rt") as file:
        users = list(csv.DictReader(file))
    lines = [profile(u["user_id"], gender=u["gender"], region=u["region_large"], age=u["age"] or "null") for u in users]
    make_pokec(tmp_path, lines, "")
    pairs = data_root / "pokec" / "soc-pokec-relationships.sample20k.txt.gz"
    (tmp_path / "soc-pokec-relationships.txt").write_bytes(gzip.decompress(pairs.read_bytes()))
    data = load_pokec(tmp_path)
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    assert data.num_edges == 298_926
    assert float(same.float().mean()) == pytest.approx(0.4439, abs=1e-4)


def test_users_without_friendships(tmp_path):
    data = load(tmp_path, [profile(0), profile(1)], "")
    assert (data.num_nodes, data.edge_index.shape) == (2, (2, 0))


def test_a_profile_of_one_field_takes_no_room(tmp_path):
    """NumPy makes every row of a block as long as the longest: 100 rows and one of 10 MB would be a gigabyte."""
    lines = [profile(user, completion="5" * 10_000_000 if user == 50 else "50") for user in range(100)]
    with pytest.raises(ValueError, match="of column 3 has 10000000 bytes"), at_most(100e6):
        load(tmp_path, lines)
