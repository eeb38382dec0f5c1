"""Heterophilous graphs, Facebook100, MNIST, 20 Newsgroups and digits: small and real ones; labels for tuning."""

import gzip
import struct

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits as sklearn_digits
from torch_geometric.data import Data
from torch_geometric.datasets import HeterophilousGraphDataset, LINKXDataset
from torch_geometric.utils import coalesce

from diffusion_mp.data import KNNGraph, random_split_per_class
from diffusion_mp_experiments.graphs import (
    load_digits,
    load_facebook,
    load_heterophilous,
    load_mnist,
    load_newsgroups,
    load_rows,
)
from diffusion_mp_experiments.graphs.node_sets import visible_labels
from hostile import check_data
from small_sets import (
    GROUPS,
    make_facebook,
    make_heterophilous,
    make_mnist,
    make_newsgroups,
)

DAMAGED_IMAGES = [
    (struct.pack(">4I", 2051, 3, 28, 28) + bytes(3 * 784), "its header says 3"),
    (struct.pack(">4I", 2051, 7, 28, 29) + bytes(7 * 784), "its header says 7"),
    (struct.pack(">4I", 2050, 7, 28, 28) + bytes(7 * 784), "its header says 7"),
    (struct.pack(">4I", 2051, 7, 28, 28) + bytes(99), "it ends after 99 of 3920 bytes"),
    (b"abc", "error"),
]
SETS_OF_PYG = [
    (
        load_heterophilous,
        HeterophilousGraphDataset,
        "Minesweeper",
        "minesweeper.npz",
        (10_000, 78_804, 7),
    ),
    (load_facebook, LINKXDataset, "johnshopkins55", "data.mat", (5180, 373_172, 2406)),
]


def pairs(data):
    actual = list(map(tuple, data.edge_index.t().tolist()))
    assert len(actual) == len(set(actual))
    return set(actual)


def both(*edges):
    return {pair for i, j in edges for pair in ((i, j), (j, i))}


def test_small_heterophilous(tmp_path):
    arrays = np.load(*make_heterophilous(tmp_path))
    data = load_heterophilous(tmp_path, "small")
    check_data(data)
    assert torch.equal(data.x, torch.from_numpy(arrays["node_features"]))
    assert data.y.tolist() == arrays["node_labels"].tolist()
    assert pairs(data) == both((0, 1), (1, 2), (3, 5), (4, 5))
    for part in ("train", "val", "test"):
        assert torch.equal(
            data[f"{part}_mask"], torch.from_numpy(arrays[f"{part}_masks"]).t()
        )
    (tmp_path / "small" / "raw").mkdir(parents=True)
    (tmp_path / "small.npz").rename(
        tmp_path / "small" / "raw" / "small.npz"
    )  # where PyG puts it
    assert load_heterophilous(tmp_path, "small").num_nodes == 6


def test_small_facebook(tmp_path):
    make_facebook(tmp_path)
    data = load_facebook(tmp_path, "small")
    check_data(data)
    assert data.y.tolist() == [1, 0, -1, 1, 0, 1]
    values = [[1, 2, 6], [0, 3, 4], [0, 7, 9]]  # of the columns beside gender
    people = [(1, 0, 7), (1, 3, 7), (2, 3, 9), (1, 4, 9), (6, 0, 0), (2, 3, 7)]
    columns = zip(zip(*people, strict=True), values, strict=True)
    one_hot = [np.equal.outer(column, of_column) for column, of_column in columns]
    assert np.array_equal(data.x, np.concatenate(one_hot, 1))
    assert pairs(data) == both((0, 1), (1, 2), (1, 5), (3, 4))


def test_small_mnist_and_newsgroups(tmp_path):
    images, labels = make_mnist(tmp_path)
    data = load_mnist(tmp_path, 5)
    pixels = np.frombuffer(gzip.decompress(images.read_bytes())[16:], np.uint8).reshape(
        7, 784
    )
    assert torch.equal(data.x * 255, torch.tensor(pixels[:5]).float())
    assert data.y.tolist() == list(gzip.decompress(labels.read_bytes())[8:13])
    make_newsgroups(tmp_path)
    data = load_newsgroups(tmp_path, groups=GROUPS, num_words=4)
    assert data.y.tolist() == [0, 1, 1, 0]
    assert data.x.shape == (4, 4)
    assert torch.allclose(data.x[:3].norm(dim=1), torch.ones(3))
    assert (data.x[3] == 0).all()  # headers are not read
    with pytest.raises(ValueError, match=r"it has nothing of alt\.atheism"):
        load_newsgroups(tmp_path)


@pytest.mark.parametrize(("content", "said"), DAMAGED_IMAGES)
def test_damaged_images(tmp_path, content, said):
    images, labels = make_mnist(tmp_path)
    labels.write_bytes(gzip.compress(struct.pack(">2I", 2049, 7) + bytes([10] * 7)))
    with pytest.raises(ValueError, match="a label 10, and digits end at 9"):
        load_mnist(tmp_path, 5)
    images.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.gz: .*{said}"):
        load_mnist(tmp_path, 5)


def test_digits_pixels_labels_and_neighbours():
    data = load_digits(num_neighbors=3)
    pixels, labels = sklearn_digits(return_X_y=True)
    assert torch.equal(data.x.double() * 16, torch.from_numpy(pixels))
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == labels.tolist()
    # What KNNGraph makes is tested with it.
    joined = KNNGraph(3)(Data(x=torch.from_numpy(pixels)))
    assert torch.equal(data.edge_index, joined.edge_index)


@pytest.mark.data
@pytest.mark.parametrize(("load", "dataset", "pyg", "file", "sizes"), SETS_OF_PYG)
def test_the_graph_is_that_of_pyg(data_root, tmp_path, load, dataset, pyg, file, sizes):
    root = data_root / dataset.__name__
    name = pyg.lower()
    (tmp_path / name / "raw").mkdir(parents=True)
    (tmp_path / name / "raw" / file).symlink_to((root / name / "raw" / file).resolve())
    expected = dataset(str(tmp_path), pyg)[0]
    actual = load(root, name)
    assert (actual.num_nodes, actual.num_edges, actual.num_features) == sizes
    if load is load_facebook:
        expected = type(expected)(
            x=expected.x, y=expected.y, edge_index=coalesce(expected.edge_index)
        )
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.data
def test_the_real_files_have_their_known_sizes(data_root):
    data = load_heterophilous(data_root / "heterophilous_npz", "chameleon_filtered")
    assert (data.num_nodes, data.num_edges) == (890, 17_708)
    assert (data.num_features, data.test_mask.size(1)) == (2325, 10)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert (masks.sum(0) == 1).all()
    data = load_mnist(data_root / "MNIST", 1000)
    assert data.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert (float(data.x.min()), float(data.x.max())) == (0, 1)


@pytest.mark.data
@pytest.mark.slow
def test_ten_groups_have_as_many_messages_as_in_nodeformer(data_root):
    data = load_newsgroups(data_root / "20newsgroups")
    assert data.x.shape == (9607, 1000)
    sizes = [799, 982, 975, 990, 999, 991, 984, 990, 987, 910]
    assert data.y.bincount().tolist() == sizes


Y = torch.arange(400) % 4
Y[::10] = -1


def test_every_label_is_on_one_side():
    tuning = visible_labels(Y, True)
    reported = visible_labels(Y, False)
    assert ((tuning >= 0) ^ (reported >= 0))[Y >= 0].all()
    assert (tuning[Y < 0] == -1).all()
    assert (reported[Y < 0] == -1).all()
    assert torch.equal(torch.maximum(tuning, reported), Y)
    assert (tuning >= 0).sum() == 108
    assert torch.equal(visible_labels(Y, True), tuning)

    def used(tuning, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(
            random_split_per_class(visible_labels(Y, tuning), 5, 20, None, generator)
        ).any(0)

    tuned = torch.stack([used(True, seed) for seed in range(5)]).any(0)
    assert not any((used(False, seed) & tuned).any() for seed in range(5))


@pytest.mark.parametrize(
    "dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", ">u2", ">i4"]
)
def test_numbers_of_any_width(tmp_path, dtype):
    """torch neither compares nor adds uint16, uint32 and uint64."""
    make_heterophilous(tmp_path)
    right = load_heterophilous(tmp_path, "small")
    with np.load(tmp_path / "small.npz") as file:
        arrays = {name: file[name].astype(dtype) for name in ("edges", "node_labels")}
    make_heterophilous(tmp_path, **arrays)
    data = load_heterophilous(tmp_path, "small")
    assert all(torch.equal(data[name], value) for name, value in right)
    arrays["edges"] += np.array(1, dtype)
    make_heterophilous(tmp_path, **arrays)
    with pytest.raises(ValueError, match=r"edges must lie in 0\.\.5, got up to 6"):
        load_heterophilous(tmp_path, "small")


@pytest.mark.parametrize(
    ("name", "rows", "rarest"),
    [("wine", 178, 48), ("rings", 1000, 500), ("two classes", 2000, 200)],
)
def test_rows_of_a_table_are_standardised(name, rows, rarest):
    data = load_rows(name)
    assert data.num_nodes == rows
    assert data.edge_index is None
    assert abs(int(data.y.bincount().min()) - rarest) < 30
    torch.testing.assert_close(
        data.x.mean(0), torch.zeros(data.x.size(1)), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(data.x.std(0, correction=0), torch.ones(data.x.size(1)))


def test_some_rows_of_a_table_have_labels():
    from diffusion_mp_experiments.train import RowsDataModule

    few, all_ = (RowsDataModule(f"breast cancer {share}%").data for share in (10, 100))
    # Of the 399 rows that are not for tuning: three in five, or a tenth of them.
    assert [int(data.train_mask.sum()) for data in (few, all_)] == [23, 239]
    assert int(few.val_mask.sum()) == int(all_.val_mask.sum()) == 79
    with pytest.raises(ValueError, match="such as 'iris 10%'; got 'iris'"):
        RowsDataModule("iris")
    with pytest.raises(ValueError, match="name must be"):
        RowsDataModule("roses 10%").load()
