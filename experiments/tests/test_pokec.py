"""The readers of large graphs, Pokec's and OGB's, and the graph that is drawn in the place of Pokec."""

import csv
import gzip
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusion_mp_experiments.graphs import load_ogb, load_pokec, synthetic_pokec
from diffusion_mp_experiments.graphs.pokec import FEATURES
from helpers import draw
from small_sets import at_most, make_mat, make_ogb, make_pokec, profile, rows_of, write
from subrun import run_program

REGIONS = ["kraj a, x", "kraj a, y", "Kraj A, z", "kraj b", "null"]
REGIONS += ["kraj c, x", "kraj d", "kraj e", "kraj f"]


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
    # 30 and 10 are stated: mean 20, deviation 10.
    assert column(data, "age") == [1, 0, 0, -1]
    assert column(data, "age_unknown") == [0, 1, 1, 0]
    for name in ("column_9_filled", "column_59_filled"):
        assert column(data, name) == [1, 0, 0, 0]
    assert column(data, "column_10_filled") == [0, 0, 0, 0]
    assert column(data, "public") == pytest.approx([1 / 3**0.5] * 3 + [-(3**0.5)])
    assert (
        column(data, "completion") == column(data, "last_login") == [0] * 4
    )  # all the same
    data.validate()


def test_regions_by_frequency_and_dates_as_days(tmp_path):
    lines = [profile(i, region=region) for i, region in enumerate(REGIONS)]
    data = load(tmp_path, lines)
    assert column(data, "region_1") == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert column(data, "region_2") == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert column(data, "region_unknown") == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    places = [FEATURES.index(f"region_{k}") for k in range(1, 6)]
    assert data.x[-1, places].sum() == 0  # the sixth
    lines = [profile(i) for i in range(3)]
    lines[0] = lines[0].replace("2005-04-03", "2005-04-01")
    lines[1] = lines[1].replace("2005-04-03 00:00:00.0", "null")
    data = load(tmp_path, lines)
    assert column(data, "registration") == [-1, 0, 1]
    assert column(data, "dates_unknown") == [0, 1, 0]


def test_many_blocks_are_one(tmp_path, monkeypatch):
    """Blocks of lines, and of bytes that end within a line."""
    lines = [
        profile(i, age=str(18 + i), texts=(9 + i,), gender=str(i % 2))
        for i in range(20)
    ]
    pairs = "".join(f"{i}\t{(7 * i + 3) % 20}\n" for i in range(20))
    complete = load(tmp_path, lines, pairs)
    monkeypatch.setattr("diffusion_mp_experiments.graphs.pokec._USERS", 3)
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BYTES", 500)
    blocks = load_pokec(tmp_path, cache=tmp_path / "blocks")
    for name in ("x", "y", "edge_index", "user_id"):
        assert torch.equal(complete[name], blocks[name])


def test_missing_files_are_named_and_the_cache_records_what_was_read(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"missing soc-pokec-profiles.txt.gz, soc-pokec-.*snap\.stanford",
    ):
        load_pokec(tmp_path)
    with pytest.raises(
        FileNotFoundError,
        match=r"missing pokec\.mat.*github\.com/CUAI.*synthetic_pokec",
    ):
        load_pokec(tmp_path, "linkx")
    load(tmp_path, [profile(0), profile(1)])
    record = json.loads(
        (tmp_path / "processed" / "pokec-snap" / "sources.json").read_text()
    )
    for name, entry in record["files"].items():
        assert (
            entry["sha256"]
            == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        )
        (tmp_path / name).unlink()
    assert load_pokec(tmp_path).num_nodes == 2  # the cache is enough


CSV = "user_id,gender,region_large,region_small,age\n"


@pytest.mark.parametrize("zipped", [False, True])
def test_a_sample_is_known_by_its_content(tmp_path, zipped):
    """Under any name, among files of other kinds; of two samples the longer."""
    users = f"{CSV}7,1,Kraj A,x,30\n3,0,Kraj B,x,10\n12,null,kraj a,,0\n"
    texts = {"users.csv": users, "friends.txt": "7\t3\n3\t12\n"}
    write(tmp_path, {f"{name}{'.gz' * zipped}": text for name, text in texts.items()})
    write(tmp_path, {"a.csv": f"{CSV}7,1,a,x,30\n", "b.txt": "7 7\n"})
    write(tmp_path, {"COLUMNS.txt": "1\tuser_id\n", "empty": "", "other.csv": "7,3\n"})
    (tmp_path / "picture.gz").write_bytes(bytes(range(256)))
    data = load_pokec(tmp_path)
    assert data.user_id.tolist() == [7, 3, 12]
    assert data.y.tolist() == [1, 0, -1]
    assert data.edge_index.tolist() == [[0, 1], [1, 2]]
    # The same as profiles in which nobody states more.
    unstated = "2012-05-25 11:20:00.0\t2005-04-03 00:00:00.0"
    lines = [
        profile(
            user, gender=gender, region=region, age=age, public="null", completion=""
        ).replace(unstated, "null\tnull")
        for user, gender, region, age in (
            (7, "1", "kraj a, x", "30"),
            (3, "0", "kraj b, x", "10"),
            (12, "null", "kraj a", "0"),
        )
    ]
    (tmp_path / "snap").mkdir()
    expected = load(tmp_path / "snap", lines, "7\t3\n3\t12\n")
    assert torch.equal(data.x, expected.x)
    assert column(data, "age") == [1, -1, 0]


def test_linkx(tmp_path, generator):
    x = draw(generator, 5, 65)
    edges = torch.randint(5, (2, 9), generator=generator)
    make_mat(
        tmp_path,
        node_feat=x.numpy(),
        edge_index=edges.numpy(),
        label=np.array([[0, 1, 1, -1, 0]]),
    )
    data = load_pokec(tmp_path, "linkx")
    assert torch.equal(data.x, x.float())
    assert torch.equal(data.edge_index, edges)
    assert data.edge_index.is_contiguous()
    assert data.y.tolist() == [0, 1, 1, -1, 0]


@pytest.mark.data
def test_the_real_format(data_root, tmp_path):
    for name in ("profiles.sample500.txt", "relationships.sample500.txt.gz"):
        source = data_root / "pokec" / f"soc-pokec-{name}"
        (tmp_path / source.name.replace(".sample500", "")).write_bytes(
            source.read_bytes()
        )
    data = load_pokec(tmp_path)
    assert (data.num_nodes, data.num_edges) == (500, 2913)
    assert data.y.bincount().tolist() == [264, 236]
    assert sum(column(data, "age_unknown")) == 112
    assert sum(column(data, "region_unknown")) == 0
    # The texts of the sample are blanked.
    assert data.x[:, FEATURES.index("column_9_filled") :].sum() == 0
    assert data.x.isfinite().all()
    first = data.user_id[data.edge_index[:, :3]]
    assert first.tolist() == [[1, 1, 1], [13, 11, 6]]


@pytest.mark.data
def test_twenty_thousand_real_users(data_root, tmp_path):
    """Ids are not line numbers: matched by id 44.4 % of friendships join one gender, by line 50.0 %."""
    with gzip.open(data_root / "pokec" / "nodes_20k.csv.gz", "rt") as file:
        users = list(csv.DictReader(file))
    lines = [profile(user["user_id"], gender=user["gender"]) for user in users]
    pairs = data_root / "pokec" / "soc-pokec-relationships.sample20k.txt.gz"
    data = load(tmp_path, lines, gzip.decompress(pairs.read_bytes()).decode())
    sample = load_pokec(data_root / "pokec", cache=tmp_path / "sample")
    for name in ("user_id", "y", "edge_index"):
        assert torch.equal(sample[name], data[name])
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    assert data.num_edges == 298_926
    assert float(same.float().mean()) == pytest.approx(0.4439, abs=1e-4)


def test_one_long_field_takes_no_room_and_friendships_may_be_none(tmp_path):
    """NumPy makes every row of a block as long as the longest."""
    lines = [
        profile(user, completion="5" * 500_000 if user == 50 else "50")
        for user in range(100)
    ]
    with (
        pytest.raises(ValueError, match="line 51: a line must have at most"),
        at_most(30e6),
    ):
        load(tmp_path, lines)
    data = load(tmp_path, [profile(0), profile(1)], "")
    assert (data.num_nodes, data.edge_index.shape) == (2, (2, 0))


READ = """
import resource, sys
from diffusion_mp_experiments.graphs import load_pokec
unit = 1024 if sys.platform != "darwin" else 1  # kilobytes on Linux, bytes on macOS
data = load_pokec(sys.argv[1])
assert data.num_edges == int(sys.argv[2]) * 1_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "millions", "text"), [(1_632_803, 1, 300), (400_000, 46, 0)]
)
def test_a_gigabyte_of_either_file(
    tmp_path: Path, users: int, millions: int, text: int
) -> None:
    """Of the whole process, imports included: as many users as Pokec has, and 1.5 times as many friendships."""
    # the first id
    first = 1_000_000_000
    day = "2012-05-25 11:20:00.0"
    ends = torch.randint(
        first, first + users, (1_000_000, 2), generator=torch.Generator().manual_seed(0)
    )
    with (tmp_path / "soc-pokec-profiles.txt").open("w") as file:
        for user in range(users):
            numbers = f"{first + user}\t1\t50\t{user % 2}\tzilinsky kraj, zilina\t{day}\t{day}\t{user % 60}"
            file.write(numbers + "\tnull" * 50 + "\t" + "x" * text + "\n")
    with (tmp_path / "soc-pokec-relationships.txt").open("w") as file:
        file.writelines(
            "".join(f"{a}\t{b}\n" for a, b in ends.tolist()) for _ in range(millions)
        )
    assert max(file.stat().st_size for file in tmp_path.iterdir()) > 1e9
    assert float(run_program("-c", READ, str(tmp_path), str(millions))) < 1e9


SIZE = {"num_nodes": 20_000, "num_edges": 375_000}


@pytest.fixture(scope="module")
def data():
    return synthetic_pokec(**SIZE)


def test_sizes_degrees_homophily_and_signal(data):
    assert data.x.shape == (20_000, 65)
    assert data.edge_index.shape == (2, 375_000)
    assert bool((data.edge_index[0].diff() >= 0).all())
    assert 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < 20_000
    data.validate()
    for ends in data.edge_index:
        degree = ends.bincount(minlength=20_000).double()
        assert float(degree.median()) == pytest.approx(6.09, abs=1)
        for share, deviations in ((0.9, 1.2816), (0.99, 2.3263)):
            assert float(degree.quantile(share)) == pytest.approx(
                6.09 * math.exp(1.5 * deviations), rel=0.06
            )
    labelled = (data.y[data.edge_index] >= 0).all(0)
    source, target = data.y[data.edge_index[:, labelled]]
    assert float((source == target).float().mean()) == pytest.approx(0.444, abs=0.01)
    right = (data.x.sum(1) > 0) == (data.y == 1)
    assert float(right[data.y >= 0].float().mean()) == pytest.approx(0.618, abs=0.015)


@pytest.mark.usefixtures("in_double")
def test_seed_decides_everything_and_nothing_else_does(data, tmp_path):
    """The first of the graphs was drawn while the default dtype was float32."""
    before = torch.get_rng_state()
    again = synthetic_pokec(**SIZE)
    other = synthetic_pokec(**SIZE, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("x", "edge_index", "y"):
        assert torch.equal(data[name], again[name])
        assert not torch.equal(data[name], other[name])
    y = synthetic_pokec(1_000, 5_000, 3, unlabelled=0.1).y
    assert set(y.tolist()) == {-1, 0, 1}
    assert 60 < int((y < 0).sum()) < 140
    for _ in range(2):
        cached = synthetic_pokec(**SIZE, cache=tmp_path / "cache")
        assert torch.equal(cached.edge_index, data.edge_index)
    assert not torch.equal(
        synthetic_pokec(**SIZE, seed=1, cache=tmp_path / "cache").x, data.x
    )


CHANGES = [
    (
        "edge_index",
        lambda array: np.where(array == 3, 4, array),
        r"edge_index must lie in 0\.\.3, got up to 4",
    ),
    ("y", lambda array: array + 36, r"y must lie in -1\.\.39, got up to 75"),
    (
        "y",
        lambda array: array - 2,
        r"y must lie in -1\.\.39, got up to 37 and down to -2",
    ),
]


@pytest.fixture
def arxiv(tmp_path):
    """Four papers and five citations: 0 → 1, 3 → 1, 2 → 0, 3 → 3, 0 → 2."""
    make_ogb("ogbn-arxiv")(
        tmp_path,
        **{"raw/node-feat.csv.gz": rows_of(np.arange(4 * 128).reshape(4, 128) / 8)},
    )
    return tmp_path


def test_arxiv(arxiv):
    data = load_ogb(arxiv, "ogbn-arxiv")
    assert data.edge_index.tolist() == [[0, 3, 2, 3, 0], [1, 1, 0, 3, 2]]
    assert data.x.shape == (4, 128)
    assert data.x[1, 3] == (128 + 3) / 8
    assert data.y.tolist() == [0, 39, 4, 4]
    assert data.node_year.tolist() == [2013, 2017, 2020, 2018]
    masks = (data.train_mask, data.val_mask, data.test_mask)
    assert [mask.nonzero().tolist() for mask in masks] == [[[0]], [[1]], [[2]]]
    data.validate()
    write(
        arxiv / "ogbn_arxiv", {"split/time/test.csv.gz": "2\n3\n"}
    )  # another split is read anew
    assert load_ogb(arxiv, "ogbn-arxiv").test_mask.nonzero().tolist() == [[2], [3]]
    (arxiv / "ogbn_arxiv" / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"missing split/time/valid.csv.gz. Unpack arxiv.*folder ogbn_arxiv",
    ):
        load_ogb(arxiv, "ogbn-arxiv", cache=arxiv / "none")


def test_proteins_have_both_directions(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "diffusion_mp_experiments.files.text_tables._BYTES", 1
    )  # several blocks
    rows = np.repeat([[0.5], [0.25], [1], [2], [3]], 8, 1)
    make_ogb("ogbn-proteins")(tmp_path, **{"raw/edge-feat.csv.gz": rows_of(rows)})
    data = load_ogb(tmp_path, "ogbn-proteins")
    assert data.num_nodes == 4
    assert data.edge_index.tolist() == [
        [0, 1, 3, 1, 2, 0, 3, 3, 0, 2],
        [1, 0, 1, 3, 0, 2, 3, 3, 2, 0],
    ]
    assert data.edge_attr[:, 0].tolist() == [0.5, 0.5, 0.25, 0.25, 1, 1, 2, 2, 3, 3]
    assert data.y.shape == (4, 112)
    assert data.y.dtype == torch.int64
    assert data.node_species.tolist() == [3702, 4932, 9606, 3702]
    assert data.x is None
    raw = tmp_path / "ogbn_proteins" / "raw"
    (raw / "species.csv.gz").rename(
        raw / "node_species.csv.gz"
    )  # as the ogb package does
    assert load_ogb(tmp_path, "ogbn-proteins").node_species[0] == 3702


@pytest.mark.parametrize(("name", "change", "message"), CHANGES)
def test_a_cache_that_was_changed(arxiv, name, change, message):
    load_ogb(arxiv, "ogbn-arxiv")
    cache = arxiv / "ogbn_arxiv" / "processed" / "arrays"
    np.save(cache / f"{name}.npy", change(np.load(cache / f"{name}.npy")))
    with pytest.raises(ValueError, match=rf"arrays: {message}.*Delete the folder"):
        load_ogb(arxiv, "ogbn-arxiv")
