"""``Energy``: distance to the previous state plus λ times a sum of penalties over pairs of nodes."""

from __future__ import annotations

import math
from types import NoneType
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.pairs import State, by_head, check_heads, large_distance, metric_by_head
from diffusion_mp.energies.penalties import Penalty, QuadraticPenalty, get_penalty, warn_beyond_domain
from diffusion_mp.energies.spectrum import Form
from diffusion_mp.errors import (
    CouplingMismatchError,
    check_choice,
    check_device,
    check_kind,
    check_number,
    check_positive,
    check_tensor,
    describe,
)
from diffusion_mp.graph.checks import as_ptr, check_ptr


class Energy:
    r"""E(Z, k) = ‖Z − Z_k‖² + λ P(Z), the energies of TfD (Wu, Wipf & Yan, 2025) in a form that descends.

    P(Z) = Σ_ij δ(‖z_i − z_j‖²) over all ordered pairs of the same graph (Eq. 13), or Σ_ij s_ij δ(‖z_i − z_j‖²) for a
    ``coupling`` S (Eq. 8). λ multiplies the double sum as in Eqs. 8 and 13. The paper's proofs write λ tr ZᵀΔZ, where λ
    is twice this one, since Σ_ij s_ij‖z_i − z_j‖² = 2 tr ZᵀΔZ.

    Optional terms, with M = diag(``metric``):

    * ``graph_term`` Ã (Eq. 25): λ P becomes ½λ P + ½λ Σ_ij ã_ij‖z_i − z_j‖². The step with ½Ω + ½Ã descends it for
      τ and λ of Theorem 1; the step of Eq. 24, which normalises Ŝ separately, does not (D24 in docs/errata.md).
    * ``source`` H with weight ``beta``, and ``leak`` κ: + λ [2κ⟨Z, MZ⟩ − 4β⟨MH, Z⟩], of which the step
      z − τ(Δ + κ)z + τβh is the gradient step. For the row-normalised step of Theorem 7 give the metric d̄ (the degrees
      of Ω at the step's start); it is 1 otherwise. Without ``x_prev`` this is F(Z), which falls from layer to layer for
      every τ < 2/(λ₁ + κ). Propositions 5 and 10 print ‖Z − (Z_k + ηH)‖² + λP instead (``version="printed"`` with
      η = 2λβ). It falls within a step, but not from layer to layer as they claim (D21 in docs/errata.md).
    * ``activation="relu"`` (Eq. 23): ψ = ∞ where an entry is negative, 0 elsewhere. Proposition 9 holds for the step
      from h(Z_k) with ω evaluated there: pass h(Z_k) as ``x_prev``. From Z_k, as printed, it fails (D23).
    * ``laplacian="residual"``: tr Zᵀ(I − S)Z in place of tr Zᵀ(D̄ − S)Z, the energy of the residual step
      (1 − τ)z + τSz (GCN as Example 1 prints it); needs the quadratic penalty and a symmetric coupling.

    Args:
        penalty: a `Penalty` or its name.
        lam: λ > 0, for instance ``certify(...).lam``.
        coupling: S [N, N]; a penalty other than the quadratic one needs a `SparseCoupling`, whose entries are listed.
        source, beta, leak, metric, graph_term, activation, version, laplacian: see above; the source has the shape of
            x, the metric is [N] or [N, H].
        ptr: bounds [B + 1] of the graphs of a ragged batch, for the sums over all pairs.

    Shapes:
        x, x_prev [N, C], or [N, H, D] for H heads, whose energies add up. The result is a 0-dimensional float64
        tensor for every dtype of x, since differences between layers are below the rounding of float32.

    Warns:
        UserWarning: two nodes are farther apart than the penalty's ``domain``, where the energy is not meaningful.

    Raises:
        ValueError: shapes that do not fit, λ not positive, a printed form with a source but no ``x_prev``.
        CouplingMismatchError: a coupling for which the energy is not defined.

    Examples:
        >>> h = torch.nn.functional.normalize(x.double(), dim=1)
        >>> energy = Energy(SimplePenalty(), lam=certify(SimplePenalty(), h, tau=0.5).lam)
        >>> following = ExplicitEuler(tau=0.5)(h, SimplePenalty().coupling(h, normalize=True))
        >>> bool(energy(following, h) <= energy(h, h))
        True
    """

    def __init__(
        self,
        penalty: Penalty | str,
        lam: float = 1.0,
        *,
        coupling: Coupling | None = None,
        source: State | None = None,
        beta: float = 1.0,
        leak: float = 0.0,
        metric: Float[Tensor, " N"] | Float[Tensor, "N H"] | None = None,
        graph_term: Coupling | None = None,
        activation: Literal["relu"] | None = None,
        version: Literal["falling", "printed"] = "falling",
        laplacian: Form = "conservative",
        ptr: Tensor | None = None,
    ) -> None:
        check_positive(lam, "lam")
        check_positive(leak, "leak", allow_zero=True)
        check_choice(version, "version", ["falling", "printed"])
        check_choice(laplacian, "laplacian", ["conservative", "residual"])
        check_choice(activation, "activation", ["relu", None])
        check_number(beta, "beta")
        for name, other in (("coupling", coupling), ("graph_term", graph_term)):
            check_kind(other, name, (Coupling, NoneType), "a Coupling or None")
        if source is not None:
            check_heads(source, "source")
        if metric is not None:
            check_tensor(metric, "metric", "[num_nodes] or [num_nodes, heads]")
            if metric.dim() not in (1, 2):
                raise ValueError(f"metric must be [num_nodes] or [num_nodes, heads]; got {describe(metric)}.")
        self.penalty, self.lam, self.ptr = get_penalty(penalty), lam, None if ptr is None else as_ptr(ptr)
        self.coupling, self.graph_term, self.laplacian = coupling, graph_term, laplacian
        self.source, self.beta, self.leak, self.metric = source, beta, leak, metric
        self.activation, self.version = activation, version
        self._check_coupling()

    def __call__(self, x: State, x_prev: State | None = None) -> Float[Tensor, ""]:
        """Return E(x, k) with x_prev = Z_k; without ``x_prev`` the first term is omitted."""
        self._check(x, x_prev)
        warn_beyond_domain(self.penalty, self, x, lambda: self._large_distance(x))
        return self._assemble(x, x_prev, self._pairs(x))

    def surrogate(self, x: State, x_prev: State | None, at: State) -> Float[Tensor, ""]:
        """Return Ẽ(x, k; Ω) of Eq. 14 with ω_ij = f(‖at_i − at_j‖²): at least E (Proposition 6), equal where at = x.

        Since δ̃(f(s)) = f(s)s − δ(s), this is Σ ω_ij(z_ij² − s_ij) + δ(s_ij), s the distances of ``at``.
        """
        self._check(x, x_prev)
        self._check(at, None, "at")
        check_device(at, "at", x.device, "x")
        return self._assemble(x, x_prev, self._majorant(x, at))

    def __repr__(self) -> str:
        names = ("coupling", "source", "metric", "graph_term", "ptr")
        given = "".join(f", {name}" for name in names if getattr(self, name) is not None)
        return f"Energy({self.penalty!r}, lam={self.lam:g}, version={self.version!r}{given})"

    def _assemble(self, x: Tensor, x_prev: Tensor | None, pairs: Tensor) -> Tensor:
        """Return the sum of all terms, given the sum over pairs."""
        energy = self.lam * pairs
        if self.graph_term is not None:
            energy = energy / 2 + self.lam / 2 * self.graph_term.dirichlet(x).double().sum()
        if self.leak:
            energy = energy + 2 * self.lam * self.leak * _inner(self._weigh(x), x)
        if self.source is not None:
            # Both forms pull with −4λβ⟨MH, Z⟩; the printed one completes the square around Z_k + ηMH with η = 2λβ.
            pull = 2 * self.lam * self.beta * self._weigh(self.source)
            if self.version == "falling":
                energy = energy - 2 * _inner(pull, x)
            elif x_prev is None:
                raise ValueError(
                    "x_prev must be given for version='printed' with a source: Eqs. 11 and 26 measure the distance to "
                    "x_prev + ηH. Use version='falling' for an energy of x alone."
                )
            else:
                x_prev = x_prev + pull
        if x_prev is not None:
            energy = energy + _inner(x - x_prev, x - x_prev)
        if self.activation == "relu":
            energy = torch.where((x < 0).any(), math.inf, energy)
        return energy

    def _pairs(self, x: Tensor) -> Tensor:
        """Return P(x)."""
        if self.coupling is None:
            return self.penalty.total(x, self.ptr)
        if isinstance(self.penalty, QuadraticPenalty):
            dirichlet = self.coupling.dirichlet(x).double().sum()
            if self.laplacian == "residual":  # 2 tr Zᵀ(I − S)Z = Σ s_ij‖z_i − z_j‖² + 2 Σ (1 − d_i)‖z_i‖²
                squares = by_head(x).square().sum(2, dtype=torch.float64)
                dirichlet = dirichlet + 2 * ((1 - self.coupling.degree()) * squares).sum()
            return dirichlet
        weight, z2 = self._edges(x)
        return (weight * self.penalty.delta(z2)).sum()

    def _majorant(self, x: Tensor, at: Tensor) -> Tensor:
        """Σ ω_ij z_ij² − δ̃(ω_ij) for the ω of ``at``."""
        if isinstance(self.penalty, QuadraticPenalty):
            return self._pairs(x)
        if self.coupling is None:
            omega = self.penalty.coupling(at.double(), self.ptr)
            return self.penalty.total(at, self.ptr) + (omega.dirichlet(x.double()) - omega.dirichlet(at.double())).sum()
        weight, z2 = self._edges(x)
        s = self._edges(at)[1]
        return (weight * (self.penalty.f(s) * (z2 - s) + self.penalty.delta(s))).sum()

    def _edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries [E, H] of the sparse coupling and the squared distances of their nodes."""
        coupling = cast(SparseCoupling, self.coupling)  # checked at construction
        source, target = coupling.graph.edges
        values = by_head(x).double()
        return coupling.weight.double(), (values[target] - values[source]).square().sum(2)

    @torch.no_grad()
    def _large_distance(self, x: Tensor) -> float:
        """Return at least a quarter of the largest squared distance in P."""
        if self.coupling is None:
            return large_distance(x, self.ptr)
        z2 = self._edges(x)[1]
        return float(z2.max()) if z2.numel() else 0.0

    def _weigh(self, x: Tensor) -> Tensor:
        """Return M x."""
        if self.metric is None:
            return x
        metric = metric_by_head(self.metric)
        return (metric if x.dim() == 2 else metric.unsqueeze(2)) * x

    def _check_coupling(self) -> None:
        quadratic = isinstance(self.penalty, QuadraticPenalty)
        if self.coupling is not None and not quadratic and not isinstance(self.coupling, SparseCoupling):
            raise CouplingMismatchError(
                f"{type(self.penalty).__name__} over the entries of a coupling needs a SparseCoupling; got "
                f"{type(self.coupling).__name__}. Leave `coupling` out to sum over all pairs."
            )
        if self.laplacian == "residual" and (self.coupling is None or not quadratic or not self.coupling.symmetric):
            raise CouplingMismatchError(
                f"laplacian='residual' needs the quadratic penalty and a symmetric coupling; got {self.penalty!r} and "
                f"{self.coupling!r}."
            )

    def _check(self, x: Tensor, x_prev: Tensor | None, name: str = "x") -> None:
        check_heads(x, name)
        if x_prev is not None:
            check_heads(x_prev, "x_prev")
        if self.ptr is not None:
            check_ptr(x.size(0), self.ptr)
        for name, other in (("x_prev", x_prev), ("source", self.source)):
            if other is not None and other.shape != x.shape:
                raise ValueError(f"{name} must have the shape {list(x.shape)} of the state; got {describe(other)}.")
            if other is not None:
                check_device(other, name, x.device, "the state")
        if self.metric is not None:
            check_device(self.metric, "metric", x.device, "the state")
            if self.metric.size(0) != x.size(0):
                raise ValueError(f"metric must have {x.size(0)} rows, one per node; got {describe(self.metric)}.")
        for name, coupling in (("coupling", self.coupling), ("graph_term", self.graph_term)):
            if coupling is None:
                continue
            check_device(x, "x", coupling.device, name)
            if coupling.num_nodes != x.size(0):
                raise ValueError(f"{name} must have {x.size(0)} nodes as the state does; got {coupling!r}.")
            if coupling.heads > 1 and (x.dim() == 2 or x.size(1) != coupling.heads):
                raise ValueError(
                    f"{name} has {coupling.heads} heads, so the state must be [num_nodes, {coupling.heads}, channels]; "
                    f"got {describe(x)}."
                )


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return ⟨a, b⟩, accumulated in float64."""
    return (a * b).sum(dtype=torch.float64)
