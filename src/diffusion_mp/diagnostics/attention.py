"""The error of random-feature attention as an estimate of the softmax, and a plot of attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import (
    check_counts,
    check_generator,
    check_index,
    check_kind,
    check_number,
    describe,
)
from diffusion_mp.couplings import Coupling, LogLowRankCoupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.diagnostics.hooks import axis
from diffusion_mp.diffusivities import KernelizedSoftmaxDiffusivity
from diffusion_mp.diffusivities.kernelized_softmax import (
    attention_features,
    orthogonal_directions,
)
from diffusion_mp.graph import Graph
from diffusion_mp.runtime.progress import progress_bar

COLUMNS = 512  # of S per comparison, so that memory is O(N), not O(N²)


@torch.no_grad()
def kernel_error(
    diffusivity: KernelizedSoftmaxDiffusivity,
    x: Float[Tensor, "N C"],
    num_features: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    *,
    graph: Graph | None = None,
    draws: int = 10,
    generator: torch.Generator | None = None,
) -> dict[int, float]:
    r"""Measure how far random features are from the softmax that they estimate.

    Return {m: ‖S_m − S‖_F / ‖S‖_F}, where S is the exact softmax at the state x and S_m its estimate from m random
    features. Each number is a mean over the draws and heads.

    The error falls like m^-½ (slides, Theorem 1) if m is well above the relative variance of one feature. That variance
    is at most e^(‖q_i + k_j‖²/τ) − 1 over the pairs. An error near or above 1 means that m features do not suffice:
    raise τ, or bound the queries and keys (``normalize="row"``).

    The measurement takes O(N² m) time per draw and O(N (m + 512)) memory.

    Args:
        diffusivity: the layer's diffusivity, for its queries, keys and temperature. Its own features do not change.
        x: a state to measure at, such as the input of a trained layer.
        num_features: the numbers of features m to try. The default doubles from 16 to 4 096.
        graph: the boundaries of a ragged batch. By default all rows of x belong to one graph.
        draws: number of independent draws of features for every m, over which the error is averaged.
        generator: random generator of the features. By default a new one with seed 0, so that the measurement repeats
            and does not change the training that goes on after it.

    Shapes:
        x: [N, C].

    Examples:
        >>> list(kernel_error(KernelizedSoftmaxDiffusivity(4), x, num_features=(16, 32), draws=2))
        [16, 32]
    """
    if not isinstance(diffusivity, KernelizedSoftmaxDiffusivity):
        raise TypeError(
            f"diffusivity must be a KernelizedSoftmaxDiffusivity; got {describe(diffusivity)}. In a NodeFormer layer "
            f"it is conv.diffusivity.attention (conv.diffusivity without a relational bias)."
        )
    check_kind(
        num_features,
        "num_features",
        (list, tuple, range),
        "a list of numbers of features",
    )
    check_generator(generator)
    check_counts(
        draws=draws, **{f"num_features[{i}]": m for i, m in enumerate(num_features)}
    )
    exact = diffusivity.exact(x, graph)
    graph = Graph.coerce(x, graph)
    q, k = diffusivity.scaled_queries_and_keys(x, graph)
    # Not the global state: a measurement must not change the training that goes on after it.
    draw = torch.Generator().manual_seed(0) if generator is None else generator

    def distance(m: int) -> float:
        directions = orthogonal_directions(m, q.size(2), draw).to(q.device, q.dtype)
        log_query, log_key, log_weight = attention_features(q, k, directions)
        return _relative_distance(
            LogLowRankCoupling(log_query, log_key, graph.segments, log_weight), exact
        )

    bar = progress_bar("kernel_error", "m", iterable=num_features)
    return {m: sum(distance(m) for _ in range(draws)) / draws for m in bar}


def _relative_distance(approximate: Coupling, exact: Coupling) -> float:
    """Return the mean over heads of ‖R − S‖_F / ‖S‖_F, computed by blocks of columns."""
    nodes = approximate.num_nodes
    if not nodes:
        return 0.0
    squares = torch.zeros(2, approximate.heads, dtype=torch.float64)
    for first in range(0, nodes, COLUMNS):
        # Products with unit vectors: a column of S each.
        units = torch.zeros(nodes, 1, min(COLUMNS, nodes - first))
        units[first:, 0].fill_diagonal_(1)
        units = units.to(exact.device, exact.dtype)
        columns = exact.matmul(units)
        difference = approximate.matmul(units) - columns
        # Squares of many small entries lose digits in single precision.
        both = torch.stack([difference, columns]).double()
        squares += both.square().sum((1, 3)).cpu()
    errors, sizes = squares
    return float((errors / sizes).sqrt().mean())


def plot_attention(
    coupling: Coupling,
    ax: Any = None,
    *,
    head: int = 0,
    threshold: float = 1e-8,
) -> Any:
    """Plot the entries s_ij of one head on a logarithmic colour scale; row i is the receiver (SFi-Former, Figure 4).

    Args:
        coupling: a nonnegative coupling of a graph small enough for N × N pixels.
        ax: a matplotlib axis. By default a new figure is made. The axis is returned, with the image in
            ``ax.images[-1]``.
        head: index of the head to plot.
        threshold: lower end of the colour scale, whose upper end is 1. Entries below the threshold are white; the
            default 1e-8 keeps eight decades.

    Examples:
        >>> axes = plot_attention(SimpleDiffusivity()(x))
    """
    check_coupling_kind(coupling)
    check_index(head, "head", coupling.heads)
    check_number(
        threshold, "threshold", lambda number: 0 < number < 1, "lie between 0 and 1"
    )
    with torch.no_grad():
        entries = coupling.to_dense()[head].double().cpu()
    if bool((entries < 0).any()):
        raise ValueError(
            f"coupling must be non-negative on a logarithmic scale; its least entry is {float(entries.min()):.3g}."
        )
    # Only now: an error leaves no empty figure behind.
    ax = axis(ax)
    # Entries that are not drawn are white.
    shown = entries.masked_fill(entries <= threshold, float("nan")).numpy()
    ax.imshow(
        shown,
        cmap="viridis",
        norm="log",
        vmin=threshold,
        vmax=1.0,
        interpolation="nearest",
    )
    ax.set(xlabel="sender j", ylabel="receiver i")
    return ax
