"""Forecasts that need no network: what a network is measured against, and what it may correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.errors import check_choice, check_kind, check_state

ForecastName = Literal["zero", "last", "mean", "own", "pooled", "ridge"]
_PENALTIES = np.logspace(-3, 3, 13)


def fit_forecast(name: ForecastName, snapshots: Sequence[Data]) -> Callable[[Tensor], Tensor]:
    """A forecast ŷ [N] of a snapshot's lags x [N, L], fitted to earlier snapshots.

    - "zero": 0, the mean of a standardised series.
    - "last": the latest lag.
    - "mean": x̄_i, the mean of the lags.
    - "pooled": x̄_i + (1/N) Σ_j (x_jL − x̄_j): on top of its mean, every node departs from it as all do on average.
    - "own": the mean of y_i over the snapshots that are given, whatever the lags are.
    - "ridge": a linear autoregression, the same for all nodes (Hoerl & Kennard 1970), its penalty chosen by leaving one
      out.

    Raises:
        ValueError: an unknown name, or no snapshot.

    Examples:
        >>> series = [Data(x=torch.rand(5, 4), y=torch.rand(5)) for _ in range(8)]
        >>> fit_forecast("ridge", series)(torch.rand(5, 4)).shape
        torch.Size([5])
    """
    check_choice(name, "name", get_args(ForecastName))
    check_kind(snapshots, "snapshots", (list, tuple), "a list of Data")
    for snapshot in snapshots:
        check_kind(snapshot, "snapshots", Data, "a list of Data")
        check_state(snapshot.x, "x of snapshots")
        check_kind(snapshot.y, "y of snapshots", Tensor, "a tensor [N]")
    if not snapshots:
        raise ValueError("snapshots must hold at least one snapshot to learn from; got none.")
    own = torch.stack([snapshot.y for snapshot in snapshots]).mean(0)
    match name:
        case "last":
            return lambda x: x[:, -1]
        case "mean":
            return lambda x: x.mean(1)
        case "own":
            return lambda x: own
        case "pooled":
            return lambda x: x.mean(1) + (x[:, -1] - x.mean(1)).mean()
        case "ridge":
            return _ridge(snapshots)
    return lambda x: torch.zeros_like(x[:, 0])


def _ridge(snapshots: Sequence[Data]) -> Callable[[Tensor], Tensor]:
    from sklearn.linear_model import RidgeCV

    lags, values = torch.cat([s.x for s in snapshots]), torch.cat([s.y for s in snapshots])
    fitted = RidgeCV(_PENALTIES).fit(lags.double().numpy(), values.double().numpy())
    weight, constant = torch.from_numpy(fitted.coef_).to(lags), float(fitted.intercept_)
    return lambda x: x @ weight + constant
