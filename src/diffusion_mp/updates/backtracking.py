"""``Backtracking``: the explicit step, with τ made small enough for the energy to go down."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.pairs import find_distance_above
from diffusion_mp.energies.penalties import Penalty, QuadraticPenalty
from diffusion_mp.errors import ConvergenceError, check_counts, check_positive
from diffusion_mp.updates.base import Form, LaplacianUpdate


class Backtracking(LaplacianUpdate):
    r"""The step of Eq. 6 of TfD (Wu, Wipf & Yan, 2025) with the first τ, τq, τq², … at which the energy does not rise.

    .. math:: x' = x - \tau (d x - S v), \qquad P(x') \le P(x)

    This makes Theorem 7 constructive: it states that such a τ exists when S is the penalty's own coupling at the
    state. The energy P is, by the coupling that comes,

    * for `QuadraticPenalty` that of the Laplacian of ``form``, tr xᵀΔx (Theorem 1; the residual form has its own);
    * for other penalties Σ_ij δ(‖x_i − x_j‖²) over the pairs of the same graph (Eq. 13), or over the observed edges if
      the coupling is sparse (Example 5);
    * or whatever ``penalty`` returns, when it is a function of the state [N, H, D], such as an `Energy`.

    Nor is a step taken that leaves the penalty's domain: beyond it the simple penalty falls, and would reward a state
    that explodes. One product with S, one energy per trial. The search runs without gradients; the accepted step is
    differentiated with τ held constant. The τ of the last call is ``last_tau``.

    Args:
        penalty: the penalty δ, or a callable x ↦ energy (0-dimensional).
        tau: the first step tried, > 0.
        shrink: factor q in (0, 1).
        max_steps: trials at most.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).

    Shapes:
        x, values [N, H, D]; result [N, H, D].

    Raises:
        ConvergenceError: no step down within ``max_steps``: the coupling does not belong to this energy.
        ValueError: a state outside the penalty's domain, an argument out of range, a source, shapes that do not fit.
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
    ) -> None:
        super().__init__(form)
        check_positive(tau, "tau")
        check_positive(shrink, "shrink")
        if shrink >= 1.0:
            raise ValueError(f"shrink must lie in (0, 1), or τ would never get smaller; got {shrink}.")
        check_counts(max_steps=max_steps)
        if not isinstance(penalty, Penalty) and not callable(penalty):
            raise TypeError(f"penalty must be a Penalty or a function of the state; got {penalty!r}.")
        self.penalty, self.tau, self.shrink, self.max_steps = penalty, float(tau), float(shrink), max_steps
        self.last_tau: float | None = None

    def step(
        self,
        x: Float[Tensor, " N #H D"],
        coupling: Coupling,
        values: Float[Tensor, " N #H D"] | None = None,
        source: Float[Tensor, " N #H D"] | None = None,
    ) -> Float[Tensor, " N #H D"]:
        """Take the largest step tried that does not raise the energy."""
        values = self.validate(x, coupling, values, source)
        diagonal = self.diagonal(coupling)
        own = (diagonal.to(x.dtype) if isinstance(diagonal, Tensor) else diagonal) * x
        slope = own - coupling @ values
        # At rest, what is left of the two terms is rounding, and its energy means nothing.
        at_rest = bool(slope.norm() <= 64 * torch.finfo(x.dtype).eps * own.norm())
        x = x.expand_as(slope)
        self.last_tau = self.tau if at_rest else self._search(x.detach(), slope.detach(), coupling)
        return torch.sub(x, slope, alpha=self.last_tau)

    @torch.no_grad()
    def _search(self, x: Tensor, slope: Tensor, coupling: Coupling) -> float:
        outside = self._distance_outside(x, coupling)
        if outside is not None:
            raise ValueError(
                f"x must lie in the domain of {self.penalty!r}, squared distances in {list(self.penalty.domain)}; "  # type: ignore[union-attr]
                f"it holds two nodes at squared distance {outside:.6g}. Normalise the rows, x / x.norm(dim=-1, "
                f"keepdim=True), or use SigmoidPenalty, whose domain is unbounded."
            )
        start = self.energy(x, coupling)
        tau = self.tau
        for _ in range(self.max_steps):
            trial = torch.sub(x, slope, alpha=tau)
            if bool(self.energy(trial, coupling) <= start) and self._distance_outside(trial, coupling) is None:
                return tau
            tau *= self.shrink
        raise ConvergenceError(
            f"Backtracking found no τ between {tau / self.shrink:.3g} and {self.tau:.3g} that lowers the energy from "
            f"{float(start):.6g}. The energy has to belong to the coupling (pass the penalty of its diffusivity), the "
            f"coupling has to be symmetric up to row normalisation, and the state finite."
        )

    def energy(self, x: Float[Tensor, "N H D"], coupling: Coupling) -> Float[Tensor, ""]:
        """The energy that must not rise, in float64 where it is one of ours."""
        if not isinstance(self.penalty, Penalty):
            return self.penalty(x)
        if isinstance(self.penalty, QuadraticPenalty):
            centred = x - x.mean(0) if self.form == "conservative" else x  # constants cost nothing; they would cancel
            return (centred.double() * self.laplacian(coupling, x.dtype)(centred).double()).sum()
        if isinstance(coupling, SparseCoupling):
            cost = self.penalty.delta(edge_distances(x, coupling))
            weight = coupling.graph.edge_weight
            return (cost if weight is None else weight.unsqueeze(1) * cost).sum()
        return self.penalty.total(x, coupling.ptr)

    def _distance_outside(self, x: Tensor, coupling: Coupling) -> float | None:
        """A squared distance among those summed that the penalty is not meant for; None if there is none."""
        limit = self.penalty.reach(x.dtype) if isinstance(self.penalty, Penalty) else math.inf
        if limit == math.inf:
            return None
        if not isinstance(coupling, SparseCoupling):
            return find_distance_above(limit, x, coupling.ptr)
        distances = edge_distances(x, coupling)
        return float(distances.max()) if bool((distances > limit).any()) else None

    def extra_repr(self) -> str:
        return f"{self.penalty}, tau={self.tau:g}, shrink={self.shrink:g}, form={self.form!r}"


def edge_distances(x: Float[Tensor, "N H D"], coupling: SparseCoupling) -> Float[Tensor, "E H"]:
    """‖x_i − x_j‖² over the observed edges, in float64."""
    sender, receiver = coupling.graph.edges
    return (x[sender] - x[receiver]).double().square().sum(-1)
