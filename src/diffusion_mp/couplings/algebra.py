"""The identity and polynomials of couplings; multiples and sums are in base.py."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_mp.checks import check_tensor, describe, floating
from diffusion_mp.couplings.base import Coupling, DerivedCoupling, check_coupling_kind
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.shapes import Entries, Pairs, Values
from diffusion_mp.graph.arguments import as_num_nodes
from diffusion_mp.runtime.cache import cached_property


class IdentityCoupling(Coupling):
    """Couple every node with itself only.

    The coupling is the identity: s_ij is 1 if i = j, else 0. A layer with this coupling is an MLP (Wu, Wipf & Yan 2025,
    Table 1). In ``ptr`` of this coupling every node is a separate graph, so a sum takes its boundaries from the other
    terms.

    Args:
        num_nodes: number N of nodes.
        dtype: dtype of the coupling; ``None`` is the default dtype of torch.
        device: device of the coupling; ``None`` is the default device of torch.

    Examples:
        >>> torch.equal(IdentityCoupling(6).to_dense()[0], torch.eye(6))
        True
    """

    row_stochastic = True
    no_empty_row = True
    nonnegative = True
    positive_semidefinite = True
    low_rank = True

    def __init__(
        self,
        num_nodes: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        num_nodes = as_num_nodes(num_nodes)
        # A tensor without entries says the dtype and the device, and takes no memory.
        super().__init__(num_nodes, 1, floating((0,), dtype, device))

    @cached_property
    def ptr(self) -> Tensor:
        return torch.arange(self.num_nodes + 1)

    def _product(self, v: Values) -> Values:
        # Without a copy: `received` makes one where a caller may write to the result.
        return v

    def _transpose(self) -> Coupling:
        return self

    def _at(self, edge_index: Pairs) -> Entries:
        return (edge_index[0] == edge_index[1]).to(self.dtype).unsqueeze(1)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        # No features: all of the identity is its diagonal.
        nothing = torch.empty(self.num_nodes, 1, 0, dtype=dtype, device=self.device)
        return LowRankForm(nothing, nothing, self._ones(dtype))


class PolynomialCoupling(DerivedCoupling):
    """Evaluate a polynomial of a coupling without storing its powers.

    The polynomial has no constant term. A product evaluates it by Horner's rule with P products of S:

        Σ_p c_p S^p

    Here p runs from 1 to P. The polynomial is symmetric where S is symmetric.

    Args:
        coupling: the coupling S.
        coefficients: the coefficients c [P], or [P, H] for one polynomial per head, with P ≥ 1.

    Options:
        nonnegative: whether no entry of the polynomial is negative. ``None``, the default, promises nothing.

    Examples:
        >>> S = PolynomialCoupling(UniformCoupling(6), torch.tensor([0.5, 0.5]))  # ½A + ½A²
        >>> torch.allclose(S.degree(), torch.ones(6, 1))
        True
    """

    parts = ("coupling", "coefficients")
    low_rank = False

    def __init__(
        self, coupling: Coupling, coefficients: Tensor, **promises: bool | None
    ) -> None:
        check_coupling_kind(coupling)
        shape = "[degree] or [degree, heads]"
        check_tensor(
            coefficients, "coefficients", shape, coupling.device, "the coupling"
        )
        by_head = coefficients
        if coefficients.dim() == 1:
            by_head = coefficients.unsqueeze(1)
        if (
            by_head.dim() != 2
            or not by_head.numel()
            or len({1, coupling.heads, by_head.size(1)}) > 2
        ):
            raise ValueError(
                f"coefficients must be {shape} with a degree of at least 1, and one head or those of the coupling, "
                f"which has {coupling.heads}; got {describe(coefficients)}."
            )
        heads = max(coupling.heads, by_head.size(1))
        super().__init__(coupling, heads, **promises)
        self.coefficients = by_head

    def _product(self, v: Values) -> Values:
        coefficients = self.coefficients.to(v.dtype).unsqueeze(2)
        inner = coefficients[-1] * v
        # From the highest power down, so that every power costs one product of S.
        for p in range(coefficients.size(0) - 2, -1, -1):
            inner = coefficients[p] * v + self.coupling._product(inner)
        return self.coupling._product(inner)

    def _transpose(self) -> Coupling:
        return PolynomialCoupling(
            self.coupling.T, self.coefficients, nonnegative=self.nonnegative
        )

    def _at(self, edge_index: Pairs) -> Entries:
        """Return the entries in O(E) for P = 1; for P > 1 an entry is a sum over walks."""
        if self.coefficients.size(0) > 1:
            return super()._at(edge_index)
        return self.coefficients[0].to(self.dtype) * self.coupling._at(edge_index)
