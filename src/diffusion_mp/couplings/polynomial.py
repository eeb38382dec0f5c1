"""A polynomial of a coupling: several hops, matrix-free."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.errors import check_device, check_tensor, describe


class PolynomialCoupling(Coupling):
    r"""Σ_{p=1..P} c_p Sᵖ, by Horner's rule: S(c₁v + S(c₂v + …)), P products of S and no power of it.

    Args:
        coupling: S.
        coefficients: c [P], or [P, H] with one polynomial per head.
        nonnegative: a promise about the entries of the polynomial. It is symmetric where S is.

    Raises:
        ValueError: the coefficients have another shape, or heads that do not match those of S.

    Examples:
        >>> A = UniformCoupling(6)
        >>> S = PolynomialCoupling(A, torch.tensor([0.0, 0.5, 0.5]).unsqueeze(1))  # ½A + ½A²
        >>> torch.allclose(S.to_dense(), A.to_dense())  # the mean of a mean is the mean
        True
    """

    def __init__(self, coupling: Coupling, coefficients: Tensor, *, nonnegative: bool = False) -> None:
        check_coupling_kind(coupling)
        check_tensor(coefficients, "coefficients", "[degree] or [degree, heads]")
        check_device(coefficients, "coefficients", coupling.device, "the coupling")
        by_head = coefficients.unsqueeze(1) if coefficients.dim() == 1 else coefficients
        fits = by_head.dim() == 2 and by_head.numel() > 0
        if not fits or (1 not in (coupling.heads, by_head.size(1)) and by_head.size(1) != coupling.heads):
            raise ValueError(
                f"coefficients must be [degree] or [degree, heads] with a degree of at least 1, and one head or those "
                f"of the coupling, which has {coupling.heads}; got {describe(coefficients)}."
            )
        self.coupling, self.coefficients = coupling, by_head
        super().__init__(
            coupling.num_nodes,
            max(coupling.heads, by_head.size(1)),
            coupling,
            symmetric=lambda: coupling.symmetric,
            nonnegative=nonnegative,
            metric=lambda: coupling.metric,
        )

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        coefficients = self.coefficients.to(v.dtype).unsqueeze(2)
        inner = coefficients[-1] * v
        for p in range(coefficients.size(0) - 2, -1, -1):
            inner = coefficients[p] * v + self.coupling._product(inner)
        return self.coupling._product(inner)

    def _transpose(self) -> Coupling:
        turned = self.coupling.T
        if turned is self.coupling:
            return self
        return PolynomialCoupling(turned, self.coefficients, nonnegative=self.nonnegative)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """O(E) for P = 1; beyond, an entry counts walks, and the inherited products with unit vectors do that."""
        if self.coefficients.size(0) > 1:
            return super()._at(edge_index)
        return self.coefficients[0].to(self.dtype) * self.coupling._at(edge_index)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        power = base = self.coupling.to_dense()
        coefficients = self.coefficients.to(self.dtype)[:, :, None, None]
        dense = coefficients[0] * power
        for c in coefficients[1:]:
            power = power @ base
            dense = dense + c * power
        return dense
