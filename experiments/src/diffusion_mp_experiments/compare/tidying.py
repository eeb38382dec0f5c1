"""What tables and tensors share once they are read: the task, the labels, and the edges."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, is_undirected, to_undirected

from diffusion_mp_experiments.compare.problem import MASKS, Problem

_FEW = 20  # whole numbers that are classes unless the user says otherwise
_MOST = 1000  # classes
_TASKS = {
    "rows": (None, "node", "regression"),
    "nodes": (None, "node", "link", "regression"),
    "graphs": (None, "graph", "regression"),
}


def node_problem(
    data: Data,
    labels: np.ndarray,
    what: str,
    *,
    task: str | None,
    directed: bool | None,
    notes: list[str],
    names: Sequence[str] | None = None,
    split: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Problem:
    """Return the problem of one graph, or of the rows of a table, which have no edge_index.

    Args:
        data: x, and what is known of edges.
        labels: what is predicted, [N], as in `as_labels`; not read for links.
        what: what has the labels, which begins the messages.
        task: as in `read`.
        directed: as in `tidy_edges`.
        notes: what was changed so far.
        names: names of the nodes, by default their numbers.
        split: masks of the training, validation and test nodes.

    Raises:
        ValueError: the task does not fit, or there is nothing to predict.
    """
    kind = "rows" if data.edge_index is None else "nodes"
    _check_task(task, kind, what)
    classes: tuple[str, ...] = ()
    if task != "link":
        data.y, classes, more = as_labels(labels, what, task)
        notes = notes + more
    if split is not None:
        data.update(dict(zip(MASKS, split, strict=True)))
    if kind == "nodes":
        directed, more = tidy_edges(data, directed)
        notes = notes + more
    return Problem(
        task="link" if task == "link" else "node",
        classes=classes,
        graphs=[data],
        names=tuple(names or map(str, range(len(data.x)))),
        split=split,
        directed=bool(directed),
        notes=tuple(notes),
    )


def graph_problem(
    graphs: list[Data],
    labels: np.ndarray,
    what: str,
    *,
    task: str | None,
    notes: list[str],
    names: Sequence[str] | None = None,
    split: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Problem:
    """Return the problem of several graphs; the arguments are those of `node_problem`, with a label for every graph."""
    _check_task(task, "graphs", what)
    y, classes, more = as_labels(labels, what, task)
    for data, label in zip(graphs, y.split(1), strict=True):
        data.y = label
    return Problem(
        task="graph",
        classes=classes,
        graphs=graphs,
        names=tuple(names or map(str, range(len(graphs)))),
        split=split,
        notes=(*notes, *more),
    )


def _check_task(task: str | None, kind: str, what: str) -> None:
    if task not in _TASKS[kind]:
        choices = some(_TASKS[kind][1:])
        raise ValueError(
            f"{what}: task must be one of {choices} for {kind} (a link needs edges); got {task!r}."
        )


def some(values: Iterable[object]) -> str:
    """Return the first few values for a message."""
    values = list(values)
    shown = ", ".join(map(repr, values[:10]))
    if len(values) > 10:
        shown += ", …"
    return shown


def as_labels(
    values: np.ndarray, what: str, task: str | None
) -> tuple[Tensor, tuple[str, ...], list[str]]:
    """Turn values into class numbers, or into numbers to predict.

    Text, integers and bools are classes, and so are at most 20 different whole numbers among floats.

    Args:
        values: numbers, bools or text, [N]. Unknown are NaN and infinity, negative integers unless they are predicted
            as numbers, and None among text.
        what: what has the values, which begins the messages.
        task: "regression" makes them numbers; "node" and "graph" make them classes.

    Returns:
        y [N] as in `Problem`, the names of the classes, and notes.

    Raises:
        ValueError: there is nothing to predict, or there are too many classes.
    """
    known = _is_known(values, task)
    found, place, counts = np.unique(
        values[known], return_inverse=True, return_counts=True
    )
    notes = []
    if len(found) < 2:
        only = "no value is known"
        if len(found):
            only = f"all known ones are {found[0]}"
        raise ValueError(
            f"{what} must have at least two different values, but {only}; name another with target=, "
            f"or fill in what is missing (in integers -1 means unknown)."
        )
    if not known.all():
        notes.append(f"{what} is unknown for {int((~known).sum())} of {len(known)}.")
    if _is_number(found, what, task):
        numbers = np.where(known, values, np.nan).astype(np.float32)
        if len(found) <= _MOST and (found % 1 == 0).all() and task is None:
            notes.append(
                f'{what} has {len(found)} whole numbers and is predicted as a number; task="node" makes them classes.'
            )
        return torch.from_numpy(numbers), (), notes
    most = max(_FEW, min(_MOST, int(known.sum()) // 2))
    if len(found) > most:
        raise ValueError(
            f"{what} has {len(found)} different values, and classes may be at most {most} here; name another "
            f'with target=, or predict a number with task="regression".'
        )
    classes = tuple(_class_name(value) for value in found)
    single = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if single:
        notes.append(f"{what} has classes with a single example: {some(single)}.")
    y = torch.full((len(values),), -1)
    y[torch.from_numpy(known)] = torch.from_numpy(place)
    return y, classes, notes


def _is_known(values: np.ndarray, task: str | None) -> np.ndarray:
    if values.dtype.kind == "f":
        return np.isfinite(values)
    if values.dtype.kind in "iu" and task != "regression":
        return values >= 0
    return np.array([value is not None for value in values], bool)


def _is_number(found: np.ndarray, what: str, task: str | None) -> bool:
    if task == "regression":
        if found.dtype.kind not in "iuf":
            raise ValueError(
                f'{what} must hold numbers for task="regression"; got {some(found.tolist()[:3])}, which can be classes.'
            )
        return True
    if task is not None or found.dtype.kind != "f":
        return False
    return len(found) > _FEW or bool((found % 1 != 0).any())


def _class_name(value: object) -> str:
    # 3.0 of a table is the class "3".
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value)


def tidy_edges(data: Data, directed: bool | None) -> tuple[bool, list[str]]:
    """Merge duplicate edges in place, and add the reverse of every edge unless the graph is directed.

    Args:
        data: a graph with edge_index.
        directed: whether edges have a direction; None finds out whether all have their reverse.

    Returns:
        whether the graph is directed, and notes.
    """
    notes = []
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
                f"{added} edges without their reverse were given one; directed=True (--directed) keeps them as listed."
            )
    return directed, notes


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
