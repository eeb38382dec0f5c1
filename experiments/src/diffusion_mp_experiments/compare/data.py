"""The data of a comparison as LightningDataModules: nodes of a graph, graphs, or the edges of a graph."""

from collections.abc import Sequence
from copy import copy
from dataclasses import field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit

from diffusion_mp.checks import Count
from diffusion_mp.data import KNNGraph, Split
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.settings import settings
from diffusion_mp_experiments.train.batch_modules import BatchDataModule, selected
from diffusion_mp_experiments.train.classifiers import LinkPredictor
from diffusion_mp_experiments.train.datamodules import (
    FullGraphDataModule,
    Parts,
    SplitDataModule,
    has_label,
    read_once,
)

#: Shares of the labelled rows that train and validate; the others test.
SHARES = (0.6, 0.2)
#: Of the training of the model that is kept, which tests nothing.
KEPT_SHARES = (0.8, 0.2)
#: Labels of classes below which nothing is compared; of numbers twice as many.
FEWEST = 10
#: Number of neighbours with which the row of a table is joined.
NEIGHBOURS = 10
# Features from this number on are stored sparse, if fewer than this share of the entries are not zero.
_WIDE = 256
_DENSE = 0.1
# Of labels that are reserved for the search of settings.
_RESERVED = 0.3
# Splits of different seeds have different numbers.
_SPLITS = 1000


def labels_of(problem: Problem) -> Tensor:
    """Return the labels of all nodes, or of all graphs."""
    return torch.cat([graph.y.view(-1) for graph in problem.graphs])


def stratified(
    y: Tensor, mask: Tensor, shares: tuple[float, float], generator: torch.Generator
) -> Split:
    """Draw a split of the rows of a mask in which every class has the same shares; numbers are drawn without strata.

    Args:
        y: classes or numbers [N].
        mask: the rows to split [N].
        shares: shares of training and validation rows.
        generator: draws the split.
    """
    rows = mask.nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=generator)]
    strata = torch.zeros(len(rows)) if y.is_floating_point() else y[rows]
    rows = rows[strata.argsort(stable=True)]
    _, counts = strata.unique(return_counts=True)
    place = torch.empty(len(y))
    for members in rows.split(counts.tolist()):
        # A random shift, so that the single node of a class may fall anywhere.
        within = torch.arange(len(members)) + torch.rand((), generator=generator)
        place[members] = within / len(members)
    train, val = shares
    return Split(
        mask & (place < train),
        mask & (place >= train) & (place < train + val),
        mask & (place >= train + val),
    )


def split_of(
    problem: Problem, number: int, seed: int, tuning: bool, pooled: bool
) -> Split:
    """Return a split that came with the data, or one that is drawn.

    With `pooled` a fixed part of the labels serves for the search of settings only. Otherwise a split is tuned on its
    own validation rows, see `_for_search`.
    """
    y = labels_of(problem)
    known = has_label(y)
    if problem.split is not None:
        masks = []
        for mask in problem.split:
            column = mask if mask.dim() == 1 else mask[:, number % mask.size(1)]
            masks.append(column & known)
        split = Split(*masks)
    else:
        if pooled:
            fixed = torch.Generator().manual_seed(seed)
            reserved, *_ = stratified(y, known, (_RESERVED, 0.0), fixed)
            known = reserved if tuning else known & ~reserved
        generator = torch.Generator().manual_seed(_SPLITS * seed + number)
        split = stratified(y, known, SHARES, generator)
    if tuning and not pooled:
        return _for_search(split, y, torch.Generator().manual_seed(number))
    return split


def with_labels_in_split(problem: Problem) -> Problem:
    """Return a problem whose split has labels in every part: without it, splits are drawn.

    In files of contests the test rows are those that are to be predicted, and have no labels.

    Raises:
        ValueError: no training row has a label, or there are too few labels to divide.
    """
    if problem.task == "link":
        return problem
    known = has_label(labels_of(problem))
    if problem.split is not None:
        train, *others = (
            (mask.view(len(mask), -1) & known.unsqueeze(1)).any(0).all()
            for mask in problem.split
        )
        if not train:
            raise ValueError(
                "the training rows of every split must have labels; the split that came with the data has none there. "
                "Correct it, or leave it out."
            )
        if all(others):
            return problem
        note = (
            "The split that came with the data has no labels in its validation or test rows, so splits were drawn "
            "from the rows with labels."
        )
        problem = replace(problem, split=None, notes=(*problem.notes, note))
    # Of a single row in a part there is no R².
    least = FEWEST if problem.classes else 2 * FEWEST
    if known.sum() < least:
        raise ValueError(
            f"the target must have {least} labels at least, since some train, some choose and some test; got "
            f"{int(known.sum())}."
        )
    return problem


def _for_search(split: Split, y: Tensor, generator: torch.Generator) -> Split:
    """Return a split that tests on validation rows, and chooses epochs on other ones.

    The score of the best of many epochs is too good on the rows that chose it. Networks would win over models without
    epochs that are as good.
    """
    if split.val.sum() < split.train.sum():
        train, stop, _ = stratified(y, split.train, KEPT_SHARES, generator)
        parts = Split(train, stop, split.val)
    else:
        stop, _, rest = stratified(y, split.val, (0.5, 0.0), generator)
        parts = Split(split.train, stop, rest)
    # Of a few rows nothing can be spared.
    if all(bool(part.any()) for part in parts):
        return parts
    return split._replace(test=split.val)


def kept_split(problem: Problem, validated: bool) -> Split:
    """Return the split of the model that is kept: all labels train, but for a validation part if it needs one."""
    y = labels_of(problem)
    known = has_label(y)
    split = stratified(y, known, KEPT_SHARES, torch.Generator().manual_seed(0))
    return split if validated else split._replace(train=known)


def scaling(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return shift and scale of every feature: mean and deviation, or 0 and 1 for a column that lies in [0, 1].

    Sparse features stay sparse: all are divided by one number, so that rows have the length of sixteen ones.
    """
    x = torch.cat([graph.x for graph in problem.graphs])
    if is_sparse(x):
        length = x.norm(dim=1).mean().clamp(min=1e-12)
        return torch.zeros(x.size(1)), (length / 4).expand(x.size(1))
    # In double precision, or numbers such as times would lose what tells them apart.
    x = x.double()
    low, high = x.aminmax(dim=0)
    other = (low < 0) | (high > 1)
    constant = low == high
    shift = torch.where(constant, low, torch.where(other, x.mean(0), 0.0))
    # What was constant may have another value in new rows.
    scale = torch.where(other & ~constant, x.std(0), 1.0)
    return shift, scale


def is_sparse(x: Tensor) -> bool:
    """Return whether features, such as words of a text, are mostly zeros: models read them in less time as CSR."""
    return x.size(1) >= _WIDE and int(x.count_nonzero()) < _DENSE * x.numel()


def prepared(
    graphs: Sequence[Data], problem: Problem, k: int = NEIGHBOURS
) -> list[Data]:
    """Return graphs as models read them: features scaled as those of the problem, and rows of a table joined.

    Args:
        graphs: the graphs of the problem, or new ones with the same features.
        problem: the problem.
        k: number of neighbours of the row of a table.
    """
    shift, scale = scaling(problem)
    result = []
    for graph in graphs:
        graph = copy(graph)
        graph.x = ((graph.x - shift) / scale).float()
        if graph.edge_index is None:
            graph = KNNGraph(min(k, len(graph.x) - 1), weighted=True)(graph)
        if problem.task == "node" and is_sparse(graph.x):
            graph.x = graph.x.to_sparse_csr()
        result.append(graph)
    return result


def target_scaling(problem: Problem, split: Split) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the training targets, or 0 and 1 for classes.

    R² does not see the unit, and a loss of numbers near one trains alike for all targets.
    """
    y = labels_of(problem)
    if not y.is_floating_point():
        return torch.tensor(0), torch.tensor(1)
    known = y[split.train].double()
    deviation = known.std()
    return known.mean(), deviation if deviation > 0 else torch.ones_like(deviation)


def scaled_target(y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return targets as models learn them: numbers by their `target_scaling`, and classes as they are."""
    if not y.is_floating_point():
        return y
    return ((y - shift) / scale).float()


@settings
class _Compared(SplitDataModule):
    """What data modules of a comparison share.

    Args:
        problem: the file of the `Problem`.
        seed: draws the splits, together with their numbers.
        pooled: see `split_of`.
        kept: whether this is the training of the model that is kept, see `kept_split`.
        validated: whether that model needs validation rows, to choose its epoch.
    """

    problem: str = field(default="", kw_only=True)
    seed: int = field(default=0, kw_only=True)
    pooled: bool = field(default=False, kw_only=True)
    kept: bool = field(default=False, kw_only=True)
    validated: bool = field(default=True, kw_only=True)

    tuned_on: ClassVar[Literal["val", "test"]] = "test"

    @property
    def compared(self) -> Problem:
        return read_once(Problem.load, self.problem)

    @property
    def num_classes(self) -> int:
        return max(1, len(self.compared.classes))

    def graphs(self, k: int = NEIGHBOURS) -> list[Data]:
        return read_once(_prepared, self.problem, k)

    def masks(self) -> Split:
        if self.kept:
            split = kept_split(self.compared, self.validated)
            return split._replace(test=split.val)
        return split_of(self.compared, self.split, self.seed, self.tuning, self.pooled)


def _prepared(path: str, k: int) -> list[Data]:
    problem = read_once(Problem.load, path)
    return prepared(problem.graphs, problem, k)


@settings
class ComparedNodes(_Compared, FullGraphDataModule):
    """The nodes of a graph, or the rows of a table, which are joined with their k nearest rows.

    Args:
        k: number of neighbours of the row of a table.
        num_parts: number of random parts of the graph to train on, a step each.
        problem, seed, pooled, kept, validated, split, tuning: see `_Compared`.
    """

    k: Count = NEIGHBOURS
    num_parts: Count = 1

    def load(self) -> Data:
        split = self.masks()
        data = split.apply_to(self.graphs(self.k)[0])
        data.y = scaled_target(data.y, *target_scaling(self.compared, split))
        return data


@settings
class ComparedGraphs(_Compared, BatchDataModule):
    """Graphs, each of which has a label.

    Args:
        batch_size: number of graphs in a batch.
        problem, seed, pooled, kept, validated, split, tuning: see `_Compared`.
    """

    batch_size: Count | None = 64

    def parts(self) -> Parts:
        split = self.masks()
        graphs = self.graphs()
        if not self.compared.classes:
            scaling_of_y = target_scaling(self.compared, split)
            graphs = [copy(graph) for graph in graphs]
            for graph in graphs:
                graph.y = scaled_target(graph.y, *scaling_of_y)
        return selected(graphs, split)


class ComparedLinks(_Compared):
    """The edges of a graph: a tenth validates, another tenth tests, each beside as many other pairs of nodes.

    Models read the edges that train.
    """

    trains = LinkPredictor

    @property
    def num_classes(self) -> int:
        return 16

    @property
    def data(self) -> Data:
        return self.part(0)[0]

    def parts(self) -> Parts:
        data = copy(self.graphs()[0])
        data.y = None
        cut = RandomLinkSplit(
            0.1,
            0.1,
            is_undirected=data.is_undirected(),
            add_negative_train_samples=False,
        )
        # PyG draws from the global generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SPLITS * self.seed + self.split)
            train, val, test = cut(data)
        return [train], [val], [val if self.tuning or self.kept else test]
