"""What a ``Graph`` refuses, and the sentences it says: first form (free), then values (one pass over the data)."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_mp.errors import check_finite, describe


def check_edge_index(edge_index: object) -> None:
    """Raise unless ``edge_index`` is an integer tensor [2, E]."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"edge_index must be a tensor [2, num_edges], a sparse tensor or a Graph; got {describe(edge_index)}."
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " It looks transposed: pass edge_index.t()." if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise ValueError(f"edge_index must be [2, num_edges]; got {describe(edge_index)}.{hint}")
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise TypeError(
            f"edge_index must hold integers; got {describe(edge_index)}. Convert it with edge_index.long()."
        )


def check_form(
    num_nodes: int,
    edge_index: Tensor | None,
    edge_weight: Tensor | None,
    batch: Tensor | None,
    ptr: Tensor | None,
    full_degree: Tensor | None,
) -> None:
    """Rank, dtype and length, without a look at the values."""
    if isinstance(num_nodes, int) and num_nodes < 0:
        raise ValueError(f"num_nodes must be at least 0; got {num_nodes}.")
    if edge_index is not None:
        check_edge_index(edge_index)
    if edge_weight is not None:
        if edge_index is None:
            raise ValueError("edge_weight needs edge_index; got edge_weight alone.")
        if edge_weight.dim() != 1 or edge_weight.numel() != edge_index.size(1):
            raise ValueError(
                f"edge_weight must be one-dimensional with one entry per edge ({edge_index.size(1)}); "
                f"got {describe(edge_weight)}. Edge features belong to edge_attr, not to edge_weight."
            )
        if not edge_weight.is_floating_point():
            raise TypeError(f"edge_weight must be floating point; got {describe(edge_weight)}.")
    if batch is not None:
        if batch.dim() != 1 or batch.numel() != num_nodes:
            raise ValueError(f"batch must be [num_nodes] = [{num_nodes}]; got {describe(batch)}.")
        if batch.is_floating_point() or batch.dtype == torch.bool:
            raise TypeError(f"batch must hold integers; got {describe(batch)}.")
    if ptr is not None and (ptr.dim() != 1 or ptr.is_floating_point() or ptr.numel() < 1):
        raise ValueError(f"ptr must be a one-dimensional integer tensor [num_graphs + 1]; got {describe(ptr)}.")
    if full_degree is not None and (full_degree.shape != (num_nodes, 2) or not full_degree.is_floating_point()):
        raise ValueError(
            f"full_degree must be floating point [{num_nodes}, 2], the in- and out-degree of every node in the whole "
            f"graph; got {describe(full_degree)}."
        )


def check_segments(num_nodes: int, batch: Tensor | None, ptr: Tensor | None) -> None:
    """Every graph of the batch is one run of rows."""
    if batch is not None and batch.numel():
        if bool((batch[1:] < batch[:-1]).any()):
            raise ValueError(
                "batch must be sorted, so that every graph is a run of rows. "
                "Sort the nodes with order = batch.argsort(stable=True) and relabel edge_index."
            )
        if int(batch[0]) < 0:
            raise ValueError(f"batch must hold graph numbers >= 0; got {int(batch[0])}.")
    if ptr is not None and (int(ptr[0]) != 0 or int(ptr[-1]) != num_nodes or bool((ptr[1:] < ptr[:-1]).any())):
        raise ValueError(
            f"ptr must rise from 0 to num_nodes = {num_nodes} without a step back; got {ptr.tolist()[:12]}."
        )


def check_edges(num_nodes: int, edge_index: Tensor | None, edge_weight: Tensor | None, member: Tensor | None) -> None:
    """Indices in range, no edge between graphs (``member`` [N] tells them apart), weights finite and non-negative."""
    if edge_index is None or not edge_index.numel():
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"edge_index must lie in [0, {num_nodes - 1}] for {num_nodes} nodes; it reaches from {low} to {high}."
        )
    if member is not None:
        crossing = int((member[edge_index[0]] != member[edge_index[1]]).sum())
        if crossing:
            raise ValueError(f"edge_index joins nodes of different graphs of the batch ({crossing} edges do).")
    if edge_weight is not None:
        check_finite(edge_weight, "edge_weight")
        if bool((edge_weight < 0).any()):
            raise ValueError(
                f"edge_weight must be non-negative, a degree needs that; the smallest is {float(edge_weight.min()):g}. "
                f"Graph(..., validate=False) takes signed weights for use without normalisation."
            )
