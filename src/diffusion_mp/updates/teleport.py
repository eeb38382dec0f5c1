"""Propagation that returns to where it started: the steps of APPNP and of label propagation, and where they end."""

from diffusion_mp.errors import check_positive
from diffusion_mp.updates.explicit_euler import ExplicitEuler
from diffusion_mp.updates.implicit import Equilibrium


def teleport(alpha: float) -> ExplicitEuler:
    """x′ = (1 − α) S x + α h, the step of APPNP: of size 1 − α, with source and leak α/(1 − α).

    The leak keeps a deep stack apart, which a source alone does not (D22 in docs/errata.md).

    Examples:
        >>> teleport(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape  # a step of APPNP
        torch.Size([6, 4])
    """
    check_positive(alpha, "alpha", allow_zero=True)
    rate = _rate(alpha)
    return ExplicitEuler(1 - alpha, "residual", beta=rate, leak=rate)


def teleport_limit(alpha: float) -> Equilibrium:
    """x* = α (I − (1 − α) S)⁻¹ h, where such steps end (PPNP; Klicpera et al. 2019, Eq. 3); for 0 < α < 1.

    Examples:
        >>> teleport_limit(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape  # APPNP without end
        torch.Size([6, 4])
    """
    check_positive(alpha, "alpha")
    rate = _rate(alpha)
    return Equilibrium("residual", beta=rate, leak=rate)


def _rate(alpha: float) -> float:
    """The weight of the source and the leak, α/(1 − α)."""
    if alpha >= 1:
        raise ValueError(f"alpha must lie in [0, 1), nothing would propagate at 1; got {alpha}.")
    return alpha / (1 - alpha)
