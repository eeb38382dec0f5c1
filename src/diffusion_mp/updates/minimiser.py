"""``quadratic_minimiser``: the state in which the terms of a quadratic energy are in balance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling, ScaledCoupling
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EnergyTerm,
    Mean,
    ScaledTerm,
    SourceTerm,
    damping_and_constant,
)
from diffusion_mp.graph import Graph
from diffusion_mp.updates.derivatives import (
    formula_runs,
    newton_step,
    refuse_export,
    refuse_recorded_tangents,
)
from diffusion_mp.updates.implicit import shifted_inverse
from diffusion_mp.updates.linear_solve import solve

WHAT = "the state at rest"


def quadratic_minimiser(
    energy: Energy, state: HeadState, least: Tensor
) -> HeadState | None:
    """Return the minimiser of a source and other convex quadratic terms, as exact as the dtype of a state needs it.

    At the minimiser the half gradients, A z − c, add up to zero. If all terms but the source are pulls of couplings, A
    is a Laplacian, the same for all channels, and is solved by `shifted_inverse`. Otherwise all channels are solved
    together in double precision, separately for every graph, with the diagonal of A as the preconditioner. The
    eigenvalues of A are at least ``least``, the weight β of the source, which bounds the error of the solution. The
    result is ``None`` if this process has only some of the rows.
    """
    parts = [
        term.term if isinstance(term, ScaledTerm) else term for term in energy.terms
    ]
    if any(
        isinstance(part, CouplingTerm) and not part.coupling.whole for part in parts
    ):
        return None
    if len(parts) == 1 and isinstance(parts[0], SourceTerm):
        return parts[0].source.clone()  # what a layer returns can be written to
    terms = [_weighed_in_double(term) for term in energy.terms]
    pulled = _pulled_source(terms)
    if pulled is not None:
        coupling, source = pulled
        solution = shifted_inverse(
            coupling, "conservative", 1.0, source.double(), state.dtype, what=WHAT
        )
        return solution.to(state.dtype)
    refuse_export(WHAT)
    graph = energy.graph_of(state)
    # Of the state the shape alone counts: a minimiser does not depend on where one begins.
    wide = state.detach().double()
    if formula_runs(wide.numel() ** 2):

        def slope(z: Tensor) -> Tensor:
            return reduce(add, [term.half_gradient(z, graph) for term in terms])

        return newton_step(slope, torch.zeros_like(wide)).to(state.dtype)
    return _iterated(terms, wide, graph, least, state.dtype).to(state.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of iterations depends on values
def _iterated(
    terms: Sequence[EnergyTerm],
    wide: HeadState,
    graph: Graph,
    least: Tensor,
    dtype: torch.dtype,
) -> HeadState:
    refuse_recorded_tangents()
    means = [term.weighted_mean(wide) or _affine(term, wide, graph) for term in terms]
    damping, constant = damping_and_constant(means)
    pulls = [(mean.pull, mean.scale) for mean in means if mean.pull is not None]

    def operator(v: Tensor) -> Tensor:
        z = v.view_as(wide)
        out = damping * z
        for pull, scale in pulls:
            # The constants are left out: a solver takes the linear part.
            out = out - scale * pull(z)
        return out.view_as(v)

    def preconditioner(v: Tensor) -> Tensor:
        return (v.view_as(wide) / damping).view_as(v)

    channels = wide.size(1) * wide.size(2)
    solution = solve(
        operator,
        constant.expand_as(wide).reshape(
            -1, 1, 1
        ),  # one column, since a matrix may mix all channels
        preconditioner=preconditioner,
        ptr=None if graph.segments is None else channels * graph.segments,
        least=float(least.detach()),
        dtype=dtype,
        what=WHAT,
    )
    return solution.view_as(wide)


def _affine(term: EnergyTerm, z: HeadState, graph: Graph) -> Mean:
    """Return the half gradient of a quadratic term in the form of `Mean`."""
    damping = term.bound(z, graph)
    # An affine function is known by its value at zero.
    constant = -term.half_gradient(torch.zeros_like(z), graph)
    return Mean(
        damping,
        constant,
        lambda z: damping * z - term.half_gradient(z, graph) - constant,
    )


def _weighed_in_double(term: EnergyTerm) -> EnergyTerm:
    """Return a term whose weight is in double.

    The gradient of a weight is ⟨g, D z⟩ − ⟨g, S z⟩. If each of the two products were rounded to the dtype of the
    weight, nothing would be left of their difference where z hardly varies.
    """
    if not isinstance(term, ScaledTerm):
        return term
    weight = term.weight
    if isinstance(weight, Tensor):
        weight = weight.double()
    return ScaledTerm(weight, _weighed_in_double(term.term))


def _pulled_source(terms: Sequence[EnergyTerm]) -> tuple[Coupling, Tensor] | None:
    """Return Σ_t (c_t / β) S_t and H for one source β‖Z − H‖² and terms c_t of couplings S_t, else ``None``."""
    sources = []
    couplings: list[tuple[float | Tensor, Coupling]] = []
    for term in terms:
        if not isinstance(term, ScaledTerm):
            return None
        part = term.term
        if isinstance(part, SourceTerm) and part.metric is None:
            sources.append((term.weight, part.source))
        elif isinstance(part, CouplingTerm) and part.coupling.symmetric:
            couplings.append((term.weight, part.coupling))
        else:
            return None
    nonnegative = all(coupling.nonnegative for _, coupling in couplings)
    # A negative entry may leave no minimum, and two sources are a case for the general solver.
    if len(sources) != 1 or not couplings or not nonnegative:
        return None
    beta, source = sources[0]
    scaled = [
        ScaledCoupling(weight / beta, coupling, nonnegative=True)
        for weight, coupling in couplings
    ]
    return reduce(add, scaled), source
