"""Checks of the arguments of a ``Graph``: first their form (free), then their values (one pass)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from diffusion_mp import checks
from diffusion_mp.graph.part_edge_index import PartEdgeIndex
from diffusion_mp.runtime.precision import wide_dtype
from diffusion_mp.runtime.torch_private import transforms_active

# Number of empty graphs that a batch vector may count beyond one per node. More is an error, and costs memory.
EMPTY_GRAPHS = 1 << 16
# A pair of nodes is numbered source · N + target, in 64 bits.
MOST_NODES = 3_037_000_499


def as_num_nodes(num_nodes: object) -> int:
    """Return the number of nodes, from anything that counts as an integer."""
    # Under torch.compile it is a symbol, which a comparison would fix.
    if torch.compiler.is_compiling():
        return cast("int", num_nodes)
    count = checks.as_whole(num_nodes, "num_nodes")
    checks.check_counts(0, num_nodes=count)
    if count > MOST_NODES:
        raise ValueError(
            f"num_nodes must be at most {MOST_NODES}, beyond which pairs have no number; got {count}."
        )
    return count


def as_edge_index(edge_index: object) -> Tensor:
    """Return the edges [2, E] as a plain tensor of int64; keys of pairs, source · N + target, overflow in less."""
    # The degrees of a PartEdgeIndex are read already, and PyG's subclass would slow every operation down.
    edges: Any = checks.plain(edge_index)
    checks.check_kind(
        edges,
        "edge_index",
        Tensor,
        "a tensor [2, num_edges], a sparse tensor or a Graph",
    )
    checks.check_integer_pairs(edges, "edge_index")
    return edges.long()


def as_edge_weight(
    edge_weight: object, edge_index: Tensor | None, num_nodes: int
) -> Tensor:
    """Return the weights [E], one per edge, on the device of the edges."""
    if edge_index is None:
        raise ValueError("edge_weight needs edge_index; got edge_weight alone.")
    num_edges = edge_index.size(1)
    weight = checks.as_tensor(edge_weight, "edge_weight", "a floating-point tensor")
    # PyG's functions order arguments differently, so a mask or a batch may come here.
    if not weight.is_floating_point() and isinstance(edge_weight, Tensor):
        raise TypeError(
            f"edge_weight must be floating point, one for each of {num_edges} edges; got {checks.describe(weight)}. "
            f"Integers and a mask of edges are weights as edge_weight.float(); a batch goes by name, batch=…, and so "
            f"does a mask of nodes, mask=…, to LabelPropagation."
        )
    # A list has neither a device nor a dtype.
    if not isinstance(edge_weight, Tensor):
        weight = weight.to(edge_index.device, torch.get_default_dtype())
    checks.check_tensor(
        weight, "edge_weight", "of one dimension", edge_index.device, "edge_index"
    )
    if weight.dim() != 1 or weight.numel() != num_edges:
        raise ValueError(
            f"edge_weight must be one-dimensional with one entry per edge ({num_edges}); got "
            f"{checks.describe(weight)}. Edge features belong to edge_attr, not to edge_weight."
        )
    return weight


def as_batch(batch: object, num_nodes: int) -> Tensor:
    """Return the graph number of every row [N]."""
    vector = checks.as_tensor(batch, "batch", "a tensor [num_nodes] of integers")
    # Naming the size here would make torch.compile fix it.
    member = checks.index_vector(vector, "batch", "[num_nodes]")
    if member.numel() != num_nodes:
        raise ValueError(
            f"batch must be [num_nodes] = [{num_nodes}]; got {checks.describe(member)}."
        )
    return member


def as_ptr(ptr: object) -> Tensor:
    """Return the row boundaries [B + 1] of a ragged batch, on the CPU."""
    what = "a one-dimensional integer tensor [num_graphs + 1]"
    bounds = checks.as_tensor(ptr, "ptr", what)
    # While torch compiles, the number of graphs is a symbol, which this comparison would fix.
    empty = not torch.compiler.is_compiling() and bounds.numel() == 0
    fits = (
        bounds.dim() == 1
        and bounds.dtype in checks.INTEGERS
        and bounds.layout == torch.strided
    )
    if not fits or bounds.is_meta or empty:
        raise ValueError(f"ptr must be {what}; got {checks.describe(ptr)}.")
    return bounds.cpu().long()


def check_edge_order(edge_index: object, edge_attr: object) -> None:
    """Raise if features of edges come with a sparse adjacency, whose edges have no order."""
    if (
        edge_attr is not None
        and isinstance(edge_index, Tensor)
        and edge_index.layout != torch.strided
    ):
        raise ValueError(
            "edge_attr goes with edge_index [2, E]; the edges of a sparse adjacency have no order."
        )


def check_ptr(num_nodes: int, ptr: Tensor) -> None:
    """Raise unless row boundaries rise from 0 to N; an empty graph repeats one."""
    # The boundaries are on the CPU, so reading them waits for nothing.
    if (
        int(ptr[0]) != 0
        or int(ptr[-1]) != num_nodes
        or bool((ptr[1:] < ptr[:-1]).any())
    ):
        raise ValueError(
            f"ptr must rise from 0 to num_nodes = {num_nodes} without a step back; got {ptr.tolist()[:12]}."
        )


def full_degree_of(edge_index: object) -> Tensor | None:
    """Return the degrees that the edges of a part bring; raise for edges that were computed from such edges."""
    if not isinstance(edge_index, PartEdgeIndex):
        return None
    if edge_index.full_degree is None:
        raise ValueError(
            "edge_index was computed from the edges of a part with degrees='full', and it is not known whether the "
            "degrees of the whole graph belong to it. Assign it to batch.edge_index and pass Graph.from_data(batch), "
            "which takes batch.full_degree; or pass edge_index.as_tensor(), for the degrees in the part alone."
        )
    return edge_index.full_degree


def check_full_degree(full_degree: object, num_nodes: int) -> None:
    fits = (
        isinstance(full_degree, Tensor)
        and full_degree.is_floating_point()
        and full_degree.shape == (num_nodes, 2)
    )
    if not fits or full_degree.layout != torch.strided or full_degree.is_meta:  # type: ignore[attr-defined]
        raise ValueError(
            f"full_degree must be floating point [{num_nodes}, 2], the in- and out-degree of every node in the whole "
            f"graph; got {checks.describe(full_degree)}."
        )


def check_batch(num_nodes: int, batch: Tensor) -> None:
    """Raise unless every graph of the batch is one run of rows, and graphs are about as many as nodes at most."""
    if not batch.numel():
        return
    # Kernels read the rows of a graph as one block of memory.
    if bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            "batch must be sorted, so that every graph is a run of rows. Sort the nodes with order = "
            "batch.argsort(stable=True) and relabel edge_index."
        )
    # Sorted, so the ends are the extremes.
    first = int(batch[0])
    last = int(batch[-1])
    if first < 0:
        raise ValueError(f"batch must hold graph numbers >= 0; got {first}.")
    if last >= num_nodes + EMPTY_GRAPHS:
        raise ValueError(
            f"batch must number the graphs of {num_nodes} nodes; it reaches {last}. Renumber them: "
            f"torch.unique(batch, return_inverse=True)[1]."
        )


def check_edges(
    num_nodes: int,
    edge_index: Tensor | None,
    edge_weight: Tensor | None,
    member: Tensor | None,
) -> None:
    """Raise for an index out of range, an edge between graphs, and weights that are negative or not finite.

    ``member`` [N] is the graph of every node.
    """
    if edge_index is None or not edge_index.numel() or edge_index.is_meta:
        return
    # An index out of range would read or write foreign memory in the compressed products.
    checks.check_range(edge_index, "edge_index", num_nodes)
    # Attention stays within a graph, and an edge between graphs would carry values from one to another.
    if member is not None:
        source, target = member.to(edge_index.device)[edge_index]
        crossing = int((source != target).sum())
        if crossing:
            raise ValueError(
                f"edge_index joins nodes of different graphs of the batch ({crossing} edges do)."
            )
    # Inside `vmap` there may be one vector of weights for each element of a batch, without values to read.
    if edge_weight is None or transforms_active():
        return
    checks.check_finite(edge_weight, "edge_weight")
    if bool((edge_weight < 0).any()):
        raise ValueError(
            f"edge_weight must be non-negative, a degree needs that; the smallest is {float(edge_weight.min()):g}. "
            f"Graph(..., validate=False) takes signed weights for use without normalisation."
        )
    # A degree beyond the range of the dtype in which weights are added up would make every entry of its row zero;
    # no degree is larger than the sum of all weights, and 2^16 leaves room for products with a state.
    precision = wide_dtype(edge_weight.dtype)
    total = float(edge_weight.detach().sum(dtype=torch.float64))
    if total > torch.finfo(precision).max / (1 << 16):
        raise ValueError(
            f"edge_weight must leave {precision} room for degrees and what they multiply; the sum of all is "
            f"{total:.3g}. Divide the weights by the largest: edge_weight / edge_weight.max()."
        )


def row_bounds(ptr: object, num_nodes: int) -> Tensor | None:
    """Return the checked row boundaries that couplings take as ``ptr``, or ``None`` for one graph."""
    if ptr is None:
        return None
    bounds = as_ptr(ptr)
    # Fake tensors, which torch.export uses, have no values to read.
    if checks.values_to_check():
        check_ptr(num_nodes, bounds)
    return bounds
