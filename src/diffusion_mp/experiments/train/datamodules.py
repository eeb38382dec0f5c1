"""One graph, one split, full batch, as LightningDataModules."""

from __future__ import annotations

from typing import Literal

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from diffusion_mp.data import Split, random_split_per_class
from diffusion_mp.errors import check_seed
from diffusion_mp.experiments.files.reading import as_path
from diffusion_mp.experiments.graphs import load_digits, load_planetoid


def _only(batch: list[Data]) -> Data:
    return batch[0]


class FullGraphDataModule(pl.LightningDataModule):
    """Serves one `Data` with train_mask, val_mask and test_mask, once per epoch; subclasses write `load()`."""

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
            self._data = self.load()
        return self._data

    @property
    def num_features(self) -> int:
        """Width of x: the in_channels of a model."""
        return int(self.data.num_node_features)

    @property
    def num_classes(self) -> int:
        """Number of labels: the out_channels of a model."""
        return int(self.data.y.max()) + 1

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
        split: "random" draws 20 labels per class, 500 validation and 1 000 test nodes; "public" is the one fixed split.
        seed: draws the random split; unused for "public".
        per_class, num_val, num_test: sizes of the random split.
        download: let PyG fetch missing files into `root`.
    """

    def __init__(
        self,
        root: str = "data/Planetoid",
        name: Literal["Cora", "CiteSeer", "PubMed"] = "Cora",
        split: Literal["random", "public"] = "random",
        seed: int = 0,
        per_class: int = 20,
        num_val: int = 500,
        num_test: int = 1000,
        download: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(split, str) or split not in ("random", "public"):
            raise ValueError(f'split must be "random" or "public", got {split!r}.')
        check_seed(seed)
        self.root, self.network, self.split, self.seed = as_path(root, "root"), name, split, seed
        self.per_class, self.num_val, self.num_test, self.download = per_class, num_val, num_test, download

    def load(self) -> Data:
        """The network with the masks of this split."""
        data = load_planetoid(self.root, self.network, download=self.download)
        if self.split == "public":
            return Split.of(data).apply_to(data)
        generator = torch.Generator().manual_seed(self.seed)
        return random_split_per_class(data.y, self.per_class, self.num_val, self.num_test, generator).apply_to(data)
