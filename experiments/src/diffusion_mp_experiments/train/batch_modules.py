"""Batches of graphs, and of snapshots of one graph, as LightningDataModules."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import ClassVar

import torch
from pytorch_lightning import LightningModule
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from diffusion_mp.checks import Count, checked
from diffusion_mp.data import Split, ToDiffusionGraph, random_split
from diffusion_mp_experiments.graphs import (
    fit_forecast,
    load_snapshots,
    load_synmol,
    load_tu,
)
from diffusion_mp_experiments.graphs.node_sets import visible_labels
from diffusion_mp_experiments.graphs.temporal import ForecastName, TemporalName
from diffusion_mp_experiments.settings import settings
from diffusion_mp_experiments.train.classifiers import Forecaster, GraphClassifier
from diffusion_mp_experiments.train.datamodules import (
    Parts,
    SplitDataModule,
    read_once,
)


class BatchDataModule(SplitDataModule):
    """Base class: batches of graphs (`ToDiffusionGraph`), in random order for training; subclasses define `parts`.

    Args:
        batch_size: number of graphs in a batch, or `None` for all of them.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.
    """

    trains: ClassVar[type[LightningModule]] = GraphClassifier

    @checked
    def __init__(
        self, batch_size: Count | None, split: int = 0, tuning: bool = False
    ) -> None:
        super().__init__(split=split, tuning=tuning)
        self.batch_size = batch_size

    def train_dataloader(self) -> Iterable[Data]:
        """Return batches in another order every epoch; a single batch is always the same."""
        part = self.part(0)
        # One batch in another order is the same sum, and layers would forget what they have cached.
        if self.batch_size is None or self.batch_size >= len(part):
            return self._in_order(0)
        return DataLoader(
            part,  # type: ignore[arg-type]
            self.batch_size,
            shuffle=True,
            collate_fn=ToDiffusionGraph(),
        )

    def together(self, part: Sequence[Data]) -> list[Data]:
        size = self.batch_size or len(part)
        return [
            ToDiffusionGraph()(list(part[start : start + size]))
            for start in range(0, len(part), size)
        ]


@settings
class TUDataModule(BatchDataModule):
    """A set of TUDataset, split at random (see `load_tu`).

    Args:
        root: the folder that holds the folder `<name>`.
        name: name of the set, such as "MUTAG" or "PROTEINS".
        train: share of the graphs that train.
        val: share of the graphs that validate; all others test.
        batch_size: number of graphs in a batch, or `None` for all of them.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = TUDataModule("data/TUDataset", "MUTAG")  # reads the files later
    """

    root: str = "data/TUDataset"
    name: str = "MUTAG"
    train: float = 0.8
    val: float = 0.1
    batch_size: Count | None = 64

    def parts(self) -> Parts:
        graphs = read_once(load_tu, self.root, self.name)
        labels = visible_labels(torch.cat([graph.y for graph in graphs]), self.tuning)
        return selected(
            graphs, random_split(labels, self.train, self.val, self.generator)
        )


@settings
class SynMolDataModule(BatchDataModule):
    """SynMol with its published test molecules (see `load_synmol`); tuning uses training molecules only.

    Args:
        root: the folder that holds the file.
        val: share of the training molecules that validate.
        batch_size: number of molecules in a batch, or `None` for all of them.
        split: number of the split, see `SplitDataModule`.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = SynMolDataModule("data/SynMol")  # reads the files later
    """

    root: str = "data/SynMol"
    val: float = 0.1
    batch_size: Count | None = 256

    def parts(self) -> Parts:
        graphs = read_once(load_synmol, self.root, "train")
        y = torch.cat([graph.y for graph in graphs])
        trained = 1 - self.val
        if self.tuning:
            y = visible_labels(y, True)
            # While settings are tuned, some training molecules stand in for the test molecules.
            trained = 1 - 2 * self.val
        train, val, test = selected(
            graphs, random_split(y, trained, self.val, self.generator)
        )
        if not self.tuning:
            test = read_once(load_synmol, self.root, "test")
        return train, val, test


@settings
class SnapshotDataModule(BatchDataModule):
    """Forecasting on a graph (see `load_snapshots`): the first snapshots train, the next validate, the last test.

    Every snapshot has `base`, the forecast that a model is to correct (`fit_forecast`). The base is fitted to the
    training snapshots only.

    Settings are chosen on rolling windows, since the snapshots before the test may rise where later snapshots fall.
    With `tuning` all snapshots before the test are cut into `windows` + 1 parts of one length. In split i the first i +
    1 parts train, and the next part validates and stands in for the test.

    Args:
        root: the folder that holds the file.
        name: "chickenpox" or "england_covid".
        lags: number of values that a forecast sees; by default the number of `load_snapshots`.
        base: name of the forecast to correct, see `fit_forecast`. The default "zero" leaves the whole forecast to the
            model.
        train: share of the snapshots that train.
        val: share of the snapshots that validate; all others test. The default shares are the 2 : 2 : 6 of Wu, Wipf &
            Yan (2025, Table 5).
        windows: number of windows for tuning.
        batch_size: number of snapshots in a batch. By default all of them.
        split: number of the window or of a run. There is one published split.
        tuning: whether settings are being chosen, see `SplitDataModule`.

    Examples:
        >>> data = SnapshotDataModule("data/spatial_temporal", "chickenpox")  # reads the files later
    """

    trains = Forecaster

    root: str = "data/spatial_temporal"
    name: TemporalName = "chickenpox"
    lags: int | None = None
    base: ForecastName = "zero"
    train: float = 0.2
    val: float = 0.2
    windows: Count = 4
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.train > 0 and self.val > 0 and self.train + self.val < 1):
            raise ValueError(
                f"train and val must be above 0 and their sum below 1; got {self.train} and {self.val}."
            )
        if self.tuning and not 0 <= self.split < self.windows:
            raise ValueError(
                f"split must lie in 0..{self.windows - 1}, a window, while settings are tuned; got {self.split}."
            )

    @property
    def num_classes(self) -> int:
        return 1

    def parts(self) -> Parts:
        snapshots = read_once(load_snapshots, self.root, self.name, self.lags)
        first = round(self.train * len(snapshots))
        last = round((self.train + self.val) * len(snapshots))
        tested = slice(last, None)
        if self.tuning:
            first = last * (self.split + 1) // (self.windows + 1)
            last = last * (self.split + 2) // (self.windows + 1)
            tested = slice(first, last)
        cuts = [slice(first), slice(first, last), tested]
        if not all(snapshots[cut] for cut in cuts):
            raise ValueError(
                f"{self.name} has {len(snapshots)} snapshots, which leave none to train, validate or test with "
                f"train={self.train}, val={self.val} and windows={self.windows}."
            )
        # Of what trains alone, or the base would know the test.
        forecast = fit_forecast(self.base, snapshots[:first])

        def with_base(snapshot: Data) -> Data:
            # A copy: the snapshots are read once for all data modules, which have other bases.
            snapshot = copy(snapshot)
            snapshot.base = forecast(snapshot.x)
            return snapshot

        train, val, test = (list(map(with_base, snapshots[cut])) for cut in cuts)
        return train, val, test


def selected(graphs: Sequence[Data], split: Split) -> Parts:
    train, val, test = (
        [graphs[i] for i in mask.nonzero().flatten().tolist()] for mask in split
    )
    return train, val, test
