"""Terms of an energy of a graph whose rows several ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import Constraint, EnergyTerm
from diffusion_mp.energies.pairs import HeadState, Scalar
from diffusion_mp.energies.terms import Majorant, SharedTerm
from diffusion_mp.graph import Graph

if TYPE_CHECKING:
    from diffusion_mp.distributed.sharded_graph import ShardedGraph


class HaloTerm(SharedTerm):
    """A sum over edges, of which a rank has those that arrive at its rows.

    With V_r the sum over the edges of rank r, a function of its rows and of its halo, the energy is V = Σ_r V_r. Its
    half gradient and bound at a row are therefore the sums of those of all V_r that read the row: rows are exchanged
    before, and what a rank has for its halo is collected after.

    Args:
        term: V_r, a term of the graph ``arriving`` of the ranks.
        shards: the part of the graph.
    """

    depends_on = "edges"

    def __init__(self, term: EnergyTerm, shards: ShardedGraph) -> None:
        self.term = term
        self.shards = shards
        self.quadratic = term.quadratic

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        """Return the value on this rank; the values of all ranks add up to V."""
        return self.term.value(self.shards.exchange(z), self.shards.arriving)

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        shards = self.shards
        wide = shards.exchange(z)
        half, damping = self.term.majorant(wide, shards.arriving, convex)
        damping = damping.expand(len(wide), -1, -1)
        return Majorant(shards.collect(half), shards.collect(damping))

    def flaw(self, constraint: Constraint) -> str | None:
        return self.term.flaw(constraint)

    def attention(self, z: HeadState, graph: Graph) -> list[Coupling]:
        shards = self.shards
        couplings = self.term.attention(shards.exchange(z), shards.arriving)
        return [shards.share(coupling) for coupling in couplings]

    def __repr__(self) -> str:
        return f"HaloTerm({self.term!r})"
