"""Attention over features that stay what they are, found once and diagonalised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.errors import CouplingMismatchError, check_kind
from diffusion_mp.graph import Graph


class Diagonalized(Diffusivity):
    """The couplings of another diffusivity, which is symmetric and has no parameters, with the eigenvectors at hand.

    Where training goes over one graph of a few thousand nodes again and again, and all pairs of its features are
    coupled, N³ operations once are cheaper than N² in every step: the state at rest is then two products with a dense
    matrix, exact at any β and μ. The coupling is kept until other features or another graph come.

    Args:
        diffusivity: of one head; its couplings are symmetric.

    Raises:
        CouplingMismatchError: when it is called, a coupling that is not symmetric or has several heads.
    """

    depends_on = "graph"
    symmetric = True
    why_no_penalty = "the coupling does not follow the state: certify it itself (Theorem 1)."

    def __init__(self, diffusivity: Diffusivity) -> None:
        super().__init__()
        check_kind(diffusivity, "diffusivity", Diffusivity, "a Diffusivity")
        self.diffusivity, self.needs_graph = diffusivity, diffusivity.needs_graph
        self._seen: list[Tensor] = []
        self._kept: Coupling | None = None

    @torch.no_grad()
    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        seen = [x] if graph.edge_index is None or not self.needs_graph else [x, graph.edge_index]
        same = len(seen) == len(self._seen) and all(map(torch.equal, seen, self._seen))
        if self._kept is None or not same:
            self._kept = _Diagonal(self.diffusivity(x.double(), graph), x.dtype)
            self._seen = [tensor.clone() for tensor in seen]
        return self._kept


class _Diagonal(Coupling):
    """A symmetric nonnegative coupling of one head as a dense matrix, and D̄ − S = Q diag(rates) Qᵀ."""

    def __init__(self, coupling: Coupling, dtype: torch.dtype) -> None:
        if coupling.heads != 1 or not coupling.symmetric:
            raise CouplingMismatchError(
                f"Diagonalized needs a symmetric coupling of one head; got a {type(coupling).__name__} with heads="
                f"{coupling.heads}, symmetric={coupling.symmetric}. Make it with row_stochastic=False, or normalise it "
                f"with SymmetricDiffusivity."
            )
        (entries,) = coupling.to_dense()
        degree = entries.sum(1)
        rates, modes = torch.linalg.eigh(torch.diag(degree) - entries)
        self.entries, self.modes = entries.to(dtype), modes.to(dtype)
        self.rates, self.sums = rates.clamp(min=0), degree.to(dtype).unsqueeze(1)
        super().__init__(
            coupling.num_nodes, 1, self.entries, ptr=coupling.ptr, symmetric=True, nonnegative=coupling.nonnegative
        )

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return (self.entries.to(v.dtype) @ v.flatten(1)).view_as(v)

    def _transpose(self) -> Coupling:
        return self

    def degree(self) -> Float[Tensor, "N heads"]:
        return self.sums

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Float[Tensor, "N H D"]
    ) -> Float[Tensor, "N H D"]:
        modes = self.modes.to(v.dtype)
        factors = function(self.rates).to(v.dtype).unsqueeze(1)
        return (modes @ (factors * (modes.T @ v.flatten(1)))).view_as(v)
