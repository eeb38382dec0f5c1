"""``Rows``: what is asked of others where the rows at hand are not the whole graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from diffusion_mp.couplings import Coupling
    from diffusion_mp.diffusivities import Diffusivity

C = TypeVar("C", bound="Coupling")


class Rows:
    """The rows of a graph, all of them at hand.

    Rows of different nodes meet in couplings only, and in a few sums. So a graph whose rows come in blocks, or lie with
    several processes, is a subclass of ``Graph`` that answers these methods; layers and models are the same.
    """

    num_nodes: int
    first_node: int = 0
    """The number of the first row in the whole graph."""

    @property
    def total_nodes(self) -> int:
        """The nodes of the whole graph."""
        return self.num_nodes

    def couple(self, diffusivity: Diffusivity, x: Float[Tensor, "N C"]) -> Coupling:
        """The coupling of a diffusivity, for a state that was checked; its product gives these rows."""
        return diffusivity.couple(x, self)  # type: ignore[arg-type]  # a Graph

    def share(self, coupling: C) -> C | Coupling:
        """The coupling between these rows and all of the graph, from one that was made of these rows alone."""
        return coupling

    def total(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """A sum over the nodes of the whole graph, from one over these rows."""
        return x
