"""The identity: every node couples with itself only (an MLP; Wu, Wipf & Yan 2025, Table 1)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.errors import floating


class IdentityCoupling(Coupling):
    """s_ij = 1 if i = j, else 0. To it every node is a graph of its own: in a sum, the other terms say what a graph is.

    Args:
        num_nodes: N.
        dtype, device: of the entries.

    Examples:
        >>> S = IdentityCoupling(6)
        >>> torch.equal(S.to_dense()[0], torch.eye(6))
        True
    """

    def __init__(
        self, num_nodes: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        like = floating((0,), dtype, device)
        super().__init__(
            num_nodes,
            1,
            like,
            ptr=lambda: torch.arange(num_nodes + 1),
            row_stochastic=True,
            nonnegative=True,
            positive_semidefinite=True,
            low_rank=True,
        )

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return v

    def _transpose(self) -> Coupling:
        return self

    def degree(self) -> Float[Tensor, "N heads"]:
        return torch.ones(self.num_nodes, 1, dtype=self.dtype, device=self.device)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return (edge_index[0] == edge_index[1]).to(self.dtype).unsqueeze(1)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        nothing = torch.empty(self.num_nodes, 1, 0, dtype=dtype, device=self.device)
        return LowRankForm(nothing, nothing, torch.ones(self.num_nodes, 1, dtype=dtype, device=self.device))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        return torch.eye(self.num_nodes, dtype=self.dtype, device=self.device).unsqueeze(0)
