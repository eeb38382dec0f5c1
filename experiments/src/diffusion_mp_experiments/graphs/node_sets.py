"""Small node data sets: heterophilous graphs, Facebook100, MNIST, 20 Newsgroups, digits; and labels for tuning."""

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, to_undirected

from diffusion_mp.checks import (
    check_choice,
    check_counts,
    check_finite,
    check_kind,
    label_vector,
)
from diffusion_mp.data.knn import KNNGraph
from diffusion_mp.data.splits import Labels, label_mask
from diffusion_mp_experiments.files.archives import members
from diffusion_mp_experiments.files.arrays import read_matrices, read_npz
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)

_MASKS = ("train", "val", "test")
_NPZ = 1 << 28  # bytes of all arrays; the largest file, questions, has 60 million
_HETEROPHILOUS = (
    "from the folder data of https://github.com/yandex-research/heterophilous-graphs."
)


def load_heterophilous(root: str | Path, name: str) -> Data:
    """Load a graph of Platonov et al. (2023), such as minesweeper, or chameleon_filtered, which has no duplicates.

    The function reads `root/<name>.npz` or `root/<name>/raw/<name>.npz`. The graph is the same as in PyG's
    `HeterophilousGraphDataset`.

    Args:
        root: the folder that holds the file.
        name: name of the graph.

    Shapes:
        x: [N, C].
        edge_index: [2, E] in both directions.
        y: [N].
        train_mask, val_mask, test_mask: [N, splits], the published splits; `Split.of(data, i)` is split number i.

    Raises:
        FileNotFoundError: the file is missing. The message says where to get it.
        ValueError: the file is damaged.

    Examples:
        >>> load_heterophilous(folder, "minesweeper")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: minesweeper...missing minesweeper.npz. Fetch it from the folder data of https...
    """
    check_kind(name, "name", str, "the name of a file, like minesweeper")
    folder = as_path(root, "root")
    path = as_path(folder / f"{name}.npz", "name")
    if not path.is_file() and (folder / name / "raw").is_dir():
        path = folder / name / "raw" / path.name
    check_present(name, path.parent, [path], f"Fetch it {_HETEROPHILOUS}")
    with reading(path, f"Fetch it anew, {_HETEROPHILOUS}"):
        names = [
            "node_features",
            "node_labels",
            "edges",
            *(f"{part}_masks" for part in _MASKS),
        ]
        x, y, edges, *masks = map(
            torch.from_numpy, read_npz(path, names, _NPZ).values()
        )
        check_finite(x, "node_features")
        check_indices(y, len(x), "node_labels")
        check_indices(edges, len(x), "edges")
        nodes = len(x)
        shapes = [x.dim(), y.shape, edges.shape[1:], *(mask.shape for mask in masks)]
        expected = [2, (nodes,), (2,), *[(len(masks[0]), nodes)] * 3]
        if shapes != expected or {mask.dtype for mask in masks} != {torch.bool}:
            raise ValueError(
                f"features, labels, ends of edges and masks of bools do not go together: {shapes}"
            )
        if (torch.stack(masks).sum(0) > 1).any():
            raise ValueError("a node is in two parts of a split")
        # The file has every edge once.
        edge_index = to_undirected(edges.t().contiguous().long(), num_nodes=len(y))
    parts = {
        f"{part}_mask": mask.t().contiguous()
        for part, mask in zip(_MASKS, masks, strict=True)
    }
    return Data(x=x.float(), edge_index=edge_index, y=y.long(), **parts)


_GENDER = 1  # the column of local_info
_MEMORY = 1 << 30  # bytes
_NUMBERS = 1 << 27  # of x; johnshopkins55 has 12 million
_FACEBOOK = "from the folder data/facebook100 of https://github.com/CUAI/Non-Homophily-Large-Scale."


def load_facebook(root: str | Path, name: str) -> Data:
    """Load the students of one university, such as johnshopkins55, and their friendships (Traud et al. 2012).

    The function reads `root/<name>/raw/data.mat`, where PyG's `LINKXDataset` (Lim et al. 2021) puts it. The graph is
    the same as PyG's: gender is the label, and the other columns, one-hot, are the features.

    Args:
        root: the folder that holds the folder `<name>`.
        name: name of the university.

    Shapes:
        x: [N, C].
        edge_index: [2, E] in both directions.
        y: [N] in −1 (unknown), 0 and 1.

    Raises:
        FileNotFoundError: the file is missing. The message says where to get it.
        ValueError: the file is damaged.

    Examples:
        >>> load_facebook(folder, "johnshopkins55")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: johnshopkins55...missing data.mat. Fetch it as data.mat from the folder data/facebook100...
    """
    check_kind(name, "name", str, "the name of a university, like johnshopkins55")
    path = as_path(root, "root") / name / "raw" / "data.mat"
    check_present(name, path.parent, [path], f"Fetch it as data.mat {_FACEBOOK}")
    with reading(path, f"Fetch it anew, {_FACEBOOK}"), TemporaryDirectory() as scratch:
        table, friends = read_matrices(
            path, ["local_info", "A"], Path(scratch), _MEMORY
        )
        if table.dtype.kind not in "iu" or table.shape[1] <= _GENDER or not len(table):
            raise ValueError(
                f"its local_info is no table of whole numbers but {table.dtype} {table.shape}"
            )
        people = np.array(table, np.int64)
        if not hasattr(friends, "tocoo") or friends.shape != (len(people), len(people)):
            raise ValueError(
                f"its A is no sparse matrix of all, but a matrix {friends.shape} of {len(people)} people"
            )
        entries = friends.tocoo()
        pairs = np.stack([entries.row, entries.col]).astype(np.int64)
        x = _one_hot(np.delete(people, _GENDER, 1))
        y = torch.from_numpy(people[:, _GENDER]) - 1
        if int(y.min()) < -1 or int(y.max()) > 1:
            raise ValueError("its column of gender must hold 0, for not known, 1 and 2")
        return Data(
            x=x, edge_index=coalesce(torch.from_numpy(pairs), num_nodes=len(y)), y=y
        )


def _one_hot(columns: Shaped[np.ndarray, "N columns"]) -> Tensor:
    from sklearn.preprocessing import OneHotEncoder

    # As PyG makes it: a column for every value that occurs, in order of the values.
    encoder = OneHotEncoder(sparse_output=False, dtype=np.float32).fit(columns)
    width = sum(map(len, encoder.categories_))
    if len(columns) * width > _NUMBERS:
        raise ValueError(
            f"its local_info has {width} different values of {len(columns)} people"
        )
    return torch.from_numpy(encoder.transform(columns))


_MNIST = "PyTorch's torchvision.datasets.MNIST downloads it to this place."


def load_mnist(root: str | Path, num_images: int = 15_000) -> Data:
    """Load the first images of MNIST's training set (LeCun et al. 1998), without edges; `KNNGraph` adds them.

    The function reads `root/raw/train-images-idx3-ubyte.gz` and `root/raw/train-labels-idx1-ubyte.gz`.

    Args:
        root: the folder that holds the folder `raw`.
        num_images: number of images. The default 15 000 is the number of Wu, Wipf & Yan (2025, Table 6).

    Shapes:
        x: [num_images, 784] in [0, 1].
        y: [num_images] in 0..9.

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ValueError: a file is damaged.

    Examples:
        >>> load_mnist(folder)  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: MNIST...train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz. Put it there; PyTorch's...
    """
    check_counts(num_images=num_images)
    raw = as_path(root, "root") / "raw"
    images = raw / "train-images-idx3-ubyte.gz"
    labels = raw / "train-labels-idx1-ubyte.gz"
    check_present("MNIST", raw, [images, labels], f"Put it there; {_MNIST}")
    x = _idx(images, (num_images, 28, 28))
    y = _idx(labels, (num_images,))
    if int(y.max()) > 9:
        raise ValueError(
            f"{labels}: it has a label {int(y.max())}, and digits end at 9. Fetch it anew; {_MNIST}"
        )
    return Data(x=x.flatten(1).float() / 255, y=y.long())


def _idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read the beginning of an array of bytes in LeCun's format: a magic number, the sizes, the numbers row by row."""
    with reading(path, f"Fetch it anew; {_MNIST}"), gzip.open(path) as file:
        magic, count, *sizes = struct.unpack(
            f">{1 + len(shape)}I", file.read(4 * (1 + len(shape)))
        )
        if magic != 0x800 + len(shape) or tuple(sizes) != shape[1:] or count < shape[0]:
            raise ValueError(
                f"its header says {count} × {sizes}, type {magic:#x}; expected {shape} bytes or more"
            )
        content = file.read(math.prod(shape))
        if len(content) < math.prod(shape):
            raise ValueError(
                f"it ends after {len(content)} of {math.prod(shape)} bytes"
            )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


TEN_GROUPS = (
    *(
        "alt.atheism",
        "comp.sys.ibm.pc.hardware",
        "misc.forsale",
        "rec.autos",
        "rec.sport.hockey",
        "sci.crypt",
    ),
    *("sci.electronics", "sci.med", "sci.space", "talk.politics.guns"),
)
_ARCHIVE = "20news-bydate.tar.gz"
_LONGEST = 1 << 20  # bytes of a message that are read; the longest has 160 000


def load_newsgroups(
    root: str | Path, *, groups: Sequence[str] = TEN_GROUPS, num_words: int = 1000
) -> Data:
    """Load messages of 20 Newsgroups (Lang 1995) as weights of words, without edges; `KNNGraph` adds them.

    The headers of messages are not read, since they name the group. scikit-learn's `TfidfVectorizer` weighs the words,
    without English stop words. Rows have norm 1, or norm 0 if a message has none of the words.

    Args:
        root: the folder that holds `20news-bydate.tar.gz`.
        groups: names of the groups; group number c is class c. The default groups are NodeFormer's.
        num_words: how many words, the most frequent ones.

    Shapes:
        x: [messages, num_words], in the order of the archive.
        y: [messages].

    Raises:
        FileNotFoundError: the archive is missing. The message says where to get it.
        ValueError: the archive is damaged.

    Examples:
        >>> load_newsgroups(folder, groups=["sci.space", "rec.autos"])  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: 20 Newsgroups...missing 20news-bydate.tar.gz. Fetch 20news-bydate.tar.gz from http...
    """
    check_counts(num_words=num_words)
    check_kind(groups, "groups", (list, tuple), "names of newsgroups")
    from sklearn.feature_extraction.text import TfidfVectorizer

    path = as_path(root, "root") / _ARCHIVE
    way_out = (
        f"Fetch {_ARCHIVE} from http://qwone.com/~jason/20Newsgroups/ and put it there."
    )
    check_present("20 Newsgroups", path.parent, [path], way_out)
    texts = []
    labels = []
    with reading(path, way_out):
        for member, content in members(path):
            group = member.name.split("/")[-2] if member.name.count("/") else ""
            if group in groups:
                # Latin-1 decodes any bytes, and most of these are ASCII.
                message = content.read(_LONGEST).decode("latin-1").replace("\r\n", "\n")
                texts.append(message.partition("\n\n")[2])
                labels.append(groups.index(group))
        if len(set(labels)) < len(groups):
            raise ValueError(
                f"it has nothing of {groups[min({*range(len(groups))}.difference(labels))]}"
            )
        words = TfidfVectorizer(
            stop_words="english", max_features=num_words
        ).fit_transform(texts)
    return Data(x=torch.from_numpy(words.toarray()).float(), y=torch.tensor(labels))


def load_digits(num_neighbors: int = 5) -> Data:
    """Load scikit-learn's 1 797 images of 8 × 8 pixels on their nearest-neighbour graph.

    This is the low-label setting of Wu, Wipf & Yan (2025). Two images are joined, in both directions, if one is among
    the nearest neighbours of the other by Euclidean distance.

    Args:
        num_neighbors: number of nearest neighbours of an image, 1..1 796.

    Shapes:
        x: [1797, 64] in [0, 1].
        y: [1797] in 0..9.
        edge_index: [2, E], sorted, without loops.

    Examples:
        >>> load_digits(num_neighbors=5).x.shape
        torch.Size([1797, 64])
    """
    from sklearn.datasets import load_digits as sklearn_digits

    check_counts(num_neighbors=num_neighbors)
    pixels, labels = sklearn_digits(return_X_y=True)
    # Sixteenths are exact in every floating-point format, and so are the distances between them.
    # No `edge_index` yet: neighbours are found among the pixels.
    data = Data(
        x=torch.from_numpy(pixels / 16).float(), y=torch.from_numpy(labels).long()
    )
    return KNNGraph(num_neighbors)(data)


def _two_classes() -> tuple[np.ndarray, np.ndarray]:
    """Two normal distributions on a line, three standard deviations apart, of 90 and 10 % of the rows."""
    generator = np.random.default_rng(0)
    labels = (generator.random(2_000) < 0.1).astype(int)
    return (generator.normal(size=2_000) + 3 * labels)[:, None], labels


#: Tables whose rows have numbers.
NUMBERS = ("diabetes", "friedman 1", "friedman 2", "friedman 3")
#: All tables of `load_rows`; the others have classes.
TABLES = (
    *NUMBERS,
    "breast cancer",
    "digits",
    "iris",
    "moons",
    "rings",
    "three classes",
    "two classes",
    "wine",
)


def load_rows(name: str) -> Data:
    """Load rows of a table and their classes or numbers; columns have mean zero and variance one, without a graph.

    Args:
        name: "iris", "wine", "breast cancer" or "digits" of scikit-learn; or drawn: "moons" and "rings" (two classes),
            "two classes" (90 and 10 %), "three classes" (70, 25 and 5 %). With a number for every row: "diabetes" of
            scikit-learn; or drawn, Friedman's (1991) three functions with noise, "friedman 1" to "friedman 3".

    Shapes:
        x: [N, C].
        y: [N], classes (int64), or numbers (float32) of mean zero and variance one.

    Examples:
        >>> load_rows("iris").x.shape
        torch.Size([150, 4])
    """
    from sklearn import datasets
    from sklearn.preprocessing import StandardScaler

    check_choice(name, "name", TABLES)
    drawn = {
        "moons": lambda: datasets.make_moons(1_000, noise=0.15, random_state=0),
        "rings": lambda: datasets.make_circles(
            1_000, noise=0.08, factor=0.5, random_state=0
        ),
        "two classes": _two_classes,
        # Overlapping classes in twelve columns, of which five tell them apart.
        "three classes": lambda: datasets.make_classification(
            3_000,
            12,
            n_informative=5,
            n_classes=3,
            n_clusters_per_class=1,
            weights=[0.7, 0.25, 0.05],
            flip_y=0.02,
            random_state=0,
        ),
        "friedman 1": lambda: datasets.make_friedman1(1_000, noise=1, random_state=0),
        "friedman 2": lambda: datasets.make_friedman2(1_000, noise=50, random_state=0),
        "friedman 3": lambda: datasets.make_friedman3(1_000, noise=0.1, random_state=0),
    }
    if name in drawn:
        rows, labels = drawn[name]()
    else:
        load = getattr(datasets, f"load_{name.replace(' ', '_')}")
        rows, labels = load(return_X_y=True)
    rows = torch.from_numpy(StandardScaler().fit_transform(rows)).float()
    if name in NUMBERS:
        y = torch.from_numpy((labels - labels.mean()) / labels.std()).float()
    else:
        y = torch.from_numpy(labels.astype(np.int64))
    return Data(x=rows, y=y)


_POOL_SEED = 2025  # the same in every run
_POOL = 0.3  # share of the labels


def visible_labels(y: Labels, tuning: bool) -> Int[Tensor, " N"]:
    """Return the labels from which splits for tuning, or splits for reported results, are drawn; all others are −1.

    A fixed random part of the labelled nodes (or graphs), 30 %, belongs to tuning, the rest to results. A split trains,
    validates and tests on one side. So no label of a reported result was seen while settings were chosen.
    """
    y = label_vector(y)
    labelled = label_mask(y).cpu().nonzero().flatten()
    generator = torch.Generator().manual_seed(_POOL_SEED)
    # Of labelled nodes alone, or unknown labels would take a share.
    order = torch.randperm(len(labelled), generator=generator)
    pool = torch.zeros(len(y), dtype=torch.bool)
    pool[labelled[order[: int(_POOL * len(labelled))]]] = True
    return y.where(pool.to(y.device) == tuning, -1)
