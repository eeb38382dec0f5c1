"""Positive orthogonal random features: softmax attention as an inner product (Choromanski et al. 2021)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import accumulating, without_autocast


def orthogonal_directions(
    num_features: int, dim: int, generator: torch.Generator | None = None
) -> Float[Tensor, "m D"]:
    """m Gaussian directions w_r ~ N(0, I), orthogonal within every block of ``dim`` of them.

    The blocks are Haar-distributed; every direction has the length of an independent Gaussian vector, so that each
    one alone is exactly Gaussian and the kernel estimate unbiased, with less variance than independent ones have.
    """
    blocks = -(-num_features // dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    lengths = torch.randn(num_features, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (q.reshape(-1, dim)[:num_features] * lengths).to(torch.get_default_dtype())


def positive_features(
    a: Float[Tensor, "N H D"], directions: Float[Tensor, "m D"]
) -> tuple[Float[Tensor, "N H m"], Float[Tensor, "N H one"]]:
    r"""w_r·a and −½‖a‖²: log φ(a)_r is their sum, less ½ log m, with E[φ(a)·φ(b)] = exp(a·b).

    In at least float32, also under autocast.
    """
    (a, directions), _ = accumulating(a, directions)
    with without_autocast(a):
        return a @ directions.t(), -0.5 * a.square().sum(2, keepdim=True)


def attention_features(
    q: Float[Tensor, "N H D"], k: Float[Tensor, "N H D"], directions: Float[Tensor, "m D"]
) -> tuple[Float[Tensor, "N H m"], Float[Tensor, "N H m"], Float[Tensor, "N H one"]]:
    r"""Log features of queries and of keys, and the log weight of every key, whose attention estimates softmax(q·k).

    −½‖q‖² is one factor for a whole row: it cancels from a normalised attention, and left in it would cost digits.
    Where q is k, the features are one tensor too.
    """
    log_key, log_weight = positive_features(k, directions)
    log_query = log_key if q is k else positive_features(q, directions)[0]
    return log_query, log_key, log_weight


def stabilized_features(
    q: Float[Tensor, "N H D"], k: Float[Tensor, "N H D"], directions: Float[Tensor, "m D"], eps: float, graph: Graph
) -> tuple[Float[Tensor, "N H m"], Float[Tensor, "N H m"], Float[Tensor, "N H one"]]:
    r"""Log features e^{w_r·a − ½‖a‖² − M} + ε of queries and keys, and log weights of zero, as released code has them.

    M is the largest w_r·q of a query's own, and the largest w_r·k of all keys of a graph: with ε it does not cancel.
    """
    if graph.num_nodes != graph.total_nodes:
        raise ValueError(
            "stabilizer needs the largest feature of all keys, which no rank knows of its part of a graph. Take "
            "stabilizer=0, or one process."
        )
    (along_q, half_q), (along_k, half_k) = (positive_features(a, directions) for a in (q, k))
    floor = torch.full_like(half_q, math.log(eps))
    largest_q, largest_k = along_q.amax(2, keepdim=True), largest(along_k.amax(2, keepdim=True), graph)
    log_query = torch.logaddexp(along_q + half_q - largest_q, floor)
    return log_query, torch.logaddexp(along_k + half_k - largest_k, floor), torch.zeros_like(half_k)


def largest(x: Float[Tensor, "N H one"], graph: Graph) -> Float[Tensor, "#N H one"]:
    """The largest row of every graph, at all of its rows; of a single graph one row for all."""
    if graph.is_single:
        return x.amax(0, keepdim=True) if len(x) else x
    batch = graph.batch.to(x.device)[:, None, None].expand_as(x)
    top = x.new_full((graph.num_graphs, *x.shape[1:]), -torch.inf)
    return top.scatter_reduce(0, batch, x, "amax").gather(0, batch)
