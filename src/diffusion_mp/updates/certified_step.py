"""``CertifiedStep``: source, graph, all pairs, activation and normalisation in a step that never raises an energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.pairs import check_metric
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EnergyTerm,
    Mean,
    ScaledTerm,
    SourceTerm,
    damping_and_constant,
)
from diffusion_mp.errors import check_positive
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import reciprocal
from diffusion_mp.modules import Positive
from diffusion_mp.updates.base import State, StateUpdate


class CertifiedStep(StateUpdate):
    r"""One step down the energy of source, pairs, graph and constraint.

    For any β, λ and μ it never raises F of `JointEnergy` (Theorem T1 of docs/certified.md), without a step size:

        x′_i = Proj_C(x_i + (β m_i (h_i − x_i) − (L_W x)_i) / (β m_i + p_i))

    W = λ (f(‖x_i − x_j‖²))_ij + μA is the coupling at x, L_W = D_W − W, H the source, C the set that every row of a
    head is confined to, and p the `majorant` of the coupling. Where C is convex, p are the row sums of W, and x′ is the
    projection of a weighted mean of h and all x_j. A node with β = 0 and no neighbours does not move.

    Args:
        beta: β ≥ 0, the weight of the source, or a learnable `Positive`.
        constraint: C, by name or a `Constraint`: None, ``"nonnegative"`` (ReLU), ``"ball"`` (clipped norms),
            ``"sphere"`` (RMSNorm without a gain), ``"nonnegative_ball"`` or ``"nonnegative_sphere"``.
        radius: of balls and spheres.

    Shapes: x, source [N, H, D]; metric m [N] or [N, H], positive; result [N, H, D].

    Raises:
        CouplingMismatchError: the coupling does not promise to be symmetric and nonnegative.

    Examples:
        >>> CertifiedStep(beta=1.0, constraint="nonnegative")(x, SigmoidPenalty().coupling(x), source=x).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        beta: float | Positive = 1.0,
        *,
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(beta, Positive):
            check_positive(beta, "beta", allow_zero=True)
            beta = float(beta)
        self.source_weight = beta
        self.constraint = get_constraint(constraint, radius)

    @property
    def beta(self) -> float | Positive:  # type: ignore[override]
        """The weight of the source, a number or the module that computes it."""
        return self.source_weight

    def step(
        self,
        x: State,
        coupling: Coupling,
        values: State | None = None,
        source: State | None = None,
        *,
        metric: Float[Tensor, " N"] | Float[Tensor, "N H"] | None = None,
        centre: Tensor | None = None,
    ) -> State:
        """Return the projection of x + (βM(h − x) − L_W x) / (βM + p), computed in at least float32.

        L_W is applied to x − ``centre``, by default the mean of every graph: differences are the same, with fewer
        digits lost to cancellation. Where rows are spread over processes, all need one centre (``Graph.centre``).
        """
        if values is not None and values is not x:
            raise ValueError(
                "CertifiedStep moves the state itself; got other values. Transform or drop out what makes the state or "
                "the source, for the energy is one of the state that moves."
            )
        if metric is not None:  # also where no source has it
            check_metric(metric, x, max(x.size(1), coupling.heads))
        terms: list[EnergyTerm] = [CouplingTerm(coupling, centre)]
        if source is not None and self.source_weight != 0.0:
            terms.append(ScaledTerm(self.source_weight, SourceTerm(source, metric)))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        graph = Graph(x.size(0), ptr=coupling.ptr, validate=False)
        # For one step nothing is worth computing ahead: gradient and bound come from one product.
        return _gradient_step(wide, terms, graph, self.constraint).to(x.dtype)

    def descent(
        self, x: State, terms: Sequence[EnergyTerm], graph: Graph
    ) -> Callable[[Float[Tensor, "N H D"]], Float[Tensor, "N H D"]]:
        """Return the map z ↦ Proj_C(z − Σ g / Σ p) of states like x, with half gradients g and bounds p (Theorem T11).

        Where C is convex and every g is p z − c − s f(z) with p, c and s that do not depend on z, the result is the
        projection of the weighted mean (Σ c + Σ s f(z)) / Σ p, and everything but f(z) is computed once. In both forms
        rounding raises F by at most 64 ε (|F(z)| + Σ_i p_i ‖z_i‖²), with ε that of the dtype of x.
        """
        constraint = self.constraint
        means = _weighted_means(terms, x) if constraint.convex else None
        if means is None:
            return partial(_gradient_step, terms=terms, graph=graph, constraint=constraint)
        damping, constant = damping_and_constant(means)
        inverse = reciprocal(damping)
        base = constant * inverse
        pulls = [(mean.pull, mean.scale * inverse) for mean in means if mean.pull is not None]

        def step(z: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
            # Products are new tensors, so sums may overwrite them. Not `addcmul`, whose backward pass multiplies by a
            # constant of one first.
            moved = reduce(Tensor.add_, [pull(z) * factor for pull, factor in pulls])
            return constraint.project_(moved.add_(base), z)

        return step

    def extra_repr(self) -> str:
        return (
            "" if isinstance(self.beta, Positive) else f"beta={self.beta:g}, "
        ) + f"constraint={self.constraint}"


def _weighted_means(terms: Sequence[EnergyTerm], x: State) -> list[Mean] | None:
    """Return the half gradients of all terms as weighted means, or ``None`` where a step is not one."""
    means = []
    for term in terms:
        mean = term.weighted_mean(x)
        if mean is None:
            return None
        means.append(mean)
    # Without a constant, thus without a source, a node may have p = 0, and stays where it is.
    anchored = any(mean.constant is not None for mean in means)
    pulled = any(mean.pull is not None for mean in means)
    return means if anchored and pulled else None


def _gradient_step(
    z: Float[Tensor, "N H D"], terms: Sequence[EnergyTerm], graph: Graph, constraint: Constraint
) -> Float[Tensor, "N H D"]:
    """Return Proj_C(z − Σ g / Σ p)."""
    majorants = [term.majorant(z, graph, constraint.convex) for term in terms]
    halves, dampings = zip(*majorants, strict=True)
    move = reduce(add, halves) * reciprocal(reduce(add, dampings))
    return constraint.project((z - move).to(z.dtype), z)
