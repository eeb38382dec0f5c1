"""Where to place diffusion layers: commutators with attention, and a report by layer (Zhang & Zhou, § 3.5)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import NoneType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diffusion_mp import checks
from diffusion_mp.diagnostics.hooks import axis, declared, recorded, tokens
from diffusion_mp.diagnostics.perturbation import perturbation_bound
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.modules import evaluating


@checks.checked
@torch.no_grad()
def commutator(
    diffusion: PDEDiffusion1d,
    attention: Callable[..., Any],
    x: Float[Tensor, "B L C"],
    mask: Bool[Tensor, "B L"] | None = None,
) -> tuple[float, float | None]:
    r"""Return how much the order of diffusion and attention matters, ‖S(A(X)) − A(S(X))‖ / ‖A(X)‖.

    This is Zhang & Zhou, Eq. 12. The second number that is returned is the same quantity with the routing frozen at X,
    ‖S(A_X(X)) − A_X(S(X))‖ / ‖A(X)‖. For one head without projections A_X(Y) = A(X) Y, and the second number is
    α‖(ΔA(X) − A(X)Δ)X‖ / ‖A(X)‖ (Eq. 13).

    Norms are over the tokens of all sequences. Both numbers are 0 if A(X) is 0.

    Args:
        diffusion: S. The step is taken without the LayerNorm of Eq. 16.
        attention: A, called as ``attention(x, mask)`` or ``attention(x)``, in evaluation mode. A method ``frozen(x,
            mask)``, as `SelfAttention` has it, returns A_X; without this method the second number is ``None``.
        x: the state that the attention reads.
        mask: true at tokens, false at padding. By default every entry is a token.

    Shapes:
        x: [B, L, C].
        mask: [B, L] of bool.

    Examples:
        >>> attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        >>> commutator(PDEDiffusion1d(4), lambda z: attention(z, z, z)[0], torch.rand(3, 10, 4))[0] > 0
        True
    """
    checks.check_function(attention, "attention", "called as attention(x, mask)")
    checks.check_sequences(x, mask, diffusion.in_channels, diffusion)
    checks.check_finite(x, "x")
    if diffusion.norm is not None:
        # Removed from a copy, not from the caller's layer.
        diffusion = copy.deepcopy(diffusion)
        diffusion.norm = None
    # An attention of a user may take no mask.
    masks = () if mask is None else (mask,)
    smooth = diffusion(x, *masks)
    routed = attention(x, *masks)
    size = float(tokens(routed, mask).norm())

    def relative(left: Tensor, right: Tensor) -> float:
        # Padding has values too, which mean nothing.
        difference = float((tokens(left, mask) - tokens(right, mask)).norm())
        return difference / size if size else 0.0

    exact = relative(diffusion(routed, *masks), attention(smooth, *masks))
    if not hasattr(attention, "frozen"):
        return exact, None
    # A_X is linear: it keeps the weights that the attention has at x, and applies them to S(x) too.
    frozen = attention.frozen(x, *masks)
    return exact, relative(diffusion(frozen(x), *masks), frozen(smooth))


Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class PlacementReport:
    """The measurements of `diagnose`, as columns for a data frame or a JSON file.

    Args:
        attention: one row per call of a self-attention. The columns are ``layer``; ``roughness`` 𝓔(X) and
            ``relative_roughness`` 𝓔(X)/‖X‖² of its input X; ``commutator`` and ``linearized``, the two numbers of
            `commutator`.
        insertion: one row per insertion of a diffusion layer. The columns are ``layer`` and these of `Perturbation`:
            ``roughness``, ``relative_roughness``, ``step``, ``lipschitz``, ``truth``, ``estimate`` and
            ``roughness_estimate``.

    Examples:
        >>> PlacementReport(attention={"layer": ["attention"], "commutator": [0.2]}, insertion={}).attention["layer"]
        ['attention']
    """

    attention: Columns
    insertion: Columns

    def plot(
        self,
        ax: Any = None,
        quantity: str = "commutator",
        *,
        label: str = "",
    ) -> Any:
        """Plot one column over the layers, and return the matplotlib axis.

        Args:
            ax: the axis to draw on. By default a new figure is made.
            quantity: a column of ``attention``, or else of ``insertion``. ``"estimate"`` also plots the truth and the
                estimate by roughness, on a logarithmic scale.
            label: name of the report in the legend, to tell several reports on one axis apart. By default the name of
                the column.
        """
        columns = {**self.insertion, **self.attention}
        names = [name for name in columns if name != "layer"]
        checks.check_choice(quantity, "quantity", names)
        # Both tables have a column of roughness; here the attention's counts.
        table = self.attention if quantity in self.attention else self.insertion
        drawn = [quantity]
        if quantity == "estimate":
            drawn = ["truth", "estimate", "roughness_estimate"]
        ax = axis(ax)
        # All lines of a report have one colour, the next of the axis, so that reports on one axis can be told apart.
        colour = None
        for name, style in zip(drawn, ("o-", "o--", "o:"), strict=False):
            title = name.replace("_", " ")
            if label:
                title = f"{label} {title}" if len(drawn) > 1 else label
            # What is not known, None, becomes NaN, which leaves a gap.
            values = np.array(table[name], dtype=float)
            (line,) = ax.plot(values, style, color=colour, label=title)
            colour = line.get_color()
        if len(drawn) > 1:
            ax.set_yscale("log")
        if len(ax.lines) > 1:
            # To the right of the axis: lines of several layers and models leave no corner free.
            ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        layers = table["layer"]
        ax.set_xticks(range(len(layers)), layers, rotation=30, ha="right")
        ax.set_ylabel(quantity.replace("_", " "))
        return ax


def diagnose(
    model: nn.Module,
    *inputs: Any,
    diffusion: PDEDiffusion1d | None = None,
    sites: Sequence[str] | None = None,
    points: int = 5,
    tol: float = 1e-4,
    **named: Any,
) -> PlacementReport:
    r"""Measure the quantities by which Zhang & Zhou predict the best placement (§ 3.5, Eqs. 6, 10, 12, 13).

    Every module with ``is_self_attention = True`` gives the commutator with S at its input. Diffusion layers are
    bypassed, one at a time, for the estimate of Theorem 4.7. A few sequences in double precision suffice.

    Args:
        model: a module that returns a tensor, such as `PDETransformer`.
        inputs: positional inputs of the model.
        diffusion: S. By default the diffusion layer of the model whose name shares the longest prefix with the name of
            the attention: the layer of the same block, which reads states of the same scale.
        sites: names of modules behind which ``diffusion`` is inserted. By default the model's own layers are bypassed.
        points: number of points at which `perturbation_bound` measures ‖J_T‖.
        tol: tolerance of `lipschitz`.
        named: keyword inputs of the model.

    Raises:
        ValueError: ``sites`` is given without ``diffusion``, or the model has no diffusion layer to use as S.
        ConvergenceError: `lipschitz` did not reach its tolerance.

    Examples:
        >>> model = PDETransformer(4, 8, 2, num_layers=1, heads=2, max_length=5, placement="P3")
        >>> report = diagnose(model, torch.rand(2, 5, 4))  # report.plot(quantity="commutator") draws it
    """
    checks.check_kind(model, "model", nn.Module, "a torch.nn.Module")
    checks.check_kind(
        sites, "sites", (list, tuple, NoneType), "a list of names of modules"
    )
    checks.check_kind(
        diffusion, "diffusion", (PDEDiffusion1d, NoneType), "a PDEDiffusion1d or None"
    )
    checks.check_counts(points=points)
    checks.check_positive(tol, "tol")
    modules = dict(model.named_modules())
    if sites is None:
        # The model's own layers are bypassed one at a time.
        sites = list(declared(model, "is_diffusion_layer"))
        inserted = None
    elif diffusion is None:
        raise ValueError(
            "sites needs diffusion, the layer to insert there; got sites alone."
        )
    else:
        inserted = diffusion
    insertion = []
    for site in sites:
        checks.check_choice(site, "sites", modules)
        measured = perturbation_bound(
            model,
            modules[site],
            *inputs,
            diffusion=inserted,
            points=points,
            tol=tol,
            **named,
        )
        insertion.append([site, *(getattr(measured, name) for name in INSERTION[1:])])
    attentions = declared(model, "is_self_attention")
    attention = []
    # One run records the states at all attentions.
    with evaluating(model):
        with torch.no_grad(), recorded(attentions) as calls:
            model(*inputs, **named)
        for name, module in attentions.items():
            for call in calls[name]:
                # A NaN would be the commutator of the whole call, and read as a finding.
                state = tokens(call.x, call.mask)
                checks.check_finite(state, f"the state that inputs give at {name}")
                smoothing = diffusion or _nearest(model, name, call.x.size(2))
                rough = call.roughness()
                # The roughness of a state of zeros is zero.
                relative = rough / (call.square() or 1.0)
                pair = commutator(smoothing, module, call.x, call.mask)
                attention.append([name, rough, relative, *pair])
    return PlacementReport(
        _columns(ATTENTION, attention), _columns(INSERTION, insertion)
    )


def _columns(names: Sequence[str], rows: list[list[Any]]) -> Columns:
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


ATTENTION = ("layer", "roughness", "relative_roughness", "commutator", "linearized")
INSERTION = (
    "layer",
    "roughness",
    "relative_roughness",
    "step",
    "lipschitz",
    "truth",
    "estimate",
    "roughness_estimate",
)


def _nearest(model: nn.Module, name: str, channels: int) -> PDEDiffusion1d:
    """Return the model's diffusion layer on ``channels`` whose name shares the longest prefix with ``name``."""
    layers = {
        other: module
        for other, module in model.named_modules()
        if isinstance(module, PDEDiffusion1d) and module.in_channels == channels
    }
    if not layers:
        raise ValueError(
            f"diffusion must be given: {type(model).__name__} has no diffusion layer on states of {channels} channels. "
            f"Pass diffusion=PDEDiffusion1d({channels})."
        )

    def prefix(other: str) -> int:
        pairs = zip(other.split("."), name.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    # In a model with a layer in every block, the layer of the same block, which reads states of the same scale.
    return layers[max(layers, key=prefix)]
