"""ListOps and the Pathfinder-like task: answers, the published grammar, splits, seeds, pinned items."""

import gzip
import hashlib
import random
import re
from collections import Counter
from typing import NamedTuple

import jaxtyping
import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.ndimage import distance_transform_edt
from scipy.ndimage import label as components
from sklearn.linear_model import LogisticRegression

from diffusion_mp.data import pad
from diffusion_mp_experiments.sequences import ListOps, Pathfinder
from diffusion_mp_experiments.sequences.dataset import item_random
from diffusion_mp_experiments.sequences.listops import OPERATORS, TOKENS
from diffusion_mp_experiments.sequences.pathfinder import Scene

SHORT = {"min_length": 10, "max_length": 60, "max_depth": 5, "max_args": 5}
EXPRESSIONS = [
    ("7", 7),
    ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
    ("[SM 9 9 5 ]", 3),
    ("[MED 1 5 3 ]", 3),
    ("[MED 3 4 ]", 3),  # 3.5, and int() rounds down
    ("[MED 9 0 8 1 ]", 4),
    ("[FIRST 4 5 6 ]", 4),
    ("[LAST 4 5 [MIN 6 ] ]", 6),
    ("( ( ( [MIN 6 ) ( ( ( [LAST 6 ) 2 ) ] ) ) ] )", 2),
]


class Operation(NamedTuple):
    """An inner node of the tree of an expression, whose leaves are digits."""

    operator: str
    arguments: tuple["int | Operation", ...]


def encode(expression: str) -> torch.Tensor:
    """The tokens of an expression; the parentheses of published files are for shift-reduce parsers."""
    words = expression.replace("(", " ").replace(")", " ").split()
    return torch.tensor([TOKENS.index(word) for word in words])


def decode(tokens: torch.Tensor) -> str:
    return " ".join(TOKENS[token] for token in tokens.tolist())


def parse(tokens: torch.Tensor) -> int | Operation:
    """The tree of an expression: a digit, or an operation on trees."""
    text = re.sub(
        r"\[(\w+)", r"Operation('\1', (", re.sub(r"(\d)", r"\1,", decode(tokens))
    )
    (tree,) = eval(text.replace("]", ")),"))
    return tree


def evaluate(tree: int | Operation) -> int:
    if isinstance(tree, int):
        return tree
    return OPERATORS[tree.operator](list(map(evaluate, tree.arguments)))


def depth(tree) -> int:
    return 1 if isinstance(tree, int) else 1 + max(map(depth, tree.arguments))


def operations(tree) -> list[Operation]:
    if isinstance(tree, int):
        return []
    return [tree] + [op for child in tree.arguments for op in operations(child)]


def digest(dataset) -> str:
    text = ";".join(f"{decode(tokens)}={label}" for tokens, label in dataset)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("expression", "answer"), EXPRESSIONS)
def test_small_expressions(expression, answer):
    assert evaluate(parse(encode(expression))) == answer


def test_the_arenas_lengths_depths_and_arguments():
    dataset = ListOps("val", num=30)
    trees = [parse(tokens) for tokens, _ in dataset]
    assert all(500 < len(tokens) < 2000 for tokens, _ in dataset)
    assert max(map(depth, trees)) == 10
    counts = Counter(len(op.arguments) for tree in trees for op in operations(tree))
    assert sorted(counts) == list(range(2, 11))
    names = Counter(op.operator for tree in trees for op in operations(tree))
    assert sorted(names) == ["MAX", "MED", "MIN", "SM"]
    total = sum(names.values())
    assert [names[name] / total for name in names] == pytest.approx(
        [0.25] * 4, abs=0.03
    )
    digits = torch.cat(
        [tokens[(tokens >= 1) & (tokens <= 10)] for tokens, _ in dataset]
    )
    assert (torch.bincount(digits)[1:] / len(digits)).tolist() == pytest.approx(
        [0.1] * 10, abs=0.01
    )
    sizes = {"train": 96_000, "val": 2_000, "test": 2_000}
    assert {split: len(ListOps(split)) for split in sizes} == sizes
    short = ListOps(num=400, operators=list(OPERATORS), **SHORT)
    for tokens, label in [*dataset, *short]:
        assert label == evaluate(parse(tokens))
    for tokens, _ in short:
        assert 10 <= len(tokens) <= 60


def test_the_published_distribution():
    """Against the grammar written as a recursion: the same lengths, depths and numbers of arguments at the root."""
    source = random.Random(0)

    def grow(level: int):
        if level == 5 or source.random() > 0.25:
            return 0
        return Operation(
            "MIN", tuple(grow(level + 1) for _ in range(source.randint(2, 5)))
        )

    def length(tree) -> int:
        return 1 if isinstance(tree, int) else 2 + sum(map(length, tree.arguments))

    theirs = [
        tree for tree in (grow(1) for _ in range(60_000)) if 10 <= length(tree) <= 60
    ]
    ours = [parse(tokens) for tokens, _ in ListOps(num=len(theirs) // 2, **SHORT)]
    measures = (length, depth, lambda tree: len(tree.arguments))
    for measure in measures:
        a, b = (np.array([measure(tree) for tree in trees]) for trees in (theirs, ours))
        error = np.hypot(a.std() / len(a) ** 0.5, b.std() / len(b) ** 0.5)
        assert abs(a.mean() - b.mean()) < 4 * error
        assert abs(a.std() / b.std() - 1) < 0.05


def test_no_expression_is_in_two_splits_and_lengths_may_not_exist():
    short = {"num": 800, "min_length": 4, "max_length": 6}
    splits = [
        {decode(tokens) for tokens, _ in ListOps(split, **short)}
        for split in ("train", "val", "test")
    ]
    assert all(len(split) > 300 for split in splits)
    assert splits[0].isdisjoint(splits[1] | splits[2])
    assert splits[1].isdisjoint(splits[2])
    dataset = ListOps(num=1, max_depth=2, max_args=3)
    with pytest.raises(
        RuntimeError,
        match=r"No tree of 501 \.\. 1999 tokens .* max_depth 2 or max_args 3",
    ):
        dataset[0]
    with pytest.raises(IndexError, match=r"-1 \.\. 0; got 1"):
        dataset[1]
    assert (len(TOKENS), len(set(TOKENS)), TOKENS[0]) == (18, 18, "<pad>")


@pytest.mark.usefixtures("no_typecheck")  # the shape checks draw from `random`
def test_items_depend_on_seed_split_and_index_alone():
    states = random.getstate(), torch.get_rng_state()
    ten, three = (ListOps(num=n, **SHORT) for n in (10, 3))
    assert torch.equal(ten[2][0], three[2][0])  # asked for out of order
    assert digest(three) == digest([ten[i] for i in range(3)])
    assert torch.equal(ten[-1][0], ten[9][0])
    changes = ({"seed": 1}, {"split": "val"}, {"split": "test"})
    others = [ListOps(num=10, **change, **SHORT) for change in changes]
    # Their trees differ too, not only what fills them.
    lengths = {tuple(len(tokens) for tokens, _ in each) for each in (ten, *others)}
    assert len(lengths) == 4
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert digest(ListOps("test", num=3)) == "3d7be1b5af6103ff"


@pytest.mark.data
@pytest.mark.usefixtures("no_typecheck")  # a million calls
@pytest.mark.parametrize(
    ("name", "rows", "half_medians"),
    [
        ("test.tsv", 500, False),
        ("test_d20a.tsv.gz", 10_000, True),
        ("test_d20s.tsv.gz", 10_000, True),
    ],
)
def test_every_published_answer(data_root, monkeypatch, name, rows, half_medians):
    """MED rounds down in the published files: every answer agrees, and rounding up would miss many."""
    path = data_root / "listops" / name
    if not path.is_file():
        pytest.skip(f"no listops/{name} at {data_root}")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        columns = [line.rstrip("\n").split("\t") for line in file]
    # Nangia & Bowman write label TAB expression, the Arena expression TAB label below a header.
    pairs = [
        pair if pair[0].isdigit() else pair[::-1]
        for pair in columns
        if pair != ["Source", "Target"]
    ]
    trees = [(parse(encode(expression)), int(label)) for label, expression in pairs]
    assert len(trees) == rows
    assert all(evaluate(tree) == label for tree, label in trees)
    monkeypatch.setitem(
        OPERATORS, "MED", lambda values: int(np.ceil(np.median(values)))
    )
    assert (
        sum(evaluate(tree) != label for tree, label in trees) > rows / 20
    ) == half_medians


CORNERS = np.ones((3, 3))
# Most tests do without the run-time shape checks, which take fifteen times as long as the drawing.


def digest_of_images(dataset: Pathfinder, indices=(0, 1)) -> str:
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
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    half = len(labels) // 2
    model = LogisticRegression().fit(features[:half], labels[:half])
    return model.score(features[half:], labels[half:])


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
    assert set(counts) <= set(
        range(2, 8)
    )  # two long paths and as many of five short ones as fit
    assert np.mean(counts) > 3.7


@pytest.mark.unwatched
def test_the_drawing_has_gaps_and_shows_no_more_than_the_paths(scenes):
    pieces = []
    for scene in scenes[:200]:
        solid = scene.solid.numpy()
        visible = scene.image.numpy() > 32
        pieces.append(components(visible, CORNERS)[1] - components(solid, CORNERS)[1])
        distance = distance_transform_edt(~solid)  # to the next pixel of a path
        # The radius of a soft disc, and the corner of a pixel.
        assert distance[scene.image.numpy() > 0].max() <= 3
    assert np.mean(pieces) > 10


@pytest.mark.unwatched
def test_neither_the_ink_nor_the_distance_of_the_discs_knows_the_answer(scenes):
    images = np.stack([scene.image.flatten().numpy() for scene in scenes]) / 255
    labels = np.array([scene.label for scene in scenes])
    pixels = [(images > level).sum(axis=1) for level in (0, 0.5)]
    ink = np.stack([images.mean(axis=1), images.std(axis=1), *pixels], 1)
    assert accuracy(ink, labels) < 0.55
    # Every pixel on its own: 1 000 features.
    assert accuracy(images[:, images.std(axis=0) > 0], labels) < 0.56

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
    sizes = {"train": 160_000, "val": 20_000, "test": 20_000}
    assert {split: len(Pathfinder(split)) for split in sizes} == sizes


@pytest.mark.usefixtures("no_typecheck")
def test_sizes_and_paths_that_do_not_fit(monkeypatch):
    def paths(**options):
        dataset = Pathfinder(num=20, **options)
        solid = [dataset.scene(i).solid.numpy() for i in range(20)]
        return [components(image, CORNERS)[1] for image in solid]

    assert np.mean(paths(dashes=6, distractors=2, distractor_dashes=2)) > 3.5
    assert set(paths(distractors=0)) == {2}
    assert Pathfinder(num=1, size=48).scene(0).image.shape == (48, 48)
    monkeypatch.setattr("diffusion_mp_experiments.sequences.pathfinder._SCENES", 3)
    with pytest.raises(
        RuntimeError, match="Two paths of 60 dashes do not fit into 24 pixels"
    ):
        Pathfinder(size=24, dashes=60).scene(0)
    for index in (-1, 5):
        with pytest.raises(IndexError, match=rf"0 \.\. 4; got {index}"):
            Pathfinder(num=5).scene(index)


@pytest.mark.usefixtures("no_typecheck")
def test_images_depend_on_seed_split_and_index_alone():
    state = torch.get_rng_state()
    ten = Pathfinder(num=10)
    three = Pathfinder(num=3)
    assert digest_of_images(ten, (2, 0)) == digest_of_images(three, (2, 0))
    others = (Pathfinder(seed=1), Pathfinder("val"), Pathfinder("test"))
    assert len(set(map(digest_of_images, (ten, *others)))) == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert digest_of_images(Pathfinder("test"), range(5)) == "6f0e147f7cc895e8"
    for i in range(10):
        paths = Pathfinder(num=10)._paths(item_random("gaps", i))
        dashes = [np.linspace(*dash, 9) for path in paths for dash in path.dashes]
        owner = [
            k for k, path in enumerate(paths) for _ in path.dashes for _ in range(9)
        ]
        group = fcluster(linkage(np.concatenate(dashes), "single"), 1.8, "distance")
        # Each path is a group and each group a path.
        pairs = set(zip(owner, group, strict=True))
        assert len(pairs) == len(set(owner)) == len(set(group))
