"""The digits graph against scikit-learn."""

import pytest
import torch
from sklearn.datasets import load_digits as sklearn_digits

from diffusion_mp_experiments.graphs import load_digits


def test_pixels_labels_and_graph():
    data = load_digits()
    pixels, labels = sklearn_digits(return_X_y=True)
    assert torch.equal(data.x.double() * 16, torch.from_numpy(pixels))
    assert data.y.tolist() == labels.tolist()
    assert data.x.dtype == torch.float32
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert data.is_coalesced()


def test_edges_are_the_nearest_neighbours():
    data = load_digits(num_neighbors=3)
    distance = torch.cdist(data.x.double(), data.x.double()).fill_diagonal_(float("inf"))
    kth = distance.kthvalue(3, dim=1).values
    found = torch.zeros(distance.shape, dtype=torch.bool)
    found[data.edge_index[0], data.edge_index[1]] = True
    # Pixels are whole numbers, so neighbours may tie at the k-th distance and either may be taken.
    surely = (distance < kth[:, None]) | (distance < kth[None, :])
    perhaps = (distance <= kth[:, None]) | (distance <= kth[None, :])
    assert found[surely].all()
    assert perhaps[found].all()
    assert (found.sum(dim=1) >= 3).all()


@pytest.mark.parametrize("k", [0, 1797])
def test_bad_number_of_neighbours(k):
    with pytest.raises(ValueError, match="num_neighbors must be between 1 and 1796"):
        load_digits(k)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("k", [2.5, "5", None, True])
def test_a_number_of_neighbours_that_is_none(k):
    with pytest.raises(TypeError, match="num_neighbors must be a whole number"):
        load_digits(k)
