"""All-pair diffusivities: DIFFormer-s, DIFFormer-a, softmax and Gaussian (Wu, Wipf & Yan 2025, Section 5.2)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypedDict, Unpack, cast

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities.query_key import Normalization, Projection, QueryKeyDiffusivity
from diffusion_mp.energies.penalties import GaussianPenalty, Penalty, SigmoidPenalty, SimplePenalty, SoftmaxPenalty
from diffusion_mp.errors import check_choice, check_flags, check_positive
from diffusion_mp.graph import Graph


class AllPairOptions(TypedDict, total=False):
    """The options that all-pair diffusivities share; see :class:`AllPairDiffusivity`."""

    heads: int
    projection: Projection
    head_channels: int | None
    normalize: Normalization
    form: Literal["inner", "distance"]
    row_stochastic: bool


class AllPairDiffusivity(QueryKeyDiffusivity):
    r"""s_ij = f(q_i, k_j) / Σ_l f(q_i, k_l) over all nodes of a graph (Wu, Wipf & Yan 2025, Eq. 17).

    Args:
        channels: C of the state. Needed with projections; otherwise ``None`` leaves it open.
        heads: H. Without projections the channels are cut into H pieces.
        projection: ``None``: q = k = x, the theory's own layer (Eqs. 17–18; the default, ERRATA D20);
            ``"separate"``: q = W_Q x, k = W_K x (Eq. 54); ``"tied"``: W_Q = W_K, which keeps f symmetric (ERRATA D18).
        head_channels: channels of a projected head; C by default, as Eq. 54 has it.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55); ``"frobenius"``: one norm over all nodes,
            heads and channels of a graph, as the released code does, which makes q·k = O(1/n) and the attention nearly
            uniform (ERRATA D1; for parity only); ``None``: vectors as they are.
        form: ``"inner"``: f as a function of q·k as published; ``"distance"``: f(‖q_i − k_j‖²) with the actual
            distance, which is what the energy is made of (ERRATA D8). For unit vectors they coincide.
        row_stochastic: divide rows by their sums (Eq. 15); ``False`` gives Ω = [f] itself, symmetric where q = k.

    An energy is known (``penalty``) for ``projection=None, normalize=None, form="distance"``: f then sees the state
    itself.
    """

    def __init__(
        self,
        channels: int | None = None,
        *,
        heads: int = 1,
        projection: Projection = None,
        head_channels: int | None = None,
        normalize: Normalization = "row",
        form: Literal["inner", "distance"] = "inner",
        row_stochastic: bool = True,
    ) -> None:
        super().__init__(channels, heads, projection, head_channels, normalize)
        check_flags(row_stochastic=row_stochastic)
        check_choice(form, "form", ["inner", "distance"])
        self.form = form
        self.row_stochastic = row_stochastic
        self.symmetric = projection != "separate" and not row_stochastic
        self.why_no_penalty = (
            f"f does not read the state that moves ({projection=}, {normalize=}, {form=}): an energy is known for "
            f"projection=None, normalize=None, form='distance' (ERRATA D8, D18), for the softmax with channels given."
        )

    @abstractmethod
    def penalty_of(self, dim: int | None) -> Penalty | None:
        """δ with f = δ′ for vectors of ``dim`` channels; ``None`` where that must be known and is not."""

    @property
    def penalty(self) -> Penalty | None:  # type: ignore[override]
        """δ, where f reads the very state that moves: no projection, no normalisation, the actual distance."""
        if self.projection is None and self.normalize is None and self.form == "distance":
            return self.penalty_of(None if self.channels is None else self.channels // self.heads)
        return None

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        q, k = self.queries_and_keys(x, graph, unit=False)
        penalty = cast(Penalty, self.penalty_of(q.size(2)))
        return penalty.score.coupling(
            q,
            k,
            graph.segments,
            form=self.form,
            unit=self.normalize == "row",
            normalize=self.row_stochastic,
            nonnegative=self.normalize is not None,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form!r}, row_stochastic={self.row_stochastic}"


class SimpleDiffusivity(AllPairDiffusivity):
    r"""DIFFormer-s: f = 1 + q·k, or 2 − ½z² of the actual distance, in O(N) (Wu, Wipf & Yan 2025, Eqs. 18–19, 54–57).

    (S v)_i = (Σ_j v_j + (Σ_j v_j k_jᵀ) q_i) / (n + q_i·Σ_l k_l) with unit vectors q, k. With ``form="distance"`` it is
    exact for states of any norm and still low-rank; f is non-negative, and an energy falls, while all ‖x_i − x_j‖ ≤ 2
    (ERRATA D7).
    """

    def penalty_of(self, dim: int | None) -> Penalty:
        return SimplePenalty()


class SigmoidDiffusivity(AllPairDiffusivity):
    """DIFFormer-a: f = σ(q·k), or 1/(1 + e^{z²/2 − 1}) (Wu, Wipf & Yan 2025, Eqs. 20, 58–60); O(N²) time, O(N) memory.

    The published equations normalise q and k for this kernel too; the released code does not (ERRATA D2): that is
    ``normalize=None``.
    """

    def penalty_of(self, dim: int | None) -> Penalty:
        return SigmoidPenalty()


class SoftmaxDiffusivity(AllPairDiffusivity):
    """f = exp(q·k/√d), or exp((1 − z²/2)/√d), d the channels of a head (Wu, Wipf & Yan 2025, Eq. 21; ERRATA D9)."""

    def penalty_of(self, dim: int | None) -> Penalty | None:
        return None if dim is None else SoftmaxPenalty(dim)


class GaussianDiffusivity(AllPairDiffusivity):
    """f = exp(−z²/2σ²), the *Kernel* ablation of Wu, Wipf & Yan (2025), Fig. 3; σ is ``bandwidth``."""

    def __init__(
        self, channels: int | None = None, *, bandwidth: float = 1.0, **options: Unpack[AllPairOptions]
    ) -> None:
        super().__init__(channels, **options)
        check_positive(bandwidth, "bandwidth")
        self.bandwidth = bandwidth

    def penalty_of(self, dim: int | None) -> Penalty:
        return GaussianPenalty(self.bandwidth)
