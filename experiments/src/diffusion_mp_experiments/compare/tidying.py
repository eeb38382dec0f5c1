"""What tables and tensors share once they are read: the task, the labels, and the edges."""

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, is_undirected, to_undirected

from diffusion_mp.checks import describe
from diffusion_mp_experiments.compare.problem import Masks, Problem, Question

_FEW = 20  # whole numbers that are classes unless the user says otherwise
_MOST = 1000  # classes
_MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")
NO_FEATURES = "There are no features, so a constant takes their place."
_TASKS = {
    "rows": (None, "node", "regression"),
    "nodes": (None, "node", "link", "regression"),
    "graphs": (None, "graph", "regression"),
}


def as_problem(
    graphs: list[Data],
    labels: np.ndarray,
    what: str,
    question: Question,
    notes: list[str],
    *,
    names: Sequence[str] | None = None,
    split: Masks | None = None,
    of_graphs: bool = False,
    encoding: dict[str, Any] | None = None,
) -> Problem:
    """Return the problem of one graph, of the rows of a table, which have no edge_index, or of several graphs.

    Args:
        graphs: x, and what is known of edges.
        labels: what is predicted, of every node or every graph, as in `as_labels`; not read for links.
        what: what has the labels, which begins the messages.
        question: what is asked of the data; `directed` is as in `tidy_edges`.
        notes: what was changed so far.
        names: names of the nodes or graphs, by default their numbers.
        split: masks of the nodes or graphs that train, validate and test.
        of_graphs: whether graphs have labels, not nodes.
        encoding: how the columns of a table became features.

    Raises:
        ValueError: the task does not fit, or there is nothing to predict.
    """
    kind = "nodes"
    if of_graphs:
        kind = "graphs"
    elif graphs[0].edge_index is None:
        kind = "rows"
    task = question.task
    directed = question.directed
    if task not in _TASKS[kind]:
        choices = some(_TASKS[kind][1:])
        raise ValueError(
            f"{what}: task must be one of {choices} for {kind} (a link needs edges); got {task!r}."
        )
    if directed is not None and kind != "nodes":
        raise ValueError(
            f"directed is for the edges of one graph, and the data are {kind}; leave it out."
        )
    notes = [*notes]
    classes: tuple[str, ...] = ()
    has_labels: Literal["node", "graph", "link"] = "graph" if of_graphs else "node"
    if task == "link":
        has_labels = "link"
    else:
        y, classes = as_labels(labels, what, task, notes)
        for data, part in zip(graphs, y.chunk(len(graphs)), strict=True):
            data.y = part
    if kind == "nodes":
        directed = tidy_edges(graphs[0], directed, notes)
    count = len(graphs) if of_graphs else len(graphs[0].x)
    return Problem(
        task=has_labels,
        classes=classes,
        graphs=graphs,
        names=tuple(names or map(str, range(count))),
        split=split,
        directed=bool(directed),
        notes=tuple(notes),
        encoding=encoding,
    )


def some(values: Iterable[object]) -> str:
    """Return the first few values for a message."""
    shown = [repr(value) for value in values]
    return ", ".join(shown[:10] + ["…"] * (len(shown) > 10))


def as_labels(
    values: np.ndarray, what: str, task: str | None, notes: list[str]
) -> tuple[Tensor, tuple[str, ...]]:
    """Turn values into class numbers, or into numbers to predict.

    Text, integers and bools are classes, and so are at most 20 different whole numbers among floats.

    Args:
        values: numbers, bools or text, [N]. Unknown are None, NaN, infinity, negative integers unless they are
            predicted as numbers, and the words of `is_missing`.
        what: what has the values, which begins the messages.
        task: "regression" makes them numbers; "node" and "graph" make them classes.
        notes: gets a sentence on what is not as it may have been meant.

    Returns:
        y [N] as in `Problem`, and the names of the classes.

    Raises:
        ValueError: there is nothing to predict, or there are too many classes.
    """
    known, given = _known(values, what, task)
    found, place, counts = np.unique(given, return_inverse=True, return_counts=True)
    if len(found) < 2:
        only = "no value is known"
        if len(found):
            only = f"all known ones are {found[0]}"
        raise ValueError(
            f"{what} must have at least two different values, but {only}; name another with target=, "
            f"or fill in what is missing (in integers -1 means unknown)."
        )
    unknown = len(known) - int(known.sum())
    if unknown:
        notes.append(f"{what} is unknown for {unknown} of {len(known)}.")
    if is_number(found, what, task):
        numbers = np.where(known, values, np.nan).astype(np.float64)
        if len(found) <= _MOST and (found % 1 == 0).all() and task is None:
            notes.append(
                f'{what} has {len(found)} whole numbers and is predicted as a number; task="node" makes them classes.'
            )
        return torch.from_numpy(numbers), ()
    most = max(_FEW, min(_MOST, int(known.sum()) // 2))
    if len(found) > most:
        raise ValueError(
            f"{what} has {len(found)} different values, and classes may be at most {most} here; name another "
            f'with target=, or predict a number with task="regression".'
        )
    classes = tuple(map(class_name, found))
    single = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if single:
        notes.append(f"{what} has classes with a single example: {some(single)}.")
    y = torch.full((len(values),), -1)
    y[torch.from_numpy(known)] = torch.from_numpy(place)
    return y, classes


def class_name(value: Any) -> str:
    """Return the name of a class; 3.0 of a table is the class "3"."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def is_missing(value: str | float | None) -> bool:
    """Return whether a cell or a label says that there is nothing."""
    if isinstance(value, str):
        text = value.strip()
        # As pandas writes it; "none" may be a category.
        return text == "None" or text.lower() in _MISSING
    return value is None or not isfinite(value)


def _known(
    values: np.ndarray, what: str, task: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return which labels are known, and an array of these."""
    listed = values.tolist()
    for value in listed:
        if not (value is None or isinstance(value, (str, Real))):
            raise ValueError(
                f"{what} must hold numbers, bools or text; got {describe(value)}, so convert them."
            )
    known = np.array([not is_missing(value) for value in listed], bool)
    given = values[known]
    if given.dtype == object:
        if len({isinstance(value, str) for value in given}) > 1:
            found = some(dict.fromkeys(given))
            raise ValueError(
                f"{what} must hold either text or numbers; got {found}, so convert them."
            )
        given = np.array(given.tolist())
    if given.dtype.kind in "iu" and task != "regression":
        known[known] = given >= 0
        given = given[given >= 0]
    return known, given


def is_number(found: np.ndarray, what: str, task: str | None) -> bool:
    """Return whether the different known values are numbers to predict, not classes."""
    if task == "regression":
        if found.dtype.kind not in "iuf":
            raise ValueError(
                f'{what} must hold numbers for task="regression"; got {some(found.tolist()[:3])}, which can be classes.'
            )
        return True
    if task is not None or found.dtype.kind != "f":
        return False
    return len(found) > _FEW or bool((found % 1 != 0).any())


def tidy_edges(data: Data, directed: bool | None, notes: list[str]) -> bool:
    """Merge duplicate edges in place, and add the reverse of every edge unless the graph is directed.

    Args:
        data: a graph with edge_index.
        directed: whether edges have a direction; None finds out whether all have their reverse.
        notes: gets a sentence on everything that was changed.

    Returns:
        whether the graph is directed.
    """
    listed = data.num_edges
    _apply(coalesce, data)
    merged = listed - data.num_edges
    if merged:
        notes.append(
            f"{merged} of {listed} edges were duplicates, and were merged into the mean of what they had."
        )
    loops = int((data.edge_index[0] == data.edge_index[1]).sum())
    if loops:
        notes.append(f"{loops} of the edges are self-loops, which were kept.")
    if directed is None:
        directed = not is_undirected(data.edge_index, num_nodes=data.num_nodes)
        if directed:
            notes.append(
                "Some edges are without their reverse, so the graph is directed; directed=False adds the reverse."
            )
    if not directed:
        before = data.num_edges
        _apply(to_undirected, data)
        added = data.num_edges - before
        if added:
            notes.append(
                f"Edges are read in both directions, also the {added} that are listed in one only; directed=True "
                f"(--directed) reads them as listed."
            )
    return directed


def _apply(function: Callable[..., Any], data: Data) -> None:
    fields = [name for name in ("edge_attr", "edge_weight") if name in data]
    data.edge_index, parts = function(
        data.edge_index,
        [data[name] for name in fields],
        num_nodes=data.num_nodes,
        reduce="mean",
    )
    for name, part in zip(fields, parts, strict=True):
        data[name] = part
