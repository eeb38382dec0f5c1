"""``quadratic_minimiser``: the state where the terms of a quadratic energy are in balance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.energies.spectrum import precision
from diffusion_mp.energies.terms import EnergyTerm, ScaledTerm, affine, damping_and_constant
from diffusion_mp.graph import Graph
from diffusion_mp.updates.derivatives import formula_runs, newton_step
from diffusion_mp.updates.linear_solve import solve


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of iterations depends on values
def quadratic_minimiser(
    terms: Sequence[EnergyTerm], state: Float[Tensor, "N H D"], graph: Graph, least: Tensor
) -> Float[Tensor, "N H D"]:
    """Return the minimiser of a sum of convex quadratic terms, as exact as the dtype of a state needs it.

    The half gradients, A z − c in all channels, add up to zero there. Up to rounding, the eigenvalues of A are at least
    ``least``, the weight of the source, which bounds the error of the solution of `conjugate_gradients`; it is solved
    in double precision, in every graph on its own, with A divided by its diagonal as a preconditioner.
    """
    wide = state.detach().double()
    terms = [_weighed_in_double(term) for term in terms]
    if formula_runs(wide.numel() ** 2):

        def slope(z: Tensor) -> Tensor:
            return reduce(add, [term.half_gradient(z, graph) for term in terms])

        return newton_step(slope, torch.zeros_like(wide)).to(state.dtype)
    means = [term.weighted_mean(wide) or affine(term, wide, graph) for term in terms]
    damping, constant = damping_and_constant(means)
    pulls = [(mean.pull, mean.scale) for mean in means if mean.pull is not None]

    def operator(v: Tensor) -> Tensor:
        z = v.view_as(wide)
        out = damping * z
        for pull, scale in pulls:
            out = out - scale * pull(z)
        return out.view_as(v)

    def preconditioner(v: Tensor) -> Tensor:
        return (v.view_as(wide) / damping).view_as(v)

    channels = wide.size(1) * wide.size(2)
    solution = solve(
        operator,
        constant.expand_as(wide).reshape(-1, 1, 1),  # one column, since a matrix may mix all channels
        preconditioner=preconditioner,
        ptr=None if graph.segments is None else channels * graph.segments,
        least=float(least.detach()),
        tol=None if state.dtype == wide.dtype else precision(state.dtype).residual,
        what="the state at rest",
    )
    return solution.view_as(wide).to(state.dtype)


def _weighed_in_double(term: EnergyTerm) -> EnergyTerm:
    """Return a term whose weight is in double.

    The gradient of a weight is ⟨g, D z⟩ − ⟨g, S z⟩. Each of the two would be rounded to the dtype of the weight, and
    nothing is left of their difference where z hardly varies.
    """
    if not isinstance(term, ScaledTerm):
        return term
    weight = term.weight
    if isinstance(weight, Tensor):
        weight = weight.double()
    return ScaledTerm(weight, _weighed_in_double(term.term))
