"""What the scores of a comparison say, and what about the data would make them say something else."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from sklearn.tree import DecisionTreeClassifier
from torch_geometric.utils import homophily

from diffusion_mp.data import Split
from diffusion_mp_experiments.compare.data import labels_of, split_of
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.reproduce.report import Estimate, Line
from diffusion_mp_experiments.reproduce.table import Record, Table
from diffusion_mp_experiments.train.datamodules import has_label

# A constant that is right so often hides what a model does for the other classes.
_IMBALANCED = 0.7
# More rows than these are not sorted to look for duplicates.
_MOST_ROWS = 200_000
# Share of different features among the rows, from which on two rows with the same features may be one thing.
_OWN = 0.25
# Share of the rows that have to be tested on a split before it counts.
_NEARLY = 0.9
# A single column that tells the classes so well is probably the label itself.
_LEAK = 0.999


def digest(problem: Problem) -> str:
    """Hash the data of a problem."""
    found = hashlib.sha256(repr((problem.task, problem.classes)).encode())
    for graph in problem.graphs:
        for name in sorted(graph.keys()):
            found.update(name.encode())
            found.update(graph[name].contiguous().numpy().tobytes())
    for mask in problem.split or ():
        found.update(mask.numpy().tobytes())
    return found.hexdigest()[:12]


def equals(
    best: Line, lines: Sequence[Line], behind: Mapping[str, Estimate | None]
) -> list[Line]:
    """Return the rows that are not behind the best by more than two standard errors on test, cheapest first."""
    same = []
    for line in lines:
        difference = behind.get(line.row)
        if line.row == best.row:
            same.append(line)
        elif difference is not None:
            mean, error = difference
            # Without a standard error nothing is known.
            if not math.isnan(error) and mean >= -2 * error:
                same.append(line)
    return sorted(same, key=lambda line: line.seconds)


def common_splits(runs: Sequence[Record]) -> set[int]:
    """Return the splits that nearly as many rows were tested on as on any: those that the time has ended are not."""
    counts = Counter(run["split"] for run in runs)
    most = max(counts.values(), default=0)
    return {split for split, count in counts.items() if count >= _NEARLY * most}


def accuracy_error(one: float, other: float, rows: int) -> float:
    """Return the standard error of the difference of two accuracies in % on so many test rows.

    The mistakes of the two models are taken to be independent. Models that make the same ones differ by less chance.
    """
    variances = [score * (100 - score) / max(rows, 1) for score in (one, other)]
    return math.sqrt(sum(variances))


def warnings(problem: Problem, table: Table) -> list[str]:
    """Return sentences on what in the data deserves a look before the scores are believed."""
    found = [*problem.notes]
    if problem.task == "link":
        return found
    y = labels_of(problem)
    known = has_label(y)
    if problem.classes:
        counts = torch.bincount(y[known], minlength=len(problem.classes))
        share = float(counts.max() / counts.sum())
        if share >= _IMBALANCED and table.metric.name == "acc":
            largest = problem.classes[int(counts.argmax())]
            found.append(
                f"{100 * share:.1f} % of the labels are {largest}, so a constant has that accuracy: look at --metric "
                "macro_f1 too."
            )
        rare = [
            name
            for name, n in zip(problem.classes, counts.tolist(), strict=True)
            if n < 10
        ]
        if rare:
            found.append(
                f"There are fewer than ten labels of {', '.join(rare[:5])}: no score says much about these classes."
            )
    if problem.task == "node":
        found += _of_nodes(problem, table)
    return found


def reported_split(problem: Problem, table: Table, number: int = 0) -> Split:
    """Return a split of the reported scores, by default the first."""
    arguments = table.data["init_args"]
    return split_of(problem, number, arguments["seed"], False, arguments["pooled"])


def _of_nodes(problem: Problem, table: Table) -> list[str]:
    found = []
    data = problem.graphs[0]
    y = data.y
    known = has_label(y)
    split = reported_split(problem, table)
    if (same := _duplicates(data.x, split.train, split.test)) > 0:
        found.append(
            f"{same:,} test rows have the same features as a training row: scores are too good if these are the same "
            f"things, listed twice."
        )
    if problem.classes:
        if (column := _telling_column(data.x[known], y[known])) is not None:
            found.append(
                f"Feature {column} alone tells the classes: it may be the label itself, or made of it."
            )
        if data.edge_index is not None and data.edge_index.numel():
            ends = known[data.edge_index].all(0)
            between = data.edge_index[
                :, ends & (data.edge_index[0] != data.edge_index[1])
            ]
            if between.numel() and float(homophily(between, y)) == 1.0:
                found.append(
                    "Every edge joins two nodes of one class: the edges may have been made from the labels."
                )
    return found


def _duplicates(x: torch.Tensor, train: torch.Tensor, test: torch.Tensor) -> int:
    if x.size(1) < 2 or len(x) > _MOST_ROWS:
        return 0
    rows, number = np.unique(x.numpy(), axis=0, return_inverse=True)
    # Few different rows are what a few coarse columns make.
    if len(rows) < _OWN * len(x):
        return 0
    trained = np.zeros(len(rows), bool)
    trained[number[train.numpy()]] = True
    # Rows without any feature are equal, and say nothing.
    empty = (x != 0).any(1).numpy()
    return int((trained[number] & test.numpy() & empty).sum())


def _telling_column(x: torch.Tensor, y: torch.Tensor) -> int | None:
    classes = len(y.unique())
    for column in range(min(x.size(1), 200)):
        values = x[:, column : column + 1].numpy()
        # A leaf for every class is enough for a label, and too few to learn rows by heart.
        tree = DecisionTreeClassifier(max_leaf_nodes=max(2, classes))
        if tree.fit(values, y.numpy()).score(values, y.numpy()) > _LEAK:
            return column
    return None
