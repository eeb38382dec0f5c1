"""Labels that spread over any coupling, for a number of steps and without end."""

import numpy as np
import pytest
import torch
from sklearn.semi_supervised import LabelSpreading
from torch import Tensor

import diffusion_mp as dm
from diffusion_mp_experiments.train import DigitsDataModule
from helpers import refuses

Y = torch.tensor([0, 1, -1])
DIRECTED = torch.tensor([[0, 1], [1, 2]])


def clouds(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.arange(60) % 3
    centres = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    points = centres[y] + 0.5 * torch.randn(60, 2, generator=generator)
    return points.double(), y, torch.arange(60) < 6


def gaussian(bandwidth: float, *, diagonal: bool = False) -> dm.Diffusivity:
    options = {"normalize": None, "measure": "distance", "row_stochastic": False}
    return dm.SymmetricDiffusivity(
        dm.GaussianDiffusivity(bandwidth=bandwidth, **options), diagonal
    )


@pytest.mark.parametrize(("alpha", "bandwidth"), [(0.5, 1.0), (0.9, 0.3), (0.99, 0.15)])
def test_the_limit_is_label_spreading_of_scikit_learn(
    alpha: float, bandwidth: float, generator: torch.Generator
):
    """The same S and α. Theirs iterates until the change is below a tolerance, and divides rows by their sums."""
    points, y, mask = clouds(generator)
    theirs = LabelSpreading(
        kernel="rbf", gamma=0.5 / bandwidth**2, alpha=alpha, max_iter=100_000, tol=1e-12
    )
    theirs.fit(points.numpy(), np.where(mask, y, -1))
    soft = torch.eye(3, dtype=torch.float64)[y]
    ours = dm.LabelPropagation(None, alpha, gaussian(bandwidth))(
        soft, mask=mask, features=points
    )
    expected = torch.from_numpy(theirs.label_distributions_)
    torch.testing.assert_close(
        ours / ours.sum(1, keepdim=True), expected, rtol=0, atol=1e-6
    )


def test_the_limit_is_where_the_steps_end(generator: torch.Generator) -> None:
    points, y, mask = clouds(generator)
    edges = torch.randint(60, (2, 200), generator=generator)
    batch = (torch.arange(60) >= 40).long()
    edges = edges[:, batch[edges[0]] == batch[edges[1]]]
    both = gaussian(0.5) + dm.AdjacencyDiffusivity("sym", direction="undirected")
    steps, limit = (dm.LabelPropagation(k, 0.9, 0.5 * both) for k in (2000, None))
    labelled = {"mask": mask, "features": points.float()}
    expected = limit(y, edges, batch=batch, **labelled)
    got = steps(y, edges, batch=batch, **labelled)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    labelled = {name: value[:40] for name, value in labelled.items()}
    alone = limit(y[:40], edges[:, edges[0] < 40], **labelled)
    torch.testing.assert_close(alone, expected[:40])


def test_a_sharp_kernel_spreads_nothing_past_its_own_diagonal() -> None:
    """Points thirty widths apart: with the diagonal every node hears itself alone, without it S is that of a path."""
    points = 3 * torch.arange(20.0).unsqueeze(1)
    y = torch.tensor([0] + 19 * [-1])
    models = [
        dm.LabelPropagation(50, 0.99, gaussian(0.1, diagonal=diagonal))
        for diagonal in (True, False)
    ]
    reached = [model(y, features=points).squeeze(1) > 0 for model in models]
    assert reached[0].tolist() == [True] + 19 * [False]
    assert reached[1].all()


@pytest.mark.slow
def test_digits_by_their_pixels_alone() -> None:
    data = DigitsDataModule(seed=0).load()
    accuracy = []
    for diagonal in (False, True):
        model = dm.LabelPropagation(None, 0.99, gaussian(0.3, diagonal=diagonal))
        right = model(data.y, mask=data.train_mask, features=data.x).argmax(1) == data.y
        accuracy.append(float(right[data.test_mask].float().mean()))
    assert accuracy[0] > 0.95
    assert accuracy[1] < accuracy[0] - 0.01


@pytest.mark.parametrize(
    ("diffusivity", "reads"),
    [
        (dm.SimpleDiffusivity(), True),
        (0.5 * gaussian(1.0) + dm.AdjacencyDiffusivity(), True),
        (dm.GATDiffusivity(4), True),
        (None, False),
        (dm.NeumannDiffusivity(), False),
        (0.5 * dm.AdjacencyDiffusivity("row"), False),
    ],
)
def test_features_come_if_and_only_if_the_diffusivity_reads_nodes(diffusivity, reads):
    model = dm.LabelPropagation(2, diffusivity=diffusivity)
    passed, other = {"features": torch.rand(3, 4)}, {}
    if not reads:
        passed, other = other, passed
    assert model(Y, DIRECTED, **passed).shape == (3, 2)
    with pytest.raises(ValueError, match=r"features .* must be passed .*got"):
        model(Y, DIRECTED, **other)


test_refusals = refuses(
    (lambda: dm.LabelPropagation(None, 1.0), r"alpha must lie in"),
    (
        lambda: dm.LabelPropagation(3, 0.9, dm.SimpleDiffusivity(heads=2)),
        "diffusivity .* one head",
    ),
    (lambda: dm.LabelPropagation(None)(Y, DIRECTED), "symmetric"),
    (
        lambda: dm.LabelPropagation(3, 0.9, gaussian(1.0))(Y, features=torch.eye(4)),
        "features",
    ),
    error=ValueError,
)


def test_an_undirected_graph_has_a_limit() -> None:
    assert dm.LabelPropagation(None)(
        Y, dm.Graph(3, DIRECTED).to_undirected()
    ).shape == (3, 2)
