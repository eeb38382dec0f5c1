"""LightningDataModules: graphs in three parts, and one graph whose nodes are split by masks."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures, ToUndirected

from diffusion_mp.checks import (
    Count,
    Seed,
    check_kind,
    check_seed,
    checked,
)
from diffusion_mp.data import (
    KNNGraph,
    RandomPartitionLoader,
    Split,
    random_split,
    random_split_per_class,
)
from diffusion_mp.data.knn import Metric
from diffusion_mp_experiments import graphs
from diffusion_mp_experiments.graphs.node_sets import NUMBERS, visible_labels
from diffusion_mp_experiments.graphs.ogb import OgbName
from diffusion_mp_experiments.settings import settings
from diffusion_mp_experiments.train.classifiers import NodeClassifier

Loaded = TypeVar("Loaded")


def read_once(load: Callable[..., Loaded], *args: Any) -> Loaded:
    """Return `load(*args)`, kept for later calls: a process trains many models on one data set."""
    try:
        hash(args)
    except TypeError:
        return load(*args)  # which says what is wrong with a list, say
    return _kept(load, *args)


@lru_cache(4)
def _kept(load: Callable[..., Any], *args: Any) -> Any:
    return load(*args)


def has_label(y: Tensor) -> Tensor:
    """Return a mask of the known labels: not NaN, or not below zero."""
    return ~y.isnan() if y.is_floating_point() else y >= 0


Parts = tuple[Sequence[Data], Sequence[Data], Sequence[Data]]


@settings
class SplitDataModule(LightningDataModule):
    """Base class: graphs to train, validate and test on; subclasses define `parts`.

    Args:
        split: number of the split. It seeds `generator`, which draws random splits.
        tuning: whether settings are being chosen, so that the data of reported results stay unseen. Random splits are
            then drawn from the labels for tuning, and otherwise from all other labels (see `visible_labels`). In
            published splits the validation nodes stand in for the test nodes. Off by default.
    """

    #: The LightningModule that trains a model on these data.
    trains: ClassVar[type[LightningModule]] = NodeClassifier
    #: The part whose score is that of a setting, where settings are chosen.
    tuned_on: ClassVar[Literal["val", "test"]] = "val"

    split: Seed = field(default=0, kw_only=True)
    tuning: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__init__()
        self._batches: dict[int, list[Data]] = {}

    def parts(self) -> Parts:
        """Return the graphs that train, validate and test; called once, when first needed."""
        raise NotImplementedError

    def together(self, part: Sequence[Data]) -> list[Data]:
        return list(part)

    @property
    def num_features(self) -> int:
        """Width of x: the in_channels of a model."""
        return int(self.part(0)[0].num_node_features)

    @property
    def num_edge_features(self) -> int | None:
        """Width of edge_attr: the edge_dim of a model; None without edge_attr."""
        return self.part(0)[0].num_edge_features or None

    @property
    def num_classes(self) -> int:
        """Number of classes, of tasks, or 1 for a number: the out_channels of a model."""
        labels = [graph.y for number in range(3) for graph in self.part(number)]
        if labels[0].dim() == 2:
            return labels[0].size(1)
        if labels[0].is_floating_point():
            return 1
        return int(torch.cat(labels).max()) + 1

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.split)

    def part(self, number: int) -> Sequence[Data]:
        """Return the graphs that train (0), validate (1) or test (2)."""
        return self._parts[number]

    @cached_property
    def _parts(self) -> Parts:
        # Tensors made while validating could not be trained on.
        with torch.inference_mode(False):
            return self.parts()

    def to(self, device: torch.device | str) -> None:
        """Move all graphs to a device, for loops that do not move batches as a Trainer does."""
        parts = [self.part(number) for number in range(3)]
        # A graph that is in several parts is moved once, and stays one graph.
        moved = {id(graph): copy(graph).to(device) for part in parts for graph in part}
        train, val, test = ([moved[id(graph)] for graph in part] for part in parts)
        self._parts = train, val, test
        self._batches.clear()

    def train_dataloader(self) -> Iterable[Data]:
        return self._in_order(0)

    def val_dataloader(self) -> Iterable[Data]:
        return self._in_order(1)

    def test_dataloader(self) -> Iterable[Data]:
        return self._in_order(2)

    def _in_order(self, number: int) -> Iterable[Data]:
        """Return the batches of a part, made once, since layers cache with a graph what they compute from it."""
        if number not in self._batches:
            with torch.inference_mode(False):
                self._batches[number] = self.together(self.part(number))
        return DataLoader(self._batches[number], batch_size=None)  # type: ignore[arg-type]


class FullGraphDataModule(SplitDataModule):
    """Base class: one `Data` with train_mask, val_mask and test_mask, once per epoch; subclasses define `load`.

    With `num_parts` above 1 an epoch is a step on each of so many random parts of the graph.
    """

    num_parts = 1

    def load(self) -> Data:
        """Return the graph with its masks; called once, when first needed."""
        raise NotImplementedError

    def parts(self) -> Parts:
        data = [self.load()]
        return data, data, data

    @property
    def data(self) -> Data:
        return self.part(0)[0]

    def train_dataloader(self) -> Iterable[Data]:
        if self.num_parts == 1:
            return self._in_order(0)
        # Cut on the CPU; the training loop moves one part after another.
        graph = copy(self.data).cpu()
        return RandomPartitionLoader(graph, self.num_parts, seed=self.split)

    def predict_dataloader(self) -> Iterable[Data]:
        return self._in_order(0)


class DigitsDataModule(FullGraphDataModule):
    """Scikit-learn's digits on their kNN graph, with few labels per class.

    Args:
        per_class: number of training labels of each of the ten classes.
        num_val: number of validation nodes; all others are test nodes.
        num_neighbors: k of the graph over pixels.
        seed: draws the split.

    Examples:
        >>> data = DigitsDataModule(per_class=5, seed=0)
    """

    @checked
    def __init__(
        self,
        per_class: int = 5,
        num_val: int = 500,
        num_neighbors: int = 5,
        seed: Seed = 0,
    ) -> None:
        super().__init__(split=seed)
        self.per_class = per_class
        self.num_val = num_val
        self.num_neighbors = num_neighbors

    def load(self) -> Data:
        data = graphs.load_digits(self.num_neighbors)
        return random_split_per_class(
            data.y, self.per_class, self.num_val, None, self.generator
        ).apply_to(data)


class PlanetoidDataModule(FullGraphDataModule):
    """Cora, CiteSeer or PubMed from files on disk (see `load_planetoid`), with features that sum to 1 in every row.

    Args:
        root: folder that holds `<Name>/raw/ind.<name>.*`.
        name: "Cora", "CiteSeer" or "PubMed".
        split: "public" is the fixed split. "random" draws 20 labels per class, 500 validation and 1 000 test nodes from
            all labels. A number draws that split from the labels for results only (see `visible_labels`).
        seed: draws the split if it is "random".
        tuning: whether to draw split number `split` from the labels for tuning; all other nodes of these labels test.
        sparse: whether x is a CSR matrix, which a model reads in a fraction of the time. Dense by default.
        per_class: number of training nodes of each class in a random split.
        num_val: number of validation nodes in a random split.
        num_test: number of test nodes in a random split; `None` takes all that remain.
        download: whether PyG downloads missing files into `root`. Off by default.

    Examples:
        >>> data = PlanetoidDataModule("data/Planetoid", "Cora", split="public")  # reads the files later
    """

    def __init__(
        self,
        root: str = "data/Planetoid",
        name: Literal["Cora", "CiteSeer", "PubMed"] = "Cora",
        split: Literal["random", "public"] | int = "random",
        seed: int = 0,
        tuning: bool = False,
        sparse: bool = False,
        per_class: int = 20,
        num_val: int = 500,
        num_test: int | None = 1000,
        download: bool = False,
    ) -> None:
        # True is an int for Python, and no number of a split.
        self.numbered = type(split) is int
        self.public = split == "public"
        if not self.numbered and split not in ("random", "public"):
            raise ValueError(
                f'split must be a number, "random" or "public", got {split!r}.'
            )
        check_seed(seed)
        if tuning and not self.numbered:
            raise ValueError(
                f"tuning needs a number as split, for only such splits keep labels apart; got {split!r}."
            )
        drawn = split if isinstance(split, int) else seed
        super().__init__(split=drawn, tuning=tuning)
        self.root = root
        self.network = name
        self.sparse = sparse
        self.download = download
        self.per_class = per_class
        self.num_val = num_val
        self.num_test = num_test

    def load(self) -> Data:
        data = graphs.load_planetoid(self.root, self.network, download=self.download)
        if self.public:
            split = Split.of(data)
        else:
            labels = visible_labels(data.y, self.tuning) if self.numbered else data.y
            num_test = None if self.tuning else self.num_test
            split = random_split_per_class(
                labels, self.per_class, self.num_val, num_test, self.generator
            )
        data = split.apply_to(data)
        if self.sparse:
            data.x = data.x.to_sparse_csr()
        return data


@settings
class HeterophilousDataModule(FullGraphDataModule):
    """A graph of Platonov et al. (2023) with one of its published splits (see `load_heterophilous`).

    Args:
        root: the folder that holds the file.
        name: name of the graph, such as "chameleon_filtered" or "minesweeper".
        normalize_features: whether to divide the features of every node by their sum.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = HeterophilousDataModule("data/heterophilous_npz", "chameleon_filtered")  # reads the files later
    """

    root: str = "data/heterophilous_npz"
    name: str = "chameleon_filtered"
    normalize_features: bool = False

    def load(self) -> Data:
        data = read_once(graphs.load_heterophilous, self.root, self.name)
        # Published splits set no labels aside: validation nodes stand in for the test.
        split = Split.of(data, self.split)
        data = (split._replace(test=split.val) if self.tuning else split).apply_to(data)
        return NormalizeFeatures()(data) if self.normalize_features else data


@settings
class FacebookDataModule(FullGraphDataModule):
    """A university of Facebook100, split at random (see `load_facebook`).

    Args:
        root: the folder that holds the folder `<name>`.
        name: name of the university.
        train: share of the students of known gender that train (Lim et al. 2021).
        val: share of the students of known gender that validate; all others test.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = FacebookDataModule("data/LINKXDataset", "johnshopkins55")  # reads the files later
    """

    root: str = "data/LINKXDataset"
    name: str = "johnshopkins55"
    train: float = 0.5
    val: float = 0.25

    def load(self) -> Data:
        data = read_once(graphs.load_facebook, self.root, self.name)
        return random_split(
            visible_labels(data.y, self.tuning), self.train, self.val, self.generator
        ).apply_to(data)


@settings
class OgbDataModule(FullGraphDataModule):
    """ogbn-arxiv or ogbn-proteins with its published split (see `load_ogb`).

    Papers are joined in both directions. Proteins have the sums of the features of their edges (`SumEdgeFeatures`) and
    112 labels; `metric="roc_auc"` is the published score.

    Args:
        root: the folder that holds the unpacked archive.
        name: "ogbn-arxiv" or "ogbn-proteins".
        cache: the folder of the memory-mapped arrays; by default the folder of `load_ogb`.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = OgbDataModule("data", "ogbn-arxiv")  # reads the files later
    """

    root: str = "data"
    name: OgbName = "ogbn-arxiv"
    cache: str | None = None

    def load(self) -> Data:
        data = graphs.load_ogb(self.root, self.name, cache=self.cache)
        if self.name == "ogbn-proteins":
            data = graphs.SumEdgeFeatures()(data)
        else:
            # A paper is like those that it cites and those that cite it.
            data = ToUndirected()(data)
        data.edge_attr = None  # to free its memory
        if self.tuning:
            data.test_mask = data.val_mask
        return data


@settings
class KNNDataModule(FullGraphDataModule):
    """Images or messages on the graph of their nearest neighbours (see `KNNGraph`), with few labels per class.

    Args:
        name: "MNIST", "20Newsgroups" or "digits".
        root: folder of the files of "MNIST" or "20Newsgroups"; "digits" needs none.
        k: number of neighbours of a row.
        metric: "euclidean" or "cosine", see `KNNGraph`.
        per_class: number of training labels of each class.
        num_val: number of validation nodes; all others are test nodes.
        num_parts: number of random parts of the graph to train on, a step each (see `RandomPartitionLoader`). By
            default the graph is one part.
        weighted: whether edges have weights, see `KNNGraph`.
        sharpness: how fast weights fall with the distance, see `KNNGraph`.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = KNNDataModule("digits", k=10, per_class=10)
    """

    name: Literal["MNIST", "20Newsgroups", "digits"] = "MNIST"
    root: str = "data/MNIST"
    k: int = 10
    metric: Metric = "euclidean"
    per_class: int = 10
    num_val: int = 1000
    num_parts: Count = 1
    weighted: bool = False
    sharpness: float = 8.0

    def load(self) -> Data:
        joined_by = (self.k, self.metric, self.weighted, self.sharpness)
        data = read_once(_joined, self.name, self.root, joined_by)
        labels = visible_labels(data.y, self.tuning)
        return random_split_per_class(
            labels, self.per_class, self.num_val, None, self.generator
        ).apply_to(data)


@settings
class RowsDataModule(FullGraphDataModule):
    """Rows of a table without edges, some of which have a label.

    A fifth of the rows validates. `labelled` of the training rows have a label, and the other rows are tested.

    Args:
        name: name of the table, see `load_rows`, and the share of labelled rows: "iris 10%". At 100 % three of five
            rows are labelled.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = RowsDataModule("iris 10%")
        >>> int(data.data.train_mask.sum())
        6
    """

    name: str = "iris 10%"

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "a table and the percentage of labelled rows, such as 'iris 10%'"
        check_kind(self.name, "name", str, what)
        self.table, _, percent = self.name.rpartition(" ")
        try:
            self.labelled = float(percent.removesuffix("%")) / 100
        except ValueError:
            raise ValueError(f"name must be {what}; got {self.name!r}.") from None

    def load(self) -> Data:
        data = read_once(graphs.load_rows, self.table)
        # Numbers are split as the rows of a single class are.
        classes = data.y
        if self.table in NUMBERS:
            classes = torch.zeros_like(data.y).long()
        labels = visible_labels(classes, self.tuning)
        return random_split(labels, 0.6 * self.labelled, 0.2, self.generator).apply_to(
            data
        )


def _joined(name: str, root: str, joined_by: tuple[Any, ...]) -> Data:
    if name == "digits":
        data = graphs.load_digits()
    elif name == "MNIST":
        data = read_once(graphs.load_mnist, root)
    else:
        data = read_once(graphs.load_newsgroups, root)
    return KNNGraph(*joined_by)(data)
