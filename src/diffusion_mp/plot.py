"""Pictures of trained models: every function draws on a matplotlib axis and returns the axis.

Without ``ax`` a function makes a new figure. The functions need the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.diagnostics import EnergyTrace, posterior_variance
from diffusion_mp.diagnostics.hooks import axis, hooked
from diffusion_mp.layers import CertifiedBlock, WeightedGraph
from diffusion_mp.modules import evaluating

__all__ = ["eigenvalues", "energies", "neighbours", "spectrum", "uncertainty"]


@torch.no_grad()
def energies(
    model: nn.Module | Tensor,
    *inputs: Any,
    ax: Any = None,
    **named: Any,
) -> Any:
    """Draw the energy before the first layer and after each layer, divided by the absolute value of the first energy.

    A model with a method ``energies``, such as a certified model, draws the energy that its layers lower. Other models
    draw Σ_ij ‖z_i − z_j‖². A network of blocks has a line for every block, over the steps of the block.

    Args:
        model: the model, or the energies themselves as a tensor [layers] or [blocks, steps].
        inputs: positional inputs of the model, which runs on them in evaluation mode.
        ax: the axis to draw on. By default a new figure is made.
        named: keyword inputs of the model.

    Examples:
        >>> axes = energies(CertifiedDIFFormer(4, 16, 3, num_layers=8), x, edge_index)
    """
    values: Any = model
    if isinstance(model, nn.Module):
        with evaluating(model):
            compute: Any = getattr(model, "energies", None)
            if compute is not None:
                values = compute(*inputs, **named)
            else:
                with EnergyTrace(model) as trace:
                    model(*inputs, **named)
                # The output of a layer is the input of the next, so only the first has an energy before.
                values = [trace.records[0].before, *trace.energies]
    rows = torch.atleast_2d(torch.as_tensor(values).detach().cpu())
    ax = axis(ax)
    for number, row in enumerate(rows, 1):
        # The energy of equal states may be zero.
        relative = row / row[0].abs().clamp(min=1e-30)
        ax.plot(relative.tolist(), "o-", markersize=3, label=f"block {number}")
    ax.set(xlabel="layer", ylabel="energy / |energy before|")
    if len(rows) > 1:
        ax.legend(fontsize="small")
        ax.set(xlabel="step of the block")
    # Only a linear axis has a locator for whole numbers.
    if ax.get_xscale() == "linear":
        ax.locator_params("x", integer=True)
    return ax


@torch.no_grad()
def neighbours(
    coupling: Coupling,
    node: int,
    *,
    top: int = 10,
    names: Iterable[str] = (),
    ax: Any = None,
) -> Any:
    """Draw the strongest couplings s_ij of a node i as bars, averaged over heads.

    Args:
        coupling: the coupling, such as the one that a layer returns with ``return_coupling=True``.
        node: i, the receiving node.
        top: number of bars: the senders j with the largest |s_ij|.
        names: a name for every node. By default the number of the node.
        ax: the axis to draw on. By default a new figure is made.

    Examples:
        >>> axes = neighbours(DIFFormer(4, 16, 3)(x, edge_index, return_coupling=True)[1][-1], node=2, top=3)
    """
    check_coupling_kind(coupling)
    checks.check_counts(top=top)
    checks.check_index(node, "node", coupling.num_nodes)
    others = torch.arange(coupling.num_nodes, device=coupling.device)
    # Listed pairs, since the matrix of a large graph may not fit into memory.
    pairs = torch.stack([others, torch.full_like(others, node)])
    row = coupling.at(pairs).mean(1).cpu()
    # By absolute value, since couplings may be negative.
    best = row.abs().topk(min(top, len(row))).indices
    # A list, since pandas looks up a Series by label and not by position.
    names = list(names) or [str(int(j)) for j in others]
    if len(names) != coupling.num_nodes:
        raise ValueError(
            f"names must hold one for each of {coupling.num_nodes} nodes; got {len(names)}."
        )
    ax = axis(ax)
    ax.barh(range(len(best)), row[best].tolist())
    # The strongest at the top, where matplotlib puts the last.
    ax.set_yticks(range(len(best)), [names[int(j)] for j in best])
    ax.invert_yaxis()
    ax.set(xlabel="s_ij", ylabel="sender j", title=f"couplings of node {names[node]}")
    return ax


def spectrum(
    model: nn.Module | tuple[Tensor, Tensor],
    *inputs: Any,
    ax: Any = None,
    **named: Any,
) -> Any:
    """Draw the eigenvalues of the matrices B of a model, and the share of its states along the eigenvectors.

    States along an eigenvector of eigenvalue 1 make neighbours agree; with −1 they make neighbours differ (Theorem T8
    of docs/certified.md).

    Args:
        model: a model with a `CertifiedBlock` that has a `WeightedGraph` term, or the result of `eigenvalues`.
        inputs: positional inputs of the model.
        ax: the axis to draw on. By default a new figure is made.
        named: keyword inputs of the model.

    Examples:
        >>> axes = spectrum(CertifiedTransformer(4, 16, 3), x, edge_index)
    """
    if isinstance(model, nn.Module):
        model = eigenvalues(model, *inputs, **named)
    values, shares = model
    ax = axis(ax)
    bins = torch.linspace(-1, 1, 17)
    even = torch.full_like(values, 1 / len(values))
    ax.hist(values, bins, weights=even, color="0.75", label="eigenvalues")
    # A line, since it hides no bar behind it.
    ax.hist(
        values,
        bins,
        weights=shares,
        label="states",
        histtype="step",
        color="#0072B2",
        linewidth=1.5,
    )
    ax.set(xlabel="eigenvalue of B", ylabel="share", xlim=(-1, 1))
    ax.legend(loc="upper left", fontsize="small")
    return ax


@torch.no_grad()
def eigenvalues(model: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of the matrices B of every `WeightedGraph`, and the share of the last states along each.

    The mean over nodes is subtracted from the states first, since it says nothing about neighbours. The shares add up
    to 1.

    Args:
        model: a model with a `CertifiedBlock` that has a `WeightedGraph` term.
        inputs: positional inputs of the model, which runs on them in evaluation mode.
        named: keyword inputs of the model.

    Raises:
        ValueError: the model has no such block.

    Examples:
        >>> values, shares = eigenvalues(CertifiedTransformer(4, 16, 3), x, edge_index)
    """
    bases: dict[str, tuple[Tensor, Tensor]] = {}
    for name, block in model.named_modules():
        if not isinstance(block, CertifiedBlock):
            continue
        for term in block.terms:
            if isinstance(term, WeightedGraph):
                matrices = term.matrices()
                # Diagonal matrices are stored as vectors.
                if matrices.dim() == 2:
                    matrices = matrices.diag_embed()
                bases[name] = torch.linalg.eigh((matrices + matrices.mT) / 2)
    if not bases:
        raise ValueError(
            f"model must have a CertifiedBlock with a WeightedGraph; {type(model).__name__} has none."
        )
    shares: dict[str, Tensor] = {}

    def look(name: str, x: Tensor, graph: object, state: Tensor) -> None:
        _, vectors = bases[name]
        # Not the mean over nodes, which neighbours that agree or differ leave as it is.
        centred = (state - state.mean(0)).to(vectors)
        along = (centred @ vectors).square().sum(1).flatten()
        shares[name] = along / along.sum() / len(bases)

    blocks = {name: model.get_submodule(name) for name in bases}
    with hooked(blocks, look), evaluating(model):
        model(*inputs, **named)
    values = torch.cat([values.flatten() for values, _ in bases.values()])
    return values.cpu(), torch.cat([shares[name] for name in bases]).cpu()


@torch.no_grad()
def uncertainty(
    coupling: Coupling,
    points: Tensor,
    *,
    leak: float = 0.1,
    ax: Any = None,
) -> Any:
    """Draw the nodes as points in the plane, coloured by their `posterior_variance`.

    Args:
        coupling: a symmetric and nonnegative coupling, see `posterior_variance`.
        points: the positions [N, 2]. Of more than two columns the two principal components are drawn.
        leak: κ > 0 of `posterior_variance`.
        ax: the axis to draw on. By default a new figure is made.

    Examples:
        >>> axes = uncertainty(SigmoidPenalty().coupling(0.1 * x), x)
    """
    check_coupling_kind(coupling)
    checks.check_state(points, "points")
    if len(points) != coupling.num_nodes or points.size(1) < 2:
        raise ValueError(
            f"points must be [{coupling.num_nodes}, 2] or wider, a row for every node; got {checks.describe(points)}."
        )
    points = points.double().cpu()
    if points.size(1) > 2:
        centred = points - points.mean(0)
        # A single row has one direction, which the full matrix completes to two axes.
        axes = torch.linalg.svd(centred, full_matrices=len(points) < 2).Vh
        points = centred @ axes[:2].T
    variance = posterior_variance(coupling, leak).mean(1).cpu()
    ax = axis(ax)
    drawn = ax.scatter(points[:, 0], points[:, 1], c=variance, s=8, norm="log")
    ax.figure.colorbar(drawn, ax=ax, label="posterior variance")
    # Principal components have no unit.
    ax.set(xticks=[], yticks=[])
    return ax
