"""Search for a step that raises an energy, where a part of the energy is not of the library.

For terms of the library the premise of Theorem T11 is proved. A term, penalty, constraint or coupling of somebody
else's only claims it, and no finite number of states can prove the claim; a search may refute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.terms import (
    SCALES,
    EnergyTerm,
    ScaledTerm,
    overflows,
    rescaled,
    resolution,
    sum_by_graph,
    term_flaw,
)
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import reciprocal

if TYPE_CHECKING:
    from diffusion_mp.energies.energy import JointEnergy

#: What parts of an energy may be made of.
KINDS = (EnergyTerm, Penalty, Constraint, Coupling, nn.Module)


def foreign_parts(*parts: Any) -> list[Any]:
    """Return what these parts of an energy are made of that is not defined in the library.

    Examples:
        >>> foreign_parts(PairTerm(SimplePenalty())), len(foreign_parts(PairTerm(FunctionPenalty(torch.ones_like))))
        ([], 1)
    """
    return [*_foreign(parts, set())]


def _foreign(part: Any, visited: set[int]) -> Iterator[Any]:
    if id(part) in visited or isinstance(part, type):
        return
    visited.add(id(part))
    if isinstance(part, partial):
        yield from _foreign(part.func, visited)
    elif isinstance(part, (list, tuple)):
        for element in part:
            yield from _foreign(element, visited)
    elif isinstance(part, dict):
        for element in part.values():
            yield from _foreign(element, visited)
    elif isinstance(part, KINDS):
        if not _in_library(type(part)):
            yield part
            return  # a subclass may have replaced anything
        yield from _foreign(vars(part), visited)
    elif callable(part) and not isinstance(part, Tensor) and not _in_library(part):
        yield part


def _in_library(defined: Any) -> bool:
    module = getattr(defined, "__module__", None) or ""
    return module.partition(".")[0] == "diffusion_mp"


def counterexample(
    energy: JointEnergy, x: Float[Tensor, "N H D"], steps: int, own: Iterable[Any]
) -> tuple[str | None, int]:
    """Return a sentence about a step that raises F or a majorant that fails, or ``None``, and how many states it took.

    Looked at are all states of ``steps`` steps from x, in the dtype of x; then, in double precision, states contracted
    and spread about the mean of every graph, and states at random around them, at the scales of `SCALES`. At every one
    F has to fall in a step, in every graph, up to rounding. Terms made of ``own`` have to bound themselves there.
    """
    graph = energy.graph(x)
    # A state in half precision lies in C up to its own rounding, and steps begin at the projection in single precision.
    wide = energy.constraint.project(x.to(torch.promote_types(x.dtype, torch.float32)))
    states = [wide]
    suspects = [term for term in energy.terms if foreign_parts(term)]
    least = sum(resolution(term, wide, graph) for term in suspects)
    for number in range(steps):
        after = step(energy, states[-1], graph)
        if (flaw := rise(energy, states[-1], after, graph, least)) is not None:
            return f"step {number + 1} from this state raises F: {flaw}", len(states)
        states.append(after)
    count = len(states)
    if any(isinstance(part, Constraint) for part in own):
        flaw = projection_flaw(energy.constraint, states[0].double(), graph)
        if flaw is not None:
            return flaw, count
    for state in (states[0], states[-1]):
        for candidate, regular in around(state.double(), graph):
            start = energy.constraint.project(candidate)
            if overflows(start, *(term.value(start, graph) for term in energy.terms)):
                continue
            after = step(energy, start, graph)
            count += 1
            # Where the numbers of double precision end nothing is compared; own terms are asked for finite ones below.
            finite = bool(after.isfinite().all())
            if finite and (flaw := rise(energy, start, after, graph, least)) is not None:
                return f"a step from another state raises F: {flaw}", count
            for term in suspects if regular else ():  # it takes some fifty values and gradients
                if (flaw := term_flaw(term, start, graph)) is not None:
                    return flaw, count
    return None, count


def around(
    z: Float[Tensor, "N H D"], graph: Graph
) -> Iterator[tuple[Float[Tensor, "N H D"], bool]]:
    """Yield z contracted and spread about the mean of each graph, and states at random around z.

    With each comes whether it is one of the former.
    """
    generator = torch.Generator(z.device).manual_seed(0)
    for scale in SCALES:
        yield rescaled(z, graph, scale), True
        yield (
            z + scale * torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device),
            False,
        )


def step(energy: JointEnergy, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
    """Return the step of Theorem T11, Proj_C(z − Σ g / Σ p)."""
    majorants = [term.majorant(z, graph, energy.constraint.convex) for term in energy.terms]
    if not majorants:
        return z
    half = reduce(add, [majorant.half_gradient for majorant in majorants])
    damping = reduce(add, [majorant.damping for majorant in majorants])
    return energy.constraint.project(z - half * reciprocal(damping), z).to(z.dtype)


def rise(
    energy: JointEnergy,
    before: Float[Tensor, "N H D"],
    after: Float[Tensor, "N H D"],
    graph: Graph,
    least: float | Tensor = 0.0,
) -> str | None:
    """Return a sentence about a graph whose F is higher ``after`` a step by more than rounding, or ``None``.

    Rounding is 64 ε (Σ_t |V_t| + Σ_i p_i ‖z_i‖²) in the dtype of the state, and ``least`` (`resolution`).
    """
    if not energy.terms:
        return None
    old = torch.stack([term.by_graph(before, graph) for term in energy.terms])
    new = torch.stack([term.by_graph(after, graph) for term in energy.terms])
    squares = torch.maximum(before.square(), after.square()).double()
    bounds = [(term.bound(before, graph) * squares).sum((1, 2)) for term in energy.terms]
    for term, values, bound in zip(energy.terms, old, bounds, strict=True):
        if graph.segments is None or not _by_differences(term):
            continue
        total = term.value(before, graph)
        if not bool(
            (values.sum() - total).abs() <= 1e-8 * (values.abs().sum() + total.abs() + bound.sum())
        ):
            return f"{term!r} is no sum over the graphs of the batch, so it couples them."
    sizes = old.abs().sum(0) + new.abs().sum(0) + sum_by_graph(reduce(add, bounds), graph)
    rounding = 64 * torch.finfo(before.dtype).eps * sizes + least
    excess = new.sum(0) - old.sum(0) - rounding
    risen = ~(excess <= 0)  # NaN is no descent either
    if not bool(risen.any()):
        return None
    where = int(risen.int().argmax())
    if len(risen) > 1 and bool(excess.sum() <= 0):
        # A coupling of all rows makes F of a graph depend on other graphs, and then only the sum has to fall.
        rows = (graph.batch == where)[:, None, None]
        mixed = torch.where(rows, after, before)
        alone = torch.stack([term.by_graph(mixed, graph) for term in energy.terms]).sum(0)
        if bool((alone - new.sum(0))[where].abs() > rounding[where]):
            return None
    what = f" of graph {where}" if len(risen) > 1 else ""
    return f"F{what} goes from {float(old.sum(0)[where]):.6g} to {float(new.sum(0)[where]):.6g}."


def _by_differences(term: EnergyTerm) -> bool:
    """Return whether the values of a term by graph are differences, which assume that it is a sum over graphs."""
    while isinstance(term, ScaledTerm):
        term = term.term
    return type(term).by_graph is EnergyTerm.by_graph


def projection_flaw(constraint: Constraint, z: Float[Tensor, "N H D"], graph: Graph) -> str | None:
    """Return a sentence saying that ``project`` does not give the nearest point of a constraint, or ``None``."""
    points = [candidate for candidate, _ in around(z, graph)]
    members = [constraint.project(point) for point in points]
    for point, nearest in zip(points, members, strict=True):
        distance = (point - nearest).norm(dim=2)
        for other in members:
            if bool((distance > (1 + 1e-9) * (point - other).norm(dim=2)).any()):
                return f"{constraint} does not project to the nearest point: another point of it is nearer."
            away = point - nearest
            across = other - nearest
            products = (away * across).sum(2)
            room = 1e-9 * away.norm(dim=2) * (across.norm(dim=2) + nearest.norm(dim=2))
            if constraint.convex and bool((products > room).any()):
                return f"{constraint} says that it is convex, and its projection is not that onto a convex set."
    return None
