"""``Energy``: a sum of terms on a constraint set, and the step that never raises it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from types import NoneType

import torch
from torch import Tensor

from diffusion_mp import checks
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.pairs import (
    HeadState,
    PerGraph,
    Scalar,
    State,
    by_head,
    check_heads,
)
from diffusion_mp.energies.terms import (
    EnergyTerm,
    ProximalTerm,
    ScaledTerm,
    SourceTerm,
    damping_and_constant,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import graph_sizes
from diffusion_mp.runtime.precision import reciprocal


def _after(term: EnergyTerm, x_prev: State) -> EnergyTerm:
    if isinstance(term, ScaledTerm):
        return ScaledTerm(term.factor, _after(term.term, x_prev))
    return SourceTerm(x_prev) if isinstance(term, ProximalTerm) else term


class Energy:
    """A sum of terms on a constraint set, with a step that never raises it.

    With half gradients g_t and bounds p_t of the terms V_t, the energy and its step are

        F(Z) = Σ_t V_t(Z) + Σ_i ι_C(z_i)

        z′ = Proj_C(z − Σ_t g_t / Σ_t p_t)

    The step never raises F, up to rounding, 64 ε (|F(z)| + Σ_i p_i ‖z_i‖²) in the dtype of the state (Theorem T11 of
    docs/certified.md). `CertifiedBlock` takes this step. `certify_step` tells whether the premises hold, and which
    premise fails.

    The energy E(Z, k) of an explicit step (Wu, Wipf & Yan 2025, Eqs. 8 and 13) has a `ProximalTerm`:
    ``Energy([ProximalTerm(), 2 * lam * PairTerm(SimplePenalty())])(z, z_k)``, where λ multiplies Σ_ij.

    Args:
        terms: the terms V_t, each an `EnergyTerm`.
        constraint: the set C, a `Constraint` or its name: ``"nonnegative"`` (ReLU), ``"ball"`` (clipped norms),
            ``"sphere"`` (RMSNorm without a gain) or ``"nonnegative_ball"``. ``None``, the default, is no constraint.
        radius: the radius of a ball or a sphere that ``constraint`` names. 1 by default.
        graph: the graph that the terms read. ``None`` is one graph of all nodes, without edges.

    Shapes:
        - x: [N, C] or [N, H, D]; the energies of the heads add up.
        - output: a 0-dimensional float64 tensor, since the differences between steps are below the rounding of float32.
          It is ∞ outside of C, up to rounding.

    Warns:
        UserWarning: two nodes are farther apart than the domain of a penalty, where its energy is not meaningful.

    Examples:
        >>> energy = Energy([CouplingTerm(AdjacencyDiffusivity("sum")(x, graph)), 0.5 * SourceTerm(x)], "nonnegative")
        >>> start = x.relu().unsqueeze(1)
        >>> bool(energy(energy.step(start)) <= energy(start))
        True
    """

    def __init__(
        self,
        terms: Sequence[EnergyTerm],
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
        *,
        graph: Graph | None = None,
        _checked: bool = False,
    ) -> None:
        if not _checked:
            what = "a list of terms, each an EnergyTerm"
            checks.check_kind(terms, "terms", Sequence, what)
            for term in terms:
                what = "an EnergyTerm"
                checks.check_kind(term, "every one of terms", EnergyTerm, what)
            checks.check_kind(graph, "graph", (Graph, NoneType), "a Graph or None")
        # A copy that nobody can change: certificates are about these terms.
        self.terms = tuple(terms)
        self.constraint = get_constraint(constraint, radius)
        self.graph = graph

    def __call__(self, x: State, x_prev: State | None = None) -> Scalar:
        """Return F(x).

        Args:
            x: state [N, C] or [N, H, D].
            x_prev: the state before the step, of the shape of x, which only a `ProximalTerm` reads. ``None`` makes that
                term zero.
        """
        z, graph = self.checked(x)
        # Energies of two steps may differ by less than float32 resolves.
        total = x.new_zeros((), dtype=torch.float64)
        for term in self.terms_after(x, x_prev):
            total = total + term.value(z, graph)
        return torch.where(self.constraint.holds(z), total, math.inf)

    def terms_after(self, x: State, x_prev: State | None) -> list[EnergyTerm]:
        """Return the terms for a step from ``x_prev`` to ``x``; a `ProximalTerm` becomes the distance of the two."""
        if x_prev is None:
            return list(self.terms)
        if x_prev.shape != x.shape:
            raise ValueError(
                f"x_prev must have the shape {list(x.shape)} of the state; got {checks.describe(x_prev)}."
            )
        return [_after(term, x_prev) for term in self.terms]

    def by_graph(self, x: State) -> PerGraph:
        """Return F(x) of every graph of the batch, [B] in float64. The sum of these values is F(x).

        Args:
            x: state [N, C] or [N, H, D].
        """
        z, graph = self.checked(x)
        checks.check_has_values(x, "x")
        values = x.new_zeros(graph.num_graphs, dtype=torch.float64)
        for term in self.terms:
            values = values + term.by_graph(z, graph)
        # Nearly always, and a look at every graph would wait for as many answers.
        if bool(self.constraint.holds(z)):
            return values
        parts = z.split(graph_sizes(graph.segments, len(z)))
        inside = torch.stack([self.constraint.holds(part) for part in parts])
        return torch.where(inside, values, math.inf)

    def step(self, z: HeadState) -> HeadState:
        """Return the next state Proj_C(z − Σ g / Σ p), [N, H, D].

        Args:
            z: state [N, H, D].
        """
        if not self.terms:
            return self.constraint.project(z)
        graph = self.graph_of(z)
        majorants = [
            term.majorant(z, graph, self.constraint.convex) for term in self.terms
        ]
        halves, dampings = zip(*majorants, strict=True)
        # A node without bounds, that is, without source and neighbours, does not move.
        move = reduce(add, halves) * reciprocal(reduce(add, dampings))
        return self.constraint.project((z - move).to(z.dtype), z)

    def descent(self, z: HeadState) -> Callable[[HeadState], HeadState]:
        """Return the map of a step, for several steps from states like z.

        If C is convex and every g is p z − c − s f(z) with p, c and s that do not depend on z, a step is the projection
        of the weighted mean (Σ c + Σ s f(z)) / Σ p. Everything but f(z) is then computed once.

        Args:
            z: state [N, H, D].
        """
        means = [term.weighted_mean(z) for term in self.terms]
        affine = [mean for mean in means if mean is not None]
        pulls = [(mean.pull, mean.scale) for mean in affine if mean.pull is not None]
        # Without a constant, that is, without a source, a node may have p = 0 and stay where it is.
        anchored = any(mean.constant is not None for mean in affine)
        constraint = self.constraint
        if not (constraint.convex and anchored and pulls and len(affine) == len(means)):
            return self.step
        damping, constant = damping_and_constant(affine)
        inverse = reciprocal(damping)
        base = constant * inverse
        factors = [(pull, scale * inverse) for pull, scale in pulls]

        def step(z: HeadState) -> HeadState:
            # Products are new tensors, so sums may overwrite them. Not `addcmul`, whose backward pass multiplies by a
            # constant of one first.
            moved = reduce(Tensor.add_, [pull(z) * factor for pull, factor in factors])
            return constraint.project(moved.add_(base), z)

        return step

    def graph_of(self, z: State) -> Graph:
        return Graph(len(z)) if self.graph is None else self.graph

    def checked(self, x: State) -> tuple[HeadState, Graph]:
        """Return a state by head and the graph of the terms.

        Raises:
            ValueError: the state and the graph have different numbers of nodes.
        """
        check_heads(x)
        graph = self.graph_of(x)
        if graph.num_nodes != len(x):
            raise ValueError(
                f"x must have {graph.num_nodes} rows, one per node of the graph; got {len(x)}."
            )
        return by_head(x), graph

    def __repr__(self) -> str:
        terms = " + ".join(map(repr, self.terms)) or "0"
        return f"Energy({terms}, constraint={self.constraint})"
