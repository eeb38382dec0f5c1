"""Heterophilous graphs, MNIST and 20 Newsgroups from files: small ones, damaged ones, and the real ones."""

import gzip
import struct

import numpy as np
import pytest
import torch
from hostile import check_data
from small_sets import GROUPS, make_facebook, make_heterophilous, make_mnist, make_newsgroups
from torch_geometric.datasets import HeterophilousGraphDataset, LINKXDataset
from torch_geometric.utils import coalesce

from diffusion_mp_experiments.graphs import load_facebook, load_heterophilous, load_mnist, load_newsgroups
from diffusion_mp_experiments.graphs.node_sets import TEN_GROUPS

# ---------------------------------------------------------------- heterophilous graphs


def test_a_small_graph(tmp_path):
    arrays = np.load(make_heterophilous(tmp_path))
    data = load_heterophilous(tmp_path, "small")
    check_data(data)
    assert torch.equal(data.x, torch.from_numpy(arrays["node_features"]))
    both = {(0, 1), (1, 0), (1, 2), (2, 1), (3, 5), (5, 3), (4, 5), (5, 4)}
    assert set(map(tuple, data.edge_index.t().tolist())) == both
    assert data.edge_index.size(1) == 8
    assert torch.equal(data.val_mask, torch.from_numpy(arrays["val_masks"]).t())


def test_it_lies_where_pyg_puts_it_too(tmp_path):
    folder = tmp_path / "small" / "raw"
    folder.mkdir(parents=True)
    make_heterophilous(folder)
    assert load_heterophilous(tmp_path, "small").num_nodes == 6


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"edges": np.array([[0, 6]])}, "edges must lie in 0..5, got up to 6"),
        ({"edges": np.array([0, 1])}, "do not go with 6 nodes"),
        ({"node_labels": np.array([0, 1])}, r"node_labels \[2\]"),
        ({"node_labels": np.array([0.0] * 6)}, "node_labels must be integers"),
        ({"node_features": np.array([[np.nan]] * 6)}, "must be finite numbers"),
        ({"val_masks": np.ones((3, 6), bool)}, r"val_masks must be bools \[splits, 6\]"),
        ({"val_masks": np.ones((2, 6), bool)}, "a node is in two parts of a split"),
        ({"train_masks": np.array(["a"] * 6)}, "TypeError: can't convert np.ndarray of type numpy.str_"),
        ({"edges": np.array([{}], dtype=object)}, "Object arrays cannot be loaded when allow_pickle=False"),
    ],
)
def test_arrays_that_do_not_belong_together(tmp_path, other, said):
    make_heterophilous(tmp_path, **other)
    with pytest.raises(ValueError, match=said) as caught:
        load_heterophilous(tmp_path, "small")
    assert "small.npz" in str(caught.value)
    assert "heterophilous-graphs" in str(caught.value)


def test_no_file_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing squirrel\.npz\. Fetch it from the folder data of https"):
        load_heterophilous(tmp_path, "squirrel")


@pytest.mark.data
def test_minesweeper_is_that_of_pyg(data_root, tmp_path):
    raw = tmp_path / "minesweeper" / "raw"
    raw.mkdir(parents=True)
    place = data_root / "HeterophilousGraphDataset" / "minesweeper" / "raw" / "minesweeper.npz"
    (raw / "minesweeper.npz").symlink_to(place.resolve())
    expected = HeterophilousGraphDataset(str(tmp_path), "Minesweeper")[0]
    found = load_heterophilous(data_root / "HeterophilousGraphDataset", "minesweeper")
    assert (found.num_nodes, found.num_edges, found.num_features) == (10_000, 78_804, 7)
    for name in ("x", "y", "edge_index", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.data
def test_chameleon_has_its_known_sizes(data_root):
    data = load_heterophilous(data_root / "heterophilous_npz", "chameleon_filtered")
    assert (data.num_nodes, data.num_edges, data.num_features, data.test_mask.size(1)) == (890, 17_708, 2325, 10)
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all()


# ---------------------------------------------------------------- Facebook100


def test_small_facebook(tmp_path):
    make_facebook(tmp_path)
    data = load_facebook(tmp_path, "small")
    check_data(data)
    assert data.y.tolist() == [1, 0, -1, 1, 0, 1]
    values = [[1, 2, 6], [0, 3, 4], [0, 7, 9]]  # of the columns beside gender
    people = [(1, 0, 7), (1, 3, 7), (2, 3, 9), (1, 4, 9), (6, 0, 0), (2, 3, 7)]
    assert data.x.tolist() == [
        [float(value == own) for own, column in zip(person, values, strict=True) for value in column]
        for person in people
    ]
    both = {(0, 1), (1, 0), (1, 2), (2, 1), (1, 5), (5, 1), (3, 4), (4, 3)}
    assert set(map(tuple, data.edge_index.t().tolist())) == both


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"local_info": np.ones((6, 1), np.uint16)}, "its local_info is no table of whole numbers"),
        ({"local_info": np.ones((6, 4))}, "its local_info is no table of whole numbers"),
        ({"local_info": np.ones((5, 4), np.uint16)}, r"its A is a matrix \(6, 6\) of 5 people"),
        ({"A": np.eye(6)}, "A is no sparse matrix"),
        ({"local_info": np.full((6, 4), 3, np.uint16)}, "its column of gender must hold 0"),
    ],
)
def test_students_that_are_none(tmp_path, other, said):
    make_facebook(tmp_path, **other)
    with pytest.raises(ValueError, match=said):
        load_facebook(tmp_path, "small")


def test_a_university_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing data\.mat\. Fetch it as data\.mat from the folder"):
        load_facebook(tmp_path, "small")


@pytest.mark.data
def test_johnshopkins_is_that_of_pyg(data_root, tmp_path):
    raw = tmp_path / "johnshopkins55" / "raw"
    raw.mkdir(parents=True)
    (raw / "data.mat").symlink_to((data_root / "LINKXDataset" / "johnshopkins55" / "raw" / "data.mat").resolve())
    expected = LINKXDataset(str(tmp_path), "johnshopkins55")[0]
    found = load_facebook(data_root / "LINKXDataset", "johnshopkins55")
    assert (found.num_nodes, found.num_edges, found.num_features) == (5180, 373_172, 2406)
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)
    assert torch.equal(found.edge_index, coalesce(expected.edge_index))


# ---------------------------------------------------------------- MNIST


def test_small_mnist(tmp_path):
    images, labels = make_mnist(tmp_path)
    data = load_mnist(tmp_path, 5)
    pixels = np.frombuffer(gzip.decompress(images.read_bytes())[16:], np.uint8).reshape(7, 784)
    assert torch.equal(data.x * 255, torch.tensor(pixels[:5]).float())
    assert data.y.tolist() == list(gzip.decompress(labels.read_bytes())[8:13])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack(">4I", 2051, 3, 28, 28) + bytes(3 * 784), "its header says 3"),
        (struct.pack(">4I", 2051, 7, 28, 29) + bytes(7 * 784), "its header says 7"),
        (struct.pack(">4I", 2050, 7, 28, 28) + bytes(7 * 784), "its header says 7"),
        (struct.pack(">4I", 2051, 7, 28, 28) + bytes(99), "it ends after 99 of 3920 bytes"),
        (b"abc", "error"),
    ],
)
def test_damaged_images(tmp_path, content, said):
    images, _ = make_mnist(tmp_path)
    images.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=said) as caught:
        load_mnist(tmp_path, 5)
    assert str(images) in str(caught.value)


def test_labels_beyond_nine_too_many_images_and_no_files(tmp_path):
    _, labels = make_mnist(tmp_path)
    labels.write_bytes(gzip.compress(struct.pack(">2I", 2049, 7) + bytes([10] * 7)))
    with pytest.raises(ValueError, match="a label 10, and digits end at 9"):
        load_mnist(tmp_path, 5)
    with pytest.raises(ValueError, match="num_images must be at most 60000, got 60001"):
        load_mnist(tmp_path, 60_001)
    with pytest.raises(FileNotFoundError, match=r"missing train-images-idx3-ubyte\.gz"):
        load_mnist(tmp_path / "nowhere")


@pytest.mark.data
def test_the_first_images_of_mnist(data_root):
    data = load_mnist(data_root / "MNIST", 1000)
    assert data.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert (float(data.x.min()), float(data.x.max())) == (0, 1)


# ---------------------------------------------------------------- 20 Newsgroups


def test_small_newsgroups(tmp_path):
    make_newsgroups(tmp_path)
    data = load_newsgroups(tmp_path, groups=GROUPS, num_words=4)
    assert data.y.tolist() == [0, 1, 1, 0]
    assert data.x.shape == (4, 4)
    assert torch.allclose(data.x[:3].norm(dim=1), torch.ones(3))
    assert (data.x[3] == 0).all()  # what stands in a header is not read


def test_groups_that_are_not_there(tmp_path):
    make_newsgroups(tmp_path)
    with pytest.raises(ValueError, match=r"it has nothing of alt\.atheism"):
        load_newsgroups(tmp_path)
    with pytest.raises(TypeError, match=r"groups must be names of newsgroups; got 'sci\.space'"):
        load_newsgroups(tmp_path, groups="sci.space")
    with pytest.raises(FileNotFoundError, match=r"missing 20news-bydate\.tar\.gz\. Fetch 20news"):
        load_newsgroups(tmp_path / "nowhere")


@pytest.mark.data
@pytest.mark.slow
def test_ten_groups_have_as_many_messages_as_in_nodeformer(data_root):
    data = load_newsgroups(data_root / "20newsgroups")
    assert data.x.shape == (9607, 1000)
    assert data.y.bincount(minlength=10).tolist() == [799, 982, 975, 990, 999, 991, 984, 990, 987, 910]
    assert len(TEN_GROUPS) == 10
