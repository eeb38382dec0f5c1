"""``MixturePenalty``: a penalty that is learned, and concave at every moment of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings.scores import MixtureScore
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.errors import check_kind, check_place, check_positive, check_tensor
from diffusion_mp.kernels.precision import exp_limit


class MixturePenalty(nn.Module, Penalty):
    r"""f(z²) = Σ_m c_m e^{−z²/(2σ_m²)} with learned c_m, σ_m > 0, and δ(z²) = Σ_m 2c_mσ_m² (1 − e^{−z²/(2σ_m²)}).

    f is completely monotone (Bernstein, 1928), so δ is concave and increasing whatever was learned, and everything that
    is certified for penalties stays so at every step of training (Theorem T5 of docs/certified.md). The kernel f is
    positive definite. The logarithms of c and σ are the parameters, so a step of training changes both by a factor.
    Widths count up to e^±20 and weights up to e^±40, so that cσ² stays within single precision.

    Args:
        widths: σ_m at the start.
        weights: c_m at the start; equal, with f(0) = 1, by default.

    Raises:
        TypeError, ValueError: none at all, not as many weights as widths, or one that is not positive and finite.

    Examples:
        >>> penalty = MixturePenalty(widths=(0.5, 1.0))
        >>> penalty.total(x).shape
        torch.Size([])
    """

    def __init__(self, widths: Sequence[float] = (0.25, 0.5, 1.0, 2.0), weights: Sequence[float] | None = None) -> None:
        super().__init__()
        check_kind(widths, "widths", (list, tuple), "a list of numbers")
        weights = [1 / max(len(widths), 1)] * len(widths) if weights is None else weights
        check_kind(weights, "weights", (list, tuple), "a list of numbers, or None")
        if not widths or len(weights) != len(widths):
            raise ValueError(
                f"widths must hold a number at least, and weights as many; got {len(widths)} and {len(weights)}."
            )
        for name, numbers in (("widths", widths), ("weights", weights)):
            for number in numbers:
                check_positive(number, f"every one of {name}")
        self.initial = [float(width) for width in widths], [float(weight) for weight in weights]
        self.log_widths = nn.Parameter(torch.empty(len(widths)))
        self.log_weights = nn.Parameter(torch.empty(len(weights)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the widths and weights of the start."""
        for parameter, numbers in zip((self.log_widths, self.log_weights), self.initial, strict=True):
            parameter.copy_(torch.tensor(numbers, dtype=torch.float64).log())

    @property
    def widths(self) -> Float[Tensor, " M"]:
        """σ as it is now."""
        return _exp(self.log_widths, 20.0)

    @property
    def weights(self) -> Float[Tensor, " M"]:
        """c as it is now."""
        return _exp(self.log_weights, 40.0)

    @property
    def score(self) -> MixtureScore:
        return MixtureScore(self.widths, self.weights)

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        check_tensor(z2, "z2", "of squared distances")
        check_place(z2, self, "z2")
        scale = 2 * self.widths.to(z2.dtype).square()
        z2 = z2.clamp(min=0)  # a distance of zero may be rounded below, and over a narrow width that is far
        return -(scale * self.weights.to(z2.dtype) * torch.expm1(-z2.unsqueeze(-1) / scale)).sum(-1)

    def extra_repr(self) -> str:
        numbers = ([round(value, 6) for value in values.tolist()] for values in (self.widths, self.weights))
        return "widths={}, weights={}".format(*numbers)


def _exp(logarithms: Float[Tensor, " M"], limit: float) -> Float[Tensor, " M"]:
    """e^logarithms between e^±limit, or as far as the dtype goes."""
    limit = min(limit, exp_limit(logarithms.dtype))
    return logarithms.clamp(-limit, limit).exp()
