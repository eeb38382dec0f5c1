"""The layers of the papers with attention over all pairs: each only chooses a diffusivity and an update.

Their options are those of the diffusivity, of the update and of :class:`DiffusionConv`, where they are explained. For
another choice give :class:`DiffusionConv` or :class:`MultiHeadConv` a diffusivity of your own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    AdjacencyEnhancedDiffusivity,
    AllPairDiffusivity,
    EdgeSparseFlowDiffusivity,
    GaussianDiffusivity,
    GraphAugmentedDiffusivity,
    KernelizedSoftmaxDiffusivity,
    PenaltyDiffusivity,
    Positive,
    RelationalBias,
    SGFormerDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
    SparseFlowDiffusivity,
)
from diffusion_mp.diffusivities.query_key import Normalization, Projection
from diffusion_mp.energies import Penalty
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_positive
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.layers.multi_head_conv import MultiHeadConv
from diffusion_mp.updates import ExplicitEuler, StateUpdate, teleport

TAU = 0.5

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

    The first two are different updates, which the paper takes for one (docs/errata.md, D3). Without observed edges all
    three are Eq. 17.

    Where in- and output have the same channels, the defaults are those of the layer inside :class:`DIFFormer`: the
    state itself propagates and is kept. Where they differ, a map of the values has to change them, with a bias as in
    PyG.

    Args:
        in_channels, out_channels, heads: as in :class:`DiffusionConv`.
        kernel: ``"simple"`` (DIFFormer-s, O(N)), ``"sigmoid"`` (DIFFormer-a), ``"softmax"``, ``"gaussian"``, or a
            `Penalty`, whose f it then is.
        projection, normalize: of the attention, see :class:`AllPairDiffusivity`.
        tau, beta, leak: of the update, see :class:`ExplicitEuler`.
        update: another one, which has its own step size, source and leak.
        graph: how observed edges enter.
        self_loops: of the graph term D^-½AD^-½; the released code adds them in its training script.
        transform, keep, bias: see :class:`DiffusionConv`. By default no W_V, ``"state"`` and no bias for channels that
            stay, as Eq. 63 prints it; W_V, ``"values"`` and a bias for others.
        options: further ones of :class:`DiffusionConv` (``concat``, ``dropout``, …).
        qkv_bias: biases of W_Q, W_K and W_V, of those that there are.
        graph_weight: w: (1 − w) Ŝ + w Ã in the update that ``graph`` names; by default both count 1, or both ½.
        direction, degrees: of the graph term, see :class:`AdjacencyDiffusivity`.

    The released code is this layer with other options: docs/released.md.

    Examples:
        >>> DIFFormerConv(4, 8, kernel="simple", tau=0.5)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("wu2025transformers", "wu2023difformer")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        kernel: Literal["simple", "sigmoid", "softmax", "gaussian"] | Penalty = "simple",
        projection: Projection = None,
        normalize: Normalization = "row",
        tau: float | Tensor | Positive = TAU,
        beta: float = 0.0,
        leak: float = 0.0,
        update: StateUpdate | None = None,
        graph: Literal["sum", "mean"] | None = "sum",
        self_loops: SelfLoops = "remaining",
        transform: bool | None = None,
        keep: Literal["values", "state"] | None = None,
        bias: bool | None = None,
        concat: bool = False,
        qkv_bias: bool = False,
        graph_weight: float | None = None,
        direction: Literal["directed", "undirected", "pyg"] = "directed",
        degrees: Literal["weighted", "count"] = "weighted",
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads)
        if not isinstance(kernel, Penalty):
            check_choice(kernel, "kernel", KERNELS)
        check_choice(graph, "graph", ["sum", "mean", None])
        check_flags(concat=concat, qkv_bias=qkv_bias)
        changes = in_channels != (heads * out_channels if concat else out_channels)
        transform = changes if transform is None else transform
        check_flags(transform=transform)
        biased = qkv_bias and projection is not None
        make = partial(PenaltyDiffusivity, kernel) if isinstance(kernel, Penalty) else KERNELS[kernel]
        attention = make(in_channels, heads=heads, projection=projection, normalize=normalize, bias=biased)
        adjacency = AdjacencyDiffusivity("sym", self_loops=self_loops, direction=direction, degrees=degrees)
        augmented = GraphAugmentedDiffusivity(attention, adjacency, graph or "sum", graph_weight)
        if update is None:
            update = ExplicitEuler(tau, "conservative" if graph == "mean" else "residual", beta=beta, leak=leak)
        elif isinstance(tau, (Tensor, Positive)) or tau != TAU or beta or leak:
            raise ValueError(
                f"tau, beta and leak are those of the explicit step, which update replaces; got tau={tau}, "
                f"beta={beta}, leak={leak} beside {update!r}. Give them to the update."
            )
        super().__init__(
            in_channels,
            out_channels,
            attention if graph is None else augmented,
            update,
            heads if transform else 1,
            concat=concat,
            transform=transform,
            keep=("values" if changes else "state") if keep is None else keep,
            bias=changes if bias is None else bias,
            value_bias=qkv_bias and transform,
            **options,
        )


class NodeFormerConv(MultiHeadConv):
    r"""One layer of NodeFormer (Wu et al. 2022; slides, Algorithm 1 and "Input Graphs as Relational Bias").

    z_u = W_O ‖_h [ Σ_v s^h_uv v^h_v + Σ_p σ(b_ph) Σ_v (A^p)_uv v^h_v ],  v = W_V x, with the kernelised
    Gumbel-softmax s of :class:`KernelizedSoftmaxDiffusivity`: a step of size 1 of the coupling S + Σ_p σ(b_p) A^p.
    Without observed edges it is attention alone, where the released code needs a graph to run at all.

    The defaults are those that train well with few labels, in this layer and in :class:`NodeFormer`. The slides have
    ``relational_bias="sum", hops=1, tau=0.25, logits="dot", num_samples=10`` (docs/errata.md, N11).

    Args:
        in_channels, heads: as in :class:`DiffusionConv`.
        out_channels: channels after W_O, and of every head unless ``head_channels`` is given.
        head_channels: of queries, keys and values.
        relational_bias: how observed edges are added: ``"sym"`` or ``"row"``, normalised by degrees, as the released
            code has it, ``"sum"``, the plain sum of the slides, or ``None``.
        hops: P, how far the bias reaches.
        projection, tau, logits, num_samples: of the attention, see :class:`KernelizedSoftmaxDiffusivity`.
        bias, dropout, validate: as in :class:`MultiHeadConv`.
        attention: further options of :class:`KernelizedSoftmaxDiffusivity` (``num_features``, ``generator``, …).
        qkv_bias: biases of W_Q, W_K and W_V, of those that there are.
        powers, gate: of the bias of the edges, see :class:`RelationalBias`.

    The released code is this layer with other options: docs/released.md.

    Examples:
        >>> NodeFormerConv(4, 8, heads=2)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("wu2022nodeformer", "choromanski2021performer")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        head_channels: int | None = None,
        relational_bias: Literal["sum", "sym", "row"] | None = "sym",
        hops: int = 4,
        projection: Projection = "separate",
        tau: float = 1.0,
        logits: Literal["dot", "scaled_dot"] = "scaled_dot",
        num_samples: int = 0,
        bias: bool = True,
        dropout: float = 0.0,
        validate: bool = False,
        qkv_bias: bool = False,
        powers: Literal["walks", "reach"] = "walks",
        gate: Literal["sigmoid"] | None = "sigmoid",
        **attention: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels)
        check_choice(relational_bias, "relational_bias", ["sum", "sym", "row", None])
        check_flags(qkv_bias=qkv_bias)
        width = out_channels if head_channels is None else head_channels
        softmax = KernelizedSoftmaxDiffusivity(
            in_channels,
            heads=heads,
            projection=projection,
            head_channels=None if projection is None else width,
            bias=qkv_bias and projection is not None,
            tau=tau,
            logits=logits,
            num_samples=num_samples,
            **attention,
        )
        edges = RelationalBias(heads, hops=hops, normalization=relational_bias or "sum", powers=powers, gate=gate)
        super().__init__(
            in_channels,
            out_channels,
            softmax if relational_bias is None else GraphAugmentedDiffusivity(softmax, edges),
            heads,
            head_channels=width,
            bias=bias,
            dropout=dropout,
            validate=validate,
            value_bias=qkv_bias,
        )


class SFiConv(MultiHeadConv):
    r"""x′ = x + (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h with the sparse flow S (SFi-Former, Eq. 11).

    Ã = D^-½ (A + I) D^-½, and γ > 0 is learnable. Without observed edges the bracket is S^h alone. With ``lam=0`` S is
    softmax attention, and this is a layer of DFi-Former; that and ``adjacency=False`` is multi-head attention.

    Args:
        in_channels, heads: as in :class:`DiffusionConv`.
        out_channels: channels after W_O; those of x with ``residual``.
        head_channels: of queries, keys and values; by default ``out_channels / heads``.
        hops: let flow come only from nodes at most so many edges away (:class:`EdgeSparseFlowDiffusivity`, O(E));
            ``None``: from all.
        adjacency: the term Ã; ``False`` leaves it out, and (1 + γ)⁻¹ γ with it.
        gamma, self_loops: γ at the start, and of Ã; see :class:`AdjacencyEnhancedDiffusivity`.
        projection: of the attention.
        residual: add x; ``False`` gives the change only, as :class:`GPSBlock` needs it.
        bias, dropout, validate: as in :class:`MultiHeadConv`.
        attention: further options of :class:`SparseFlowDiffusivity` (``lam``, ``alpha``, ``friction``, …).

    Raises:
        TypeError, ValueError: channels that do not fit, or as in the diffusivities.

    Examples:
        >>> SFiConv(4, 4, heads=2)(x, edge_index).shape
        torch.Size([6, 4])
    """

    references = ("sfiformer",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        head_channels: int | None = None,
        hops: int | None = None,
        adjacency: bool = True,
        gamma: float = 1.0,
        self_loops: SelfLoops = "remaining",
        projection: Projection = "separate",
        residual: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        validate: bool = False,
        **attention: Any,
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads)
        check_flags(adjacency=adjacency)
        if head_channels is None and out_channels % heads:
            raise ValueError(
                f"heads must divide out_channels; got {heads} heads, {out_channels} channels. Or pass head_channels."
            )
        width = out_channels // heads if head_channels is None else head_channels
        shared: dict[str, Any] = {"heads": heads, "projection": projection}
        shared["head_channels"] = None if projection is None else width
        if hops is None:
            flow = SparseFlowDiffusivity(in_channels, **shared, **attention)
        else:
            flow = EdgeSparseFlowDiffusivity(in_channels, hops=hops, **shared, **attention)
        enhanced = AdjacencyEnhancedDiffusivity(flow, gamma=gamma, self_loops=self_loops)
        super().__init__(
            in_channels,
            out_channels,
            enhanced if adjacency else flow,
            heads,
            head_channels=width,
            residual=residual,
            bias=bias,
            dropout=dropout,
            validate=validate,
        )


class SGFormerConv(DiffusionConv):
    r"""Z = β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z⁽⁰⁾, heads averaged (slides, "SGFormer"; Wu et al. 2023b).

    Node by node, with v = W_V x: z_i = β (v_i + (1/n) Σ_j (q̃_i·k̃_j) v_j) / (1 + (1/n) Σ_j q̃_i·k̃_j) + (1 − β) z⁽⁰⁾_i.
    Observed edges are not read. Z⁽⁰⁾ is the ``source`` of the call, x itself by default; β = 1 leaves it out, which is
    the attention of PyG's ``SGFormerAttention``.

    Args:
        in_channels, out_channels, heads: as in :class:`DiffusionConv`; in- and output have the same channels.
        beta: β in (0, 1].
        projection, normalize: of the attention, see :class:`SGFormerDiffusivity`.
        transform, bias: see :class:`DiffusionConv`.
        options: further ones of :class:`DiffusionConv` (``concat``, ``dropout``, ``validate``, …).
        qkv_bias: biases of W_Q, W_K and W_V, of those that there are.

    Raises:
        TypeError, ValueError: β does not lie in (0, 1], or as in :class:`DiffusionConv`.

    Examples:
        >>> SGFormerConv(4, 4)(x).shape
        torch.Size([6, 4])
    """

    references = ("wu2023sgformer",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        beta: float = 0.5,
        projection: Projection = "separate",
        normalize: Literal["row", "frobenius"] = "row",
        transform: bool = True,
        bias: bool = False,
        qkv_bias: bool = False,
        **options: Any,
    ) -> None:
        check_counts(in_channels=in_channels)
        check_flags(transform=transform, qkv_bias=qkv_bias)
        check_positive(beta, "beta", allow_zero=True)
        if not 0 < beta <= 1:
            raise ValueError(
                f"beta must lie in (0, 1], the attention beside 1 - beta of the initial state; got {beta}."
            )
        super().__init__(
            in_channels,
            out_channels,
            SGFormerDiffusivity(
                in_channels,
                heads=heads,
                projection=projection,
                normalize=normalize,
                bias=qkv_bias and projection is not None,
            ),
            teleport(1 - beta),
            heads if transform else 1,
            transform=transform,
            value_bias=qkv_bias and transform,
            bias=bias,
            keep="state",
            **options,
        )
