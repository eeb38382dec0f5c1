"""The fast path: complete rows tile by tile, or the rows of many small graphs; nothing of size N² is kept.

The friction of a row's best conductor is set, not read off its tile, since all other frictions are measured from it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import (
    Buffers,
    at_once,
    by_stacks,
    even,
)
from diffusion_mp.kernels.sparse_flow.rows import (
    Circuit,
    Features,
    RowPotentials,
    RowProblem,
    RowTerms,
    empty_potentials,
    solve,
    unit_limit,
)
from diffusion_mp.runtime.precision import exp_, exp_limit

# Entries of a tile: 1 MiB in float32, for half a dozen of them to stay in cache.
TILE = 1 << 18


def _rows(x: Tensor) -> list[slice]:
    """Split the rows of a stack into tiles with all columns."""
    nodes = x.size(1)
    return even(nodes, at_once(TILE, x) // nodes)


def _by_tiles(
    compute: Callable[..., Sequence[Tensor]],
    ptr: Tensor | None,
    inputs: list[Tensor],
    widths: Sequence[int],
) -> list[Tensor]:
    """Apply ``compute`` to memory for one tile at a time, and to stacks of the inputs and their mask."""
    # Tiles of all stacks use the same memory: mapping it anew takes longer than a pass over it.
    room = Buffers(inputs[0], inputs[0].dtype)
    return by_stacks(partial(compute, room), ptr, inputs, widths, TILE)


def _widths(*inputs: Tensor) -> list[int]:
    return [x.size(2) for x in inputs]


def _scores(
    room: Buffers,
    features: Sequence[Tensor],
    rows: slice,
) -> tuple[Tensor, Tensor]:
    q, k, fq, fk = features
    return room.inner(q[:, rows], k), room.inner(fq[:, rows], fk, "u")


def _scalars(*by_row: Tensor) -> list[Tensor]:
    return [x.unsqueeze(2) for x in by_row]


def _first(ptr: Tensor | None, like: Tensor) -> Tensor | int:
    """Return the first node of every node's graph, [N, 1]."""
    if ptr is None:
        return 0
    first = ptr[:-1].repeat_interleave(ptr.diff())
    return first.unsqueeze(1).to(like.device)


def _together(
    features: Features,
    terms: RowTerms,
    ptr: Tensor | None,
    *others: Tensor,
) -> list[Tensor]:
    """Return all tensors, the terms as [N, H, 1] with places of the best conductors."""
    # Numbers of nodes become places in the tile of their graph.
    best = terms.best - _first(ptr, terms.best)
    return [*features, *_scalars(*terms[:6], best), *others]


def potentials(circuit: Circuit, ptr: Tensor | None) -> RowPotentials:
    """Solve the rows."""

    def compute(room: Buffers, *stacks: Any) -> tuple[Tensor]:
        *features, lam, leak, mask = stacks
        solved = []
        for rows in _rows(lam):
            s, u = _scores(room, features, rows)
            # Before padding is closed: its scores are infinite then.
            resistance = _log_sum(s, mask, -1)
            friction = _log_sum(u, mask)
            if mask is not None:
                # Padding does not conduct, and its friction is infinite, so that it never is a candidate.
                closed = mask.log().mT
                s.add_(closed)
                u.sub_(closed)
            problem = RowProblem(
                s, u, resistance, friction, lam[:, rows], leak[:, rows]
            )
            solved.append(torch.cat(solve(problem), 2))
        # Also the places of the best conductors, whole numbers that floating point holds.
        return (torch.cat(solved, 1),)

    *features, lam, leak = circuit
    if not lam.size(0):
        return empty_potentials(lam)
    inputs = [*features, *_scalars(lam, leak)]
    (numbers,) = _by_tiles(compute, ptr, inputs, [len(RowPotentials._fields)])
    fields = RowPotentials(*(x.contiguous() for x in numbers.unbind(2)))
    return fields._replace(best=fields.best.long() + _first(ptr, numbers))


def _log_sum(x: Tensor, mask: Tensor | None, sign: int = 1) -> Tensor:
    """Return log Σ_j e^{sign x_ij}; the largest exponent is subtracted first, and padding may have it."""
    # Not the maximum of −x, which would be a tensor more.
    if sign < 0:
        top = -x.amin(-1, keepdim=True)
        share = exp_(-top - x)
    else:
        top = x.amax(-1, keepdim=True)
        share = exp_(x - top)
    if mask is not None:
        share.mul_(mask.mT)
    return share.sum(-1, keepdim=True).log_() + top


class _Entries:
    """z = ``through`` · max(ρ − ν ``above``, 0) of a tile: e^{s + a} and e^{u − w} − 1, written over s and u."""

    def __init__(
        self,
        s: Tensor,
        u: Tensor,
        terms: Sequence[Tensor],
        rows: slice,
        mask: Tensor | None,
    ) -> None:
        a, w, self.rho, self.nu, lift, reach, self.best = (x[:, rows] for x in terms)
        # Rarely is a row's reach finite or its lift not zero, and a question costs less than a pass over a tile.
        if bool(reach.isfinite().any()):
            u.masked_fill_(u >= reach, torch.inf)
        self.above = exp_(u.sub_(w)).sub_(1)
        self.above.scatter_(2, self.best, 0.0)
        s.add_(a)
        if bool(lift.any()):
            s += torch.lt(self.above, 0) * lift
        # No entry that flows conducts more than the best, however a recomputed s is rounded.
        self.through = exp_(s, unit_limit(s.dtype))
        if mask is not None:
            self.through.mul_(mask.mT).mul_(mask[:, rows])

    def flow(self) -> Tensor:
        """Return z, written over ``above``."""
        # ``above`` is needed no more, and takes the result.
        driven = self.above.mul_(-self.nu).add_(self.rho)
        return driven.clamp_min_(0).mul_(self.through)

    def on_support(self, room: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``through``, zero where nothing flows, ``above`` and z."""
        shape = self.above.shape
        driven = torch.mul(self.above, -self.nu, out=room("z", *shape))
        driven.add_(self.rho).clamp_min_(0)
        # In numbers, with which products are several times as fast as with booleans.
        flows = torch.gt(driven, 0, out=room("gradient", *shape))
        self.through.mul_(flows)
        return self.through, self.above, driven.mul_(self.through)


def _multiply(
    out: Tensor,
    tile: Tensor,
    y: Tensor,
    rows: slice,
    transpose: bool,
) -> None:
    """Write these rows of a product with y, or add what these rows contribute to the product with the transpose."""
    if transpose:
        out.baddbmm_(tile.mT, y[:, rows])
    else:
        out[:, rows] = tile @ y


def _pull_scores(
    gradients: Sequence[Tensor],
    features: Sequence[Tensor],
    ds: Tensor,
    du: Tensor,
    rows: slice,
) -> None:
    """Add the gradients of q, k, q̃ and k̃ from the gradients of a tile of s = q·k and u = q̃·k̃."""
    dq, dk, dfq, dfk = gradients
    q, k, fq, fk = features
    _multiply(dq, ds, k, rows, False)
    _multiply(dk, ds, q, rows, True)
    _multiply(dfq, du, fk, rows, False)
    _multiply(dfk, du, fq, rows, True)


def product(
    features: Features,
    v: Tensor,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> Tensor:
    """Return Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D]."""

    def compute(room: Buffers, *stacks: Any) -> tuple[Tensor]:
        v, mask = stacks[11:]
        out = torch.zeros_like(v)
        for rows in _rows(v):
            scores = _scores(room, stacks[:4], rows)
            z = _Entries(*scores, stacks[4:11], rows, mask).flow()
            _multiply(out, z, v, rows, transpose)
        return (out,)

    inputs = _together(features, terms, ptr, v)
    (out,) = _by_tiles(compute, ptr, inputs, _widths(v))
    return out


def product_backward(
    grad: Tensor,
    features: Features,
    v: Tensor,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, q̃, k̃, v, a, w, ρ and ν; every tile is recomputed.

    With y_ij = ν e^{s + a + u − w} on the support, 0 at the best conductor, and G_ij = grad_i·v_j (transposed
    v_i·grad_j): ds = da = zG, du = −dw = −yG, dρ = e^{s + a} G, dν = e^{s + a}(1 − e^{u − w}) G.
    """

    def compute(room: Buffers, *stacks: Any) -> tuple[Tensor, ...]:
        inputs = stacks[:4]
        terms = stacks[4:11]
        v, grad, mask = stacks[11:]
        # The gradient of z_ij, G, is the same product with its sides exchanged.
        left, right = (v, grad) if transpose else (grad, v)
        gradients = [torch.zeros_like(x) for x in (*inputs, v)]
        # Columns for a, w, ρ and ν.
        by_row = v.new_empty(*v.shape[:2], 4)
        for rows in _rows(v):
            scores = _scores(room, inputs, rows)
            tile = _Entries(*scores, terms, rows, mask)
            # z and its factors are read several times, so none is written over yet.
            through, above, flow = tile.on_support(room)
            _multiply(gradients[4], flow, grad, rows, not transpose)
            outer = room.inner(left[:, rows], right, "gradient")
            ds = flow.mul_(outer)
            by_rho = through.mul_(outer)
            drho = by_rho.sum(2)
            by_nu = above.mul_(by_rho)
            dnu = -by_nu.sum(2)
            # At the best conductor e^{u − w} is one, whatever u is.
            du = by_nu.add_(by_rho).mul_(-tile.nu).scatter_(2, tile.best, 0.0)
            by_row[:, rows] = torch.stack([ds.sum(2), -du.sum(2), drho, dnu], 2)
            _pull_scores(gradients[:4], inputs, ds, du, rows)
        return *gradients, by_row

    together = _together(features, terms, ptr, v, grad)
    widths = [*_widths(*features, v), 4]
    # One result of four columns is unstacked at once.
    *gradients, by_row = _by_tiles(compute, ptr, together, widths)
    # Columns with gaps slow down all that follows.
    by_terms = (x.contiguous() for x in by_row.unbind(2))
    return *gradients, *by_terms


def pulls(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_rho: Tensor,
    grad_nu: Tensor,
    grad_mu: Tensor,
    circuit: Circuit,
    out: RowPotentials,
) -> tuple[list[Tensor], Tensor]:
    """Backpropagate through the solution of the rows: coefficients of a row's gradients, and d(1/α), each [N, H].

    The coefficients are step, by_resistance, by_friction, at_s, at_u, nu and by_lam:

        ds = −step z − by_resistance r,  du = step y − by_friction f,  dλ = by_lam − step nu Σ e^{s + a}(1 − e^{u − w}),

    with y of :func:`product_backward`, and ``at_s`` and ``at_u`` more at the best conductor.

    In a constant unit e^h a = h − s_o, w = u_o, ρ = ζe^{−h}, ν = γe^{−h}, γ = c_oθ_o and μ = θ_o + ζ/c_o. The
    differential of Σ_j z_j + μ/α = 1 gives the differential of ζ (S3 of docs/errata.md), with
    D = Σ_J e^{s + a} ν(1 − e^{u − w}) and the slope Σ_J e^{s + a} + e^h/(αc_o):

        slope dρ = −Σ z (ds − ds_o) + Σ y (du − du_o) − D dlog γ − (θ_o dlog θ_o − ζ/c_o dlog c_o)/α − μ d(1/α),
        dlog c_o = ds_o − Σ r ds,   dlog θ_o = dlog λ + du_o − Σ f du.
    """
    lam, leak = circuit[4:]
    a = out.a
    nu = out.nu
    limit = exp_limit(a.dtype)
    mu = out.log_mu.exp()
    # θ_o = λf and θ_o/μ = λ share. The friction is read off ν where w is not u_o, see ``rows.units``.
    log_f = torch.where(
        (nu > 0) & (nu < 1),
        nu.log() + a - out.resistance - lam.log(),
        out.w - out.friction,
    )
    theta = lam * log_f.exp()
    share = (log_f - out.log_mu).clamp_max(limit).exp()
    # Where nothing flows μ is α.
    alone = torch.where(out.support > 0, 0.0, grad_mu)
    grad_mu = grad_mu - alone
    by_share = grad_mu * share
    # Clamped for rows where nothing flows, whose gradients are zero.
    height = (a - out.resistance - out.log_mu).clamp_max(limit)
    step = (grad_rho + grad_mu * height.exp()) / out.slope
    # Of dlog γ = dlog c_o + dlog θ_o, which both resistances and frictions share.
    both = grad_nu * nu - step * (1 - leak * theta - out.rho * out.slope)
    by_resistance = both + step * leak * (mu - theta) - grad_mu + lam * by_share
    by_friction = both - step * leak * theta + lam * by_share
    # ν/λ, also where λ is 0.
    nu_of_one = (out.resistance + log_f - a).clamp_max(limit).exp()
    nu_of_one = torch.where(lam > 0, nu / lam, nu_of_one)
    at_s = step * (1 - leak * mu) - grad_a + by_resistance
    at_u = grad_w - step * out.drag + by_friction
    by_lam = grad_nu * nu_of_one - step * leak * log_f.exp() + by_share
    by_row = [step, by_resistance, by_friction, at_s, at_u, nu_of_one, by_lam]
    return by_row, -(step + alone) * mu


def potentials_backward(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_rho: Tensor,
    grad_nu: Tensor,
    grad_mu: Tensor,
    circuit: Circuit,
    out: RowPotentials,
    ptr: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of the circuit; see :func:`pulls`."""

    def compute(room: Buffers, *stacks: Any) -> tuple[Tensor, ...]:
        inputs = stacks[:4]
        terms = stacks[4:11]
        *pull, resistance, friction, mask = stacks[11:]
        if mask is not None:
            # Rows of padding solve a problem too, and must not send a gradient to their senders.
            pull = [x * mask for x in pull]
        step, by_resistance, by_friction, at_s, at_u, nu, by_lam = pull
        gradients = [torch.zeros_like(x) for x in inputs]
        # ``by_lam`` is that part of it which needs no entry.
        dlam = by_lam.clone()
        for rows in _rows(resistance):
            s, u = _scores(room, inputs, rows)
            # Before the entries, which are written over s and u.
            r = exp_(torch.sub(-resistance[:, rows], s, out=room("r", *s.shape)))
            f = exp_(torch.sub(u, friction[:, rows], out=room("f", *s.shape)))
            tile = _Entries(s, u, terms, rows, mask)
            through, above, flow = tile.on_support(room)
            some = step[:, rows]
            if mask is not None:
                r.mul_(mask.mT)
                f.mul_(mask.mT)
            ds = flow.mul_(-some).sub_(r.mul_(by_resistance[:, rows]))
            dammed = above.mul_(through)
            dlam[:, rows] += dammed.sum(2, keepdim=True) * some * nu[:, rows]
            drag = dammed.add_(through).mul_(tile.nu * some)
            drag.scatter_(2, tile.best, 0.0)
            du = drag.sub_(f.mul_(by_friction[:, rows]))
            ds.scatter_add_(2, tile.best, at_s[:, rows])
            du.scatter_add_(2, tile.best, at_u[:, rows])
            _pull_scores(gradients, inputs, ds, du, rows)
        return *gradients, dlam

    by_row, dleak = pulls(grad_a, grad_w, grad_rho, grad_nu, grad_mu, circuit, out)
    inputs = _together(circuit.features, out.terms, ptr)
    inputs += _scalars(*by_row, out.resistance, out.friction)
    widths = [*_widths(*circuit.features), 1]
    *gradients, dlam = _by_tiles(compute, ptr, inputs, widths)
    return *gradients, dlam.squeeze(2), dleak
