"""The Pathfinder-like task: connected components know the answer, ink does not; seeds, one pinned image."""

import hashlib

import jaxtyping
import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.ndimage import distance_transform_edt
from scipy.ndimage import label as components
from sklearn.linear_model import LogisticRegression

from diffusion_mp.data import pad
from diffusion_mp_experiments.sequences import Pathfinder
from diffusion_mp_experiments.sequences.dataset import item_random
from diffusion_mp_experiments.sequences.pathfinder import Scene

CORNERS = np.ones((3, 3))
# Most tests do without the run-time shape checks, which take fifteen times as long as the drawing.


def digest(dataset: Pathfinder, indices=(0, 1)) -> str:
    images = b"".join(dataset.scene(i).image.numpy().tobytes() for i in indices)
    return hashlib.sha256(images).hexdigest()[:16]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    drawn = [Pathfinder(num=800).scene(i) for i in range(800)]
    jaxtyping.config.update("jaxtyping_disable", before)
    return drawn


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Logistic regression, fitted on the first half and scored on the second."""
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    half = len(labels) // 2
    return LogisticRegression().fit(features[:half], labels[:half]).score(features[half:], labels[half:])


@pytest.mark.exhaustive
def test_connected_components_know_the_answer(scenes):
    """Two discs are on one path if and only if their pixels are connected in the drawing without gaps."""
    counts = []
    for scene in scenes:
        piece, count = components(scene.solid.numpy(), CORNERS)
        one, other = (piece[end] for end in scene.ends)
        assert one > 0 < other
        assert (one == other) == (scene.label == 1)
        counts.append(count)
    assert set(counts) <= set(range(2, 8))  # two long paths and as many of five short ones as fit
    assert np.mean(counts) > 3.7


@pytest.mark.unwatched
def test_the_drawing_has_gaps_and_shows_no_more_than_the_paths(scenes):
    """The visible dashes are more pieces than there are paths, and they lie on or beside the paths."""
    pieces = []
    for scene in scenes[:200]:
        solid, visible = scene.solid.numpy(), scene.image.numpy() > 32
        pieces.append(components(visible, CORNERS)[1] - components(solid, CORNERS)[1])
        distance = distance_transform_edt(~solid)  # to the next pixel of a path
        assert distance[scene.image.numpy() > 0].max() <= 3  # the radius of a soft disc, and the corner of a pixel
    assert np.mean(pieces) > 10


@pytest.mark.usefixtures("no_typecheck")
def test_gaps_within_a_path_are_shorter_than_those_between_paths():
    """The dashes of all paths, joined where they come closer than 1.8 pixels, are the paths again."""
    for i in range(10):
        paths = Pathfinder(num=10)._paths(item_random("gaps", i))
        dashes = [np.linspace(*dash, 9) for path in paths for dash in path.dashes]
        owner = [k for k, path in enumerate(paths) for _ in path.dashes for _ in range(9)]
        group = fcluster(linkage(np.concatenate(dashes), "single"), 1.8, "distance")
        assert len(set(zip(owner, group, strict=True))) == len(set(owner)) == len(set(group))


@pytest.mark.unwatched
def test_neither_the_ink_nor_the_distance_of_the_discs_knows_the_answer(scenes):
    images = np.stack([scene.image.numpy() for scene in scenes]).reshape(len(scenes), -1) / 255
    labels = np.array([scene.label for scene in scenes])
    ink = np.stack([images.mean(axis=1), (images > 0).sum(axis=1), (images > 0.5).sum(axis=1), images.std(axis=1)], 1)
    assert accuracy(ink, labels) < 0.55
    assert accuracy(images[:, images.std(axis=0) > 0], labels) < 0.56  # every pixel on its own: 1 000 features

    ends = np.array([scene.ends for scene in scenes], dtype=float)
    distance = np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1)
    assert accuracy(np.stack([distance, distance**2], axis=1), labels) < 0.58


def test_classes_shapes_and_tokens():
    dataset = Pathfinder("test", num=7)
    scene = dataset.scene(3)
    assert (scene.image.shape, scene.image.dtype) == ((32, 32), torch.uint8)
    assert int(scene.image.max()) > 240
    tokens, label = dataset[3]
    assert torch.equal(tokens, scene.image.flatten().long())
    assert label == scene.label == 1
    tokens, mask, labels = pad(list(dataset))
    assert tokens.shape == mask.shape == (7, 1024)
    assert mask.all()
    assert labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert [len(Pathfinder(split)) for split in ("train", "val", "test")] == [160_000, 20_000, 20_000]


@pytest.mark.usefixtures("no_typecheck")
def test_sizes_and_paths_that_do_not_fit(monkeypatch):
    easy = Pathfinder(num=20, dashes=6, distractors=2, distractor_dashes=2)
    assert np.mean([components(easy.scene(i).solid.numpy(), CORNERS)[1] for i in range(20)]) > 3.5
    alone = Pathfinder(num=5, distractors=0)
    assert all(components(alone.scene(i).solid.numpy(), CORNERS)[1] == 2 for i in range(5))
    assert Pathfinder(num=1, size=48).scene(0).image.shape == (48, 48)
    monkeypatch.setattr("diffusion_mp_experiments.sequences.pathfinder._SCENES", 3)
    with pytest.raises(RuntimeError, match="Two paths of 60 dashes do not fit into 24 pixels"):
        Pathfinder(size=24, dashes=60).scene(0)
    for index in (-1, 5):
        with pytest.raises(IndexError, match=rf"0 \.\. 4; got {index}"):
            Pathfinder(num=5).scene(index)


@pytest.mark.usefixtures("no_typecheck")
def test_items_depend_on_seed_split_and_index_alone():
    state = torch.get_rng_state()
    ten, three = Pathfinder(num=10), Pathfinder(num=3)
    assert digest(ten, (2, 0)) == digest(three, (2, 0))
    assert len({digest(d) for d in (ten, Pathfinder(seed=1), Pathfinder("val"), Pathfinder("test"))}) == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert digest(Pathfinder("test"), range(5)) == "6f0e147f7cc895e8"
