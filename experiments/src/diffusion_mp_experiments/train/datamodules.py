"""One graph, one split, full batch, as LightningDataModules."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, get_args

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures, ToUndirected

from diffusion_mp.data import KNNGraph, RandomPartitionLoader, Split, random_split, random_split_per_class
from diffusion_mp.data.knn import Metric
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_kind, check_seed
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs import (
    SumEdgeFeatures,
    load_digits,
    load_facebook,
    load_heterophilous,
    load_mnist,
    load_newsgroups,
    load_ogb,
    load_planetoid,
)
from diffusion_mp_experiments.graphs.node_sets import visible_labels
from diffusion_mp_experiments.graphs.ogb import OgbName
from diffusion_mp_experiments.train.classifiers import NodeClassifier


def _only(batch: list[Data]) -> Data:
    return batch[0]


class FullGraphDataModule(pl.LightningDataModule):
    """Serves one `Data` with train_mask, val_mask and test_mask, once per epoch; subclasses write `load()`.

    `trains` is the LightningModule that a model is trained with on these data.
    """

    trains: ClassVar[type[pl.LightningModule]] = NodeClassifier

    def __init__(self) -> None:
        super().__init__()
        self._data: Data | None = None

    def load(self) -> Data:
        """The graph with its masks; called once, when first needed."""
        raise NotImplementedError(f"{type(self).__name__} must define load() and return a Data with the three masks.")

    @property
    def data(self) -> Data:
        """The graph with its masks."""
        if self._data is None:
            with torch.inference_mode(False):  # else what is first validated could not be trained on
                self._data = self.load()
        return self._data

    @property
    def num_features(self) -> int:
        """Width of x: the in_channels of a model."""
        return int(self.data.num_node_features)

    @property
    def num_classes(self) -> int:
        """Number of classes, or of tasks: the out_channels of a model."""
        return self.data.y.size(1) if self.data.y.dim() == 2 else int(self.data.y.max()) + 1

    def _loader(self) -> DataLoader[Data]:
        return DataLoader([self.data], batch_size=1, collate_fn=_only)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class DigitsDataModule(FullGraphDataModule):
    """Scikit-learn's digits on their kNN graph, few labels per class.

    Args:
        per_class: training labels of each of the ten classes.
        num_val: validation nodes; all others are test nodes.
        num_neighbors: k of the graph over pixels.
        seed: draws the split.

    Examples:
        >>> data = DigitsDataModule(per_class=5, seed=0)
        >>> data.setup("fit")
    """

    def __init__(self, per_class: int = 5, num_val: int = 500, num_neighbors: int = 5, seed: int = 0) -> None:
        super().__init__()
        check_seed(seed)
        self.per_class, self.num_val, self.num_neighbors, self.seed = per_class, num_val, num_neighbors, seed

    def load(self) -> Data:
        """The digits graph with the masks of this seed."""
        data = load_digits(self.num_neighbors)
        generator = torch.Generator().manual_seed(self.seed)
        return random_split_per_class(data.y, self.per_class, self.num_val, None, generator).apply_to(data)


class PlanetoidDataModule(FullGraphDataModule):
    """Cora, CiteSeer or PubMed from files on disk (see `load_planetoid`), rows of features normalised to sum 1.

    Args:
        root: folder that holds `<Name>/raw/ind.<name>.*`.
        name: "Cora", "CiteSeer" or "PubMed".
        split: "random" draws 20 labels per class, 500 validation and 1 000 test nodes; a number does so, too, but from
            the labels for results only (see `visible_labels`); "public" is the one fixed split.
        seed: draws the split where it is "random".
        tuning: draw split number `split` from the labels for tuning; all that neither train nor validate test.
        sparse: x as a CSR matrix, which is read in a fraction of the time.
        per_class, num_val, num_test: sizes of a random split.
        download: let PyG fetch missing files into `root`.

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
        super().__init__()
        numbered = isinstance(split, int) and not isinstance(split, bool)
        if not numbered and split not in ("random", "public"):
            raise ValueError(f'split must be a number, "random" or "public", got {split!r}.')
        check_seed(split if isinstance(split, int) else seed, "split" if numbered else "seed")
        check_flags(tuning=tuning, sparse=sparse)
        if tuning and not numbered:
            raise ValueError(
                f"tuning needs a number as split, for only such splits keep its labels apart; got {split!r}."
            )
        self.root, self.network, self.split, self.seed = as_path(root, "root"), name, split, seed
        self.tuning, self.sparse = tuning, sparse
        self.per_class, self.num_val, self.num_test, self.download = per_class, num_val, num_test, download

    def load(self) -> Data:
        """The network with the masks of this split."""
        data = load_planetoid(self.root, self.network, download=self.download)
        split = Split.of(data) if self.split == "public" else self._drawn(data.y)
        data = split.apply_to(data)
        if self.sparse:
            data.x = data.x.to_sparse_csr()
        return data

    def _drawn(self, y: Tensor) -> Split:
        seed, num_test = self.seed, None if self.tuning else self.num_test
        if isinstance(self.split, int):
            y, seed = visible_labels(y, self.tuning), self.split
        generator = torch.Generator().manual_seed(seed)
        return random_split_per_class(y, self.per_class, self.num_val, num_test, generator)


class HeterophilousDataModule(FullGraphDataModule):
    """A graph of Platonov et al. (2023) with one of its published splits (see `load_heterophilous`).

    Args:
        root, name: see `load_heterophilous`.
        split: the number of the split.
        tuning: let the validation nodes stand in for the test nodes, which nobody sees while settings are chosen.
        normalize_features: divide the features of every node by their sum.

    Examples:
        >>> data = HeterophilousDataModule("data/heterophilous_npz", "chameleon_filtered")  # reads the files later
    """

    def __init__(
        self,
        root: str = "data/heterophilous_npz",
        name: str = "chameleon_filtered",
        split: int = 0,
        tuning: bool = False,
        normalize_features: bool = False,
    ) -> None:
        super().__init__()
        check_kind(name, "name", str, "the name of a file, like chameleon_filtered")
        check_seed(split, "split")
        check_flags(tuning=tuning, normalize_features=normalize_features)
        self.root, self.name, self.split, self.tuning = as_path(root, "root"), name, split, tuning
        self.normalize_features = normalize_features

    def load(self) -> Data:
        """The graph with the masks of this split."""
        data = _heterophilous(self.root, self.name)
        split = Split.of(data, self.split)
        split = split._replace(test=split.val) if self.tuning else split
        data = split.apply_to(data)
        return NormalizeFeatures()(data) if self.normalize_features else data


class FacebookDataModule(FullGraphDataModule):
    """A university of Facebook100 in random parts (see `load_facebook`).

    Args:
        root, name: see `load_facebook`.
        train, val: shares of the students whose gender is known; the others test (Lim et al. 2021).
        split: draws the parts.
        tuning: draw them from the labels that belong to tuning, and otherwise from all others (see `visible_labels`).

    Examples:
        >>> data = FacebookDataModule("data/LINKXDataset", "johnshopkins55")  # reads the files later
    """

    def __init__(
        self,
        root: str = "data/LINKXDataset",
        name: str = "johnshopkins55",
        train: float = 0.5,
        val: float = 0.25,
        split: int = 0,
        tuning: bool = False,
    ) -> None:
        super().__init__()
        check_kind(name, "name", str, "the name of a university, like johnshopkins55")
        check_seed(split, "split")
        check_flags(tuning=tuning)
        self.root, self.name, self.split, self.tuning = as_path(root, "root"), name, split, tuning
        self.train, self.val = train, val

    def load(self) -> Data:
        """The graph with the masks of this split."""
        data = _facebook(self.root, self.name)
        labels, generator = visible_labels(data.y, self.tuning), torch.Generator().manual_seed(self.split)
        return random_split(labels, self.train, self.val, generator).apply_to(data)


class OgbDataModule(FullGraphDataModule):
    """ogbn-arxiv or ogbn-proteins with its published split (see `load_ogb`).

    Papers are joined in both directions; proteins have the sums of their edges' features (`SumEdgeFeatures`) and 112
    labels, for which `metric="roc_auc"` is the published score.

    Args:
        root, name, cache: see `load_ogb`.
        split: of no consequence, for there is one; of a table it is the number of a run.
        tuning: let the validation nodes stand in for the test nodes.

    Examples:
        >>> data = OgbDataModule("data", "ogbn-arxiv")  # reads the files later
    """

    def __init__(
        self,
        root: str = "data",
        name: OgbName = "ogbn-arxiv",
        cache: str | None = None,
        split: int = 0,
        tuning: bool = False,
    ) -> None:
        super().__init__()
        check_choice(name, "name", get_args(OgbName))
        check_seed(split, "split")
        check_flags(tuning=tuning)
        self.root, self.split, self.tuning = as_path(root, "root"), split, tuning
        self.name: OgbName = name
        self.cache = None if cache is None else as_path(cache, "cache")

    def load(self) -> Data:
        """The graph with its masks."""
        data = load_ogb(self.root, self.name, cache=self.cache, progress=False)
        data = SumEdgeFeatures()(data) if self.name == "ogbn-proteins" else ToUndirected()(data)
        data.edge_attr = None  # nobody reads it any more
        if self.tuning:
            data.test_mask = data.val_mask
        return data


class KNNDataModule(FullGraphDataModule):
    """Images or messages on the graph of their nearest neighbours (see `KNNGraph`), few labels per class.

    Args:
        name: "MNIST", "20Newsgroups" or "digits".
        root: the folder of the files, see `load_mnist` and `load_newsgroups`; digits need none.
        k, metric: of the graph.
        per_class: training labels of each class.
        num_val: validation nodes; all others are test nodes.
        split: draws the split.
        tuning: draw it from the labels that belong to tuning, and otherwise from all others (see `visible_labels`).
        num_parts: train on so many random parts of the graph, a step each (see `RandomPartitionLoader`); the whole
            graph validates and tests.
        weighted, sharpness: whether the edges have weights, and how fast these fall (see `KNNGraph`).

    Examples:
        >>> data = KNNDataModule("digits", k=10, per_class=10)
    """

    def __init__(
        self,
        name: Literal["MNIST", "20Newsgroups", "digits"] = "MNIST",
        root: str = "data/MNIST",
        k: int = 10,
        metric: Metric = "euclidean",
        per_class: int = 10,
        num_val: int = 1000,
        split: int = 0,
        tuning: bool = False,
        num_parts: int = 1,
        weighted: bool = False,
        sharpness: float = 8.0,
    ) -> None:
        super().__init__()
        check_counts(num_parts=num_parts)
        check_choice(name, "name", _FEATURES)
        check_seed(split, "split")
        check_flags(tuning=tuning)
        joins = KNNGraph(k, metric, weighted, sharpness)
        self.name, self.root, self.k, self.metric = name, as_path(root, "root"), joins.k, joins.metric
        self.per_class, self.num_val, self.split, self.tuning = per_class, num_val, split, tuning
        self.num_parts, self.weighted, self.sharpness = num_parts, weighted, sharpness

    def train_dataloader(self) -> DataLoader[Data]:
        """The graph, or its parts."""
        if self.num_parts == 1:
            return self._loader()
        return RandomPartitionLoader(self.data, self.num_parts, seed=self.split)

    def load(self) -> Data:
        """The graph with the masks of this split."""
        data = _joined(self.name, self.root, self.k, self.metric, self.weighted, self.sharpness)
        labels, generator = visible_labels(data.y, self.tuning), torch.Generator().manual_seed(self.split)
        return random_split_per_class(labels, self.per_class, self.num_val, None, generator).apply_to(data)


_FEATURES: dict[str, Callable[[Path], Data]] = {
    "MNIST": load_mnist,
    "20Newsgroups": load_newsgroups,
    "digits": lambda root: load_digits(),
}
# Many models are trained on one graph, in one process: the graph is made once.
_heterophilous, _facebook = lru_cache(2)(load_heterophilous), lru_cache(2)(load_facebook)


@lru_cache(2)
def _features(name: str, root: Path) -> Data:
    return _FEATURES[name](root)


@lru_cache(4)
def _joined(name: str, root: Path, k: int, metric: Metric, weighted: bool, sharpness: float) -> Data:
    return KNNGraph(k, metric, weighted, sharpness)(_features(name, root))
