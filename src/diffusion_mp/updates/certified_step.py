"""``CertifiedStep``: source, graph, all pairs, activation and normalisation in a step that never raises an energy."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import check_positive
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.pairs import check_metric
from diffusion_mp.energies.terms import CouplingTerm, EnergyTerm, ScaledTerm, SourceTerm
from diffusion_mp.graph import Graph
from diffusion_mp.modules import Positive
from diffusion_mp.runtime.precision import widened
from diffusion_mp.updates.base import State, StateUpdate


class CertifiedStep(StateUpdate):
    """Take one step that never raises the energy of a source, pairs, a graph and a constraint.

    It is `Energy.step` of the terms of Theorem T1 (docs/certified.md). For any β, λ and μ it never raises

        F(Z) = β‖Z − H‖²_M + (λ/2) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖² + Σ_i ι_C(z_i)

    The step is

        x′_i = Proj_C(x_i + (β m_i (h_i − x_i) − (L_W x)_i) / (β m_i + p_i))

    W = λ (f(‖x_i − x_j‖²))_ij + μA is the coupling at x, and L_W = D_W − W. H is the source, M = diag(m) the metric, C
    the set that contains every row of a head, and p the `majorant` of the coupling. If C is convex, p are the row sums
    of W, and x′ is the projection of a weighted mean of h and all x_j. A node with β = 0 and no neighbours does not
    move.

    Args:
        beta: β ≥ 0, the weight of the source, or a learnable `Positive`. 1 by default.
        constraint: the set C, a `Constraint` or its name: ``"nonnegative"`` (ReLU), ``"ball"`` (clipped norms),
            ``"sphere"`` (RMSNorm without a gain) or ``"nonnegative_ball"``. ``None``, the default, is no constraint.
        radius: the radius of a ball or a sphere that ``constraint`` names.

    Shapes:
        - x, source: [N, H, D] or [N, C].
        - metric: [N] or [N, H], positive.
        - output: the shape of x.

    Raises:
        CouplingMismatchError: the coupling does not promise to be symmetric and nonnegative.

    Examples:
        >>> CertifiedStep(beta=1.0, constraint="nonnegative")(x, SigmoidPenalty().coupling(x), source=x).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        beta: float | Positive = 1.0,
        *,
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(beta, Positive):
            check_positive(beta, "beta", allow_zero=True)
            beta = float(beta)
        self.source_weight = beta
        self.constraint = get_constraint(constraint, radius)

    @property
    def beta(self) -> float | Positive:  # type: ignore[override]
        """The weight of the source, a number or the module that computes it."""
        return self.source_weight

    def step(
        self,
        x: State,
        coupling: Coupling,
        values: State | None = None,
        source: State | None = None,
        *,
        metric: Float[Tensor, " N"] | Float[Tensor, "N H"] | None = None,
        centre: Tensor | None = None,
    ) -> State:
        """Return the projection of x + (βM(h − x) − L_W x) / (βM + p), computed in at least float32.

        Args:
            x: state [N, H, D].
            coupling: the coupling W at x.
            values: ``None`` or x, since the step moves the state itself.
            source: the source h [N, H, D], or ``None``.
            metric: the positive weights m of the nodes in the source term, [N] or [N, H]. ``None`` is ones.
            centre: a point that is subtracted from x before L_W is applied. The differences are the same, and fewer
                digits cancel. ``None`` is the mean of every graph. If rows are spread over processes, all processes
                need one centre (``Graph.centre``).
        """
        if values is not None and values is not x:
            raise ValueError(
                "CertifiedStep moves the state itself; got other values. Transform or drop out what makes the state or "
                "the source, for the energy is one of the state that moves."
            )
        if metric is not None:  # also where no source has it
            check_metric(metric, x, max(x.size(1), coupling.heads))
        terms: list[EnergyTerm] = [CouplingTerm(coupling, centre)]
        if source is not None and self.source_weight != 0.0:
            source_term = SourceTerm(source, metric, _checked=True)
            terms.append(ScaledTerm(self.source_weight, source_term, _checked=True))
        graph = Graph(x.size(0), ptr=coupling.ptr, validate=False)
        wide = widened(x)
        energy = Energy(terms, self.constraint, graph=graph, _checked=True)
        return energy.step(wide).to(x.dtype)

    def extra_repr(self) -> str:
        constraint = f"constraint={self.constraint}"
        if isinstance(self.source_weight, Positive):
            return constraint
        return f"beta={self.source_weight:g}, {constraint}"
