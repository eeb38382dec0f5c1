"""``CertifiedConv``: attention, graph, source, activation and normalisation in one step that never raises an energy."""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import Any, Unpack, cast

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import checks
from diffusion_mp.checks import Count, PositiveNumber
from diffusion_mp.couplings import Coupling, IdentityCoupling, ScaledCoupling
from diffusion_mp.diffusivities import Diffusivity, Positive
from diffusion_mp.energies import (
    Constraint,
    CouplingTerm,
    Energy,
    PairTerm,
    Penalty,
    ScaledTerm,
    get_constraint,
)
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    Neighbours,
    Pairs,
    TermModule,
)
from diffusion_mp.layers.options import CertifiedConvOptions, PairOptions, split

#: The names of parameters in a state dict, and where they are in the block. They are those that the layer had before it
#: was a block, so that older files load.
NAMES = {
    "mu.": "terms.0.weight.",
    "graph_term.": "terms.0.diffusivity.",
    "lam.": "terms.1.weight.",
    "weight": "terms.1.projection",
    "attention.of_pairs.": "terms.1.attention.of_distance.",
    "attention.": "terms.1.attention.",
}


class CertifiedConv(CertifiedBlock):
    r"""Descent steps on an energy of a source, an attention and a graph: a block of `Pairs` and `Neighbours`.

    For any learned β, λ, μ > 0 the energy

        F(Z) = β‖Z − H‖² + (λ/2n) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖² + Σ_i ι_C(z_i)

    does not rise in a step (Theorem T1 of docs/certified.md). A step is, with W = (λ/n) (f(‖z_i − z_j‖²))_ij + μA,

        z_i ← Proj_C((β h_i + (p_i − w_i) z_i + Σ_j w_ij z_j) / (β + p_i))

    n is the number of nodes of the graph, H the ``source`` of the call, δ the penalty with δ′ = f, w_i the row sums of
    W, and p_i the majorant of `CertifiedStep`. States outside C are projected onto C first. :meth:`energy` returns F.

    Args:
        channels: Number of channels C of the state.
        penalty: δ, or its name: ``"simple"``, ``"quadratic"``, ``"sigmoid"``, ``"softmax"`` or ``"gaussian"``. The
            default has an attention in O(N). ``None`` leaves out the attention, the sum over δ.
        heads: Number of heads H. Without projections the channels are cut into H heads, each with its own constraint
            and attention.
        num_layers: Number of steps. ``None`` iterates to a stationary point of F and differentiates it implicitly. The
            stationary point is the minimiser if C is convex and there is no attention.
        constraint: The set C of every row of a head: ``None``, ``"nonnegative"``, ``"ball"``, ``"sphere"``,
            ``"nonnegative_ball"`` or a `Constraint`. The default is the set that the default penalty needs, since its f
            is negative between states further apart than 2.
        lam: Initial λ > 0; λ is learned.
        mu: Initial μ > 0; μ is learned.
        graph: A, the diffusivity of `Neighbours`. ``True`` is D^-½AD^-½ of the symmetric part of the graph. ``False``
            does not read edges.

    Options:
        projection (str or None): ``"tied"``: distances are measured by learned projections; ``None`` (default):
            distances of the state itself. See `Pairs`.
        radius (float): Radius of a ball or sphere that is given by its name; 1 by default.
        beta (float): Initial weight β > 0 of the source, which is learned; 1 by default.

    Shapes:
        x: [N, channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        source: [N, channels], H; x by default.
        beside: A symmetric and nonnegative coupling of the N nodes, which is added to A.
        output: [N, channels]; with ``return_coupling`` also W, or a list of the W of several steps.

    Raises:
        CouplingMismatchError: A does not declare that it is symmetric and nonnegative.

    Examples:
        >>> CertifiedConv(4, lam=1.0, mu=1.0)(0.1 * x, edge_index).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        channels: int,
        *,
        penalty: Penalty | str | None = "simple",
        heads: Count = 1,
        num_layers: Count | None = 1,
        constraint: Constraint | str | None = "ball",
        lam: PositiveNumber = 1.0,
        mu: PositiveNumber = 1.0,
        graph: bool | Diffusivity = True,
        **options: Unpack[CertifiedConvOptions],
    ) -> None:
        checks.check_kind(
            graph, "graph", (bool, Diffusivity), "a Diffusivity, True or False"
        )
        # `Pairs` needs C too: whether weights are nonnegative depends on the distances within it.
        inside = get_constraint(constraint, options.get("radius", 1.0))
        attention, block = split(options, PairOptions)
        projection = attention.get("projection")
        # Neighbours first, also where there are none: `NAMES` counts on it.
        terms: list[TermModule] = [Neighbours(channels, mu, graph)]
        if penalty is not None:
            pairs = Pairs(
                channels,
                lam,
                penalty=penalty,
                heads=heads,
                projection=projection,
                constraint=inside,
            )
            terms.append(pairs)
        # Projected heads move the uncut state.
        cut = heads if projection is None else 1
        super().__init__(
            channels, terms, num_layers, constraint=inside, heads=cut, **block
        )
        outer = {inside: name for name, inside in NAMES.items()}
        self.register_state_dict_post_hook(partial(_rename, outer))
        self.register_load_state_dict_pre_hook(partial(_rename, NAMES))

    @property
    def lam(self) -> Positive | None:
        """The module that computes λ; ``None`` in a layer without attention."""
        return None if len(self.terms) == 1 else cast("Pairs", self.terms[1]).weight

    @property
    def mu(self) -> Positive:
        """The module that computes μ."""
        return cast("Neighbours", self.terms[0]).weight

    def attention(self, z: Float[Tensor, "N H D"], energy: Energy) -> list[Coupling]:
        """Return W at a state."""
        graph = energy.graph_of(z)
        parts = [
            ScaledCoupling(term.weight, term.term.pull(z, graph), nonnegative=True)
            for term in cast("tuple[ScaledTerm, ...]", energy.terms)
            if isinstance(term.term, (CouplingTerm, PairTerm))
        ]
        # A caller who asked for W gets an operator, also where nothing attends and no edge was observed.
        if not parts:
            return [0.0 * IdentityCoupling(len(z), dtype=z.dtype, device=z.device)]
        return [reduce(add, parts)]

    def returned(self, couplings: list[Coupling]) -> Coupling | list[Coupling]:
        return couplings[0] if self.num_layers == 1 else couplings


def _rename(
    names: dict[str, str],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *others: Any,
) -> None:
    """Replace the beginnings of the names behind ``prefix``, in place; a hook of torch, which passes the others."""
    # A list, since the dict changes in the loop.
    for name in [name for name in state if name.startswith(prefix)]:
        inside = name.removeprefix(prefix)
        # In the order of `NAMES`, where the longer of two beginnings comes first.
        old = next((old for old in names if inside.startswith(old)), "")
        new = names.get(old, "") + inside.removeprefix(old)
        state[prefix + new] = state.pop(name)
