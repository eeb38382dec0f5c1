"""The row problem of sparse flow on observed edges: O(E), and differentiable any number of times."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.operation import operation
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.sparse_flow.reference import log_entries
from diffusion_mp.kernels.sparse_flow.rows import Dense, RowTerms, solve, unit_limit


class EdgeFlow(NamedTuple):
    """The flow z of every edge [E, H] and the potential μ of every node [N, H].

    Examples:
        >>> score, ones = torch.zeros(12, 1), torch.ones(12, 1)
        >>> found = sparse_flow_edges(score, score, ones, torch.zeros(6, 1), torch.zeros(6, 1), edge_index[1])
        >>> isinstance(found, EdgeFlow), found.flow.shape, found.potential.shape
        (True, torch.Size([12, 1]), torch.Size([6, 1]))
    """

    flow: Tensor
    potential: Tensor


class Segments(Dense):
    """Entries [E, H] of the rows in ``target``; a number per row is [N, H], 0 where a row has no entry."""

    def __init__(self, target: Tensor, like: Tensor) -> None:
        self.target, self.zeros = target, torch.zeros_like(like)

    def add(self, entries: Tensor) -> Tensor:
        return self.zeros.index_add(0, self.target, entries)

    def top(self, entries: Tensor) -> Tensor:
        return self._reduce(entries, "amax")

    def best(self, entries: Tensor) -> Tensor:
        number = torch.arange(entries.size(0), device=entries.device).unsqueeze(1)
        largest = entries == self.spread(self.top(entries))
        return self._reduce(number.where(largest, entries.size(0) - 1), "amin")  # a row of NaN has no largest entry

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        # Padded, since there may be no entry; torch.compile may not know the number.
        return pad(entries, (0, 0, 0, 1)).gather(0, place)

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.masked_fill(self.is_at(place), 0.0)

    def spread(self, row: Tensor) -> Tensor:
        return row.index_select(0, self.target)

    def some(self, *entries: Tensor) -> list[Tensor]:
        return []

    def is_at(self, place: Tensor) -> Tensor:
        """Return which entries stand at the place of their row."""
        return self.spread(place) == torch.arange(self.target.size(0), device=place.device).unsqueeze(1)

    def _reduce(self, entries: Tensor, how: str) -> Tensor:
        index = self.target.unsqueeze(1).expand_as(entries)
        return self.zeros.to(entries).scatter_reduce(0, index, entries, how, include_self=False)


class Support(NamedTuple):
    """Whether an edge flows [E, H], and the edge that conducts best among those of its node [N, H]."""

    active: Tensor
    best: Tensor


def _solved(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, target: Tensor
) -> Support:
    rows = Segments(target, lam)
    solution = solve(s, u, resistance, friction, lam, leak, rows)
    terms = RowTerms(*map(rows.spread, solution.terms))
    return Support(log_entries(s, u, terms, rows.is_at(solution.best)) > -torch.inf, solution.best)


# An operation, because torch.compile cannot trace a loop that ends by values.
@operation("sparse_flow_support", cpu=_solved)
def _support(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, target: Tensor
) -> Support:
    return Support(torch.empty_like(s, dtype=torch.bool), torch.empty_like(lam, dtype=torch.long))


def _log_sum(x: Tensor, prior: Tensor, rows: Segments) -> Tensor:
    """Return log Σ_e a_e e^{x_e} of every row, 0 where a row has no weight."""
    closed = prior == 0
    with torch.no_grad():
        top = rows.top(x.masked_fill(closed, torch.finfo(x.dtype).min))
    total = rows.add(prior * (x - rows.spread(top)).masked_fill(closed, 0.0).exp())
    return torch.where(total == 0, 0.0, (total + (total == 0)).log() + top)


def sparse_flow_edges(
    s: Float[Tensor, "E H"],
    u: Float[Tensor, "E H"],
    prior: Float[Tensor, "E one"],
    lam: Float[Tensor, "N H"],
    leak: Float[Tensor, "N H"],
    target: Int[Tensor, " E"],
) -> EdgeFlow:
    r"""The flow of least energy over the edges that end at each node (SFi-Former, Eqs. 6 and 9, on a given graph).

    An edge of weight a counts as a parallel ones: r_e = e^{−s_e}/Σ_l a_l e^{−s_l}, f_e = e^{u_e}/Σ_l a_l e^{u_l} over
    the edges l with the same target, and z_e = a_e max(μ − λf_e, 0)/r_e with Σ_e z_e + μ/α = 1. With λ = 0 and α = ∞ it
    is the softmax of s with prior a. A node without edges, or without weight on any, receives nothing: μ = α, or 0.
    O(E H) time and memory, in at least float32.

    Args:
        s, u, prior: scores of resistances and frictions, and a ≥ 0.
        lam, leak: λ ≥ 0, and 1/α, 0 for conservation.
        target: the node that each edge ends at.

    Examples:
        >>> score, ones = torch.zeros(12, 1), torch.ones(12, 1)  # a ring: two equal edges end at every node
        >>> flow, _ = sparse_flow_edges(score, score, ones, torch.ones(6, 1), torch.zeros(6, 1), edge_index[1])
        >>> bool((flow == 0.5).all())
        True
    """
    (s, u, prior, lam, leak), _ = accumulating(s, u, prior, lam, leak)
    rows = Segments(target, lam)
    resistance, friction = _log_sum(-s, prior, rows), _log_sum(u, prior, rows)
    with torch.no_grad():
        active, best = _support(s + prior.log(), u, resistance, friction, lam, leak, target)
        idle, off = rows.add(active.to(lam.dtype)) == 0, ~active
        best = best.masked_fill(idle, 0)
    # Linear on the support, as in ``rows.solve`` with o the best conductor (but for its weight).
    # A row where nothing flows is zero in the end, and has to be finite on the way.
    s_best, w = torch.where(idle, -resistance, rows.at(s, best)), torch.where(idle, friction, rows.at(u, best))
    log_c, f = resistance + s_best, (w - friction).exp()
    share = (prior * (s - rows.spread(s_best)).masked_fill(off, 0.0).exp()).masked_fill(off, 0.0)
    # c(θ − θ_o) is −e^p(1 − e^x) or, if it is large, e^{p + x}(1 − e^−x).
    above, limit = (u - rows.spread(w)).masked_fill(off | rows.is_at(best), 0.0), unit_limit(s.dtype)
    more, less = above.masked_fill(above <= 0, 0.0), above.masked_fill(above > 0, 0.0)
    at_best = (s + rows.spread(resistance + w - friction)).masked_fill(off, 0.0)  # log of c θ_o/λ
    dammed = at_best.clamp(max=limit).exp() * less.expm1() - (at_best + more).clamp(max=limit).exp() * (-more).expm1()
    dammed = rows.spread(lam) * prior * dammed
    slope = rows.add(share) + leak * (-log_c).exp()
    height = (1 - leak * lam * f + rows.add(dammed)) / slope.masked_fill(idle, 1.0)  # c_o(μ − θ_o)
    flow = (share * rows.spread(height) - dammed).clamp_min(0)
    alone = 1 / leak.masked_fill(leak == 0, torch.inf)
    return EdgeFlow(flow, torch.where(idle, alone, lam * f + height * (-log_c).exp()))
