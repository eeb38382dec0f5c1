"""The data sets of PyG Temporal as snapshots, and forecasts of them that need no network."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import ToUndirected

from diffusion_mp.checks import as_whole, check_choice, check_kind
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)

TemporalName = Literal["chickenpox", "england_covid"]
ForecastName = Literal["zero", "last", "mean", "own", "pooled", "ridge"]
_LAGS = {"chickenpox": 4, "england_covid": 8}
_FOLDER = "from the folder dataset of https://github.com/benedekrozemberczki/pytorch_geometric_temporal."


def load_snapshots(
    root: str | Path, name: TemporalName, lags: int | None = None
) -> list[Data]:
    """Load one set of PyG Temporal (Rozemberczki et al. 2021), a graph for every day or week that can be forecast.

    - chickenpox: weekly cases in 20 Hungarian counties, 521 weeks, one graph. The published cases are standardised.
    - england_covid: daily cases in 129 regions, 61 days, and a weighted graph of movements for every day; a forecast
      has the graph of the last known day. Every region is standardised over all days, as PyG Temporal does it. This
      shows the test period to the model, but only so are figures comparable with published figures.

    The function reads `root/<name>.json`. Edges are made undirected: two directions get their mean weight, and a single
    direction serves for both.

    Args:
        root: the folder that holds the file.
        name: "chickenpox" or "england_covid".
        lags: number of values that a forecast sees. By default 4 for chickenpox and 8 for england_covid.

    Returns snapshots in order of time.

    Shapes:
        x: [N, lags], the latest last.
        y: [N].
        edge_index: [2, E].
        edge_weight: [E].

    Raises:
        FileNotFoundError: the file is missing. The message says where to get it.
        ValueError: the file is damaged.

    Examples:
        >>> load_snapshots(folder / "none", "england_covid")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: england_covid...missing england_covid.json. Fetch it from the folder dataset of https...
    """
    check_choice(name, "name", get_args(TemporalName))
    lags = _LAGS[name] if lags is None else as_whole(lags, "lags")
    path = as_path(root, "root") / f"{name}.json"
    check_present(name, path.parent, [path], f"Fetch it {_FOLDER}")
    with reading(path, f"Fetch it anew, {_FOLDER}"):
        content = json.loads(path.read_bytes())
        series = torch.tensor(
            content["FX" if name == "chickenpox" else "y"], dtype=torch.float64
        ).float()
        if series.dim() != 2 or not series.numel() or not series.isfinite().all():
            raise ValueError(
                f"its series must be finite numbers [times, nodes], got {list(series.shape)}"
            )
        times, nodes = series.shape
        if name == "chickenpox":
            graphs = [_graph(content["edges"], [1.0] * len(content["edges"]), nodes)]
        else:
            edges = content["edge_mapping"]["edge_index"]
            weights = content["edge_mapping"]["edge_weight"]
            graphs = [
                _graph(edges[str(day)], weights[str(day)], nodes)
                for day in range(times)
            ]
            # With the 1e-10 of PyG Temporal, so that figures can be compared.
            series = (series - series.mean(0)) / (series.std(0, correction=0) + 1e-10)
    if not 0 < lags < times:
        raise ValueError(
            f"lags must lie in 1..{times - 1}, for {name} has {times} times; got {lags}."
        )
    lagged = (
        (now, series[now - lags : now].t().contiguous()) for now in range(lags, times)
    )
    # One graph for all weeks, or the graph of the last known day.
    return [
        Data(x=x, y=series[now], **graphs[(now - 1) % len(graphs)]) for now, x in lagged
    ]


def _graph(edges: Any, weights: Any, num_nodes: int) -> dict[str, Tensor]:
    edge_index = torch.tensor(edges)
    edge_weight = torch.tensor(weights, dtype=torch.float32)
    check_indices(edge_index, num_nodes, "the ends of edges")
    if (
        edge_index.dim() != 2
        or edge_index.size(1) != 2
        or edge_weight.shape != edge_index.shape[:1]
    ):
        raise ValueError(
            f"edges {list(edge_index.shape)} and weights {list(edge_weight.shape)} do not fit"
        )
    if not edge_weight.isfinite().all() or (edge_weight < 0).any():
        raise ValueError("weights of edges must be finite and not negative")
    graph = Data(
        edge_index=edge_index.t().contiguous(),
        edge_weight=edge_weight,
        num_nodes=num_nodes,
    )
    # Symmetric couplings need both directions of an edge, with one weight.
    graph = ToUndirected(reduce="mean")(graph)
    return {"edge_index": graph.edge_index, "edge_weight": graph.edge_weight}


def fit_forecast(
    name: ForecastName, snapshots: Sequence[Data]
) -> Callable[[Tensor], Tensor]:
    """Fit a forecast without a network to earlier snapshots; the result maps a snapshot's lags x [N, L] to ŷ [N].

    - "zero": 0, the mean of a standardised series.
    - "last": the latest lag.
    - "mean": x̄_i, the mean of the lags.
    - "pooled": x̄_i + (1/N) Σ_j (x_jL − x̄_j). To its own mean every node adds the average departure of all nodes from
      theirs.
    - "own": the mean of y_i over the given snapshots, whatever the lags are.
    - "ridge": one linear autoregression for all nodes (Hoerl & Kennard 1970), with the penalty chosen by leave-one-out.

    Args:
        name: name of the forecast.
        snapshots: the snapshots to fit to.

    Examples:
        >>> series = [Data(x=torch.rand(5, 4), y=torch.rand(5)) for _ in range(8)]
        >>> fit_forecast("ridge", series)(torch.rand(5, 4)).shape
        torch.Size([5])
    """
    check_choice(name, "name", get_args(ForecastName))
    check_kind(snapshots, "snapshots", (list, tuple), "a list of Data")
    for snapshot in snapshots:
        check_kind(snapshot, "snapshots", Data, "a list of Data")
    if not snapshots:
        raise ValueError(
            "snapshots must hold at least one snapshot to learn from; got none."
        )
    mean_of_node = torch.stack([snapshot.y for snapshot in snapshots]).mean(0)
    forecasts: dict[str, Callable[[Tensor], Tensor]] = {
        "zero": lambda x: torch.zeros_like(x[:, 0]),
        "last": lambda x: x[:, -1],
        "mean": lambda x: x.mean(1),
        "own": lambda x: mean_of_node,
        "pooled": lambda x: x.mean(1) + (x[:, -1] - x.mean(1)).mean(),
    }
    if name in forecasts:
        return forecasts[name]
    from sklearn.linear_model import RidgeCV

    lags = torch.cat([s.x for s in snapshots])
    values = torch.cat([s.y for s in snapshots])
    fitted = RidgeCV(np.logspace(-3, 3, 13)).fit(
        lags.double().numpy(), values.double().numpy()
    )
    weight = torch.from_numpy(fitted.coef_).to(lags)
    constant = float(fitted.intercept_)
    return lambda x: x @ weight + constant
