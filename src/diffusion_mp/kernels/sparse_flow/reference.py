"""Sparse flow in plain torch: rows solved by a sort, every graph's matrix written out, and the row problem on edges."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.checks import values_to_check
from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels.operation import operation
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.sparse_flow.rows import (
    DENSE,
    Circuit,
    Dense,
    Features,
    RowPotentials,
    RowProblem,
    RowTerms,
    or_still,
    solve,
    unit_limit,
    units,
)
from diffusion_mp.runtime.precision import accumulating, exp_limit


def flowing(log_conductance: Tensor, log_threshold: Tensor, inverse: Tensor) -> Tensor:
    """Return which entries flow: Σ_i c_i max(θ_j − θ_i, 0) + θ_j/α < 1, summed in logarithms without cancellation."""
    # Which entries flow has no derivative, not even in forward mode, which no_grad does not stop.
    log_conductance = log_conductance.detach()
    log_threshold = log_threshold.detach()
    inverse = inverse.detach()
    closed = log_conductance == -torch.inf
    # λ may be 0, and −∞ less −∞ is not a number.
    log_threshold = log_threshold.clamp_min(torch.finfo(log_threshold.dtype).min)
    order = log_threshold.masked_fill(closed, torch.inf).argsort(-1)
    theta = log_threshold.gather(-1, order)
    log_c = log_conductance.gather(-1, order)
    position = torch.arange(theta.size(-1), device=theta.device)

    def before(x: Tensor) -> Tensor:
        """Return what stands before every entry."""
        # Not a row that is shorter by one, which would fix its size in an export.
        moved = x.index_select(-1, (position - 1).clamp(min=0))
        return moved.masked_fill(position == 0, -torch.inf)

    # From one threshold to the next all conductors below it and the leak take part.
    through = torch.logaddexp(before(log_c).logcumsumexp(-1), inverse.log())
    rises = theta + (-(before(theta) - theta).expm1()).log()
    below = (rises + through).logcumsumexp(-1) < 0
    return torch.zeros_like(closed).scatter(-1, order, below) & ~closed


def entries(s: Tensor, u: Tensor, terms: RowTerms, is_best: Tensor) -> Tensor:
    """Return the flows z of listed pairs.

    Args:
        s: scores of the resistances, [..., H].
        u: scores of the frictions, [..., H].
        terms: the terms of the pairs' rows, each [..., H] or broadcast to that.
        is_best: whether the sender is ``terms.best``, [..., H] or broadcast to that.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> s = torch.einsum("ihf,jhf->ijh", q, k)
        >>> terms = RowTerms(*(part.unsqueeze(1) for part in rows.terms))
        >>> torch.allclose(entries(s, s, terms, terms.best == node.view(1, 6, 1)).sum(1), torch.ones(6, 2))
        True
    """
    return log_entries(s, u, terms, is_best).exp()


def log_entries(s: Tensor, u: Tensor, terms: RowTerms, is_best: Tensor) -> Tensor:
    """Return log z of listed pairs, −∞ where nothing flows.

    Args:
        s: scores of the resistances, [..., H].
        u: scores of the frictions, [..., H].
        terms: the terms of the pairs' rows, each [..., H] or broadcast to that.
        is_best: whether the sender is ``terms.best``, [..., H] or broadcast to that.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> s = (q * k).sum(2)  # the scores of every node and itself
        >>> log_entries(s, s, rows.terms, rows.best == node.unsqueeze(1)).shape
        torch.Size([6, 2])
    """
    # How far a friction is above that of the best conductor, in logarithms: zero for the best itself, however its u is
    # rounded, and infinite beyond the reach, where rounding hides on which side of the potential it is.
    apart = (u - terms.w).masked_fill(u >= terms.reach, torch.inf)
    apart = apart.masked_fill(is_best, 0.0).clamp(max=exp_limit(s.dtype))
    driven = terms.rho - terms.nu * apart.expm1()
    # No entry that flows conducts more than the best, however a recomputed s is rounded.
    log_through = s + terms.a + terms.lift * (apart < 0)
    log_through = log_through.clamp(max=unit_limit(s.dtype))
    # Filled before the logarithm too, whose derivative at zero is infinite.
    closed = ~(driven > 0)
    log_flow = log_through + driven.masked_fill(closed, 1.0).log()
    return log_flow.masked_fill(closed, -torch.inf)


def _scores(a: Tensor, b: Tensor, rows: slice) -> Tensor:
    return torch.einsum("ihf,jhf->hij", a[rows], b[rows])


def among(x: Tensor, some: Tensor, absent: float) -> Tensor:
    """Return x with other entries absent, and one more absent entry, since an empty row has no largest entry."""
    return pad(x.masked_fill(~some, absent), (0, 1), value=absent)


class OnSupport(NamedTuple):
    """A solution by its support: fields of `RowPotentials`, ``height`` = log(e^h/c_o) of a row, and by entry
    ``through`` and ``dammed``, with z = through ρ − dammed on the support.
    """

    a: Tensor
    w: Tensor
    rho: Tensor
    nu: Tensor
    lift: Tensor
    slope: Tensor
    height: Tensor
    through: Tensor
    dammed: Tensor


def _on_support(
    problem: RowProblem,
    log_c: Tensor,
    log_f: Tensor,
    active: Tensor,
    best: Tensor,
    idle: Tensor,
    rows: Dense = DENSE,
) -> OnSupport:
    """Solve Σ_j z_j + μ/α = 1, which is linear in ρ on a support; ``log_c`` and ``log_f`` belong to ``best``."""
    s, u, _, _, lam, leak = problem
    # γ without λ: the logarithm of λ is −∞ where λ is 0.
    log_drag = log_c + log_f
    # The unit is a choice: no result depends on it, so it needs no gradient.
    unit, lift, rise, nu = units((log_drag + lam.log()).detach())
    a = unit - rows.at(s, best)
    w = rows.at(u, best) + rise
    # ν moves as γ = c_o θ_o does, also where λ is 0.
    nu_of_one = torch.where(
        lam > 0, nu / lam, log_drag.clamp(max=exp_limit(s.dtype)).exp()
    ).detach()
    nu = lam * nu_of_one * (log_drag - log_drag.detach()).exp()
    apart = u - rows.spread(w)
    log_through = s + rows.spread(a) + rows.spread(lift) * (apart < 0)
    through = (
        log_through.masked_fill(~active, -torch.inf)
        .clamp(max=unit_limit(s.dtype))
        .exp()
    )
    # At the best conductor e^{u − w} is one, whatever u is. Clamped for λ = 0, where ν is zero and u may be anything.
    apart = apart.masked_fill(~active | rows.is_at(best, active), 0.0)
    above = apart.clamp(max=exp_limit(s.dtype)).expm1()
    dammed = through * rows.spread(nu) * above
    height = unit - log_c
    # Where nothing flows there is no equation, and a divisor of zero would make all gradients NaN.
    slope = (rows.add(through) + leak * height.exp()).masked_fill(idle, 1.0)
    rho = (1 - leak * lam * log_f.exp() + rows.add(dammed)) / slope
    return OnSupport(a, w, rho, nu, lift, slope, height, through, dammed)


def _solved(circuit: Circuit, nodes: slice) -> RowPotentials:
    """Solve the rows of one graph; an entry with s = u = −∞ is absent."""
    q, k, fq, fk, lam, leak = circuit
    s = _scores(q, k, nodes)
    u = _scores(fq, fk, nodes)
    none = s == -torch.inf
    # An absent entry resists infinitely, and the sum over conductors must not see its −s = ∞.
    resisting = (-s).masked_fill(none, -torch.inf)
    resistance = resisting.logsumexp(2, keepdim=True)
    friction = u.logsumexp(2, keepdim=True)
    # Not s + M and u − U, which cancel where the scores are large.
    log_c = -resisting.log_softmax(2).masked_fill(none, torch.inf)
    # A row of absent entries only gives NaN, which is no threshold.
    log_f = u.log_softmax(2).masked_fill(none, -torch.inf)
    lam, leak = (x[nodes].t().unsqueeze(2) for x in (lam, leak))
    with torch.no_grad():
        active = flowing(log_c, lam.log() + log_f, leak)
        best = among(s, active, -torch.inf).argmax(2, keepdim=True)
    idle = ~active.any(2, keepdim=True)
    of_best = log_c.gather(2, best), log_f.gather(2, best)
    problem = RowProblem(s, u, resistance, friction, lam, leak)
    on = _on_support(problem, *of_best, active, best, idle)
    with torch.no_grad():
        # What a kernel keeps for its backward pass has no gradient here either.
        drag = on.nu * on.through + on.dammed
        work = lam * log_f.exp() * (on.through * on.rho - on.dammed)
        last = among(u, active, -torch.inf).amax(2, keepdim=True)
        after = among(u, u > last, torch.inf).amin(2, keepdim=True)
        # Rounding of w may open an entry that is closed; then ``reach`` separates the two.
        most = (after - on.w).clamp(max=exp_limit(s.dtype)).expm1()
        reach = torch.where(on.rho > on.nu * most, (last + after) / 2, torch.inf)
    driven = on.rho * (-on.lift).exp() + on.nu
    solved = RowPotentials(
        on.a,
        on.w,
        on.rho,
        on.nu,
        on.lift,
        reach.detach(),
        best,
        on.height + on.lift + driven.masked_fill(idle, 1.0).log(),
        resistance.detach(),
        friction.detach(),
        on.slope.detach(),
        drag.scatter(2, best, 0.0).sum(2, keepdim=True),
        work.sum(2, keepdim=True),
        active.sum(2, keepdim=True).to(s),
    )
    rows = or_still(solved, ~idle, leak)
    # From one row of a matrix per head to one number per node and head.
    rows = RowPotentials(*(x.squeeze(2).t() for x in rows))
    # Numbers of nodes in the batch, not in the graph.
    return rows._replace(best=rows.best + nodes.start)


def sparse_flow_potentials(circuit: Circuit, ptr: Tensor | None) -> RowPotentials:
    """Solve every row by sorting."""
    graphs = [_solved(circuit, nodes) for nodes in slices(ptr, circuit.q.size(0))]
    return RowPotentials(*map(torch.cat, zip(*graphs, strict=True)))


def sparse_flow_product(
    features: Features,
    v: Tensor,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D]."""
    q, k, fq, fk = features
    equation = "hji,jhd->ihd" if transpose else "hij,jhd->ihd"
    parts = []
    for rows in slices(ptr, q.size(0)):
        of_rows = RowTerms(*(x[rows].t().unsqueeze(2) for x in terms))
        is_best = torch.arange(rows.start, rows.stop, device=q.device) == of_rows.best
        z = entries(_scores(q, k, rows), _scores(fq, fk, rows), of_rows, is_best)
        parts.append(torch.einsum(equation, z, v[rows]))
    return torch.cat(parts)


class EdgeFlow(NamedTuple):
    """The flow of :func:`sparse_flow_edges`.

    Attributes:
        flow: z of every edge, [E, H].
        potential: μ of every node, [N, H].

    Examples:
        >>> score, zero = torch.zeros(12, 1), torch.zeros(6, 1)
        >>> isinstance(sparse_flow_edges(score, score, score + 1, zero, zero, edge_index[1]), EdgeFlow)
        True
    """

    flow: Tensor
    potential: Tensor


class Segments(Dense):
    """Entries [E, H] of the rows in ``target``; a number per row is [N, H], 0 where a row has no entry."""

    def __init__(self, target: Tensor, like: Tensor) -> None:
        self.target = target
        # Sums begin with zeros of the shape of all results, made once.
        self.zeros = torch.zeros_like(like)

    def add(self, entries: Tensor) -> Tensor:
        return self.zeros.index_add(0, self.target, entries)

    def top(self, entries: Tensor) -> Tensor:
        index = self.target.unsqueeze(1).expand_as(entries)
        return self.zeros.to(entries).scatter_reduce(
            0, index, entries, "amax", include_self=False
        )

    def best(self, entries: Tensor) -> Tensor:
        # torch has no argmax by index: the largest of the numbers n … 1 at a maximum is its first place.
        n = entries.size(0)
        last = torch.arange(n, 0, -1, device=entries.device).unsqueeze(1)
        is_top = entries == self.spread(self.top(entries))
        # The place is n for a row without an entry, where ``at`` finds the padding.
        return n - self.top(last.where(is_top, 1))

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        # Padded for rows without an entry, also where there is no entry at all.
        return pad(entries, (0, 0, 0, 1)).gather(0, place)

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.masked_fill(self.is_at(place, entries), 0.0)

    def spread(self, row: Tensor) -> Tensor:
        return row.index_select(0, self.target)

    def is_at(self, place: Tensor, like: Tensor) -> Tensor:
        edge = torch.arange(self.target.size(0), device=place.device).unsqueeze(1)
        return self.spread(place) == edge


def _edge_support(problem: RowProblem, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether an edge flows [E, H], and the best conductor among the edges of its node [N, H]."""
    rows = Segments(target, problem.lam)
    solution = solve(problem, rows)
    terms = RowTerms(*map(rows.spread, solution.terms))
    is_best = rows.is_at(solution.best, problem.s)
    log_flow = log_entries(problem.s, problem.u, terms, is_best)
    return log_flow > -torch.inf, solution.best


def distinct(node: Tensor) -> Tensor:
    """Return keys that order entries by node and then by number: any sort of them is stable. ONNX has no stable one."""
    size = node.size(0)
    return node * size + torch.arange(size, device=node.device)


def support_by_sorting(
    problem: RowProblem,
    target: Tensor,
    width: Size | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the support by :func:`flowing`, with every row padded to ``width``, the most edges of a node."""
    s, u, resistance, friction, lam, leak = problem
    edges, heads = s.shape
    nodes = lam.size(0)
    number = torch.arange(edges, device=s.device)
    # Not `bincount`, whose result has a size that depends on values.
    count = target.new_zeros(nodes).index_add(0, target, torch.ones_like(target))
    first = count.cumsum(0) - count
    order = distinct(target).argsort()
    row = target[order]
    position = row, number - first[row]
    if width is None:
        width = edges
        # torch.func.linearize records, and has no numbers to read.
        if edges and values_to_check():
            width = int(count.max())

    def by_row(entries: Tensor, absent: float) -> Tensor:
        padded = entries.new_full((nodes, width, heads), absent)
        return padded.index_put(position, entries[order]).transpose(1, 2)

    log_c = by_row(s + resistance[target], -torch.inf)
    log_theta = by_row(lam[target].log() + (u - friction[target]), 0.0)
    active = flowing(log_c, log_theta, leak.unsqueeze(2))
    best = first.unsqueeze(1) + among(log_c, active, -torch.inf).argmax(2)
    # Without an active edge the best is one entry more.
    best = pad(order, (0, 1), value=edges)[best.clamp(max=edges)]
    in_order = active.transpose(1, 2)[position]
    return torch.zeros_like(in_order).index_put((order,), in_order), best


# An operation, because torch.compile cannot trace a loop that ends by values.
@operation("sparse_flow_support", formula=support_by_sorting, cpu=_edge_support)
def _support(problem: RowProblem, target: Tensor) -> tuple[Tensor, Tensor]:
    best = torch.empty_like(problem.lam, dtype=torch.long)
    return torch.empty_like(problem.s, dtype=torch.bool), best


def _log_sum(x: Tensor, rows: Segments) -> Tensor:
    """Return log Σ_e e^{x_e} of every row, 0 where that is −∞."""
    top = rows.top(x.detach()).clamp_min(torch.finfo(x.dtype).min)
    # Twice replaced, since the logarithm of zero has an infinite derivative even where it is not taken.
    total = rows.add((x - rows.spread(top)).exp())
    return torch.where(total == 0, 0.0, (total + (total == 0)).log() + top)


def sparse_flow_edges(
    s: Float[Tensor, "E H"],
    u: Float[Tensor, "E H"],
    prior: Float[Tensor, "E one"],
    lam: Float[Tensor, "N H"],
    leak: Float[Tensor, "N H"],
    target: Int[Tensor, " E"],
) -> EdgeFlow:
    r"""Return the flow of least energy over the edges that end at each node (SFi-Former, Eqs. 6, 9, on a given graph).

    An edge of weight a counts as a parallel edges. Over the edges l with the same target,

        r_e = e^{−s_e} / Σ_l a_l e^{−s_l},  f_e = e^{u_e} / Σ_l a_l e^{u_l}

    and z_e = a_e max(μ − λf_e, 0)/r_e with Σ_e z_e + μ/α = 1. With λ = 0 and α = ∞ the flow is the softmax of s with
    prior a. A node without edges, or without weight on any edge, receives nothing: μ is α, or 0 without a leak. O(E H)
    time and memory, in at least float32.

    Args:
        s: scores of the resistances.
        u: scores of the frictions.
        prior: a ≥ 0, the weight of every edge.
        lam: λ ≥ 0 of every node.
        leak: 1/α of every node; 0 conserves the flow.
        target: the node at which each edge ends.

    Shapes:
        s, u: [E, H].
        prior: [E, 1].
        lam, leak: [N, H].
        target: [E].

    Examples:
        >>> score, ones = torch.zeros(12, 1), torch.ones(12, 1)  # a ring: two equal edges end at every node
        >>> flow, _ = sparse_flow_edges(score, score, ones, torch.ones(6, 1), torch.zeros(6, 1), edge_index[1])
        >>> bool((flow == 0.5).all())
        True
    """
    (s, u, prior, lam, leak), _ = accumulating(s, u, prior, lam, leak)
    rows = Segments(target, lam)
    # A prior of zero removes the edge; its logarithm has no derivative that could be multiplied by zero.
    closed = prior == 0
    log_a = prior.masked_fill(closed, 1.0).log().masked_fill(closed, -torch.inf)
    resistance = _log_sum(log_a - s, rows)
    friction = _log_sum(log_a + u, rows)
    problem = RowProblem(log_a + s, u, resistance, friction, lam, leak)
    with torch.no_grad():
        active, best = _support(problem, target)
        idle = rows.add(active.to(lam.dtype)) == 0
        best = best.masked_fill(idle, 0)
    # A row where nothing flows is zero in the end, and has to be finite on the way.
    log_c = (resistance + rows.at(problem.s, best)).masked_fill(idle, 0.0)
    log_f = (rows.at(u, best) - friction).masked_fill(idle, 0.0)
    on = _on_support(problem, log_c, log_f, active, best, idle, rows)
    # Without conservation nothing flows at μ = α; with it μ is unknown, and 0 stands for that.
    alone = 1 / leak.masked_fill(leak == 0, torch.inf)
    # Rounding may make an entry at its threshold negative.
    flow = (on.through * rows.spread(on.rho) - on.dammed).clamp_min(0)
    potential = lam * log_f.exp() + on.rho * on.height.exp()
    return EdgeFlow(flow, torch.where(idle, alone, potential))
