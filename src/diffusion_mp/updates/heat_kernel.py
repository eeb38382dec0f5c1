"""``HeatKernel``: the exact solution of the diffusion, without time discretisation."""

import math
from itertools import repeat
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.checks import PositiveNumber
from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.spectrum import laplacian_extremes, spectral_interval
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.runtime.precision import wide_dtype
from diffusion_mp.updates.base import (
    Form,
    Laplacian,
    LaplacianUpdate,
    State,
    dense_formula_runs,
    working_precision,
)
from diffusion_mp.updates.linear_solve import by_graph, identity_like, reduced

#: Largest ta for an interval that begins at −a: rounding errors are multiplied by
#: e^{ta}.
LOST = 3.0


class HeatKernel(LaplacianUpdate):
    """Solve the diffusion exactly for a time t, x′ = e^{−tΔ} v (Wu, Wipf & Yan 2025, Eq. 5).

    A coupling that knows its eigenvectors (`NeumannCoupling`) is exponentiated in them. Linear attention S = U Kᵀ with
    any queries and keys has a closed form, in O(N F² + F³) (Theorem T3 of docs/certified.md). For other couplings the
    update sums a Chebyshev expansion (Tal-Ezer & Kosloff 1984):

        e^{−tΔ} v = e^{−t(c−r)} Σ_k (2 − δ_k0) (−1)ᵏ e^{−t r} I_k(t r) T_k((Δ − c)/r) v

    Here [c − r, c + r] contains the spectrum of Δ, T_k are the Chebyshev polynomials and I_k the modified Bessel
    functions. The expansion takes about √(2 t r log(1/ε)) products with S, where ε is the resolution of the values, at
    least the resolution of float32. Autograd holds the interval constant, since the result does not depend on it. The
    transforms of ``torch.func``, forward mode and exports take the exponential of a matrix, of up to 4 096 nodes.

    Args:
        t: diffusion time t > 0.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).

    Shapes:
        - x, values: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split into the
          heads of the coupling. There is no source.
        - output: [N, H, D], or [N, C].

    Raises:
        CouplingMismatchError: the coupling is not reversible and has no closed form.

    Examples:
        >>> HeatKernel(t=1.0)(x, AdjacencyDiffusivity("row")(x, graph)).shape
        torch.Size([6, 4])
    """

    needs_reversible = True
    takes_source = False

    def __init__(self, t: PositiveNumber, form: Form = "conservative") -> None:
        super().__init__(form)
        self.t = float(t)

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        v = working_precision(values, x, coupling)
        laplacian = Laplacian(coupling, self.form, v.dtype)
        out = laplacian.function(lambda rate: torch.exp(-self.t * rate), v)
        if out is None and dense_formula_runs(coupling):
            power = _exponential(-self.t * laplacian.dense())
            out = (power @ v.transpose(0, 1)).transpose(0, 1)
        elif out is None:
            out = self._without_matrix(laplacian, v, values.dtype)
        return out.to(values.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the degree of the series depends on values
    def _without_matrix(
        self, laplacian: Laplacian, v: State, dtype: torch.dtype
    ) -> State:
        """Return e^{−tΔ} v in closed form or by the series, as exact as a state of ``dtype`` needs it."""
        coupling = laplacian.coupling
        # Closed forms need a Δ whose diagonal part is one, or zero in empty rows.
        if coupling.low_rank and (self.form == "residual" or coupling.row_stochastic):
            form = coupling.low_rank_form(v.dtype)
            if form is not None and form.diagonal is None:
                rates = v.new_ones(coupling.num_nodes, coupling.heads, 1)
                if self.form == "conservative":
                    rates = (coupling.degree().unsqueeze(2) > 0.5).to(v.dtype)
                return low_rank_heat(form, rates, self.t, v)
        if not coupling.reversible:
            raise CouplingMismatchError(
                f"{type(self).__name__} needs a reversible coupling, or features without a diagonal beside them; got a "
                f"{type(coupling).__name__} in which nodes keep different shares of themselves, as in SGFormer. "
                f"ImplicitEuler, CrankNicolson and Equilibrium take it."
            )
        self.warn_if_rounded(coupling, 1.0 / self.t)
        low, high = spectral_interval(coupling, self.form)
        # A bound from row sums is free and usually good enough. If it lies far below
        # zero, it is loose or the state does grow. Only eigenvalues, by Lanczos, tell
        # which.
        if -self.t * low > LOST:
            low, high = laplacian_extremes(coupling, self.form)
        tol = torch.finfo(wide_dtype(dtype)).eps
        return math.exp(-self.t * low) * self._series(laplacian, v, low, high, tol)

    def _series(
        self, laplacian: Laplacian, v: State, low: float, high: float, tol: float
    ) -> State:
        """Return e^{−t(Δ − low)} v for a Δ with eigenvalues in [low, high]."""
        radius = (high - low) / 2
        weights = chebyshev_weights(self.t * radius, tol)
        total = weights[0] * v
        if radius == 0.0:  # Δ is a multiple of the identity
            return total
        shifted = Laplacian(laplacian.coupling, self.form, v.dtype, -(low + high) / 2)
        before = v
        current = shifted(v) / radius
        total = total + weights[1] * current
        for weight in weights[2:]:
            # T_{k+1}(X) = 2 X T_k(X) − T_{k−1}(X)
            following = (2.0 / radius) * shifted(current) - before
            before = current
            current = following
            total = total + weight * current
        return total

    def extra_repr(self) -> str:
        return f"t={self.t:g}, form={self.form!r}"


def chebyshev_weights(z: float, tol: float) -> list[float]:
    """Return the coefficients of e^{-z}·exp(−zX), X in [−1, 1], in the T_k(X), as many as ``tol`` needs."""
    from scipy.special import ive

    if z == 0.0:
        return [1.0]
    digits = math.log(1.0 / min(tol, 0.5)) + 5.0
    # About √(2z log(1/tol)) orders count. More are computed, since they cost nothing,
    # and the tail is cut off by its sum.
    most = 2.0 * math.sqrt(z * digits) + 2.0 * digits
    orders = np.arange(math.ceil(most))
    weights = 2.0 * ive(orders, z) * (-1.0) ** orders
    weights[0] /= 2.0
    # The error of stopping before order k.
    tail = np.cumsum(np.abs(weights)[::-1])[::-1]
    count = max(2, np.count_nonzero(tail > tol))
    return cast("list[float]", weights[:count].tolist())


def low_rank_heat(
    form: LowRankForm,
    diagonal: Float[Tensor, " N #H one"],
    t: float,
    v: Float[Tensor, " N #H D"],
) -> HeadState:
    """Return exp(−t(diag(d) − U Kᵀ)) v (Theorem T3 of docs/certified.md); d_i = 1, or 0 if row i of U is zero.

    For d = 1, with G = KᵀU and φ₁(X) = (e^X − 1)/X:

        e⁻ᵗ[v + U tφ₁(tG) Kᵀv]

    In general x changes by U [e^{-t} tφ₁(tG) Kᵀ(dv) + tφ₁(t(G − I)) Kᵀ((1 − d)v)]. Both matrices are blocks of one
    exponential, which does not overflow.
    """

    # Only rows without senders need the third block of the exponential.
    blocks = 2 + bool((diagonal == 0).any())

    def graphs(diagonal: Tensor, left: Tensor, right: Tensor, v: Tensor) -> Tensor:
        left, right = reduced(left, right)
        core = right.mT @ left
        eye = identity_like(core)
        zero = torch.zeros_like(core)
        rows = [
            [core - eye, eye, eye],
            [zero, -eye, zero],
            [zero, zero, zero],
        ]
        generator = torch.cat(
            [torch.cat(row[:blocks], dim=-1) for row in rows[:blocks]], dim=-2
        )
        # The blocks right of the first are e⁻ᵗ tφ₁(tG) and tφ₁(t(G − I)).
        size = core.size(-1)
        power = _exponential(t * generator)[..., :size, size:]
        kept = diagonal * v
        pooled = right.mT @ kept
        if blocks == 3:
            pooled = torch.cat([pooled, right.mT @ (v - kept)], dim=-2)
        return torch.exp(-t * diagonal) * v + left @ (power @ pooled)

    return by_graph(form, repeat(graphs), diagonal, form.left, form.right, v)


def _exponential(x: Tensor) -> Tensor:
    # torch.linalg.matrix_exp (torch 2.13) has errors up to 2e-11 for norms between 3e-4
    # and 0.05. A block 1 appended to the matrix keeps its norm above.
    size = x.size(-1)
    widened = pad(x, (0, 1, 0, 1)) + pad(x.new_ones(1, 1), (size, 0, size, 0))
    return torch.linalg.matrix_exp(widened)[..., :-1, :-1]
