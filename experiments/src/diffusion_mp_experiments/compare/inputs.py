"""A user's own data as a `Problem`: tables, arrays and graphs, from files or from Python."""

import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch_geometric.data import Batch, Data, Dataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from diffusion_mp.checks import (
    as_tensor,
    check_choice,
    check_integer_pairs,
    check_kind,
    describe,
)
from diffusion_mp_experiments.compare.problem import (
    RECORD,
    Masks,
    Problem,
    Question,
    check_graph,
    read_arrays,
)
from diffusion_mp_experiments.compare.tables import read_new, read_table
from diffusion_mp_experiments.compare.tidying import (
    NO_FEATURES,
    as_problem,
    some,
    tidy_edges,
)
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.files.text_tables import number_blocks
from diffusion_mp_experiments.graphs.graph_sets import read_tu
from diffusion_mp_experiments.graphs.node_sets import load_heterophilous
from diffusion_mp_experiments.train.checkpoints import load_checkpoint

MASKS = ("train_mask", "val_mask", "test_mask")
_FIELDS = ("x", "edge_index", "edge_attr", "edge_weight", "num_nodes", "adj_t")
_TABLES = (".csv", ".tsv", ".txt")
_FORMS = (
    "a table .csv, a folder with nodes.csv and edges.csv, a folder of TUDataset, or a file .pt, .npz or .safetensors "
    "with x, edge_index and y"
)
_WAY_OUT = "Write it anew, with x [N, C], edge_index [2, E] and y [N]."


def read(
    source: Any,
    *,
    target: str | None = None,
    task: str | None = None,
    edges: str | Path | None = None,
    identifier: str | None = None,
    directed: bool | None = None,
) -> Problem:
    """Read data of a user, and say in notes what was changed.

    Args:
        source: a `Data`; a list or a `Dataset` of them; or a path: a table .csv of nodes, rows or molecules; a folder
            with nodes.csv and edges.csv, or with a set of TUDataset; a file .pt, .npz or .safetensors of tensors; or
            what `Problem.save` wrote.
        target: what is predicted: a column, by default the only one named label, target, class or y; or the field of
            tensors, by default y.
        task: "node" or "graph" for classes, "regression" for numbers, or "link"; by default what the labels are: text,
            integers in tensors and up to 20 different whole numbers are classes.
        edges: the table of edges, by default an edges.csv beside the table of nodes.
        identifier: the column of ids, by default the one named id, node_id or node, or the first if there are edges.
        directed: True keeps the directions of edges, False adds their reverse. By default a table lists every edge
            once, in any direction, and tensors list both directions.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: molecules need rdkit.
        TypeError: an argument is of the wrong kind.
        ValueError: the content is damaged, or there is nothing to predict. The message names the file or the argument.
    """
    check_choice(task, "task", (None, "node", "graph", "link", "regression"))
    question = Question(target, task, directed)
    path = None
    if isinstance(source, (str, Path)):
        path = as_path(source, "source")
        table, its_edges = _tables(path, edges)
        if table is not None:
            return read_table(table, its_edges, identifier, question)
    if edges is not None or identifier is not None:
        raise ValueError(
            f"edges and identifier are for tables only, and source is {describe(source)}; leave them out."
        )
    if path is None:
        return _from_objects(source, "", question)
    return _read_file(path, question)


def read_more(
    source: Any, problem: Problem, edges: str | Path | None = None
) -> tuple[list[Data], list[str]]:
    """Read a table of new rows, with the columns of the table of a problem; also return the ids of its rows.

    Args:
        source: the table, a path or a DataFrame; or the folder of its nodes.csv and edges.csv.
        problem: the problem.
        edges: the table of edges, by default an edges.csv beside the table, as in `read`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the problem was no table, or the columns are not its columns. The message names them.
    """
    encoding = problem.encoding
    if encoding is None:
        raise ValueError(
            f"a table of new rows is for problems that were read from a table; got {describe(source)}. Give a graph, a "
            f"Data with the features of the compared one."
        )
    its_edges = None if edges is None else as_path(edges, "edges")
    if isinstance(source, (str, Path)):
        table, its_edges = _tables(as_path(source, "data"), edges)
        if table is None:
            raise ValueError(f"data must be a table .csv; got {describe(source)}.")
        source = table
    if problem.task == "graph" or problem.graphs[0].edge_index is None:
        if edges is not None:
            raise ValueError(
                f"edges must be left out, since the compared rows have none; got {describe(edges)}."
            )
        return read_new(source, None, encoding)
    if its_edges is None:
        raise ValueError(
            "edges must be the table of the edges between the new nodes, as the compared nodes have edges; got None."
        )
    graphs, names = read_new(source, its_edges, encoding)
    tidy_edges(graphs[0], problem.directed, [])
    return graphs, names


def _tables(path: Path, edges: str | Path | None) -> tuple[Path | None, Path | None]:
    """Return the table at the path, if there is one, and the table of edges that goes with it."""
    if path.is_dir():
        found = _csv_files(path)
        if "nodes.csv" not in found:
            return None, None
        if edges is None and "edges.csv" not in found and len(found) > 1:
            raise ValueError(
                f"{path} must hold nodes.csv and edges.csv, and holds {some(file.name for file in found.values())}; "
                f"name the table of the edges with edges= (--edges), or give the path of nodes.csv if there are none."
            )
        path = found["nodes.csv"]
    elif path.suffix.lower() not in _TABLES:
        return None, None
    beside = _csv_files(path.parent).get("edges.csv")
    if edges is not None:
        beside = as_path(edges, "edges")
    way_out = "Give the path of a table, and with edges= that of its edges."
    check_present("The table", path.parent, [path], way_out)
    if beside is not None:
        check_present("The table of edges", beside.parent, [beside], way_out)
    if beside == path:
        raise ValueError(
            f"{path} is the table of edges; give the table of the nodes as source."
        )
    return path, beside


def _csv_files(folder: Path) -> dict[str, Path]:
    """Return the files .csv of a folder by their names in small letters, which sort behind capitals."""
    files = sorted(folder.glob("*.[cC][sS][vV]"))
    return {path.name.lower(): path for path in files if path.is_file()}


def _read_file(path: Path, question: Question) -> Problem:
    if path.is_dir():
        return _read_tu(path, question)
    check_present("The source", path.parent, [path], f"Give {_FORMS}.")
    if path.suffix in (".pt", ".pth"):
        return _from_objects(_load_pt(path), f"{path}: ", question)
    with reading(path, _WAY_OUT):
        if path.suffix == ".safetensors":
            return _from_objects(load_file(path), "", question)
        if path.suffix != ".npz":
            raise ValueError(f"it must be {_FORMS}")
        arrays = read_arrays(path)
        if "node_features" in arrays:
            data = load_heterophilous(path.parent, path.stem)
            return _from_objects(data, "", question)
        if RECORD not in arrays:
            return _from_objects(arrays, "", question)
    if question != Question():
        raise ValueError(
            f"{path} is a problem that was read before; leave out target, task and directed, or read its source."
        )
    return Problem.load(path)


def _load_pt(path: Path) -> Any:
    kinds = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
    try:
        with torch.serialization.safe_globals(kinds):
            return load_checkpoint(path)
    except ValueError as error:
        raise ValueError(
            f"{path} must be what torch.save wrote of a Data or a list of Data with tensors only; it holds something "
            f"else or is damaged, and nothing in it was run, so write it anew."
        ) from error


def _read_tu(folder: Path, question: Question) -> Problem:
    raw = folder
    if (folder / "raw").is_dir():
        raw = folder / "raw"
    names = [path.name.removesuffix("_A.txt") for path in raw.glob("*_A.txt")]
    if len(names) != 1:
        raise ValueError(
            f"{folder} must hold nodes.csv and edges.csv, or one NAME_A.txt of TUDataset, and holds "
            f"{len(names)} of these; give {_FORMS}. Tables of other names are given as the table of the nodes, with "
            f"edges= (--edges) for that of the edges."
        )
    graphs = read_tu(raw, names[0], constant=True)
    problem = _from_objects(graphs, f"{folder}: ", question)
    # PyG numbers the classes anew.
    labels = number_blocks(raw / f"{names[0]}_graph_labels.txt", 1, np.int64)
    found = np.unique(np.concatenate([block for _, block in labels]))
    if problem.classes:
        problem = replace(problem, classes=tuple(map(str, found)))
    return problem


def _from_objects(source: Any, where: str, question: Question) -> Problem:
    if isinstance(source, Batch):
        source = source.to_data_list()
    if isinstance(source, dict):
        source = Data.from_dict({name: _tensor(part) for name, part in source.items()})
    if isinstance(source, Data):
        source = [source]
    check_kind(
        source,
        f"{where}source",
        (list, tuple, Dataset),
        f"a Data, a list of Data, or a path: {_FORMS}",
    )
    graphs = []
    for number, graph in enumerate(source):
        check_kind(graph, f"{where}graph {number}", Data, "a Data of PyG")
        # A copy, since PyG moves tensors in place.
        graphs.append(copy(graph).detach().cpu())
    # Data sets of one large graph are lists of one.
    if len(graphs) == 1:
        return _from_graph(graphs[0], where, question)
    return _from_graphs(graphs, where, question)


def _tensor(value: Any) -> Any:
    # Labels may be text, of which there is no tensor.
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    return value


def _array(labels: Any) -> np.ndarray:
    # NumPy has no bfloat16.
    if isinstance(labels, torch.Tensor) and labels.dtype == torch.bfloat16:
        labels = labels.float()
    return np.asarray(labels)


def _from_graph(
    source: Data,
    where: str,
    question: Question,
) -> Problem:
    field = question.target or "y"
    labels: np.ndarray = np.empty(0)
    if field in source:
        labels = np.atleast_1d(_array(source[field]))
    elif question.task != "link" or question.target is not None:
        raise ValueError(
            f"{where}source has no {field}; name the field to predict with target=, one of "
            f'{some(sorted(source.keys()))}, or predict links with task="link".'
        )
    data, notes = _graph(source, where, len(labels), (field, *MASKS))
    nodes = len(data.x)
    if labels.shape == (nodes, 1):
        labels = labels[:, 0]
    if field in source and labels.shape != (nodes,):
        raise ValueError(
            f"{where}{field} must have one label for each of {nodes} nodes; got an array of shape "
            f"{list(labels.shape)}, so choose one column of several."
        )
    return as_problem(
        [data],
        labels,
        f"{where}{field}",
        question,
        notes,
        split=_split(source, nodes, where, notes),
    )


def _graph(
    source: Data, where: str, labels: int, others: Sequence[str]
) -> tuple[Data, list[str]]:
    """Return x, edge_index, edge_attr and edge_weight as `Problem` has them, and notes; others are read elsewhere."""
    notes = []
    unread = sorted({*source.keys()} - {*_FIELDS, *others})
    if unread:
        notes.append(f"The fields {some(unread)} were left out.")
    x = source.x
    if x is None:
        rows = labels or _count_nodes(source)
        x = torch.ones(rows, 1)
        notes.append(NO_FEATURES)
    x = as_tensor(x, f"{where}x", "a tensor [num_nodes, channels]")
    data = Data(x=x.float())
    if source.edge_index is not None:
        edge_index = as_tensor(source.edge_index, f"{where}edge_index", "[2, E]")
        check_integer_pairs(edge_index, f"{where}edge_index")
        data.edge_index = edge_index.long()
    elif "adj_t" in source:
        raise ValueError(
            f"{where}source has adj_t without edge_index; leave out the transform ToSparseTensor."
        )
    for field in ("edge_attr", "edge_weight"):
        if field in source:
            part = as_tensor(source[field], f"{where}{field}", "a tensor [E, D]")
            if field == "edge_attr" and part.dim() == 1:
                part = part[:, None]
            data[field] = part.float()
    check_graph(data, where)
    return data, notes


def _count_nodes(source: Data) -> int:
    with warnings.catch_warnings():
        # PyG warns where it counts the nodes that have edges.
        warnings.simplefilter("ignore")
        return source.num_nodes or 0


def _split(data: Data, nodes: int, where: str, notes: list[str]) -> Masks | None:
    masks = [
        as_tensor(data[name], f"{where}{name}", "a mask [N]")
        for name in MASKS
        if name in data
    ]
    if len(masks) < len(MASKS):
        if masks:
            notes.append(
                f"{some(name for name in MASKS if name in data)} was left out: a split needs {', '.join(MASKS)}."
            )
        return None
    wrong = any(mask.dim() not in (1, 2) or len(mask) != nodes for mask in masks)
    splits = {mask.size(1) for mask in masks if mask.dim() == 2} - {1}
    if wrong or len(splits) > 1:
        raise ValueError(
            f"{where}masks must be [{nodes}] or [{nodes}, splits], with one number of splits; got "
            f"{', '.join(map(describe, masks))}."
        )
    # The test nodes of some data sets are the same in all splits.
    wide = [mask.bool().reshape(nodes, -1) for mask in masks]
    train, val, test = torch.broadcast_tensors(*wide)
    if ((train & val) | (train & test) | (val & test)).any():
        raise ValueError(
            f"{where}train_mask, val_mask and test_mask must not share a node; correct them, or leave them out."
        )
    return train.squeeze(1), val.squeeze(1), test.squeeze(1)


def _from_graphs(
    sources: Sequence[Data],
    where: str,
    question: Question,
) -> Problem:
    field = question.target or "y"
    graphs = []
    labels = []
    notes: list[str] = []
    for number, source in enumerate(sources):
        here = f"{where}graph {number}: "
        data, found = _graph(source, here, 0, (field,))
        # What all graphs share is said once.
        notes += [note for note in found if note not in notes]
        if data.edge_index is None:
            data.edge_index = torch.empty(2, 0, dtype=torch.long)
        graphs.append(data)
        labels.append(_graph_label(source, field, here))
    shapes = {
        (data.num_features, data.num_edge_features, "edge_weight" in data)
        for data in graphs
    }
    if len(shapes) != 1:
        raise ValueError(
            f"{where}source must be graphs with the same features of nodes and edges; got several kinds, "
            f"or no graph at all, so make them alike."
        )
    return as_problem(
        graphs,
        np.array(labels, object),
        f"{where}{field}",
        question,
        notes,
        of_graphs=True,
    )


def _graph_label(source: Data, field: str, where: str) -> Any:
    if source.get(field) is None:
        return None
    label = _array(source[field])
    if label.size != 1:
        raise ValueError(
            f"{where}{field} must be one label of the graph; got an array of shape {list(label.shape)}, so choose one."
        )
    return label.item()


def new_graphs(source: Any, problem: Problem) -> list[Data]:
    """Return new graphs as those of a problem: checked, their duplicate edges merged, in as many directions.

    Args:
        source: a `Data`, or a list of them.
        problem: the problem.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the graphs are unlike those of the problem.
    """
    what = "a table (a path or a DataFrame), a Data, or a list of them"
    check_kind(source, "data", (Data, Sequence, Dataset), what)
    sources = [source] if isinstance(source, Data) else list(source)
    for each in sources:
        check_kind(each, "data", Data, what)
    if not sources or (problem.task == "node" and len(sources) > 1):
        raise ValueError(
            f"data must be one graph where nodes are predicted, and one at least otherwise; got {len(sources)}."
        )
    first = problem.graphs[0]
    channels = first.x.size(1)
    graphs = []
    for each in sources:
        graph, _ = _graph(each, "data.", 0, ())
        if graph.x.shape[1:] != (channels,):
            raise ValueError(
                f"x of data must have the {channels} features of the compared data; got {describe(each.x)}."
            )
        if first.edge_index is not None:
            if graph.edge_index is None:
                raise ValueError(
                    "edge_index of data must be given, as the compared data have edges; got None. Of a graph without "
                    "edges it is torch.empty(2, 0, dtype=torch.long)."
                )
            tidy_edges(graph, problem.directed, [])
        graphs.append(graph)
    return graphs
