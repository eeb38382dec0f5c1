"""The row problem of sparse flow (SFi-Former, Eqs. 6 and 9), solved exactly in floating point.

Problem: argmin_z ½Σ_j r_j z_j² + Σ_j θ_j|z_j| + (α/2)(Σ_j z_j − 1)² with r = 1/c and θ = λf.

Solution: z_j = c_j max(μ − θ_j, 0), where μ is the root of Σ_j c_j max(μ − θ_j, 0) + μ/α = 1, an increasing piecewise
linear function. Newton's method reaches it in a few passes over the entries; see :func:`newton` and :func:`solve`.

Backward pass: on the support {θ_j < μ} the equation is linear in μ, and so in closed form; see ``tiled.pulls``.

Rows are the rows of a dense tile (:class:`Dense`) or the edges that end at a node (``reference.Segments``).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import Wide, empty_like
from diffusion_mp.runtime.precision import exp_, exp_limit


class Features(NamedTuple):
    """The features of the scores: q and k of the scores s, q̃ and k̃ of the frictions' scores u.

    Attributes:
        q: features of the receivers, [N, H, F].
        k: features of the senders, [N, H, F].
        friction_q: friction features of the receivers, [N, H, G].
        friction_k: friction features of the senders, [N, H, G].

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.zeros(6, 2), torch.zeros(6, 2))
        >>> sparse_flow_product(*Features(q, k, friction_q=q, friction_k=k), k, rows.terms).shape
        torch.Size([6, 2, 3])
    """

    q: Wide
    k: Wide
    friction_q: Wide
    friction_k: Wide


class Circuit(NamedTuple):
    """The `Features` of one or more graphs, and λ and 1/α of every row, [N, H]."""

    q: Wide
    k: Wide
    friction_q: Wide
    friction_k: Wide
    lam: Wide
    leak: Wide

    @property
    def features(self) -> Features:
        return Features(*self[:4])


class RowProblem(NamedTuple):
    """Scores s and u of the entries; M = log Σ_j e^{−s_j}, U = log Σ_j e^{u_j}, λ and 1/α of every row."""

    s: Tensor
    u: Tensor
    resistance: Tensor
    friction: Tensor
    lam: Tensor
    leak: Tensor


class RowTerms(NamedTuple):
    """The terms of every row [N, H], which give its flows from the scores s and u.

        z_ij = e^{s_ij + a_i} max(ρ_i + ν_i(1 − e^{u_ij − w_i}), 0)

    The potential is measured from the threshold of ``best``, the best conductor o among the senders that flow, so that
    the potential keeps all its digits. At o itself 1 − e^{u − w} counts as zero, however u is rounded. See
    :func:`solve`.

    Attributes:
        a: logarithm of the scale of the row.
        w: u_io, the logarithm of the threshold of o.
        rho: ρ, the potential above this threshold, in a unit in which neither ρ nor ν overflows.
        nu: ν, the friction of o, in the same unit.
        lift: how much larger a is for senders with u < w, where there is no such unit.
        reach: senders with u ≥ reach are closed, where rounding of u hides the threshold; else ∞.
        best: o, the number of a node.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> isinstance(rows.terms, RowTerms), rows.terms.best.shape
        (True, torch.Size([6, 2]))
    """

    a: Wide
    w: Wide
    rho: Wide
    nu: Wide
    lift: Wide
    reach: Wide
    best: Tensor


class RowPotentials(NamedTuple):
    """The solution of the flow problem of every row, [N, H]; its first seven fields are the fields of `RowTerms`.

    Only a, w, ρ, ν and log μ have a gradient. J is the set of entries that flow.

    Attributes:
        a: logarithm of the scale of the row.
        w: logarithm of the threshold of the best conductor o.
        rho: ρ, the potential above this threshold.
        nu: ν, the friction of o.
        lift: how much larger a is for senders with u < w.
        reach: senders with u ≥ reach are closed.
        best: o, the number of a node.
        log_mu: log μ, the logarithm of the potential.
        resistance: M = log Σ_j e^{−s_ij}.
        friction: U = log Σ_j e^{u_ij}.
        slope: Σ_J e^{s + a} + e^{a − M}/α, the divisor of ρ.
        drag: Σ_J ν e^{s + a + u − w}, without o.
        work: Σ_j θ_ij z_ij, the work of the frictions.
        support: the number of entries in J.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.full((6, 2), 100.0), torch.ones(6, 2))
        >>> isinstance(rows, RowPotentials), int(rows.support.sum())  # such frictions let nothing flow
        (True, 0)
    """

    a: Tensor
    w: Tensor
    rho: Tensor
    nu: Tensor
    lift: Tensor
    reach: Tensor
    best: Tensor
    log_mu: Tensor
    resistance: Tensor
    friction: Tensor
    slope: Tensor
    drag: Tensor
    work: Tensor
    support: Tensor

    @property
    def terms(self) -> RowTerms:
        """The terms that determine the flows."""
        return RowTerms(*self[:7])


def empty_potentials(lam: Tensor) -> RowPotentials:
    """Return uninitialised potentials for rows with λ [N, H]."""
    best = lam.new_empty(lam.shape, dtype=torch.long)
    return RowPotentials(*empty_like(*14 * [lam]))._replace(best=best)


def or_still(solved: RowPotentials, flows: Tensor, leak: Tensor) -> RowPotentials:
    """Replace rows where ``flows`` is false: μ is α, and the terms give zero entries."""
    zeros = RowPotentials(*map(torch.zeros_like, solved))
    still = zeros._replace(
        w=solved.friction,
        reach=zeros.reach + torch.inf,
        log_mu=-leak.masked_fill(flows, 1.0).log(),
        resistance=solved.resistance,
        friction=solved.friction,
        # Not zero, since ρ is divided by it.
        slope=zeros.slope + 1,
    )
    return RowPotentials(
        *(x.where(flows, y) for x, y in zip(solved, still, strict=True))
    )


# Newton needs three to six steps on random rows; no row needs more than it has entries.
MAX_STEPS = 100


class Dense:
    """Operations on rows along the last dimension, [..., n]; a number per row is [..., 1]."""

    def add(self, entries: Tensor) -> Tensor:
        return entries.sum(-1, keepdim=True)

    def top(self, entries: Tensor) -> Tensor:
        return entries.amax(-1, keepdim=True)

    def best(self, entries: Tensor) -> Tensor:
        """Return the first place of the largest entry of every row."""
        return entries.argmax(-1, keepdim=True)

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.gather(-1, place)

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        """Return the entries with a zero at one place of every row, possibly in place."""
        return entries.scatter_(-1, place, 0.0)

    def is_at(self, place: Tensor, like: Tensor) -> Tensor:
        """Return which entries, shaped ``like`` a tensor, stand at the place of their row."""
        return torch.zeros_like(like, dtype=torch.bool).scatter(-1, place, True)

    def spread(self, row: Tensor) -> Tensor:
        """Broadcast a number per row to its entries."""
        return row


DENSE = Dense()


class Root(NamedTuple):
    """Per row the root, Σ p and Σ pt over the entries below it, their indicator and number; and the steps taken."""

    root: Tensor
    slope: Tensor
    moment: Tensor
    active: Tensor
    support: Tensor
    steps: int


def newton(
    weight: Tensor,
    threshold: Tensor,
    leak: Tensor,
    total: Tensor | float = 1.0,
    support: Tensor | None = None,
    rows: Dense = DENSE,
) -> Root:
    r"""Return the root ν of Σ_j p_j max(ν − t_j, 0) + κν = b, row by row.

    The left side is convex, increasing and piecewise linear. A step solves the linear equation of the active set {t_j <
    ν}. Right of the root, steps fall towards the root and reach it in finitely many steps. The first step leads to the
    right, whatever set it starts with (S3 of docs/errata.md). A row with nothing active and no leak keeps its ν, which
    is 0 at first.

    Args:
        weight: p ≥ 0 of the entries.
        threshold: t of the entries.
        leak: κ ≥ 0 of the rows.
        total: b of the rows.
        support: the number of entries with a weight, if these have the least t; they are then the first active set. By
            default the first active set is the active set of a sample's root in long dense rows, or all entries.
        rows: how entries belong to rows.
    """
    if support is None and rows is DENSE and weight.size(-1) >= 512:
        # From all entries every step takes few off where thresholds span decades: 14 to 20 steps. Those that start
        # from the root of an eighth of the entries take three quarters of the time.
        some, least = (x[..., ::8].contiguous() for x in (weight, threshold))
        share = some.size(-1) / weight.size(-1)
        guess = newton(some, least, share * leak, share * total).root
        active = torch.lt(
            threshold,
            # A row of which the sample has no entry begins with all of its entries.
            guess.masked_fill_(guess == 0, math.inf),
            out=torch.empty_like(weight),
        )
        slope = rows.add(active.mul_(weight))
        active.mul_(threshold)
    else:
        slope = rows.add(weight)
        active = weight * threshold
    moment = rows.add(active)
    root = torch.where(slope + leak > 0, (total + moment) / (slope + leak), 0.0)
    size = torch.full_like(root, math.inf) if support is None else support
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        # Into a tensor of numbers, with which sums are several times as fast as with booleans.
        torch.lt(threshold, rows.spread(root), out=active)
        before = size
        size = rows.add(active).minimum(size)
        # The active sets of falling roots are nested: equal numbers mean equal sets.
        if torch.equal(size, before):
            break
        slope = rows.add(active.mul_(weight))
        moment = rows.add(active.mul_(threshold))
        # The root may not rise again by rounding, nor become NaN where nothing is active.
        root = root.fmin((total + moment) / (slope + leak))
    return Root(root, slope, moment, active, size, steps)


def unit_limit(dtype: torch.dtype) -> float:
    """Return the log of the largest unit of ρ and ν: derivatives by equal frictions, which cancel, grow like it."""
    return -2 * math.log(torch.finfo(dtype).eps)


def units(log_drag: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h of the unit e^h, ``lift``, the rise of w above u_o, and ν, from log γ.

    The unit carries γ up to its limit, and ``lift`` the rest. A γ below the inverse limit is negligible against ζ but
    for senders of far more friction than o: w rises until γ reaches that.
    """
    limit = unit_limit(log_drag.dtype)
    unit = log_drag.clamp(0.0, limit)
    lift = (log_drag - limit).clamp_min(0)
    # Without frictions (λ = 0) there is nothing to rise to.
    rubs = log_drag > -torch.inf
    rise = torch.where(rubs, (-limit - log_drag).clamp_min(0), 0.0)
    nu = torch.where(rubs, log_drag.clamp(-limit, 0.0).exp(), 0.0)
    return unit, lift, rise, nu


def below(s: Tensor, u: Tensor, bound: Tensor, rows: Dense) -> tuple[Tensor, Tensor]:
    """Return s where u < bound and less than any s elsewhere, and the number of entries with u < bound in every row."""
    within = torch.lt(u, rows.spread(bound), out=torch.empty_like(s))
    count = rows.add(within)
    return within.sub_(1).mul_(torch.finfo(s.dtype).max / 4).add_(s), count


def _reach(
    problem: RowProblem, candidates: Tensor, ceiling: Tensor, rows: Dense
) -> Tensor:
    """Return the friction below which entries can flow, by Newton's method on μ, right to its leading digits."""
    s, u, resistance, friction, lam, leak = problem
    info = torch.finfo(s.dtype)
    limit = exp_limit(s.dtype)
    # In units of the largest conductance weights are at most one, and no threshold overflows.
    top = rows.top(candidates).clamp_min(info.min)
    weight = exp_(torch.sub(candidates, rows.spread(top)))
    weight = torch.threshold_(weight, 2 * math.exp(-limit), 0.0)
    # u may be ∞.
    offset = (lam.log() - friction + resistance + top).clamp_min(info.min)
    threshold = exp_(torch.add(u, rows.spread(offset)))
    leak_in_units = leak * (-resistance - top).exp()
    log_root = newton(weight, threshold, leak_in_units, rows=rows).root.log()
    slack = 32 * info.eps * (1 + log_root.abs() + offset.abs())
    reach = torch.where(log_root > limit - 1, torch.inf, log_root - offset + slack)
    return reach.minimum(ceiling)


class FromBest(NamedTuple):
    """The best of the candidates of every row, and the unit in which ζ and γ are ρ and ν; see :func:`solve`."""

    best: Tensor
    friction: Tensor  # u_o
    log_c: Tensor
    log_f: Tensor
    a: Tensor
    w: Tensor
    nu: Tensor
    lift: Tensor
    height: Tensor  # log(e^h/c_o) of the unit e^h


def _from_best(problem: RowProblem, candidates: Tensor, rows: Dense) -> FromBest:
    """Return the candidate of every row that conducts best."""
    s, u, resistance, friction, lam, _ = problem
    log_lam = lam.log()
    best = rows.best(candidates)
    s_best = rows.at(s, best).clamp_min(torch.finfo(s.dtype).min / 8)
    u_best = rows.at(u, best)
    log_c = resistance + s_best
    unit, lift, rise, nu = units(log_c + log_lam + (u_best - friction))
    # Not w − U, whose rounding may exceed it.
    log_f = torch.where(rise > 0, nu.log() - log_c - log_lam, u_best - friction)
    return FromBest(
        best,
        u_best,
        log_c,
        log_f,
        unit - s_best,
        u_best + rise,
        nu,
        lift,
        unit - log_c,
    )


def _weights_and_thresholds(
    problem: RowProblem, candidates: Tensor, o: FromBest, rows: Dense
) -> tuple[Tensor, Tensor]:
    """Return e^{s − s_o} and γ(e^{u − u_o} − 1) of the candidates in the unit of their row, the former in place."""
    limit = exp_limit(candidates.dtype)
    apart = torch.sub(problem.u, rows.spread(o.w))
    weight = candidates.add_(rows.spread(o.a))
    if bool(o.lift.any()):
        weight += torch.lt(apart, 0) * rows.spread(o.lift)
    # No entry that flows conducts more than o.
    exp_(weight, unit_limit(weight.dtype))
    # Any threshold above ρ is as good as 2.
    highest = (2 / o.nu).log1p().clamp(max=limit)
    threshold = exp_(apart.clamp_max_(rows.spread(highest))).sub_(1)
    return weight, threshold.mul_(rows.spread(o.nu))


def solve(problem: RowProblem, rows: Dense = DENSE) -> RowPotentials:
    """Solve complete rows; ``best`` is a place among the entries.

    Sender j conducts c = e^{s + M} and has the threshold θ = λe^{u − U}:

        z_j = c_j max(μ − θ_j, 0),   Σ_j z_j + μ/α = 1.

    A good conductor o flows although μ exceeds θ_o by as little as 1/c_o, which the rounding of μ would hide. With ζ =
    c_o(μ − θ_o) and γ = c_oθ_o, z_j = e^{s_j − s_o} max(ζ + γ(1 − e^{u_j − u_o}), 0). Here only frictions that are
    almost equal cancel, and no conductance is formed, which may overflow.

    Newton's method on μ, right to its leading digits, finds candidates. Newton's method from the threshold of the best
    candidate finds ζ. If the best candidate turns out not to flow, all is repeated with the entries of less friction.
    An entry with s = −∞ and u = ∞ is absent; M and U are without it.
    """
    s, u, resistance, friction, lam, leak = problem
    info = torch.finfo(s.dtype)
    candidates = s
    ceiling = torch.full_like(lam, torch.inf)
    while True:
        reach = _reach(problem, candidates, ceiling, rows)
        # Only entries whose threshold lies below the root can flow, up to the rounding of both.
        candidates, count = below(s, u, reach, rows)
        some = count > 0
        o = _from_best(problem, candidates, rows)
        weight, threshold = _weights_and_thresholds(problem, candidates, o, rows)
        # o conducts like a leak, also below its threshold: the sign of ρ says whether it flows.
        own = rows.at(weight, o.best).where(some, 0.0)
        by_leak = leak * o.height.exp()
        total = 1 - leak * lam * o.log_f.exp()
        others = rows.without(weight, o.best)
        rho, slope, moment, active, support, _ = newton(
            others, threshold, by_leak + own, total, count, rows
        )
        flows = some & (rho > 0)
        if flows.all():
            break
        # An o closed by rounding alone serves as well, if others flow and their sum is right to the last digits.
        by_rounding = (rho * own > -8 * info.eps) & (slope > info.tiny**0.5)
        flows |= some & by_rounding & (o.lift == 0)
        closed = some & ~flows
        if not closed.any():
            break
        # Where the best does not flow, no entry of as much friction does.
        ceiling = torch.where(closed, o.friction, ceiling)
        candidates, _ = below(s, u, ceiling, rows)

    # The logarithm of θ_o.
    theta = lam.log() + o.log_f
    above = torch.logaddexp(theta, rho.log() + o.height)
    beneath = theta + (rho / o.nu).log1p()
    through = slope + own * (rho > 0)
    # Rounding of w would open closed entries.
    reach = reach.where(rows.add(active) > count, torch.inf)
    # Over the entries that flow z = ρp − pt, and e^{u − w} = 1 + t/ν.
    resisted = rows.add(active.mul_(weight).mul_(threshold).mul_(threshold))
    by_others = (o.height + o.lift).exp() * (rho * moment - resisted)
    solved = RowPotentials(
        o.a,
        o.w,
        rho,
        o.nu,
        o.lift,
        reach,
        o.best,
        torch.where(rho > 0, above, beneath),
        resistance,
        friction,
        through + by_leak,
        o.nu * slope + moment,
        theta.exp() * (rho * through - moment) + by_others,
        support,
    )
    return solved if flows.all() else or_still(solved, flows, leak)
