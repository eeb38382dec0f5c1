"""The data sets of PyG Temporal as snapshots, a graph for every time that can be forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import ToUndirected

from diffusion_mp.errors import as_whole, check_choice
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.agreement import check_indices

TemporalName = Literal["chickenpox", "england_covid"]
_LAGS = {"chickenpox": 4, "england_covid": 8}
_WAY_OUT = (
    "Fetch it anew, from the folder dataset of https://github.com/benedekrozemberczki/pytorch_geometric_temporal."
)


def load_snapshots(root: str | Path, name: TemporalName, lags: int | None = None) -> list[Data]:
    """One set of PyG Temporal (Rozemberczki et al. 2021), a graph for every day or week that can be forecast.

    - chickenpox: weekly cases in 20 Hungarian counties, 521 weeks, one graph; standardised when published.
    - england_covid: daily cases in 129 regions, 61 days, a weighted graph of movements for every day, which is that of
      the last day known. Standardised here as PyG Temporal does it, every region over all days. That shows the test
      period to whoever reads the lags; figures are comparable with published ones only so.

    Edges are made undirected: two directions have their mean weight, and one alone serves for both.

    Args:
        root: the folder that holds `chickenpox.json` and `england_covid.json`.
        name: "chickenpox" or "england_covid".
        lags: values before the one to be forecast, 4 and 8 by default.

    Returns:
        Snapshots in the order of time, with x [N, lags], the latest last, y [N], edge_index [2, E], edge_weight [E].

    Raises:
        TypeError, ValueError: an option does not fit, or the file is damaged.
        FileNotFoundError: it is missing.

    Examples:
        >>> import json
        >>> content = {"edges": [[0, 1]], "FX": [[0.0, 9.0], [1.0, 8.0], [2.0, 7.0], [3.0, 6.0]]}  # four times
        >>> _ = (folder / "chickenpox.json").write_text(json.dumps(content))
        >>> first, second = load_snapshots(folder, "chickenpox", lags=2)
        >>> first.x.tolist(), first.y.tolist()
        ([[0.0, 1.0], [9.0, 8.0]], [2.0, 7.0])
    """
    check_choice(name, "name", get_args(TemporalName))
    lags = _LAGS[name] if lags is None else as_whole(lags, "lags")
    path = as_path(root, "root") / f"{name}.json"
    check_present(name, path.parent, [path], _WAY_OUT.replace("Fetch it anew,", "Fetch it"))
    with reading(path, _WAY_OUT):
        series, graphs = _PARSERS[name](json.loads(path.read_bytes()))
    if not 0 < lags < len(series):
        raise ValueError(f"lags must lie in 1..{len(series) - 1}, for {name} has {len(series)} times; got {lags}.")
    return [
        Data(x=series[now - lags : now].t().contiguous(), y=series[now], **graphs[(now - 1) % len(graphs)])
        for now in range(lags, len(series))
    ]


def _chickenpox(content: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    series = _series(content["FX"])
    edges = content["edges"]
    return series, [_graph(edges, [1.0] * len(edges), series.size(1))]


def _england_covid(content: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    series, mapping = _series(content["y"]), content["edge_mapping"]
    days = [
        _graph(mapping["edge_index"][str(day)], mapping["edge_weight"][str(day)], series.size(1))
        for day in range(len(series))
    ]
    mean, spread = series.mean(0), series.std(0, correction=0)
    return (series - mean) / (spread + 1e-10), days


_PARSERS: dict[str, Callable[[Any], tuple[Tensor, list[dict[str, Tensor]]]]] = {
    "chickenpox": _chickenpox,
    "england_covid": _england_covid,
}


def _series(rows: Any) -> Tensor:
    """The values [times, N] of all nodes."""
    series = torch.tensor(rows, dtype=torch.float64).float()
    if series.dim() != 2 or not series.numel() or not series.isfinite().all():
        raise ValueError(f"its series must be finite numbers [times, nodes], got {list(series.shape)}")
    return series


def _graph(edges: Any, weights: Any, num_nodes: int) -> dict[str, Tensor]:
    edge_index, edge_weight = torch.tensor(edges), torch.tensor(weights, dtype=torch.float32)
    check_indices(edge_index, num_nodes, "the ends of edges")
    if edge_index.dim() != 2 or edge_index.size(1) != 2 or edge_weight.shape != edge_index.shape[:1]:
        raise ValueError(f"edges {list(edge_index.shape)} and weights {list(edge_weight.shape)} do not fit")
    if not edge_weight.isfinite().all() or (edge_weight < 0).any():
        raise ValueError("weights of edges must be finite and not negative")
    graph = Data(edge_index=edge_index.t().contiguous(), edge_weight=edge_weight, num_nodes=num_nodes)
    graph = ToUndirected(reduce="mean")(graph)
    return {"edge_index": graph.edge_index, "edge_weight": graph.edge_weight}
