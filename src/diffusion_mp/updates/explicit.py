"""Explicit steps: ``ExplicitEuler`` (GCN, GIN, APPNP, DIFFormer), ``teleport``, ``MomentumStep``, ``Backtracking``."""

import math
import sys
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.pairs import edge_distance, find_distance_above
from diffusion_mp.energies.penalties import Penalty, QuadraticPenalty
from diffusion_mp.graph.ops import graph_of, graph_sizes, mean_rows
from diffusion_mp.modules import Positive
from diffusion_mp.updates.base import Form, Laplacian, LaplacianUpdate, State


class ExplicitEuler(LaplacianUpdate):
    r"""One explicit Euler step with source and leak (Eqs. 6, 10, 22, 24, 63 of TfD, Wu, Wipf & Yan, 2025).

        x′ = x − τ(d + κ)x + τSv + τβh

    with values v, the state itself unless given, and d_i the diagonal of Δ:

    * ``form="conservative"`` (Eqs. 6, 22, 24): d_i = Σ_j s_ij, and constants stay as they are. With symmetric S and
      τ < 2/λ₁ it descends the energy of Δ = D̄ − S, tr ZᵀΔZ = ½ Σ_ij s_ij‖z_i − z_j‖².
    * ``form="residual"`` (Eq. 63, GCN, GIN): d_i = 1. With symmetric S and τ < 2/λ₁ it descends the energy of a
      positive semidefinite Δ = I − S; for GCN's S = D^-½AD^-½ that is ½ Σ_ij a_ij‖z_i/√d_i − z_j/√d_j‖², and √d_i, not
      a constant, stays as it is.

    Examples 1 and 2 print the residual form of a step that Eq. 6 defines as conservative; Eq. 24 is ½Ŝ + ½Ã in the
    conservative form, Eqs. 61–63 are Ŝ + Ã in the residual one. A source alone lets the state run off along the
    kernel of Δ; with a leak κ the steady state is (Δ + κ)⁻¹βh (see `Equilibrium`). APPNP is `teleport`.

    Args:
        tau: step size τ > 0: a number, or a learnable one, whose initial value ``reset_parameters`` restores. A
            parameter may leave this range in training; a `Positive` stays above zero.
        form, beta, leak: see `LaplacianUpdate`; shapes and errors are those of `StateUpdate`.

    Examples:
        >>> torch.allclose(ExplicitEuler(tau=1.0)(x, UniformDiffusivity()(x)), x.mean(0).expand(6, 4))
        True
    """

    tau: float | Tensor | Positive

    def __init__(
        self,
        tau: float | Tensor | Positive,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        if isinstance(tau, Tensor):
            errors.check_tensor(tau, "tau", "of no dimensions")
            if tau.dim():
                raise ValueError(
                    f"tau must be one number, nn.Parameter(torch.tensor(0.5)) for instance; got {errors.describe(tau)}."
                )
            # A model is built on the meta device to be loaded, and may be built in compiled code: there are no values.
            if not tau.is_meta and not torch.compiler.is_compiling():
                errors.check_positive(float(tau.detach()), "tau")
        elif not isinstance(tau, Positive):
            errors.check_positive(tau, "tau")
            tau = float(tau)
        self._keep("tau", tau)

    @property
    def step_size(self) -> float | Tensor:
        return self.tau() if isinstance(self.tau, Positive) else self.tau

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        if not isinstance(self.tau, float):
            return x + self.step_size * self.velocity(x, coupling, values, source)
        moved = coupling.matmul(values)
        keep = 1.0 - self.tau * self.rate(coupling)
        if isinstance(keep, Tensor):
            # Rounded after the difference, which half precision would lose.
            keep = keep.to(x.dtype)
        # GCN (τ = 1) and APPNP keep nothing of the state, up to the rounding of their numbers: two passes less.
        if isinstance(keep, Tensor) or abs(keep) > 4 * sys.float_info.epsilon:
            moved = torch.add(keep * x, moved, alpha=self.tau)
        elif self.tau != 1.0:
            moved = self.tau * moved
        if source is not None and self.beta != 0.0:
            moved = torch.add(moved, source, alpha=self.tau * self.beta)
        return moved

    def extra_repr(self) -> str:
        if isinstance(self.tau, Positive):  # a child, which prints itself
            return super().extra_repr()
        tau = f"{self.tau:g}" if isinstance(self.tau, float) else "learned"
        return f"tau={tau}, {super().extra_repr()}"


def teleport(alpha: float) -> ExplicitEuler:
    """Return the step of APPNP, x′ = (1 − α) S x + α h: size 1 − α, source weight and leak α/(1 − α), 0 ≤ α < 1.

    The leak keeps the states of a deep stack apart, which a source alone does not (D22 in docs/errata.md). The limit of
    these steps is `teleport_limit`.

    Examples:
        >>> teleport(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape  # a step of APPNP
        torch.Size([6, 4])
    """
    errors.check_number(
        alpha, "alpha", lambda share: 0 <= share < 1, "lie in [0, 1), nothing would propagate at 1"
    )
    rate = alpha / (1 - alpha)
    return ExplicitEuler(1 - alpha, "residual", beta=rate, leak=rate)


class MomentumStep(LaplacianUpdate):
    r"""K steps of the heavy-ball method (Polyak, 1964) for the diffusion with source and leak, from a state at rest.

        z⁺ = z − τ((Δ + κ)z − βh) + m(z − z₋)

    The energy of TfD (Wu, Wipf & Yan, 2025, Eq. 8) is its Lyapunov function, ‖z⁺ − z‖² the kinetic part (Theorem T4 of
    docs/certified.md). Let Δ = D̄ − Ω, P = Σ_ij δ(‖z_i − z_j‖²) and τ ≤ 2(1 − m)/λ_max, with λ_max ≤ n f(0). Then
    P(z⁺) + (2m/τ)‖z⁺ − z‖² ≤ P(z) + (2m/τ)‖z − z₋‖², which is E(Z_{k+1}, k) ≤ E(Z_k, k − 1) with λ = τ/(2m). Ω may be
    recomputed at every z.

    With one symmetric and positive semidefinite Δ for all steps, τ < 2(1 + m)/λ₁ suffices, λ₁ the largest eigenvalue
    of Δ + κ. For states measured from the steady state, ½(1 + m)‖z⁺ − z‖² + τ⟨z⁺, (Δ + κ)z⟩ is a squared norm of both
    and does not increase. Convergence is fastest for τ = 4/(√λ₁ + √μ)² and m = ((√λ₁ − √μ)/(√λ₁ + √μ))², μ the
    smallest eigenvalue that has to decay: about √(λ₁/μ) steps where `ExplicitEuler` takes λ₁/μ.

    With ``steps=1`` the calling layer or model passes the state one step earlier as ``previous``, and the coupling may
    change with the state.

    Args:
        tau, momentum, steps: τ > 0, m in [0, 1) and K.
        form, beta, leak: see `LaplacianUpdate`; shapes and errors are those of `StateUpdate`.

    Examples:
        >>> MomentumStep(tau=0.5, momentum=0.5, steps=10)(x, AdjacencyDiffusivity("row")(x, graph)).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        tau: float,
        momentum: float,
        steps: int = 10,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        errors.check_positive(tau, "tau")
        errors.check_number(
            momentum,
            "momentum",
            lambda m: 0 <= m < 1,
            "lie in [0, 1), or nothing would ever come to rest",
        )
        errors.check_counts(steps=steps)
        self.tau = float(tau)
        self.momentum = float(momentum)
        self.steps = steps
        self.takes_previous = steps == 1

    def step(
        self,
        x: State,
        coupling: Coupling,
        values: State,
        source: State | None = None,
        *,
        previous: State | None = None,
    ) -> State:
        """Return the state after K steps from ``values``, at rest without ``previous``."""
        if previous is not None and not self.takes_previous:
            raise ValueError(
                f"previous is one step earlier, so it goes with steps=1; got it with steps={self.steps}."
            )
        state = values
        before = values if previous is None else previous
        for _ in range(self.steps):
            change = self.tau * self.velocity(state, coupling, state, source)
            change = change + self.momentum * (state - before)
            before = state
            state = state + change
        return state

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, momentum={self.momentum:g}, steps={self.steps}, {super().extra_repr()}"


class Backtracking(LaplacianUpdate):
    r"""The step of Eq. 6 of TfD (Wu, Wipf & Yan, 2025) with the first of τ, τq, τq², … that does not raise the energy.

        x′ = x − τ(dx − Sv),   P(x′) ≤ P(x)

    Theorem 7 states that such a τ exists when S is the penalty's own coupling at the state. The energy P is

    * for `QuadraticPenalty` that of the Laplacian of ``form``, tr xᵀΔx (Theorem 1; the residual form has its own);
    * for other penalties Σ_ij δ(‖x_i − x_j‖²) over the pairs of the same graph (Eq. 13), or over the observed edges if
      the coupling is sparse (Example 5);
    * or the value of ``penalty``, where it is a function of the state [N, H, D], such as an `Energy`.

    A step that leaves the domain of the penalty is rejected too: beyond it the simple penalty decreases, which would
    reward a diverging state. Every graph of a batch has its own τ; ``last_tau`` is that of the last call, a number or a
    tensor [B]. A trial takes one product with S and one energy, without gradients; the accepted step is differentiated
    with τ held constant.

    Args:
        penalty: the penalty δ, or a callable x ↦ energy, of every graph [B], or of all together (0-dimensional), which
            then share τ.
        tau, shrink, max_steps: the first step tried, the factor q in (0, 1), and the maximum number of trials.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).

    Raises:
        ConvergenceError: no step down within ``max_steps``: the coupling does not belong to this energy.

    Examples:
        >>> h = torch.nn.functional.normalize(x, dim=1)
        >>> Backtracking(SimplePenalty())(h, SimplePenalty().coupling(h, normalize=True)).shape
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
    ) -> None:
        super().__init__(form)
        errors.check_positive(tau, "tau")
        errors.check_number(
            shrink, "shrink", lambda q: 0 < q < 1, "lie in (0, 1), or τ would never get smaller"
        )
        errors.check_counts(max_steps=max_steps)
        errors.check_kind(
            penalty, "penalty", (Penalty, Callable), "a Penalty or a function of the state"
        )
        self.penalty = penalty
        self.tau = float(tau)
        self.shrink = float(shrink)
        self.max_steps = max_steps
        self.last_tau: float | Tensor | None = None

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        decay = self.decay(x, coupling)
        slope = decay - coupling @ values
        x = x.expand_as(slope)
        tau = self._search(x.detach(), slope.detach(), decay.detach(), coupling)
        self.last_tau = tau if tau.dim() else float(tau)
        return x - _by_row(tau, coupling, x.dtype) * slope

    @torch.no_grad()
    def _search(self, x: Tensor, slope: Tensor, decay: Tensor, coupling: Coupling) -> Tensor:
        """Return τ of every graph [B], or one for all."""
        outside = self._outside(x, coupling)
        if bool((outside != 0).any()):
            self._refuse_state(x, outside, coupling)
        start = self.energy(x, coupling)
        # At rest the slope is the rounding error of a difference, and a search among its energies would shrink τ.
        ptr = coupling.ptr if start.dim() else None
        size = _each(torch.sum, slope.square(), ptr)
        rounding = 64 * torch.finfo(x.dtype).eps
        rest = size <= rounding**2 * _each(torch.sum, decay.expand_as(x).square(), ptr)
        tau = torch.full_like(rest, self.tau, dtype=torch.float64)
        for _ in range(self.max_steps):
            trial = x - _by_row(tau, coupling, x.dtype) * slope
            lower = self.energy(trial, coupling) <= start
            accepted = rest | (lower & (self._outside(trial, coupling) == 0))
            if bool(accepted.all()):
                return tau
            tau = torch.where(accepted, tau, tau * self.shrink)
        raise errors.ConvergenceError(
            f"Backtracking found no τ down to {float(tau.min()) / self.shrink:.3g} that lowers the energy from "
            f"{float(start[~accepted][0]):.6g}. The energy has to belong to the coupling (pass the penalty of its "
            f"diffusivity), the coupling has to be symmetric up to row normalisation, and the state finite."
        )

    def energy(self, x: Float[Tensor, "N H D"], coupling: Coupling) -> Float[Tensor, "*B"]:
        """Return the energy that must not rise, of every graph of a batch [B]; in float64 for a `Penalty`."""
        if not isinstance(self.penalty, Penalty):
            value = self.penalty(x)
            count = 1 if coupling.ptr is None else len(coupling.ptr) - 1
            if not isinstance(value, Tensor) or value.shape not in (torch.Size(), (count,)):
                raise TypeError(
                    f"penalty(x) must be one number as a tensor, or one of every graph of a batch; "
                    f"got {errors.describe(value)}."
                )
            return value
        if isinstance(self.penalty, QuadraticPenalty):
            if self.form == "conservative":
                # Constants cost nothing, and beside them differences would be rounded.
                x = x - mean_rows(x, coupling.ptr)
            laplacian = Laplacian(coupling, self.form, x.dtype)
            return _each(torch.sum, x.double() * laplacian(x).double(), coupling.ptr)
        if isinstance(coupling, SparseCoupling):
            cost = self.penalty.delta(edge_distance(x, coupling.graph))
            weight = coupling.graph.edge_weight
            return _sum_edges(cost if weight is None else weight.unsqueeze(1) * cost, coupling)
        return _each(self.penalty.total, x, coupling.ptr)

    def _outside(self, x: Tensor, coupling: Coupling) -> Tensor:
        """Return for every graph a squared distance beyond the domain, of edges the sum of these, or zero."""
        limit = self.penalty.reach(x.dtype) if isinstance(self.penalty, Penalty) else math.inf
        if limit == math.inf:
            return x.new_zeros(())
        if isinstance(coupling, SparseCoupling):
            distances = edge_distance(x, coupling.graph)
            return _sum_edges(torch.where(distances > limit, distances, 0.0), coupling)

        def beyond(part: Tensor) -> Tensor:
            return x.new_tensor(find_distance_above(limit, part) or 0.0, dtype=torch.float64)

        return _each(beyond, x, coupling.ptr)

    def _refuse_state(self, x: Tensor, outside: Tensor, coupling: Coupling) -> None:
        assert isinstance(self.penalty, Penalty)
        if isinstance(coupling, SparseCoupling):
            outside = edge_distance(x, coupling.graph)
        raise ValueError(
            f"x must lie in the domain of {self.penalty!r}, squared distances in {list(self.penalty.domain)}; "
            f"it holds two nodes at squared distance {float(outside.max()):.6g}. Normalise the rows, "
            f"x / x.norm(dim=-1, keepdim=True), or use SigmoidPenalty, whose domain is unbounded."
        )

    def extra_repr(self) -> str:
        return f"{self.penalty}, tau={self.tau:g}, shrink={self.shrink:g}, form={self.form!r}"


def _by_row(tau: Tensor, coupling: Coupling, dtype: torch.dtype) -> Tensor:
    """Return the step size of its graph for every row, or one for all."""
    if tau.dim() and coupling.ptr is not None:
        tau = tau.repeat_interleave(coupling.ptr.diff().to(tau.device)).view(-1, 1, 1)
    return tau.to(dtype)


def _each(function: Callable[[Tensor], Tensor], x: Tensor, ptr: Tensor | None) -> Tensor:
    """Return a function of the rows of every graph [B], of a single graph a number."""
    parts = [function(part) for part in x.split(graph_sizes(ptr, len(x)))]
    if ptr is None:
        return parts[0]
    return torch.stack(parts) if parts else x.new_zeros(0)


def _sum_edges(x: Tensor, coupling: SparseCoupling) -> Tensor:
    if coupling.ptr is None:
        return x.sum()
    graph = graph_of(coupling.ptr, coupling.graph.edges[1])
    return x.new_zeros(len(coupling.ptr) - 1).index_add(0, graph, x.sum(1))
