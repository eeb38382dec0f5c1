"""Search for a step that raises an energy, for energies with parts from outside the library.

For terms of the library the premise of Theorem T11 is proved. A term, penalty, constraint or coupling from elsewhere
only claims it. No finite number of states can prove the claim; a search may refute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.checks import describe
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.pairs import HeadState, Scalar
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.terms import EnergyTerm, sum_by_graph, wrong_shape
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import detached_mean_rows
from diffusion_mp.runtime.precision import reciprocal, widened

#: What parts of an energy may be made of.
KINDS = (EnergyTerm, Penalty, Constraint, Coupling, nn.Module)

#: Scales at which terms and energies are examined: states contracted to points, and
#: spread far apart.
SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)

#: Entries beyond which an exponential overflows, so that a value that is not finite
#: says nothing about its term.
OVERFLOWING = 500.0


def foreign_parts(*parts: Any) -> list[Any]:
    """Return the parts of an energy, and the parts of these, that are not defined in the library.

    Examples:
        >>> foreign_parts(PairTerm(SimplePenalty())), len(foreign_parts(PairTerm(FunctionPenalty(torch.ones_like))))
        ([], 1)
    """
    foreign: list[Any] = []
    visited = set()
    waiting = [*parts]
    while waiting:
        part = waiting.pop()
        # Modules may refer to each other in a circle.
        if id(part) in visited or isinstance(part, (type, Tensor)):
            continue
        visited.add(id(part))
        if isinstance(part, partial):
            waiting.append(part.func)
        elif isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, KINDS) and _in_library(type(part)):
            waiting.append(vars(part))
        elif isinstance(part, KINDS) or (callable(part) and not _in_library(part)):
            # And none of its parts, since a subclass may have replaced anything.
            foreign.append(part)
    return foreign


def _in_library(defined: Any) -> bool:
    module = getattr(defined, "__module__", None) or ""
    return module.partition(".")[0] == "diffusion_mp"


def counterexample(
    energy: Energy, z: HeadState, steps: int, foreign: Iterable[Any]
) -> tuple[str | None, int]:
    """Return a sentence about a step that raises F or a majorant that fails, or ``None``; and the number of states.

    These are all states of ``steps`` steps from z, in the dtype of z. Then follow, in double precision, states
    contracted and spread about the mean of every graph, and random states around them, at the scales of `SCALES`. At
    every state F has to fall in a step, in every graph, up to rounding. Terms with ``foreign`` parts have to bound
    themselves there.
    """
    graph = energy.graph_of(z)
    project = energy.constraint.project
    # A state in half precision lies in C up to its own rounding, and steps begin at the
    # projection in single precision.
    first = project(widened(z))
    if any(isinstance(part, Constraint) for part in foreign):
        flaw = projection_flaw(energy.constraint, first.double(), graph)
        if flaw is not None:
            return flaw, 1
    suspects = [term for term in energy.terms if foreign_parts(term)]
    least = sum(resolution(term, first, graph) for term in suspects)

    def starts() -> Iterator[tuple[HeadState, bool]]:
        state = first
        for number in range(steps):
            yield state, number == 0
            state = energy.step(state)
        for end in (first, state):
            for candidate, regular in around(end.double(), graph):
                yield project(candidate), regular

    count = 0
    for start, regular in starts():
        count += 1
        # Nothing is compared where double precision overflows.
        values = [term.value(start, graph) for term in energy.terms]
        if count > steps and overflows(start, *values):
            continue
        for term in suspects if regular else ():  # some fifty values and gradients
            if (flaw := term_flaw(term, start, graph)) is not None:
                return flaw, count
        after = energy.step(start)
        compared = count <= steps or bool(after.isfinite().all())
        if compared and (flaw := rise(energy, start, after, least)) is not None:
            return flaw, count
    return None, count


def around(z: HeadState, graph: Graph) -> Iterator[tuple[HeadState, bool]]:
    """Yield z contracted and spread about the mean of each graph, and random states around z.

    Each comes with a flag, which is true for contracted and spread states.
    """
    generator = torch.Generator(z.device).manual_seed(0)
    for scale in SCALES:
        yield rescaled(z, graph, scale), True
        yield z + scale * drawn(z, generator), False


def drawn(z: HeadState, generator: torch.Generator) -> HeadState:
    """Return normal numbers of the shape and dtype of z."""
    return torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)


def rise(
    energy: Energy, before: HeadState, after: HeadState, least: float | Tensor = 0.0
) -> str | None:
    """Return a sentence about a graph whose F is higher ``after`` a step by more than rounding, or ``None``.

    Rounding is 64 ε (Σ_t |V_t| + Σ_i p_i ‖z_i‖²) in the dtype of the state, and ``least`` (`resolution`).
    """
    if not energy.terms:
        return None
    graph = energy.graph_of(before)

    # Either state may be the one whose numbers are large.
    squares = torch.maximum(before.square(), after.square()).double()
    old = new = size = before.new_zeros((), dtype=torch.float64)
    for term in energy.terms:
        values = term.by_graph(before, graph)
        later = term.by_graph(after, graph)
        weighed = (term.bound(before, graph) * squares).sum((1, 2))
        sizes = values.abs() + later.abs() + sum_by_graph(weighed, graph)
        total = term.value(before, graph)
        room = 1e-8 * (sizes.sum() + total.abs())
        if not bool((values.sum() - total).abs() <= room):
            return (
                f"{term!r} is no sum over the graphs of the batch, so it couples them."
            )
        old = old + values
        new = new + later
        size = size + sizes
    rounding = 64 * torch.finfo(before.dtype).eps * size + least
    excess = new - old - rounding
    risen = ~(excess <= 0)  # NaN is no descent either
    if not bool(risen.any()):
        return None
    where = int(risen.int().argmax())
    if len(risen) > 1 and bool(excess.sum() <= 0):
        # If a coupling joins all rows, F of a graph depends on other graphs, and only
        # the sum has to fall.
        member = graph.batch.to(before.device)[:, None, None]
        mixed = torch.where(member == where, after, before)
        alone = sum(term.by_graph(mixed, graph) for term in energy.terms)
        if bool((alone - new)[where].abs() > rounding[where]):
            return None
    what = f" of graph {where}" if len(risen) > 1 else ""
    return f"a step raises F: F{what} goes from {float(old[where]):.6g} to {float(new[where]):.6g}."


def projection_flaw(constraint: Constraint, z: HeadState, graph: Graph) -> str | None:
    """Return a sentence saying that ``project`` does not give the nearest point of a constraint, or ``None``."""
    points = [candidate for candidate, _ in around(z, graph)]
    members = [constraint.project(point) for point in points]
    for point, nearest in zip(points, members, strict=True):
        away = point - nearest
        distance = away.norm(dim=2)
        for other in members:
            # No other point is nearer than the nearest point. If the set is convex, the
            # angle to every other point is at least a right angle.
            further = (point - other).norm(dim=2)
            if bool((distance > (1 + 1e-9) * further).any()):
                return f"{constraint} does not project to the nearest point: another point of it is nearer."
            across = other - nearest
            room = 1e-9 * distance * (across.norm(dim=2) + nearest.norm(dim=2))
            acute = (away * across).sum(2) > room
            if constraint.convex and bool(acute.any()):
                return f"{constraint} says that it is convex, and its projection is not that onto a convex set."
    return None


def overflows(z: Tensor, *values: Tensor) -> bool:
    """Return whether a value at z is not finite, and z has entries so large that this may be overflow."""
    finite = all(bool(value.isfinite().all()) for value in values)
    return not finite and float(z.abs().max()) > OVERFLOWING


def rescaled(z: HeadState, graph: Graph, scale: float) -> HeadState:
    """Return z contracted or spread about the mean of each graph."""
    centre = detached_mean_rows(z, graph.segments)
    return centre + scale * (z - centre)


def resolution(term: EnergyTerm, z: HeadState, graph: Graph) -> Scalar:
    """Return how much rounding may change a value by a formula that cancels for small z, such as √(1 + z²) − 1.

    The error is the error of values at distances of about one, however small the value itself is.
    """
    generator = torch.Generator(z.device).manual_seed(0)
    wide = z.double()
    usual = term.value(wide + drawn(wide, generator), graph).abs()
    return torch.where(
        usual.isfinite(), 64 * torch.finfo(torch.float64).eps * usual, 0.0
    )


def numbers_flaw(term: EnergyTerm, z: HeadState, graph: Graph) -> str | None:
    """Return a sentence saying which of the three functions has a wrong shape or no numbers at z, or ``None``."""
    results = functions_at(term, z, graph)
    for name, result in results.items():
        if (flaw := wrong_shape(term, name, result, z)) is not None:
            return flaw
        if not bool(result.isfinite().all()):
            what = name.replace("_", " ")
            return f"the {what} of {term!r} is not finite at this state: {describe(result)}."
    if bool((results["bound"] < 0).any()):
        least = float(results["bound"].min())
        return (
            f"the bound of {term!r} must be nonnegative; its least entry is {least:g}."
        )
    return None


def functions_at(term: EnergyTerm, z: HeadState, graph: Graph) -> dict[str, Tensor]:
    """Return the half gradient, the bound and the value of a term at z, by name."""
    return {
        "half_gradient": term.half_gradient(z, graph),
        "bound": term.bound(z, graph),
        "value": term.value(z, graph),
    }


@torch.no_grad()
def term_flaw(
    term: EnergyTerm, z: HeadState, graph: Graph, moves: Iterable[Tensor] = ()
) -> str | None:
    """Return a sentence saying why a term does not bound itself at z after some moves z′ − z, or ``None``.

    The moves are ``moves``, a step down the majorant, a step up, eight moves in arbitrary directions from 10⁻² to 10²,
    and some moves where the half gradient changes most.
    """
    z = z.double()
    if (flaw := numbers_flaw(term, z, graph)) is not None:
        return flaw
    half, bound, value = functions_at(term, z, graph).values()
    # Terms of the library measure distances from the mean of a graph, a user's from the origin.
    near = z - detached_mean_rows(z, graph.segments)
    least = resolution(term, z, graph)
    generator = torch.Generator(z.device).manual_seed(0)
    # Certified steps go down the majorant, and a step up is as likely to leave it.
    descent = half * reciprocal(bound.expand_as(half))
    lengths = torch.logspace(-2, 2, 8, dtype=z.dtype, device=z.device)
    anywhere = (length * drawn(z, generator) for length in lengths)
    curved = curved_moves(term, z, graph, bound, generator)
    for move in (*moves, -descent, descent, *anywhere, *curved):
        after = term.value(z + move, graph)
        linear = 2 * half * move
        quadratic = 2 * bound * move.square()
        if overflows(z + move, after):
            continue
        size = value.abs() + after.abs() + linear.abs().sum() + quadratic.sum()
        # A value may be a difference of terms of the size p ‖z‖², for example if all
        # neighbours are equal. z is measured from the mean of its graph, from which an
        # isolated node may be far.
        squares = z.square() + (z + move).square()
        squares = squares + near.square() + (near + move).square()
        cancelled = 64 * torch.finfo(z.dtype).eps * (bound * squares).sum()
        excess = after - value - (linear + quadratic).sum()
        if not bool(excess <= least + 1e-10 * size + cancelled):
            return (
                f"{term!r} exceeds its majorant by {float(excess):.3g} at a state {float(move.norm()):.3g} away: its "
                f"bound is too small, or its half gradient is not half of the gradient of its value."
            )
    return None


def curved_moves(
    term: EnergyTerm,
    z: HeadState,
    graph: Graph,
    bound: Tensor,
    generator: torch.Generator,
) -> Iterator[HeadState]:
    """Yield moves along the direction in which the half gradient changes most, as a multiple of the bound.

    The bound has to satisfy J ⪯ 2 diag(p) for the Jacobian J of the half gradient. The power method finds the largest
    eigenvalue of diag(p)⁻¹J. Random directions would miss it, since there are as many directions as entries of the
    state.
    """
    if not z.numel():
        return
    away = z - detached_mean_rows(z, graph.segments)
    spread = float(away.square().mean().sqrt())
    near = 1e-3 * (spread or 1.0)
    # A node without neighbours may have no bound, and J must not be divided by zero.
    weight = bound.clamp(min=1e-6 * float(bound.max()) or 1.0)

    def unit(direction: Tensor) -> Tensor:
        size = direction.square().mean().sqrt()
        return direction / size.clamp(min=torch.finfo(z.dtype).tiny)

    direction = drawn(z, generator)
    for _ in range(8):
        direction = unit(direction)
        ahead = term.half_gradient(z + near * direction, graph)
        behind = term.half_gradient(z - near * direction, graph)
        # The shift makes the largest eigenvalue, which may be up to 2, also the largest
        # in absolute value.
        direction = (ahead - behind) / (2 * near * weight) + 2 * direction
    direction = unit(direction)
    if not bool(direction.isfinite().all()):
        return
    for length in (near, 1e-1 * spread, spread, 1e-2, 1.0):
        yield length * direction
        yield -length * direction
