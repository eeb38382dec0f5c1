"""What couplings made of inner products q_i·k_j share: features that fit, the products of listed and of all pairs."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_mp.errors import check_device, check_tensor, describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import graph_of
from diffusion_mp.kernels.spmm import sddmm


def check_features(query: Tensor, key: Tensor, prefix: str = "") -> None:
    """Raise unless both are floating-point [N, H, F] of equal shape, dtype and device."""
    if (  # every all-pair coupling asks: what fits passes at one look, and only what does not is told why
        isinstance(query, Tensor)
        and (key is query or (isinstance(key, Tensor) and key.shape == query.shape and key.dtype == query.dtype))
        and query.dim() == 3
        and query.is_floating_point()
        and query.layout is key.layout is torch.strided
        and query.device == key.device
    ):
        return
    for name, features in (("query", query), ("key", key)):
        check_tensor(features, f"{prefix}{name}", "[num_nodes, heads, features]")
    if query.dim() != 3 or query.shape != key.shape:
        raise ValueError(
            f"{prefix}query and {prefix}key must both be [num_nodes, heads, features] of one shape; "
            f"got {describe(query)} and {describe(key)}."
        )
    if query.dtype != key.dtype:
        raise TypeError(
            f"{prefix}query and {prefix}key must have one dtype; got {describe(query)} and {describe(key)}."
        )
    check_device(key, f"{prefix}key", query.device, f"{prefix}query")


def same_graph(ptr: Int[Tensor, " bounds"], a: Int[Tensor, "*rows"], b: Int[Tensor, "*cols"]) -> Bool[Tensor, " ..."]:
    """Whether nodes ``a`` and ``b`` (broadcast against each other) lie in one graph of a ragged batch."""
    return graph_of(ptr, a) == graph_of(ptr, b)


def listed_products(
    query: Float[Tensor, "N H F"],
    key: Float[Tensor, "N H F"],
    edge_index: Int[Tensor, "two E"],
    ptr: Tensor | None,
    across: float,
) -> Float[Tensor, "E H"]:
    """q_i·k_j of listed pairs, j = ``edge_index[0]``, i = ``edge_index[1]``; ``across`` where their graphs differ."""
    products = sddmm(Graph(query.size(0), edge_index, validate=False).pattern, query, key)
    if ptr is None:
        return products
    # Filled before anybody takes an exponential: across graphs nothing bounds it, and ∞ · 0 would be NaN.
    return products.masked_fill(~same_graph(ptr, edge_index[1], edge_index[0]).unsqueeze(1), across)


def all_products(
    query: Float[Tensor, "N H F"], key: Float[Tensor, "N H F"], ptr: Tensor | None, across: float
) -> Float[Tensor, "H N N"]:
    """q_i·k_j of all pairs, ``across`` where their graphs differ: what ``to_dense`` starts from."""
    products = torch.einsum("ihf,jhf->hij", query, key)
    if ptr is None:
        return products
    nodes = torch.arange(query.size(0), device=query.device)
    return products.masked_fill(~same_graph(ptr, nodes[:, None], nodes[None, :]), across)
