"""``plot_attention``: the entries of a coupling as an image."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_positive, check_seed, describe, needed_by


def axis(ax: Any = None) -> Any:
    """Return the given matplotlib axis, or that of a new figure."""
    with needed_by("A plot", "diffusion-mp[plot]"):
        import matplotlib.pyplot as plt

    return plt.figure().add_subplot() if ax is None else ax


def plot_attention(coupling: Coupling, ax: Any = None, *, head: int = 0, threshold: float = 1e-8) -> Any:
    """Plot the entries s_ij of one head, row i the receiver, on a logarithmic colour scale (SFi-Former, Figure 4).

    Args:
        coupling: a nonnegative coupling of a graph small enough for N × N pixels.
        ax: a matplotlib axis; a new one by default.
        head: index of the head.
        threshold: lower end of the scale, whose upper end is 1; entries up to it are white.

    Returns:
        The axis; its image is ``ax.images[-1]``, for a colour bar.

    Raises:
        TypeError, ValueError: not a coupling, no such head, or a negative entry.

    Examples:
        >>> axes = plot_attention(SimpleDiffusivity()(x))
    """
    if not isinstance(coupling, Coupling):
        raise TypeError(f"coupling must be a Coupling, such as return_coupling=True gives; got {describe(coupling)}.")
    check_seed(head, "head")
    if not 0 <= head < coupling.heads:
        raise ValueError(f"head must lie in [0, {coupling.heads - 1}]; got {head}.")
    check_positive(threshold, "threshold")
    if ax is not None and not hasattr(ax, "imshow"):
        raise TypeError(f"ax must be a matplotlib axis or None; got {describe(ax)}.")
    with torch.no_grad():
        entries = coupling.to_dense()[head].double().cpu()
    if bool((entries < 0).any()):
        raise ValueError(
            f"coupling must be non-negative on a logarithmic scale; its least entry is {float(entries.min()):.3g}."
        )
    ax = axis(ax)
    from matplotlib.colors import LogNorm

    shown = entries.masked_fill(entries <= threshold, float("nan")).numpy()
    ax.imshow(shown, cmap="viridis", norm=LogNorm(vmin=threshold, vmax=1.0), interpolation="nearest")
    ax.set_xlabel("sender j")
    ax.set_ylabel("receiver i")
    return ax
