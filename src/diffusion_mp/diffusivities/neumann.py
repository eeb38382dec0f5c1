"""``NeumannDiffusivity``: learned diffusion between positions of a sequence, under a stability budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.neumann import NeumannCoupling, check_stencil, is_symmetric_stencil
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_counts, check_positive
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.neumann import Boundary


class NeumannDiffusivity(Diffusivity):
    r"""α_k = budget · σ(η) softmax(θ)_k for every head, whatever the state (Zhang & Zhou, § 3.4).

    Thus Σ_k α_k < budget throughout training. With ½, as in the paper, the explicit step I + Σ_k α_k Δ_{h_k} is
    non-expansive, with its spectrum in [−1, 1]; above ¼ the highest modes may change sign, against the paper's proof
    (docs/errata.md, P2). With ¼ the spectrum lies in [0, 1]. ``budget=None`` is α_k = exp(θ_k), for updates that are
    stable at any α: `ImplicitEuler`, `CrankNicolson`, `HeatKernel`.

    Rows are ordered positions, and the sequences of a batch are its graphs; edges are not read.

    Args:
        heads: H; each has its own α.
        strides: h_k ≥ 1.
        boundary: neighbours of the ends of a sequence, see `NeumannCoupling`.
        alpha: initial Σ_k α_k, divided equally between the strides; below the budget.
        budget: > 0, or ``None``.

    Raises:
        ValueError: an argument does not fit.

    Examples:
        >>> S = NeumannDiffusivity(strides=(1, 2), alpha=0.1)(x)  # the rows are positions of a sequence
        >>> S.symmetric
        True
    """

    positional = True
    why_no_penalty = "the stencil does not look at the state: certify the coupling itself (Theorem 1)."

    def __init__(
        self,
        heads: int = 1,
        *,
        strides: Sequence[int] = (1,),
        boundary: Boundary = "symmetric",
        alpha: float = 0.1,
        budget: float | None = 0.5,
    ) -> None:
        super().__init__()
        check_counts(heads=heads)
        check_stencil(strides, boundary)
        check_positive(alpha, "alpha")
        if budget is not None:
            check_positive(budget, "budget")
            if alpha >= budget:
                raise ValueError(
                    f"alpha must be below the budget {budget:g}, which bounds it; got {alpha:g}. Raise the budget, or "
                    f"pass budget=None with an update that is stable for any alpha."
                )
        self.heads, self.strides = heads, tuple(strides)
        self.boundary: Boundary = boundary
        self.initial_alpha, self.budget = float(alpha), budget
        self.symmetric = is_symmetric_stencil(strides, boundary)
        self.theta = nn.Parameter(torch.empty(len(self.strides), heads))
        self.eta = None if budget is None else nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Restore the initial α; no random numbers are drawn."""
        if self.eta is None or self.budget is None:
            nn.init.constant_(self.theta, math.log(self.initial_alpha / len(self.strides)))
        else:
            nn.init.constant_(self.eta, math.log(self.initial_alpha / (self.budget - self.initial_alpha)))
            nn.init.zeros_(self.theta)

    @property
    def alpha(self) -> Float[Tensor, "K heads"]:
        """α_k of every stride and head, in at least float32."""
        theta = self.theta.to(torch.promote_types(self.theta.dtype, torch.float32))
        if self.eta is None or self.budget is None:
            return theta.exp()
        return self.budget * self.eta.to(theta.dtype).sigmoid() * theta.softmax(0)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        alpha = self.alpha.to(torch.promote_types(x.dtype, torch.float32))
        return NeumannCoupling(graph.num_nodes, alpha, self.strides, self.boundary, graph.segments, nonnegative=True)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, strides={self.strides}, boundary={self.boundary!r}, budget={self.budget}"
