"""Published layers with attention over all pairs. Each layer chooses a diffusivity and an update."""

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
        in_channels: Number of channels of x.
        out_channels: Number of channels after W_O.
        diffusivity: Computes the coupling S^h of every head.
        heads: Number of heads H. A single head, of the layer or of the diffusivity, broadcasts against several.
        head_channels: Number of channels D of the values of each head.
        residual: Add x to the output, which then has as many channels as x.
        bias: Add a bias in W_O.

    Options:
        transform (bool): Apply W_V; ``True`` by default.
        value_bias (bool): Add a bias to the values, W_V x + b_V; ``False`` by default, since W_O mixes the heads and
            has the bias.
        keep (str): The state from which the update starts: ``"values"``, W_V x (default), or ``"state"``, x.
        reads (str): The input of the diffusivity: ``"state"``, x (default), or ``"values"``, W_V x.
        steps (int): Number of updates with the same coupling; 1 by default.
        dropout (float): Dropout rate on the propagated values; 0 by default.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels].

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
            # A whole step leaves nothing of the state: the output is the attention itself.
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

    ``graph="sum"`` (the default) is the residual form of Eqs. 61–63:

        x′ = (1 − τ) x + τ (Ŝ + Ã) v

    ``graph="mean"`` is the conservative form of Eq. 24:

        x′_i = (1 − ½τ Σ_j (ŝ_ij + ã_ij)) x_i + ½τ Σ_j (ŝ_ij + ã_ij) v_j

    ``graph=None`` does not read edges (Eq. 17):

        x′ = (1 − τ) x + τ Ŝ v

    The first two are different updates, although the paper equates them (docs/errata.md, D3). Without observed edges
    all three are Eq. 17. docs/released.md lists the options of the released code.

    Args:
        in_channels: Number of channels of x.
        out_channels: Number of channels of each head.
        heads: Number of heads H.
        kernel: The attention: ``"simple"`` (DIFFormer-s), ``"sigmoid"`` (DIFFormer-a), ``"softmax"``, ``"gaussian"``,
            or a `Penalty`. The default costs O(N).
        tau: Step size τ of the :class:`ExplicitEuler`, a number or a learnable one.
        update: An update that replaces the :class:`ExplicitEuler`.
        graph: How observed edges enter, ``"sum"``, ``"mean"`` or ``None``; see above.
        graph_weight: Weight w of the graph, (1 − w) Ŝ + w Ã, in place of the sum or mean.

    Options:
        projection (str or None): ``"separate"``: W_Q and W_K; ``"tied"``: W_Q = W_K; ``None`` (default): the attention
            reads the state itself, which trains better with few labels (docs/errata.md, D20).
        normalize (str or None): ``"row"`` (default): every query and key has unit norm (Eq. 55); ``"frobenius"``: one
            norm per graph, as in the released code, which makes the attention nearly uniform (docs/errata.md, D1);
            ``None``.
        transform (bool or None): Apply W_V. By default only if input and output have different channels.
        keep (str or None): The state from which the update starts: ``"state"``, x (Eq. 63), by default if input and
            output have the same channels; otherwise ``"values"``, W_V x.
        bias (bool or None): Add a bias to the output. By default only if input and output have different channels.
        concat (bool): Concatenate the heads instead of averaging them; ``False`` by default, as in Eq. 62.
        reads (str): The input of the diffusivity, ``"state"`` (default) or ``"values"``.
        steps (int): Number of updates with the same coupling; 1 by default.
        dropout (float): Dropout rate on the propagated values; 0 by default.
        beta (float): Weight β of the source in the :class:`ExplicitEuler`; 0 by default.
        leak (float): Leak κ of the :class:`ExplicitEuler`; 0 by default.
        self_loops (str): Self-loops of Ã = D^-½AD^-½: ``"keep"``, ``"add"``, ``"remaining"`` (default) or ``"remove"``;
            see ``Graph.with_self_loops``.
        direction (str): Degrees of Ã on a directed graph: ``"pyg"`` (default): in-degrees at both ends, as in
            :class:`GCNConv`; ``"directed"``: in-degree of the receiver and out-degree of the sender;
            ``"undirected"``: A is replaced by ½(A + Aᵀ).
        degrees (str): ``"weighted"`` (default): sums of edge weights; ``"count"``: numbers of edges, as in the released
            code.
        qkv_bias (bool): Add biases in W_Q, W_K and W_V, as far as the layer has them; ``False`` by default.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        source: The shape of the output, read if β > 0; by default the state from which the step starts.
        output: [N, out_channels], or [N, H · out_channels] with ``concat``.

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
        # Unit vectors, for which the simple score is not negative (Eq. 55).
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
        values = heads * out_channels if layer["transform"] else in_channels
        attention = make(
            values if layer.get("reads") == "values" else in_channels,
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
        # With an update they would have no effect, and the user would not notice.
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
            # Without W_V every head would move the same values, so the mean over heads is the result of one head.
            heads if layer["transform"] else 1,
            value_bias=qkv_bias and layer["transform"],
            **layer,
        )


class NodeFormerConv(MultiHeadConv):
    r"""One layer of NodeFormer (Wu et al. 2022; slides, Algorithm 1 and "Input Graphs as Relational Bias").

        z_u = W_O ‖_h [ Σ_v s^h_uv v^h_v + Σ_p σ(b_ph) Σ_v (A^p)_uv v^h_v ],   v = W_V x

    s is the kernelised Gumbel-softmax of :class:`KernelizedSoftmaxDiffusivity`, so the layer is a step of size 1 with
    the coupling S + Σ_p σ(b_p) A^p. Without observed edges only the attention acts.

    The slides have ``relational_bias="sum", hops=1, tau=0.25, logits="dot", num_samples=10``. The defaults here train
    better with few labels (docs/errata.md, N11). docs/released.md lists the options of the released code.

    Args:
        in_channels: Number of channels of x.
        out_channels: Number of channels after W_O.
        heads: Number of heads H.
        head_channels: Number of channels D of queries, keys and values; ``out_channels`` by default.
        relational_bias: Normalisation of the observed edges: ``"sym"``, ``"row"`` or ``"sum"`` (none). ``None`` leaves
            the edges out.
        qkv_bias: Add biases in W_Q, W_K and W_V, as far as the layer has them.

    Options:
        bias (bool): Add a bias in W_O; ``True`` by default.
        dropout (float): Dropout rate on the values; 0 by default.
        hops (int): Largest power P of A, 4 by default (docs/errata.md, N11).
        powers (str): ``"walks"`` (default): A^p counts walks of p edges; ``"reach"``, as in the released code: A^p
            joins all pairs at most 2^(p−1) steps apart.
        direction (str): Degrees of A: ``"pyg"`` (default), ``"undirected"``, or ``"directed"`` as in the released code;
            see :class:`AdjacencyDiffusivity`.
        gate (str or None): ``"sigmoid"`` (default): weights σ(b); ``None``: weights b, as in the released code on some
            data sets.
        projection (str or None): ``"separate"`` (default), ``"tied"`` or ``None``; see :class:`QueryKeyDiffusivity`.
        normalize (str or None): Norm of queries and keys: ``"row"``, ``"frobenius"`` or ``None`` (default).
        num_features (int): Number of random features m; 32 by default.
        tau (float): Temperature τ; 1 by default (docs/errata.md, N11).
        logits (str): ``"scaled_dot"`` (default): q·k/√d; ``"dot"``: q·k.
        num_samples (int): Number of noise samples per training step; 0 (default) for no noise.
        edge_regularization (float): Weight λ of the edge loss in training; 0 by default.
        relative_edge_loss (bool): Divide the edge loss by log n; ``True`` by default, otherwise the edge loss dominates
            the loss of the task (docs/errata.md, N11).
        generator (torch.Generator or None): Draws the features and the seed of the noise; ``None`` is torch's global
            generator.
        stabilizer (float): Number added to features whose maximum is one, for parity with the released code (10⁻⁶); 0
            by default.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels].

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
        # The defaults of the diffusivity are those of the slides (docs/errata.md, N11).
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
    r"""Sparse flow S plus the adjacency: x′ = x + (1 + γ)⁻¹ Σ_h [Ã + γ S^h] x W_V^h W_O^h (SFi-Former, Eq. 11).

    Ã = D^-½ (A + I) D^-½, and γ > 0 is learned. Without observed edges the bracket is S^h. With ``lam=0`` S is softmax
    attention, and the layer is DFi-Former's. With ``lam=0, adjacency=False`` it is multi-head attention.

    Args:
        in_channels: Number of channels of x.
        out_channels: Number of channels of the output.
        heads: Number of heads H.
        head_channels: Number of channels D of queries, keys and values. ``out_channels / heads`` by default, as in
            multi-head attention.
        hops: Restrict the flow to senders within so many edges, in O(E) (:class:`EdgeSparseFlowDiffusivity`). ``None``:
            the flow comes from all nodes.
        adjacency: Include Ã. Without Ã the bracket is S^h and the factor (1 + γ)⁻¹ is left out.

    Options:
        residual (bool): Add x; ``True`` by default. ``False`` returns the change of the state, as :class:`GPSBlock`
            expects.
        bias (bool): Add a bias in W_O; ``False`` by default.
        dropout (float): Dropout rate on the values; 0 by default.
        gamma (float): Initial γ; 1 by default, equal weights.
        self_loops (str): Self-loops of Ã: ``"remaining"`` (default), ``"keep"``, ``"add"`` or ``"remove"``.
        direction (str): Degrees of Ã: ``"pyg"`` (default), ``"directed"`` or ``"undirected"``; see
            :class:`AdjacencyDiffusivity`.
        projection (str or None): ``"separate"`` (default), ``"tied"`` or ``None``; see :class:`QueryKeyDiffusivity`.
        normalize (str or None): Norm of queries and keys: ``"row"``, ``"frobenius"`` or ``None`` (default).
        lam (float): λ*, the weight of friction, with λ = λ*/n; 1 by default.
        lam_scale (str): ``"own"`` (default): n is the number of nodes of the graph; ``"batch_max"``: the number of
            nodes of the largest graph in the batch, as published.
        alpha (float): α, how strongly the flow is conserved; 0.1 by default. ``math.inf`` conserves the flow; with
            finite α rows sum to less than one.
        friction (str or Module): ``"attention"`` (default): a :class:`FrictionAttention`; ``"constant"``: f = 1/n; or a
            module that maps (x, graph) to q̃ and k̃ [N, H, G].

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels].

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
        # Without a projection a head is a part of the state, and the state decides how wide it is.
        if attention.get("projection", "separate") is not None:
            attention["head_channels"] = head_channels
        # The flow over edges is a minimisation over every node's neighbours, with a solver of its own.
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
    r"""SGFormer's layer: linear attention over all pairs, with an initial residual (slides; Wu et al. 2023b).

        Z = β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z^(0)

    Heads are averaged. Node by node, with v = W_V x:

        z_i = β (v_i + (1/n) Σ_j (q̃_i·k̃_j) v_j) / (1 + (1/n) Σ_j q̃_i·k̃_j) + (1 − β) z^(0)_i

    Observed edges are not read. Z^(0) is the ``source`` of the call, by default x. β = 1 is PyG's
    ``SGFormerAttention``.

    Args:
        in_channels: Number of channels of x.
        out_channels: Number of channels of the output, equal to ``in_channels``.
        heads: Number of heads H.
        beta: Weight β of the attention, in (0, 1]; the initial state has weight 1 − β.
        projection: ``"separate"``: W_Q and W_K; ``"tied"``: W_Q = W_K; ``None``: queries and keys are the state.
        normalize: ``"row"``: every query and key has unit norm, as in PyG; ``"frobenius"``: one norm per graph, as in
            the slides, with which the attention vanishes on large graphs (docs/errata.md, G1).
        transform: Apply W_V. Without W_V the state itself propagates.
        qkv_bias: Add biases in W_Q, W_K and W_V, as far as the layer has them.

    Options:
        bias (bool): Add a bias to the output; ``False`` by default, as in the slides and in PyG.
        concat (bool): Concatenate the heads instead of averaging them; ``False`` by default.
        reads (str): The input of the diffusivity: ``"state"``, x (default), or ``"values"``, W_V x.
        steps (int): Number of updates with the same coupling; 1 by default.
        dropout (float): Dropout rate on the propagated values; 0 by default.

    Shapes:
        x: [N, in_channels].
        edge_index: Accepted and not read.
        batch: [N], sorted.
        source: [N, out_channels], Z^(0); x by default.
        output: [N, out_channels].

    Examples:
        >>> SGFormerConv(4, 4)(x).shape
        torch.Size([6, 4])
    """

    references = ("wu2023sgformer",)

    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        heads: Count = 1,
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
        values = heads * out_channels if transform else in_channels
        attention = SGFormerDiffusivity(
            values if options.get("reads") == "values" else in_channels,
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
