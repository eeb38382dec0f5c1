"""A pair of states (x_src, x_dst), which PyG has for nodes of two kinds: one run of nodes, edges from part to part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity, IdentityDiffusivity
from diffusion_mp.diffusivities.base import ScaledDiffusivity, SumDiffusivity
from diffusion_mp.errors import check_integer_pairs, check_kind, check_range, check_state, describe, plain

#: Parts of a diffusivity that add no edges and divide by no degrees.
HARMLESS = (IdentityDiffusivity, SumDiffusivity, ScaledDiffusivity)


def between(layer: Any, x: Sequence[object], edge_index: object, edge_weight: object, **inputs: Any) -> Any:
    """What ``layer`` gives for the receivers x_dst, which hear of the senders x_src.

    Raises:
        TypeError, ValueError: no pair of states and edges between them; a layer whose coupling or update means all
            nodes alike.
    """
    kind = type(layer).__name__
    if len(x) != 2:
        raise TypeError(f"x must be a tensor [num_nodes, channels], or the pair (x_src, x_dst); got {describe(x)}.")
    _check_kind_of(layer, kind)
    senders, receivers = x
    channels = None if layer.in_channels == -1 else layer.in_channels
    check_state(senders, "x_src", channels)  # type: ignore[arg-type]
    assert isinstance(senders, Tensor)
    check_state(receivers, "x_dst", senders.size(1))  # type: ignore[arg-type]
    edges = plain(edge_index)
    check_kind(edges, "edge_index", Tensor, "a tensor [2, num_edges] where x is the pair (x_src, x_dst)")
    assert isinstance(edges, Tensor)
    assert isinstance(receivers, Tensor)
    check_integer_pairs(edges, "edge_index")
    if edges.numel() and not torch.compiler.is_compiling():
        check_range(edges[0], "edge_index[0]", senders.size(0))
        check_range(edges[1], "edge_index[1]", receivers.size(0))
    for name in ("batch", "source", "features", "previous"):
        if inputs.get(name) is not None:
            raise ValueError(f"{name} goes with nodes of one kind; {kind} got it beside the pair (x_src, x_dst).")
    first = senders.size(0)
    shift = edges.new_tensor([[0], [first]]).long()
    results = layer(torch.cat([senders, receivers]), edges + shift, edge_weight, **inputs)
    if isinstance(results, Tensor):
        return results[first:]
    out, *further = results
    return out[first:], *((pairs[0] - shift, pairs[1]) if isinstance(pairs, tuple) else pairs for pairs in further)


def _check_kind_of(layer: Any, kind: str) -> None:
    for part in layer.diffusivity.modules():
        if not isinstance(part, Diffusivity) or isinstance(part, HARMLESS):
            continue
        if not part.needs_graph or part.depends_on not in ("nothing", "edges"):
            raise ValueError(
                f"{kind} couples all pairs of nodes, and got the pair (x_src, x_dst) of two kinds. Pass one state, "
                f"data.to_homogeneous(), or take an edge layer: GINConv, or GATConv(self_loops='keep')."
            )
        if isinstance(part, AdjacencyDiffusivity) and part.normalization == "sym":
            raise ValueError(
                f"{kind} divides by the degrees of both ends, which nodes of two kinds have not; got the pair "
                f"(x_src, x_dst). Take DiffusionConv with AdjacencyDiffusivity('row'), GINConv, or "
                f"GATConv(self_loops='keep')."
            )
        if getattr(part, "self_loops", None) != "keep":
            raise ValueError(
                f"{kind} adds self-loops, and a sender is no receiver where x is the pair (x_src, x_dst). Build it "
                f"with self_loops='keep' (add_self_loops=False)."
            )
    if layer.steps > 1:
        raise ValueError(f"{kind} takes {layer.steps} steps, and only receivers move where x is (x_src, x_dst).")
