"""``Backtracking``: an explicit step whose size is reduced until the energy decreases."""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.pairs import find_distance_above
from diffusion_mp.energies.penalties import Penalty, QuadraticPenalty, SimplePenalty
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError, check_counts, check_flags, check_positive
from diffusion_mp.graph.ops import graph_sizes
from diffusion_mp.updates.base import Form, LaplacianUpdate, State


class Backtracking(LaplacianUpdate):
    r"""The step of Eq. 6 of TfD (Wu, Wipf & Yan, 2025) with the first of τ, τq, τq², … that does not raise the energy.

        x′ = x − τ(dx − Sv),   P(x′) ≤ P(x)

    This makes Theorem 7 constructive: it states that such a τ exists when S is the penalty's own coupling at the
    state. The energy P is

    * for `QuadraticPenalty` that of the Laplacian of ``form``, tr xᵀΔx (Theorem 1; the residual form has its own);
    * for other penalties Σ_ij δ(‖x_i − x_j‖²) over the pairs of the same graph (Eq. 13), or over the observed edges if
      the coupling is sparse (Example 5);
    * or the value of ``penalty``, where it is a function of the state [N, H, D], such as an `Energy`.

    A step that leaves the domain of the penalty is rejected as well: beyond it the simple penalty decreases, which
    would reward a diverging state. Every graph of a batch has its own τ. The search takes one product with S and one
    energy per trial, without gradients; the accepted step is differentiated with τ held constant. ``last_tau`` is the
    τ of the last call: a number, or a tensor [B] for a batch.

    Args:
        penalty: the penalty δ, or a callable x ↦ energy, of every graph [B], or of all together (0-dimensional), which
            then share τ.
        tau: the first step tried, > 0.
        shrink: factor q in (0, 1).
        max_steps: maximum number of trials.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        exact: try the best τ first, for the simple penalty over all pairs: the energy is a quartic in τ, and its first
            minimum a root of a cubic (Theorem T7 of docs/certified.md). ``tau`` is tried where it has no minimum.

    Shapes:
        x, values [N, H, D]; result [N, H, D].

    Raises:
        ConvergenceError: no step down within ``max_steps``: the coupling does not belong to this energy.
        CouplingMismatchError: ``exact`` with a sparse coupling, whose energy is a sum over its edges.
        ValueError: ``exact`` with another penalty, a state outside the penalty's domain, an argument out of range, a
            source, shapes that do not fit.

    Examples:
        >>> step = Backtracking(SimplePenalty(), tau=1.0)  # reduces τ until the energy decreases
        >>> h = torch.nn.functional.normalize(x, dim=1)
        >>> step(h, SimplePenalty().coupling(h, normalize=True)).shape
        torch.Size([6, 4])
    """

    takes_source = False

    def __init__(
        self,
        penalty: Penalty | Callable[[Tensor], Tensor],
        tau: float = 1.0,
        *,
        shrink: float = 0.5,
        max_steps: int = 30,
        form: Form = "conservative",
        exact: bool = False,
    ) -> None:
        super().__init__(form)
        check_positive(tau, "tau")
        check_positive(shrink, "shrink")
        if shrink >= 1.0:
            raise ValueError(f"shrink must lie in (0, 1), or τ would never get smaller; got {shrink}.")
        check_counts(max_steps=max_steps)
        if not isinstance(penalty, Penalty) and not callable(penalty):
            raise TypeError(f"penalty must be a Penalty or a function of the state; got {penalty!r}.")
        check_flags(exact=exact)
        if exact and not isinstance(penalty, SimplePenalty):
            raise ValueError(f"exact=True needs SimplePenalty(), whose energy is a quartic in τ; got {penalty!r}.")
        self.penalty, self.tau, self.shrink, self.max_steps = penalty, float(tau), float(shrink), max_steps
        self.best_first = exact
        self.last_tau: float | Tensor | None = None

    def check(self, coupling: Coupling) -> None:
        """Raise ``CouplingMismatchError`` for an exact step where the energy is a sum over edges."""
        super().check(coupling)
        if self.best_first and isinstance(coupling, SparseCoupling):
            raise CouplingMismatchError(
                f"Backtracking(exact=True) knows the energy of all pairs; got {coupling!r}, which has one of its "
                f"edges. Leave exact out."
            )

    def step(self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None) -> State:
        """Take the first step tried that does not raise the energy."""
        values = self.validate(x, coupling, values, source)
        own = self.decay(x, coupling)
        slope = own - coupling @ values
        x = x.expand_as(slope)
        tau = self._search(x.detach(), slope.detach(), own.detach(), coupling)
        self.last_tau = tau if tau.dim() else float(tau)
        return _moved(x, slope, tau, coupling)

    @torch.no_grad()
    def _search(self, x: Tensor, slope: Tensor, own: Tensor, coupling: Coupling) -> Tensor:
        """Return τ of every graph [B], or one for all."""
        outside = self._distance_outside(x, coupling)
        if bool((outside != 0).any()):
            raise ValueError(
                f"x must lie in the domain of {self.penalty!r}, squared distances in {list(self.penalty.domain)}; "  # type: ignore[union-attr]
                f"it holds two nodes at squared distance {float(outside[outside != 0][0]):.6g}. Normalise the rows, "
                f"x / x.norm(dim=-1, keepdim=True), or use SigmoidPenalty, whose domain is unbounded."
            )
        start = self.energy(x, coupling)
        per_graph = coupling if start.dim() else None
        # At rest, the difference of the two terms is rounding error, and its energy is meaningless.
        rounding = 64 * torch.finfo(x.dtype).eps
        rest = _sum(slope.square(), per_graph).sqrt() <= rounding * _sum(own.expand_as(x).square(), per_graph).sqrt()
        tau = torch.where(rest, self.tau, self._first(x, slope, coupling))
        for _ in range(self.max_steps):
            trial = _moved(x, slope, tau, coupling)
            fits = (self.energy(trial, coupling) <= start) & (self._distance_outside(trial, coupling) == 0) | rest
            if bool(fits.all()):
                return tau
            tau = torch.where(fits, tau, tau * self.shrink)
        raise ConvergenceError(
            f"Backtracking found no τ down to {float(tau.min()) / self.shrink:.3g} that lowers the energy from "
            f"{float(start[~fits][0]):.6g}. The energy has to belong to the coupling (pass the penalty of its "
            f"diffusivity), the coupling has to be symmetric up to row normalisation, and the state finite."
        )

    def _first(self, x: Tensor, slope: Tensor, coupling: Coupling) -> Tensor:
        """Return the first τ to try."""
        if not (self.best_first and isinstance(self.penalty, SimplePenalty)):
            return torch.tensor(self.tau, dtype=torch.float64, device=x.device)
        parts = zip(_graphs(x, coupling), _graphs(slope, coupling), strict=True)
        best = [first_minimum(self.penalty.along(part, -down).cpu().numpy()) or self.tau for part, down in parts]
        return torch.tensor(best[0] if coupling.ptr is None else best, dtype=torch.float64, device=x.device)

    def energy(self, x: Float[Tensor, "N H D"], coupling: Coupling) -> Float[Tensor, "*B"]:
        """Return the energy that must not rise, of every graph of a batch [B]; in float64 for a `Penalty`."""
        if not isinstance(self.penalty, Penalty):
            return self.penalty(x)
        if isinstance(self.penalty, QuadraticPenalty):
            if self.form == "conservative":  # constants cost nothing; taking them out avoids cancellation
                x = torch.cat([x[:0], *(part - part.mean(0) for part in _graphs(x, coupling))])
            return _sum(x.double() * self.laplacian(coupling, x.dtype)(x).double(), coupling)
        if isinstance(coupling, SparseCoupling):
            cost = self.penalty.delta(edge_distances(x, coupling))
            weight = coupling.graph.edge_weight
            return _sum_edges(cost if weight is None else weight.unsqueeze(1) * cost, coupling)
        return _each(self.penalty.total, x, coupling)

    def _distance_outside(self, x: Tensor, coupling: Coupling) -> Tensor:
        """Return a squared distance outside the domain of the penalty, of every graph, or 0 where there is none."""
        limit = self.penalty.reach(x.dtype) if isinstance(self.penalty, Penalty) else math.inf
        if limit == math.inf:
            return x.new_zeros(())
        if not isinstance(coupling, SparseCoupling):
            return _each(lambda part: x.new_tensor(find_distance_above(limit, part) or 0.0), x, coupling)
        distances = edge_distances(x, coupling)
        return _sum_edges(torch.where(distances > limit, distances, 0.0), coupling)

    def extra_repr(self) -> str:
        exact = ", exact=True" if self.best_first else ""
        return f"{self.penalty}, tau={self.tau:g}, shrink={self.shrink:g}, form={self.form!r}{exact}"


def first_minimum(p: np.ndarray) -> float | None:
    """Return the first minimum τ > 0 of Σ_k p_k τᵏ, ``None`` unless it decreases at 0 and has one."""
    slope = np.polynomial.Polynomial(p).deriv()
    roots = slope.roots()
    real = roots.real[(abs(roots.imag) <= 1e-8 * abs(roots)) & (roots.real > 0)]
    if slope(0) >= 0 or not len(real):
        return None
    tau = real.min()
    return float(tau - slope(tau) / slope.deriv()(tau))  # a Newton step: eigenvalues are only as exact as the largest


def edge_distances(x: Float[Tensor, "N H D"], coupling: SparseCoupling) -> Float[Tensor, "E H"]:
    """Return ‖x_i − x_j‖² over the observed edges, in float64."""
    sender, receiver = coupling.graph.edges
    return (x[sender] - x[receiver]).double().square().sum(-1)


def _moved(x: Tensor, slope: Tensor, tau: Tensor, coupling: Coupling) -> Tensor:
    """Return x − τ slope, with one τ or one for every graph."""
    if tau.dim() and coupling.ptr is not None:
        tau = tau.repeat_interleave(coupling.ptr.diff().to(tau.device)).view(-1, 1, 1)
    return x - tau.to(x.dtype) * slope


def _graphs(x: Tensor, coupling: Coupling) -> tuple[Tensor, ...]:
    """Return the rows of every graph."""
    return x.split(graph_sizes(coupling.ptr, len(x)))


def _each(function: Callable[[Tensor], Tensor], x: Tensor, coupling: Coupling) -> Tensor:
    """Return a function of the rows of every graph [B], of a single graph a number."""
    parts = [function(part) for part in _graphs(x, coupling)]
    if coupling.ptr is None:
        return parts[0]
    return torch.stack(parts) if parts else x.new_zeros(0)


def _sum(x: Tensor, coupling: Coupling | None) -> Tensor:
    """Return Σ x over all rows, or over every graph of a coupling, as exact as of that graph alone."""
    return x.sum() if coupling is None else _each(torch.sum, x, coupling)


def _sum_edges(x: Tensor, coupling: SparseCoupling) -> Tensor:
    """Return Σ x [E, H] over the edges of every graph."""
    if coupling.ptr is None:
        return x.sum()
    graph = torch.searchsorted(coupling.ptr.to(x.device), coupling.graph.edges[1], right=True) - 1
    return x.new_zeros(len(coupling.ptr) - 1).index_add(0, graph, x.sum(1))
