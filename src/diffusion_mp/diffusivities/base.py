"""The base class ``Diffusivity`` of all maps from a state to a coupling, with their multiples and sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.checks import check_kind, check_state, describe
from diffusion_mp.couplings import Coupling, ScaledCoupling, SumCoupling
from diffusion_mp.couplings.base import as_scale
from diffusion_mp.graph import Graph
from diffusion_mp.modules import Positive, Resettable

if TYPE_CHECKING:
    from diffusion_mp.energies import EnergyTerm, Penalty

#: The part of the state on which an entry s_ij of a coupling depends; see ``Diffusivity.depends_on``.
Dependence = Literal["nothing", "rows", "edges", "graph", "parts"]


class Diffusivity(Resettable, ABC):
    """Base of all diffusivities: modules that turn a state and a graph into a coupling.

    A diffusivity maps a state x [N, C] and a graph to a coupling S (Wu, Wipf & Yan 2025, Eqs. 3 and 17, *diffusivity
    inference*). A new kind writes :meth:`couple` and declares the attributes below.

    Attributes:
        depends_on: what determines an entry s_ij, up to division of a row by its sum. ``"nothing"``: the graph only.
            ``"rows"``: x_i and x_j. ``"edges"``: x_i and x_j of observed edges; all other entries are zero.
            ``"graph"``, the default: more than x_i and x_j. ``"parts"``: what the diffusivities of a composition
            declare.
        needs_graph: whether observed edges are required.
        heads: number H of heads of the couplings. One head, the default, broadcasts.
        symmetric: whether the couplings are symmetric.
        row_stochastic: whether the rows of the couplings sum to one.
        penalty: the penalty δ with f = δ′, if the couplings are f(‖x_i − x_j‖²) of the state (Eq. 15). Otherwise
            ``None``.
        why_no_penalty: the sentence that a certificate shows if ``penalty`` is ``None``.
        positional: whether rows are ordered positions, so that renaming the nodes changes the coupling.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> both = 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("row")  # sums and multiples
        >>> isinstance(both, Diffusivity), both(x, graph).row_stochastic
        (True, True)
    """

    depends_on: Dependence = "graph"
    needs_graph: bool = False
    symmetric: bool = False
    row_stochastic: bool = False
    penalty: Penalty | None = None
    why_no_penalty: str = "this diffusivity declares no penalty, so no theorem names an energy that it descends."
    heads: int = 1
    positional: bool = False
    #: NumPy arrays leave the arithmetic to this class. Otherwise they would make an array of diffusivities.
    __array_ufunc__ = None

    def forward(
        self,
        x: Float[Tensor, "N C"],
        graph: Graph | None = None,
        edge_attr: Tensor | None = None,
    ) -> Coupling:
        """Return the coupling at a state.

        Args:
            x: state [N, C].
            graph: graph of the nodes. ``None`` is one graph without observed edges.
            edge_attr: features of the edges, which only `GATDiffusivity` reads. ``None`` is the only value for the
                others.

        Raises:
            ValueError: the diffusivity needs observed edges and the graph has none, or it does not read ``edge_attr``.
        """
        if edge_attr is not None:
            raise ValueError(
                f"edge_attr must be None, since {type(self).__name__} reads none; got {describe(edge_attr)}. "
                f"GATDiffusivity(edge_dim=…) reads features; pass one number per edge as edge_weight."
            )
        check_state(x)
        graph = Graph.coerce(x, graph)
        if self.needs_graph and graph.edge_index is None:
            raise ValueError(
                f"{type(self).__name__} works on observed edges; got a graph without any. "
                f"Pass edge_index (an empty [2, 0] one if no edge was observed), or choose an all-pair diffusivity."
            )
        if isinstance(graph, GraphPart):
            # A block of rows, or one of several ranks, makes the coupling of its rows with all nodes.
            return graph.couple(self, x)
        return self.couple(x, graph)

    @abstractmethod
    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        """Return the coupling of a checked state and graph. Compositions call their parts as ``D(x, graph)``.

        Args:
            x: state [N, C].
            graph: graph of the nodes.
        """

    def __mul__(self, scale: float | Tensor | Positive) -> Diffusivity:
        return ScaledDiffusivity(scale, self)

    __rmul__ = __mul__

    # A sum with 0, where Python's sum() starts, is refused too: 0 has no heads and no symmetry.
    def __add__(self, other: Diffusivity) -> Diffusivity:
        if not isinstance(other, Diffusivity):
            raise TypeError(
                f"a diffusivity can only be added to a diffusivity; got {describe(other)}."
            )
        return SumDiffusivity([self, other])

    __radd__ = __add__


class GraphPart(Graph):
    """Base of graphs that hold some rows of a larger graph and couple these rows with all nodes."""

    # Not an ABC: every call of a diffusivity checks for this class, and isinstance of an ABC is several times slower.

    def couple(self, diffusivity: Diffusivity, x: Float[Tensor, "N C"]) -> Coupling:
        """Return the local rows of the coupling of the larger graph."""
        raise NotImplementedError

    def term(self, module: nn.Module, source: Tensor, **inputs: Any) -> Any:
        """Return the term of an energy of the larger graph that a `TermModule` makes, as a function of local rows."""
        raise NotImplementedError

    def check_term(self, term: EnergyTerm) -> None:
        """Raise unless a term can be computed from local rows."""
        raise NotImplementedError


def check_heads_divide(channels: int, heads: int, what: str = "channels") -> None:
    if channels % heads:
        raise ValueError(
            f"heads must divide {what}; got {heads} heads, {channels} channels."
        )


class Composed(Diffusivity):
    """Base of functions of the couplings of other diffusivities, S = combine(S_1, S_2, …).

    A subclass registers its parts, calls :meth:`declare`, and defines :meth:`combine`.
    """

    depends_on = "parts"

    @property
    def parts(self) -> list[Diffusivity]:
        """The diffusivities of the composition, in the order of the arguments of ``combine``."""
        return [module for module in self.children() if isinstance(module, Diffusivity)]

    def declare(self) -> None:
        """Declare what follows from the parts."""
        self.needs_graph = any(part.needs_graph for part in self.parts)
        # Not ``row_stochastic``: the coupling of a sum finds from the weights whether its rows sum to one.
        self.symmetric = all(part.symmetric for part in self.parts)
        self.positional = any(part.positional for part in self.parts)
        # One head broadcasts against the others.
        self.heads = max(part.heads for part in self.parts)

    @abstractmethod
    def combine(self, *parts: Coupling) -> Coupling:
        """Return S for the couplings of the parts.

        Args:
            parts: one coupling for each of :attr:`parts`, in the same order.
        """

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        # Calls instead of `couple`, so that hooks run and a `GraphPart` couples its rows part by part.
        return self.combine(*[part(x, graph) for part in self.parts])


class ScaledDiffusivity(Composed):
    """Multiply a diffusivity by a factor, which may be learned.

    Args:
        scale: the factor: a number, or a tensor, 0-dimensional or [H]. An ``nn.Parameter`` is learned. A ``Positive``
            is learned too, and keeps nonnegative couplings nonnegative.
        diffusivity: the diffusivity to multiply.

    Examples:
        >>> isinstance(0.5 * SimpleDiffusivity(), ScaledDiffusivity)
        True
    """

    why_no_penalty = "a multiple of a diffusivity: scale λ in its Energy instead, or certify the diffusivity itself."

    scale: float | Tensor | Positive

    def __init__(
        self, scale: float | Tensor | Positive, diffusivity: Diffusivity
    ) -> None:
        super().__init__()
        if not isinstance(scale, Positive):
            scale = as_scale(scale, diffusivity.heads)
        # A number, a learned parameter or a module; only a plain tensor becomes a buffer, which moves with the module.
        self._keep("scale", scale)
        self.diffusivity = diffusivity
        self.declare()

    def combine(self, *parts: Coupling) -> Coupling:
        (coupling,) = parts
        # The sign of a plain tensor is not examined, since that would synchronise a GPU in every call.
        if isinstance(self.scale, Positive):
            return ScaledCoupling(
                self.scale(), coupling, nonnegative=True, _checked=True
            )
        return ScaledCoupling(self.scale, coupling, _checked=True)


class SumDiffusivity(Composed):
    """Add diffusivities.

    ``0.5 * Simple + 0.5 * Adjacency("sym")`` is Eq. 24 of Wu, Wipf & Yan (2025). Sums among the terms are flattened.

    Args:
        terms: the diffusivities to add, at least one. Each has one head or the largest number of heads of all terms.

    Examples:
        >>> isinstance(SimpleDiffusivity() + AdjacencyDiffusivity(), SumDiffusivity)
        True
    """

    why_no_penalty = (
        "a sum of diffusivities: terms that are normalised one by one do not descend the sum of their energies "
        "(Eq. 25; D24 in docs/errata.md). CertifiedStep on symmetric, unnormalised terms descends an Energy of them."
    )

    def __init__(self, terms: Sequence[Diffusivity]) -> None:
        super().__init__()
        flat: list[Diffusivity] = []
        for term in terms:
            check_kind(term, "every one of terms", Diffusivity, "a Diffusivity")
            flat += term.parts if isinstance(term, SumDiffusivity) else [term]
        if not flat:
            raise ValueError("terms must hold at least one diffusivity; got none.")
        # Flat, so that a + b + c has one state dict for any brackets.
        self.terms: nn.ModuleList = nn.ModuleList(flat)
        self.declare()
        if any(term.heads not in (1, self.heads) for term in flat):
            raise ValueError(
                f"the terms must have one head or {self.heads}; got {[term.heads for term in flat]}."
            )

    # Modules in the list are not children.
    @property
    def parts(self) -> list[Diffusivity]:
        return cast("list[Diffusivity]", list(self.terms))

    def combine(self, *parts: Coupling) -> Coupling:
        return SumCoupling(parts, _checked=True)
