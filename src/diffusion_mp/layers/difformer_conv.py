"""``DIFFormerConv``: attention over all pairs, and the observed graph if there is one."""

from __future__ import annotations

from typing import Any, Literal, get_args

from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    AllPairDiffusivity,
    Diffusivity,
    GaussianDiffusivity,
    GraphAugmentedDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
)
from diffusion_mp.errors import check_choice, check_counts, check_flags
from diffusion_mp.graph import SelfLoops
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.updates import ExplicitEuler

Kernel = Literal["simple", "sigmoid", "softmax", "gaussian"]

KERNELS: dict[str, type[AllPairDiffusivity]] = {
    "simple": SimpleDiffusivity,
    "sigmoid": SigmoidDiffusivity,
    "softmax": SoftmaxDiffusivity,
    "gaussian": GaussianDiffusivity,
}


class DIFFormerConv(DiffusionConv):
    r"""One propagation layer of DIFFormer (Wu, Wipf & Yan 2025, Eqs. 54–63), heads averaged (Eq. 62).

    - ``graph="sum"`` (Eqs. 61–63, the default): x′ = (1 − τ) x + τ (Ŝ + Ã) v, the residual form;
    - ``graph="mean"`` (Eq. 24): x′_i = (1 − ½τ Σ_j(ŝ_ij + ã_ij)) x_i + ½τ Σ_j (ŝ_ij + ã_ij) v_j, the conservative form;
    - ``graph=None``: x′ = (1 − τ) x + τ Ŝ v (Eq. 17), whatever edges come.

    The first two are different updates (ERRATA D3). Without observed edges all three are Eq. 17.

    Args:
        in_channels, out_channels, heads: as in :class:`DiffusionConv`.
        kernel: ``"simple"`` (DIFFormer-s, O(N)), ``"sigmoid"`` (DIFFormer-a), ``"softmax"``, ``"gaussian"``.
        projection: W_Q and W_K: ``None`` (Eqs. 17–18, the default, ERRATA D20), ``"separate"`` or ``"tied"``.
        normalize: ``"row"``, ``"frobenius"`` or ``None``; see :class:`AllPairDiffusivity`.
        tau: step size, in (0, 1] for a convex combination.
        graph: how observed edges enter.
        self_loops: of the graph term; the released training adds them (ERRATA D17).
        beta, leak: weight of the source and the leak beside it (ERRATA D22).
        options: further ones of :class:`DiffusionConv` (``transform``, ``keep``, ``bias``, ``dropout``, …).
    """

    references = ("wu2025transformers", "wu2023difformer")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        kernel: Kernel = "simple",
        projection: Literal["separate", "tied"] | None = None,
        normalize: Literal["row", "frobenius"] | None = "row",
        tau: float = 0.5,
        graph: Literal["sum", "mean"] | None = "sum",
        self_loops: SelfLoops = "remaining",
        beta: float = 0.0,
        leak: float = 0.0,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels)
        check_choice(kernel, "kernel", KERNELS)
        check_choice(self_loops, "self_loops", get_args(SelfLoops))
        check_choice(graph, "graph", ["sum", "mean", None])
        diffusivity: Diffusivity = KERNELS[kernel](in_channels, heads=heads, projection=projection, normalize=normalize)
        if graph is not None:
            diffusivity = GraphAugmentedDiffusivity(
                diffusivity, AdjacencyDiffusivity("sym", self_loops=self_loops), graph
            )
        update = ExplicitEuler(tau, "conservative" if graph == "mean" else "residual", beta=beta, leak=leak)
        transform = options.get("transform", True)
        check_flags(transform=transform)
        shared = heads if transform else 1
        super().__init__(in_channels, out_channels, diffusivity, update, shared, **options)
