"""``CertifiedStep``: source, graph, all pairs, activation and normalisation in a step that never raises an energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, sub

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vecdot

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.pairs import check_metric
from diffusion_mp.energies.terms import CouplingTerm, EnergyTerm, ScaledTerm, SourceTerm, damping_and_constant
from diffusion_mp.errors import check_positive
from diffusion_mp.graph import Graph
from diffusion_mp.graph.cache import values_only
from diffusion_mp.graph.ops import members
from diffusion_mp.kernels.precision import reciprocal
from diffusion_mp.updates.base import Positive, State, StateUpdate

#: 8 (ε / tolerance)²: where F is at least this times Σ p_i‖x_i‖², rounding x′ to nearest raises F by at most
#: tolerance · F. For a rounding error ρ_i ≤ ε|x_i| raises F by at most 2 Σ p_i|δ_i||ρ_i|, with δ the move, and
#: F ≥ ½ Σ p_i|δ_i|².
LEAST_SHARE = {
    dtype: 8 * (torch.finfo(dtype).eps / tolerance) ** 2
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12))
}


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
        self, beta: float | Positive = 1.0, *, constraint: str | Constraint | None = None, radius: float = 1.0
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
        self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None,
        *, metric: Float[Tensor, " N"] | Float[Tensor, "N H"] | None = None, centre: Tensor | None = None,
    ) -> State:  # fmt: skip
        """Return the projection of x + (βM(h − x) − L_W x) / (βM + p), computed in at least float32.

        L_W is applied to x − ``centre``, by default the mean of every graph: differences are the same, with fewer
        digits lost to cancellation. Where rows are spread over processes, all need one centre (``Graph.centre``).
        """
        if values is not None and values is not x:
            raise ValueError(
                "CertifiedStep moves the state itself; got other values. Transform or drop out what makes the state or "
                "the source, for the energy is one of the state that moves."
            )
        self.validate(x, coupling, None, source)
        if metric is not None:  # also where no source has it
            check_metric(metric, x, max(x.size(1), coupling.heads))
        terms: list[EnergyTerm] = [CouplingTerm(coupling, centre)]
        if source is not None and self.source_weight != 0.0:
            terms.append(ScaledTerm(self.source_weight, SourceTerm(source, metric)))
        return self.descend(x, terms, Graph(x.size(0), ptr=coupling.ptr, validate=False))

    def descend(self, x: State, terms: Sequence[EnergyTerm], graph: Graph) -> State:
        """Return Proj_C(x − g / p), with g the half gradients and p the damping of all terms (Theorem T11)."""
        wide, convex = x.to(torch.promote_types(x.dtype, torch.float32)), self.constraint.convex
        parts = [term.majorant(wide, graph, convex) for term in terms]
        halves, dampings, _, shares = zip(*parts, strict=True)
        rough, total, cost = reduce(add, halves), reduce(add, dampings), reduce(add, shares)
        shrink = -reciprocal(total)
        lost = LEAST_SHARE[wide.dtype] * total.detach() * _squares(wide)
        if _resolved(cost - lost.squeeze(2), graph.segments):
            return self.constraint.project(wide + rough * shrink, wide).to(x.dtype)
        move, slack = rough * shrink, [part.damping for part in parts if part.halved]
        best = move * (total * reciprocal(reduce(add, slack, total))) if slack else move
        return _rounded(self.constraint, wide, move, best).to(x.dtype)

    def descent(
        self, x: State, terms: Sequence[EnergyTerm], graph: Graph, *, from_source: bool = False
    ) -> Callable[[State], State]:
        """Return :meth:`descend` from x on, with what does not depend on the state computed once.

        With ``from_source``, x is the projection of the source, and every step starts where the one before it ended, so
        that the first may show for all of them that rounding does not matter (`_lasting_share`).
        """
        means = []
        for term in terms if self.constraint.convex else ():
            if (mean := term.weighted_mean(x)) is None:
                return partial(self.descend, terms=terms, graph=graph)
            means.append((mean, term.quadratic))
        known, further = (
            [(mean.pull, mean) for mean, of in means if mean.pull is not None and of is kind] for kind in (True, False)
        )
        # Without a source, a node may have p = 0, and stays where it is.
        if not known or all(mean.constant is None for mean, _ in means):
            return partial(self.descend, terms=terms, graph=graph)
        damping, constant = damping_and_constant([mean for mean, _ in means])
        inverse, ptr = reciprocal(damping), graph.segments
        base, factors = constant * inverse, [inverse * mean.scale for _, mean in (*known, *further)]
        scales = [torch.as_tensor(mean.scale, dtype=x.dtype).detach() for _, mean in known]
        damping, pulled = damping.detach(), reduce(add, [mean.damping for _, mean in known]).detach()
        least, shape = LEAST_SHARE[x.dtype], (*x.shape[:2], 1)
        once = (pulled - least * damping).expand(shape).contiguous()
        always: Tensor | None = None
        if from_source and pulled.numel() and len(means) == len(known) + 1:  # the other one is the source
            share = _lasting_share(least, pulled, damping - pulled)
            always = (pulled - share * damping).expand(shape).contiguous()
        settled = False

        def step(x: State) -> State:
            nonlocal always, settled
            received = [pull(x) for pull, _ in known]
            if not settled:
                state = x.detach()
                squares = _squares(state)
                shares = [scale * _inner(state, v.detach(), ptr) for v, scale in zip(received, scales, strict=True)]

                def resolved(own: Tensor) -> bool:
                    return _resolved(reduce(sub, shares, _inner(own, squares, ptr)), ptr)

                settled, always = always is not None and resolved(always), None
                if not settled and not resolved(once):
                    return self.descend(x, terms, graph)
            received += [pull(x) for pull, _ in further]
            # Not `addcmul`, whose backward pass multiplies by a constant of one first.
            moved = reduce(Tensor.add_, [v * factor for v, factor in zip(received, factors, strict=True)])
            return self.constraint.project_(moved.add_(base), x)

        return step

    def extra_repr(self) -> str:
        return ("" if isinstance(self.beta, Positive) else f"beta={self.beta:g}, ") + f"constraint={self.constraint}"


def _lasting_share(least: float, pulled: Tensor, sources: Tensor) -> Tensor:
    """Return which share of Σ p_i‖x_i‖² shows at x = Proj_C(H) that F has the share ``least`` in all later states.

    Let F(z) = Σ m_i‖z_i − h_i‖² + V(z) for z in C with V(z) = ⟨z, L z⟩, L ⪯ 2 diag(q), p = m + q and κ = max 2 q_i/m_i.
    As C is convex, F(z) ≥ F(x) − V(x) + ‖z − x‖²_M + V(z). So F(z) ≤ F(x) has ‖z − x‖²_M ≤ V(x), and with
    V(x) ≤ (1 + κ)(‖z − x‖²_M + V(z)) both F(z) ≥ V(x)/(1 + κ) and Σ p_i‖z_i‖² ≤ 2 Σ p_i‖x_i‖² + (2 + κ) V(x).
    """
    ratio = 2 * (pulled / sources).amax()
    room = 1 / (1 + ratio) - least * (2 + ratio)
    return torch.where(room > 0, 2 * least / room, torch.inf)


def _squares(x: State) -> Float[Tensor, "N H one"]:
    """Return ‖x_i‖² without a tensor of the size of x, which ``vecdot`` would make."""
    return torch.linalg.vector_norm(x.detach(), dim=2, keepdim=True).square()


def _inner(a: Tensor, b: Tensor, ptr: Tensor | None) -> Tensor:
    """Return ⟨a, b⟩, by rows where there are several graphs; without a tensor of their size where there is one."""
    return torch.dot(a.flatten(), b.flatten()) if ptr is None else vecdot(a, b)


def _resolved(margin: Tensor, ptr: Tensor | None) -> bool:
    """Return whether what is known of F of every graph, less ``LEAST_SHARE`` of Σ p_i‖x_i‖², is nonnegative.

    Assumed true while tracing, where there are no values. The calls of `_rounded` would take longer than a wait for a
    GPU.
    """
    if not values_only() or margin.is_meta:
        return True
    if ptr is None:
        return (margin.sum() if margin.dim() else margin).item() >= 0  # not where both overflow: nothing is known
    member, count = members(ptr, margin.size(0), margin.device)
    return bool((margin.new_zeros(count.size(0)).index_add(0, member, margin.sum(1)) >= 0).all())


def _rounded(constraint: Constraint, x: Tensor, move: Tensor, best: Tensor) -> Tensor:
    """Return the projection of x + move, rounded towards x + best, the minimiser of the majorant of F."""
    start, best = x.double(), best.double()
    with torch.no_grad():
        # Rounding may have moved x out of C, and projecting back may raise F, so C is shifted to contain x.
        slip = start - constraint.project(start)
        slip = torch.where(slip.abs() <= 4 * torch.finfo(x.dtype).eps * start.abs(), slip, 0.0)
    moved = start + move
    target = constraint.project(moved - slip, start)
    target = target + torch.where(target.abs() > slip.abs(), slip, 0.0)  # no entry changes its sign
    nearest = target.to(x.dtype)
    with torch.no_grad():
        # Measured from x: even in double precision a small move may be lost in x + move.
        short = torch.where(target == moved, move, target - start) - best
        beyond = ((nearest - start) - best).abs() > short.abs()
        excess = nearest - torch.nextafter(nearest, (start + best).to(x.dtype))
    return nearest - torch.where(beyond, excess, 0.0)
