"""Published layers with attention over all pairs; each chooses a diffusivity and an update, which explain options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from diffusion_mp.checks import (
    Count,
    check_choice,
    check_number,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    PenaltyDiffusivity,
    Positive,
)
from diffusion_mp.diffusivities.all_pair import (
    KERNELS,
    Projection,
    SGFormerDiffusivity,
)
from diffusion_mp.diffusivities.fixed import (
    AdjacencyEnhancedDiffusivity,
    GraphAugmentedDiffusivity,
)
from diffusion_mp.diffusivities.kernelized_softmax import (
    KernelizedSoftmaxDiffusivity,
    RelationalBias,
)
from diffusion_mp.diffusivities.sparse_flow import (
    EdgeSparseFlowDiffusivity,
    SparseFlowDiffusivity,
)
from diffusion_mp.energies import Penalty
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.layers.options import (
    AdjacencyOptions,
    DIFFormerOptions,
    EnhancedOptions,
    MixOptions,
    NodeFormerOptions,
    QueryKeyOptions,
    RelationalOptions,
    ResidualOptions,
    SFiOptions,
    StepOptions,
    split,
)
from diffusion_mp.updates import ExplicitEuler, StateUpdate, teleport

TAU = 0.5


class MultiHeadConv(DiffusionConv):
    r"""A step of size 1 with any diffusivity, whose heads are concatenated and mixed: x′ = W_O ‖_h S^h W_V^h x.

    Args:
        in_channels, diffusivity, heads, options: as in :class:`DiffusionConv`.
        out_channels, head_channels: channels after W_O, and of the values of each head.
        residual, bias: add x (for equal channels); add a bias in W_O.

    Examples:
        >>> MultiHeadConv(4, 8, SoftmaxDiffusivity(4, heads=2), heads=2, head_channels=5)(x).shape
        torch.Size([6, 8])
    """

    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        diffusivity: Diffusivity,
        heads: Count = 1,
        *,
        head_channels: Count,
        residual: bool = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        if residual and in_channels != out_channels:
            raise ValueError(
                f"residual adds x to the output, so both must have the same channels; got {in_channels} and "
                f"{out_channels}. Or pass residual=False."
            )
        # W_O mixes the heads and has the bias, so the values themselves have none.
        super().__init__(
            in_channels,
            head_channels,
            diffusivity,
            ExplicitEuler(1.0, "residual"),
            heads,
            concat=True,
            bias=False,
            **options,
        )
        self.out_channels = out_channels
        self.residual = residual
        # One head of the diffusivity may broadcast over several heads of values, or the other way round.
        self.mix = nn.Linear(
            max(heads, diffusivity.heads) * head_channels, out_channels, bias=bias
        )

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        mixed = self.mix(out)
        if self.residual:
            return x + mixed
        return mixed


class DIFFormerConv(DiffusionConv):
    r"""One propagation layer of DIFFormer (Wu, Wipf & Yan 2025, Eqs. 54–63), heads averaged (Eq. 62).

    - ``graph="sum"`` (Eqs. 61–63, the default): x′ = (1 − τ) x + τ (Ŝ + Ã) v, the residual form;
    - ``graph="mean"`` (Eq. 24): x′_i = (1 − ½τ Σ_j(ŝ_ij + ã_ij)) x_i + ½τ Σ_j (ŝ_ij + ã_ij) v_j, the conservative form;
    - ``graph=None``: x′ = (1 − τ) x + τ Ŝ v (Eq. 17); edges are not read.

    The first two are different updates, although the paper equates them (docs/errata.md, D3). Without observed edges
    all three are Eq. 17. By default, the state itself propagates and is kept if input and output have the same channels
    (Eq. 63); otherwise the values W_V x do, with a bias. docs/released.md lists the options of the released code.

    Args:
        in_channels, out_channels, heads: as in :class:`DiffusionConv`.
        kernel: ``"simple"`` (DIFFormer-s), ``"sigmoid"`` (DIFFormer-a), ``"softmax"``, ``"gaussian"`` or a `Penalty`.
        tau, update: step size of the :class:`ExplicitEuler`, or an update that replaces it.
        graph, graph_weight: how observed edges enter, see above; or (1 − w) Ŝ + w Ã with a weight w.

    Options:
        transform, keep, bias, concat, reads, steps, dropout: as in :class:`DiffusionConv`.
        projection, normalize: see :class:`PenaltyDiffusivity`; ``None`` and ``"row"`` by default.
        beta, leak: of the :class:`ExplicitEuler`.
        self_loops, direction, degrees: of Ã = D^-½AD^-½, see :class:`AdjacencyDiffusivity`; self-loops are
            ``"remaining"`` by default.
        qkv_bias: add biases in W_Q, W_K and W_V, as far as the layer has them; ``False`` by default.

    Examples:
        >>> DIFFormerConv(4, 8, kernel="simple", tau=0.5)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("wu2025transformers", "wu2023difformer")

    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        heads: Count = 1,
        *,
        kernel: Literal["simple", "sigmoid", "softmax", "gaussian"]
        | Penalty = "simple",
        tau: float | Tensor | Positive = TAU,
        update: StateUpdate | None = None,
        graph: Literal["sum", "mean"] | None = "sum",
        graph_weight: float | None = None,
        **options: Unpack[DIFFormerOptions],
    ) -> None:
        features, edges, step, layer = split(
            options, QueryKeyOptions, AdjacencyOptions, StepOptions
        )
        features.setdefault("normalize", "row")
        edges.setdefault("self_loops", "remaining")
        step = {"beta": 0.0, "leak": 0.0} | step
        qkv_bias = layer.pop("qkv_bias", False)
        projected = features.get("projection") is not None
        width = out_channels
        if layer.get("concat", False):
            width *= heads
        changes = in_channels != width
        # Eq. 63 keeps the state and moves it, which it can where the channels stay the same; W_V makes others.
        usual = {
            "transform": changes,
            "keep": "values" if changes else "state",
            "bias": changes,
        }
        for name, value in usual.items():
            if layer.get(name) is None:
                layer[name] = value
        # A penalty of one's own has no published form, which would be another default of ``measure``.
        make: Callable[..., PenaltyDiffusivity]
        if isinstance(kernel, Penalty):
            make = partial(PenaltyDiffusivity, kernel)
        else:
            check_choice(kernel, "kernel", KERNELS)
            make = KERNELS[kernel]
        attention = make(
            in_channels,
            heads=heads,
            # Without projections there is nothing that b_Q and b_K could be added to.
            bias=qkv_bias and projected,
            **features,
        )
        adjacency = AdjacencyDiffusivity("sym", **edges)
        if graph == "mean" and graph_weight is None:
            graph_weight = 0.5
        # Made with graph=None too: a wrong option is refused whether or not it is used.
        augmented = GraphAugmentedDiffusivity(attention, adjacency, graph_weight)
        if update is None:
            form: Literal["conservative", "residual"] = "residual"
            # Eq. 24 keeps 1 − ½τ Σ_j s_ij of the state, whatever the row sums are; Eqs. 61–63 keep 1 − τ.
            if graph == "mean":
                form = "conservative"
            update = ExplicitEuler(tau, form, **step)
        # Beside an update they would have no effect, and nobody would notice.
        elif isinstance(tau, (Tensor, Positive)) or tau != TAU or any(step.values()):
            raise ValueError(
                f"tau, beta and leak are those of the explicit step, which update replaces; got tau={tau}, "
                f"beta={step['beta']}, leak={step['leak']} beside {update!r}. Give them to the update."
            )
        super().__init__(
            in_channels,
            out_channels,
            attention if graph is None else augmented,
            update,
            # Without W_V every head would move the same values, and their mean is that of one.
            heads if layer["transform"] else 1,
            value_bias=qkv_bias and layer["transform"],
            **layer,
        )


class NodeFormerConv(MultiHeadConv):
    r"""One layer of NodeFormer (Wu et al. 2022; slides, Algorithm 1 and "Input Graphs as Relational Bias").

    z_u = W_O ‖_h [ Σ_v s^h_uv v^h_v + Σ_p σ(b_ph) Σ_v (A^p)_uv v^h_v ],  v = W_V x, with the kernelised
    Gumbel-softmax s of :class:`KernelizedSoftmaxDiffusivity`: a step of size 1 with the coupling S + Σ_p σ(b_p) A^p.
    Without observed edges only the attention remains.

    The slides have ``relational_bias="sum", hops=1, tau=0.25, logits="dot", num_samples=10`` (docs/errata.md, N11);
    docs/released.md lists the options of the released code.

    Args:
        in_channels, out_channels, heads: as in :class:`MultiHeadConv`.
        head_channels: channels of queries, keys and values; ``out_channels`` by default.
        relational_bias: normalisation of the observed edges, ``"sym"``, ``"row"`` or ``"sum"`` (none); or ``None``.
        qkv_bias: add biases in W_Q, W_K and W_V, as far as the layer has them.

    Options:
        bias, dropout: as in :class:`MultiHeadConv`.
        hops, powers, gate: P, the largest power of A (4 by default), and more of :class:`RelationalBias`.
        projection, tau, logits, num_samples: of :class:`KernelizedSoftmaxDiffusivity`, by default ``"separate"``, 1,
            ``"scaled_dot"`` and 0; others (``num_features``, ``edge_regularization``, …) have its defaults.

    Examples:
        >>> NodeFormerConv(4, 8, heads=2)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("wu2022nodeformer", "choromanski2021performer")

    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        heads: int = 1,
        *,
        head_channels: Count | None = None,
        relational_bias: Literal["sum", "sym", "row"] | None = "sym",
        qkv_bias: bool = False,
        **options: Unpack[NodeFormerOptions],
    ) -> None:
        mix, walks, features = split(options, MixOptions, RelationalOptions)
        walks.setdefault("hops", 4)
        features.setdefault("projection", "separate")
        # Not those of the slides, which the diffusivity has (docs/errata.md, N11).
        usual: dict[str, Any] = {"tau": 1.0, "logits": "scaled_dot", "num_samples": 0}
        width = head_channels or out_channels
        coupled: Diffusivity = KernelizedSoftmaxDiffusivity(
            in_channels,
            heads=heads,
            head_channels=width,
            bias=qkv_bias and features["projection"] is not None,
            **usual | features,
        )
        # Made with relational_bias=None too: a wrong option is refused whether or not it is used.
        edges = RelationalBias(heads, normalization=relational_bias or "sum", **walks)
        if relational_bias is not None:
            coupled = GraphAugmentedDiffusivity(coupled, edges)
        super().__init__(
            in_channels,
            out_channels,
            coupled,
            heads,
            head_channels=width,
            value_bias=qkv_bias,
            **mix,
        )


class SFiConv(MultiHeadConv):
    r"""Sparse flow S beside the adjacency: x′ = x + (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h (SFi-Former, Eq. 11).

    Ã = D^-½ (A + I) D^-½, and γ > 0 is learnable. Without observed edges the bracket is S^h alone. With ``lam=0`` S is
    softmax attention, and the layer that of DFi-Former; with ``adjacency=False`` as well it is multi-head attention.

    Args:
        in_channels, out_channels, heads: as in :class:`MultiHeadConv`.
        head_channels: channels of queries, keys and values; ``out_channels / heads`` by default.
        hops: restrict the flow to senders within so many edges (:class:`EdgeSparseFlowDiffusivity`, O(E)).
        adjacency: include Ã (otherwise S^h alone, without (1 + γ)⁻¹).

    Options:
        residual: add x, as by default; ``False`` returns the change alone, as :class:`GPSBlock` expects.
        bias, dropout: as in :class:`MultiHeadConv`, by default without bias.
        gamma, self_loops: initial γ; self-loops of Ã.
        projection, normalize, lam, lam_scale, alpha, friction: of :class:`SparseFlowDiffusivity`.

    Examples:
        >>> SFiConv(4, 4, heads=2)(x, edge_index).shape
        torch.Size([6, 4])
    """

    references = ("sfiformer",)

    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        heads: Count = 1,
        *,
        head_channels: Count | None = None,
        hops: int | None = None,
        adjacency: bool = True,
        **options: Unpack[SFiOptions],
    ) -> None:
        mix, enhanced, attention = split(options, ResidualOptions, EnhancedOptions)
        mix.setdefault("residual", True)
        mix.setdefault("bias", False)
        if head_channels is None:
            if out_channels % heads:
                raise ValueError(
                    f"heads must divide out_channels; got {heads} heads, {out_channels} channels. "
                    f"Or pass head_channels."
                )
            # As in multi-head attention: all heads together have as many channels as the output.
            head_channels = out_channels // heads
        attention["heads"] = heads
        # Without a projection the heads are parts of the state, as wide as that says.
        if attention.get("projection", "separate") is not None:
            attention["head_channels"] = head_channels
        # Over edges the flow is a problem of every node's neighbours, with an own solver.
        coupled: Diffusivity
        if hops is None:
            coupled = SparseFlowDiffusivity(in_channels, **attention)
        else:
            coupled = EdgeSparseFlowDiffusivity(in_channels, hops=hops, **attention)
        # Made with adjacency=False too: a wrong option is refused whether or not it is used.
        with_edges = AdjacencyEnhancedDiffusivity(coupled, **enhanced)
        super().__init__(
            in_channels,
            out_channels,
            with_edges if adjacency else coupled,
            heads,
            head_channels=head_channels,
            **mix,
        )


class SGFormerConv(DiffusionConv):
    r"""SGFormer's layer: linear attention over all pairs with an initial residual.

    Z = β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z⁽⁰⁾, heads averaged (slides, "SGFormer"; Wu et al. 2023b).

    Node by node, with v = W_V x: z_i = β (v_i + (1/n) Σ_j (q̃_i·k̃_j) v_j) / (1 + (1/n) Σ_j q̃_i·k̃_j) + (1 − β) z⁽⁰⁾_i.
    Observed edges are not read. Z⁽⁰⁾ is the ``source`` of the call, x by default. β = 1 is PyG's ``SGFormerAttention``.

    Args:
        in_channels, out_channels, heads, transform, options: as in :class:`DiffusionConv`, with equal channels, and by
            default without bias.
        beta, projection, normalize: β in (0, 1]; see :class:`SGFormerDiffusivity`.
        qkv_bias: add biases in W_Q, W_K and W_V, as far as the layer has them.

    Examples:
        >>> SGFormerConv(4, 4)(x).shape
        torch.Size([6, 4])
    """

    references = ("wu2023sgformer",)

    def __init__(
        self,
        in_channels: Count,
        out_channels: int,
        heads: int = 1,
        *,
        beta: float = 0.5,
        projection: Projection = "separate",
        normalize: Literal["row", "frobenius"] = "row",
        transform: bool = True,
        qkv_bias: bool = False,
        **options: Any,
    ) -> None:
        # As in the slides and in PyG.
        options.setdefault("bias", False)
        check_number(
            beta,
            "beta",
            lambda beta: 0 < beta <= 1,
            "lie in (0, 1], the attention beside 1 - beta of the initial state",
        )
        attention = SGFormerDiffusivity(
            in_channels,
            heads=heads,
            normalize=normalize,
            projection=projection,
            bias=qkv_bias and projection is not None,
        )
        super().__init__(
            in_channels,
            out_channels,
            attention,
            # An initial residual is PageRank's teleport: β S v + (1 − β) z⁽⁰⁾.
            teleport(1 - beta),
            heads if transform else 1,
            transform=transform,
            value_bias=qkv_bias and transform,
            keep="state",
            **options,
        )
