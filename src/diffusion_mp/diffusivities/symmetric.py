"""``SymmetricDiffusivity``: D^-½ΩD^-½ of any symmetric diffusivity."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, symmetric_normalized
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_flags, check_kind
from diffusion_mp.graph import Graph


class SymmetricDiffusivity(Diffusivity):
    r"""D^-½ΩD^-½ with D the row sums of Ω, or with Ω less its diagonal in place of Ω (Zhou et al. 2004, Section 2).

    What GCN does to a graph, for any non-negative symmetric Ω: an attention, a Gaussian of positions, a sum of these
    and a graph. Rows do not sum to one; the spectral radius is at most one, so label propagation and ``Equilibrium`` of
    the residual form are well posed with any leak.

    Args:
        diffusivity: gives Ω, whose rows are not divided by their sums (``row_stochastic=False``).
        diagonal: whether ω_ii counts; see :func:`symmetric_normalized`.

    Raises:
        TypeError, ValueError: no diffusivity, or one that divides rows by their sums.
        CouplingMismatchError: its couplings are not promised to be non-negative.

    Examples:
        >>> kernel = GaussianDiffusivity(normalize=None, measure="distance", row_stochastic=False)
        >>> SymmetricDiffusivity(kernel, diagonal=False)(x).symmetric
        True
    """

    depends_on = "parts"
    why_no_penalty = (
        "D^-½ΩD^-½ divides by the degrees of both ends, which are no function of a distance: certify Ω itself."
    )

    def __init__(self, diffusivity: Diffusivity, diagonal: bool = True) -> None:
        super().__init__()
        check_kind(diffusivity, "diffusivity", Diffusivity, "a Diffusivity")
        check_flags(diagonal=diagonal)
        if diffusivity.row_stochastic and not diffusivity.symmetric:
            raise ValueError(
                f"diffusivity must give Ω itself, with row sums to divide by; {type(diffusivity).__name__} has divided "
                f"its rows by them already. Make it with row_stochastic=False, or normalization='sum' for an adjacency."
            )
        self.diffusivity, self.diagonal = diffusivity, diagonal
        self.needs_graph, self.symmetric = diffusivity.needs_graph, diffusivity.symmetric
        self.heads, self.positional = diffusivity.heads, diffusivity.positional

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return symmetric_normalized(self.diffusivity(x, graph), diagonal=self.diagonal)

    def extra_repr(self) -> str:
        return f"diagonal={self.diagonal}"
