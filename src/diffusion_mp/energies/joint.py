"""``JointEnergy``: one energy of source, graph, all pairs and constraint, descended by certified steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.pairs import State, by_head, check_heads, large_distance, metric_by_head
from diffusion_mp.energies.penalties import Penalty, get_penalty, warn_beyond_domain
from diffusion_mp.errors import check_device, check_flags, check_kind, check_positive, check_tensor, describe
from diffusion_mp.graph.checks import as_ptr, check_ptr
from diffusion_mp.graph.ops import graph_sizes


class JointEnergy:
    r"""F(Z) = β‖Z − H‖²_M + (λ/2) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖² + Σ_i ι_C(z_i).

    A `CertifiedStep` never raises it (Theorem T1 of docs/certified.md). The terms are the distance to the source H, a
    penalty on all pairs of the same graph, one on edges, and the constraint C of rows (F = ∞ outside, up to rounding).
    With a ``projection`` W [H, D, C] a pair costs Σ_h δ(‖W_h(z_i − z_j)‖²). O(N d²) for the simple and the quadratic
    penalty, O(N² d) time and O(N d) memory for others.

    Args:
        penalty: δ, a `Penalty` or its name; None omits the term.
        lam, mu, beta: λ, μ, β ≥ 0, numbers or 0-dimensional tensors.
        graph_term: A, a coupling; None omits the term.
        source: H, of the shape of the state; None omits the term.
        metric: M, [N] or [N, H]; ones by default.
        constraint, radius: C, as `CertifiedStep` takes it.
        projection: W [H, D, C], for a state of one head.
        ptr: bounds [B + 1] of the graphs of a ragged batch.
        mean: divide the penalty of a graph, and the Ω of the step, by its number of nodes, so that λ does not depend on
            the size of the graph.

    Shapes:
        x [N, C] or [N, H, D], heads add up; the result is a 0-dimensional float64 tensor.

    Raises:
        TypeError, ValueError: an argument of another kind or out of range, shapes that do not fit.

    Examples:
        >>> energy = JointEnergy("simple", graph_term=AdjacencyDiffusivity("sum")(x, graph), source=0.1 * x)
        >>> energy(0.1 * x).shape
        torch.Size([])
    """

    def __init__(
        self,
        penalty: Penalty | str | None,
        lam: float | Tensor = 1.0,
        *,
        graph_term: Coupling | None = None,
        mu: float | Tensor = 1.0,
        source: State | None = None,
        beta: float | Tensor = 1.0,
        metric: Float[Tensor, " N"] | Float[Tensor, "N H"] | None = None,
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
        projection: Float[Tensor, "heads seen channels"] | None = None,
        ptr: Tensor | None = None,
        mean: bool = False,
    ) -> None:
        check_flags(mean=mean)
        for name, number in (("lam", lam), ("mu", mu), ("beta", beta)):
            if isinstance(number, Tensor) and number.dim():
                raise ValueError(f"{name} must be a number or a 0-dimensional tensor; got {describe(number)}.")
            check_positive(_number(number), name, allow_zero=True)
        check_kind(graph_term, "graph_term", (Coupling, NoneType), "a Coupling or None")
        if source is not None:
            check_heads(source, "source")
        if metric is not None:
            check_tensor(metric, "metric", "[num_nodes] or [num_nodes, heads]")
        if projection is not None:
            check_tensor(projection, "projection", "[heads, head_channels, channels]")
            if projection.dim() != 3:
                raise ValueError(f"projection must be [heads, head_channels, channels]; got {describe(projection)}.")
        self.penalty = None if penalty is None else get_penalty(penalty)
        self.lam, self.mu, self.beta = lam, mu, beta
        self.graph_term, self.source, self.metric = graph_term, source, metric
        self.constraint, self.projection = get_constraint(constraint, radius), projection
        self.ptr, self.mean = None if ptr is None else as_ptr(ptr), mean
        if self.ptr is not None:
            check_ptr(int(self.ptr[-1]), self.ptr)

    def __call__(self, x: State, x_prev: State | None = None) -> Float[Tensor, ""]:
        """Return F(x). ``x_prev`` is ignored; it is accepted so that the signature is that of `Energy`."""
        self._check(x, "x")
        if self.penalty is not None and self.constraint.diameter**2 > self.penalty.domain[1]:  # F is ∞ there otherwise
            warn_beyond_domain(self.penalty, self, x, lambda: large_distance(self._seen(x), self.ptr))
        return self._assemble(x, self._pairs(_total, x))

    def surrogate(self, x: State, at: State) -> Float[Tensor, ""]:
        """Return the majoriser Q(x) ≥ F(x), with δ replaced by its tangents at the distances of ``at``."""
        self._check(x, "x")
        self._check(at, "at")
        return self._assemble(x, self._pairs(_tangents, x, at))

    def __repr__(self) -> str:
        terms = [repr(self.penalty), f"lam={_number(self.lam):g}"]
        terms += [] if self.graph_term is None else [f"mu={_number(self.mu):g}"]
        terms += [] if self.source is None else [f"beta={_number(self.beta):g}"]
        given = [name for name in ("metric", "projection", "ptr") if getattr(self, name) is not None]
        given += ["mean"] if self.mean else []
        return f"JointEnergy({', '.join([*terms, f'constraint={self.constraint}', *given])})"

    def _pairs(self, cost: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Return the sum over pairs, ``cost(penalty, *states, ptr)``; for a mean, divided graph by graph."""
        total = states[0].new_zeros((), dtype=torch.float64)
        if self.penalty is None:
            return total
        seen = [self._seen(x) for x in states]
        if not self.mean:
            return cost(self.penalty, *seen, self.ptr)
        sizes = graph_sizes(self.ptr, len(seen[0]))
        for size, *part in zip(sizes, *(x.split(sizes) for x in seen), strict=True):
            total = total + cost(self.penalty, *part, None) / max(size, 1)
        return total

    def _assemble(self, x: Tensor, pairs: Tensor) -> Tensor:
        """Return the sum of all terms, given the sum over pairs."""
        wide = by_head(x).double()
        energy = self.lam / 2 * pairs
        if self.graph_term is not None:
            energy = energy + self.mu / 2 * self.graph_term.dirichlet(wide).sum()
        if self.source is not None:
            squares = (wide - by_head(self.source).double()).square().sum(2)
            if self.metric is not None:
                squares = metric_by_head(self.metric).double() * squares
            energy = energy + self.beta * squares.sum()
        return torch.where(self.constraint.holds(by_head(x)), energy, math.inf)

    def _seen(self, x: Tensor) -> Float[Tensor, "N H D"]:
        """Return the state as the penalty is applied to it: projected, in double precision."""
        wide = by_head(x).double()
        if self.projection is None:
            return wide
        return torch.einsum("hdc,nc->nhd", self.projection.double(), wide.squeeze(1))

    def _check(self, x: Tensor, name: str) -> None:
        check_heads(x, name)
        for other, what in ((self.source, "source"), (self.metric, "metric"), (self.projection, "projection")):
            if other is not None:
                check_device(other, what, x.device, "the state")
        if self.source is not None and by_head(self.source).shape != by_head(x).shape:
            raise ValueError(f"source must have the shape {list(x.shape)} of the state; got {describe(self.source)}.")
        if self.metric is not None and self.metric.shape not in (by_head(x).shape[:2], (len(x), 1), (len(x),)):
            raise ValueError(
                f"metric must be [{len(x)}] or [{len(x)}, heads] as the state is {list(x.shape)}; got "
                f"{describe(self.metric)}."
            )
        if self.projection is not None and (by_head(x).size(1) != 1 or x.size(-1) != self.projection.size(2)):
            raise ValueError(
                f"{name} must have one head and the {self.projection.size(2)} channels that the projection reads; got "
                f"{describe(x)}."
            )


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value


def _total(penalty: Penalty, x: Tensor, ptr: Tensor | None) -> Tensor:
    """Return Σ_ij δ(‖x_i − x_j‖²)."""
    return penalty.total(x, ptr)


def _tangents(penalty: Penalty, x: Tensor, at: Tensor, ptr: Tensor | None) -> Tensor:
    """Return the sum over pairs of the tangents of δ at ‖at_i − at_j‖², evaluated at ‖x_i − x_j‖²."""
    omega = penalty.coupling(at, ptr)
    return penalty.total(at, ptr) + (omega.dirichlet(x) - omega.dirichlet(at)).sum()
