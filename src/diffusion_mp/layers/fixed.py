"""Classical GNN layers as one step of a diffusion; each chooses a diffusivity and an update.

Values and gradients equal those of the layers of the same name in ``torch_geometric.nn``. All layers are the *residual*
form

    x′ = (1 − τ) x + τ S v

and not the conservative Eq. (6), from which the paper derives some of them (docs/errata.md, D4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.inits import glorot

from diffusion_mp.checks import (
    Count,
    FiniteNumber,
    PositiveNumber,
    Probability,
)
from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    GATDiffusivity,
    IdentityDiffusivity,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.layers.options import EdgeAttentionOptions, GATOptions, split
from diffusion_mp.updates import ExplicitEuler, StateUpdate, teleport, teleport_limit


def _gcn_adjacency(
    self_loops: SelfLoops | None = None, normalize: bool = True
) -> AdjacencyDiffusivity:
    """Return Â = D^-½ (A + I) D^-½ with the degrees of PyG; without ``normalize``, A."""
    if not normalize:
        return AdjacencyDiffusivity("sum", self_loops=self_loops or "keep")
    return AdjacencyDiffusivity("sym", self_loops=self_loops or "remaining")


def _full_step() -> ExplicitEuler:
    """Return the step x′ = S v: with τ = 1 nothing of the state itself is kept."""
    return ExplicitEuler(1.0, "residual")


class MLPConv(DiffusionConv):
    """A linear map of every node by itself, x′ = W x + b. Edges are accepted and not read.

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        out_channels: Number of channels of the output.
        bias: Add a bias b.

    Shapes:
        x: [N, in_channels].
        edge_index: Accepted and not read.
        batch: [N], sorted.
        output: [N, out_channels].

    Examples:
        >>> MLPConv(4, 8)(x).shape
        torch.Size([6, 8])
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, bias: bool = True
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            IdentityDiffusivity(),
            _full_step(),
            bias=bias,
        )

    def _evolve(
        self,
        x: Tensor,
        values: Tensor,
        coupling: Coupling,
        source: Tensor | None,
        previous: Tensor | None,
    ) -> Tensor:
        # The update decides whether a source counts or is refused.
        if source is not None:
            return super()._evolve(x, values, coupling, source, previous)
        # The product with the identity would only copy W x, in a sixth of the time of a wide layer.
        return values.squeeze(1)


class GCNConv(DiffusionConv):
    r"""GCN's layer: x′ = Â W x + b, Â = D^-½ (A + I) D^-½ normalised (Kipf & Welling 2017; Example 1 with τ = 1).

    On a directed graph messages go along the edges, and both degrees are in-degrees, as in PyG. ``direction=`` of an
    `AdjacencyDiffusivity` in a `DiffusionConv` chooses other degrees.

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        out_channels: Number of channels of the output.
        normalize: Divide by degrees. With ``False`` Â is A.
        self_loops: Self-loops of Â, ``"keep"``, ``"add"``, ``"remaining"`` or ``"remove"``; see
            ``Graph.with_self_loops``. ``None`` is ``"remaining"``, as in PyG, or ``"keep"`` without ``normalize``. Of
            parallel weighted self-loops PyG takes one; here their mean counts.
        bias: Add a bias b.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels].

    Examples:
        >>> GCNConv(4, 8)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("kipf2017gcn",)
    pyg_weights = ((r"^lin\.weight$", "value.weight"),)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        normalize: bool = True,
        self_loops: SelfLoops | None = None,
        bias: bool = True,
    ) -> None:
        adjacency = _gcn_adjacency(self_loops, normalize)
        super().__init__(in_channels, out_channels, adjacency, _full_step(), bias=bias)


class SGConv(DiffusionConv):
    r"""SGC's layer: several hops, then one linear map, x′ = Â^K W x + b (Wu et al. 2019).

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        out_channels: Number of channels of the output.
        K: Number of hops.
        self_loops: Self-loops of Â, ``"keep"``, ``"add"``, ``"remaining"`` or ``"remove"``; see
            ``Graph.with_self_loops``. ``None`` is ``"remaining"``, as in PyG.
        bias: Add a bias b.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels].

    Examples:
        >>> SGConv(4, 8, K=2)(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("wu2019sgc",)
    pyg_weights = ((r"^lin\.weight$", "value.weight"), (r"^lin\.bias$", "bias"))

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: Count = 1,
        *,
        self_loops: SelfLoops | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            _gcn_adjacency(self_loops),
            _full_step(),
            bias=bias,
            steps=K,
        )


class GINConv(DiffusionConv):
    r"""GIN's layer: x′_i = MLP((1 + ε) x_i + Σ_{j ∈ N(i)} x_j) (Xu et al. 2019); the coupling is (1 + ε) I + A.

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        mlp: Module that is applied to the sum.
        eps: Initial ε.
        train_eps: Learn ε.

    Shapes:
        x: [N, in_channels]; or the pair ([N_src, in_channels], [N_dst, in_channels]) with edges from the first to the
            second.
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``.
        edge_weight: [E].
        batch: [N], sorted.
        output: [N, out_channels], with the channels of the output of ``mlp``; [N_dst, …] for a pair.

    Examples:
        >>> GINConv(4, torch.nn.Linear(4, 8))(x, edge_index).shape
        torch.Size([6, 8])
    """

    references = ("xu2019gin",)
    pyg_weights = ((r"^nn\.", "mlp."),)

    def __init__(
        self,
        in_channels: int,
        mlp: nn.Module,
        eps: FiniteNumber = 0.0,
        *,
        train_eps: bool = False,
    ) -> None:
        # Learned as 1 + ε, the factor of the identity; `convert_from_pyg` adds the one.
        scale: float | nn.Parameter = 1.0 + eps
        if train_eps:
            scale = nn.Parameter(torch.tensor(scale))
        # The state that is kept is part of the coupling, so that a learned ε is one of its parameters.
        diffusivity = scale * IdentityDiffusivity() + AdjacencyDiffusivity("sum")
        # The MLP is the map of this layer, and stands after the sum.
        super().__init__(
            in_channels,
            in_channels,
            diffusivity,
            _full_step(),
            transform=False,
            bias=False,
        )
        self.mlp = mlp

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        return self.mlp(out)

    def convert_from_pyg(
        self, state: Mapping[str, Tensor], prefix: str
    ) -> dict[str, Tensor]:
        renamed = super().convert_from_pyg(state, prefix)
        # PyG's MLP numbers its linear maps, and a Sequential all of its parts.
        children = self.mlp.named_children()
        linear = [
            name for name, part in children if isinstance(part, (nn.Linear, Linear))
        ]
        # Norms of PyG's MLP have no counterpart, and keep names that `load_state_dict` refuses.
        for key in [key for key in renamed if key.startswith("mlp.lins.")]:
            number, name = key.removeprefix("mlp.lins.").split(".")
            if int(number) < len(linear):
                renamed[f"mlp.{linear[int(number)]}.{name}"] = renamed.pop(key)
        if "eps" not in renamed:
            return renamed
        # PyG keeps ε as a buffer where it is not learned, so it is in every state dict.
        eps = renamed.pop("eps")
        scale: Tensor | float = cast("Any", self.diffusivity).terms[0].scale
        # PyG stores [1], and torch refuses another number of dimensions.
        if isinstance(scale, Tensor):
            renamed["diffusivity.terms.0.scale"] = 1 + eps.reshape(())
        # "Not at most", since NaN compares as false.
        elif not abs(float(eps) + 1 - scale) <= 1e-6:
            raise ValueError(
                f"eps is {float(eps):g} in the state and {scale - 1:g} in the layer, which does not learn it. Build "
                f"GINConv(..., eps={float(eps):g}), or with train_eps=True."
            )
        return renamed


class GATConv(DiffusionConv):
    r"""GAT's layer: learned attention α to neighbours, x′_i = Σ_j α_ij W x_j + b (Veličković et al. 2018).

    The third argument of a call is ``edge_weight``, a prior to which α_ij is proportional. In PyG the third argument is
    the features of edges, which here are passed by name, ``edge_attr=``.

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        out_channels: Number of channels of each head.
        heads: Number of heads H.
        concat: Concatenate the heads to [N, H · out_channels], as in PyG, instead of averaging them.
        negative_slope: Negative slope of the LeakyReLU in the attention.
        dropout: Dropout rate on the entries α, as in PyG.
        residual: Add W_R x.
        value_dropout: Dropout rate on the values W x.

    Options:
        self_loops (str): Self-loops, ``"keep"``, ``"add"``, ``"remaining"`` (default, as in PyG) or ``"remove"``; see
            ``Graph.with_self_loops``.
        edge_dim (int or None): Number of channels of ``edge_attr``, which the attention reads. ``None`` (default): no
            features of edges.
        transform (bool): Apply W; ``True`` by default.
        bias (bool): Add a bias b; ``True`` by default.
        value_bias (bool): Add a bias to the values W x; ``False`` by default.
        keep (str): The state from which the update starts, ``"values"`` (default) or ``"state"``.
        steps (int): Number of updates with the same coupling; 1 by default.

    Shapes:
        x: [N, in_channels]; or the pair ([N_src, in_channels], [N_dst, in_channels]) with edges from the first to the
            second, for ``self_loops="keep"``.
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim].
        output: [N, H · out_channels], or [N, out_channels] with ``concat=False``; [N_dst, …] for a pair.

    Examples:
        >>> GATConv(4, 8, heads=2)(x, edge_index).shape  # the heads are concatenated
        torch.Size([6, 16])
    """

    references = ("velickovic2018gat",)
    pyg_weights = (
        (r"^lin(_src|_dst)?\.weight$", "value.weight"),
        (r"^att_", "diffusivity.att_"),
        (r"^lin_edge\.weight$", "diffusivity.edge.weight"),
    )

    def __init__(
        self,
        in_channels: int,
        out_channels: Count,
        heads: Count = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        *,
        residual: bool = False,
        value_dropout: Probability = 0.0,
        **options: Unpack[GATOptions],
    ) -> None:
        edges, layer = split(options, EdgeAttentionOptions)
        # Attention reads the values W x of all heads, as in the paper, and drops entries itself, as in PyG.
        total = heads * out_channels
        attention = GATDiffusivity(
            total, heads, dropout=dropout, negative_slope=negative_slope, **edges
        )
        super().__init__(
            in_channels,
            out_channels,
            attention,
            _full_step(),
            heads,
            concat=concat,
            reads="values",
            dropout=value_dropout,
            **layer,
        )
        self.edge_dim = edges.get("edge_dim")
        # PyG's name, under which its weights come.
        self.res: FeatureLinear | None = None
        if residual:
            out = total if concat else out_channels
            self.res = FeatureLinear(
                in_channels, out, bias=False, weight_initializer="glorot"
            )

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the next state; with ``return_coupling`` also the coupling, the attention α.

        Args:
            x: States of the nodes, or a pair of states of senders and receivers.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges, the prior of α; 1 by default. A layer with ``edge_dim`` refuses
                ``edge_weight`` without ``edge_attr``, since code written for PyG passes features of edges in this
                place.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            inputs: ``edge_attr``, ``source`` and ``return_coupling``, as in :class:`DiffusionConv`.
        """
        # Without features, a weight is a prior here, and code written for PyG means features by it.
        unread = self.edge_dim is not None and inputs.get("edge_attr") is None
        if unread and edge_weight is not None:
            raise ValueError(
                "edge_weight came without edge_attr, which is read here (edge_dim=…). Pass features of edges by name, "
                "edge_attr=…; in PyG's GATConv they are the third argument, which here is edge_weight."
            )
        return super().forward(x, edge_index, edge_weight, batch, **inputs)

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        if self.res is not None:
            out = out + self.res(x)
        return super().output(out, x)


class APPNPConv(DiffusionConv):
    r"""APPNP and PPNP: x^(k+1) = (1 − α) S x^(k) + α x^(0), K times or to the limit (Klicpera et al. 2019).

    The limit is

        α (I − (1 − α) S)⁻¹ x^(0)

    :class:`Equilibrium` states what the limit requires of S.

    Args:
        channels: Number of channels C of x and of the output.
        K: Number of steps; ``None`` computes the limit.
        alpha: α, the weight of x^(0); 0 < α < 1 for the limit.
        diffusivity: Computes S; Â, the normalised adjacency of GCN, by default.

    Options:
        dropout (float): Dropout rate on the propagated values; 0 by default.

    Shapes:
        x: [N, C].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None`` if the diffusivity reads no edges.
        edge_weight: [E].
        batch: [N], sorted.
        source: [N, C], x^(0); x by default.
        output: [N, C].

    Examples:
        >>> APPNPConv(4, K=10, alpha=0.1)(x, edge_index).shape
        torch.Size([6, 4])
    """

    references = ("klicpera2019appnp",)

    def __init__(
        self,
        channels: Count,
        K: Count | None = 10,
        alpha: float = 0.1,
        diffusivity: Diffusivity | None = None,
        **options: Any,
    ) -> None:
        if K is None:
            # The limit is one linear system in place of many steps.
            update: StateUpdate = teleport_limit(alpha)
        else:
            update = teleport(alpha)
        super().__init__(
            channels,
            channels,
            diffusivity or _gcn_adjacency(),
            update,
            # The model around this layer has the weights; propagation has none.
            transform=False,
            bias=False,
            steps=K or 1,
            **options,
        )


class GCNIIConv(DiffusionConv):
    r"""GCNII's layer: a GCN layer with an initial residual and an identity map, for deep networks (Chen et al. 2020).

        x′ = ((1 − α) Â x + α x^(0)) ((1 − β_l) I + β_l W),   β_l = log(θ/l + 1)

    Args:
        channels: Number of channels C of x and of x^(0), which is passed as ``source``.
        alpha: α, the weight of x^(0).
        theta: θ. Without ``theta`` and ``layer`` β_l = 1, as in PyG.
        layer: The depth l of the layer; β_l falls with the depth.
        normalize: Divide by degrees. With ``False`` Â is A.
        self_loops: Self-loops of Â, ``"keep"``, ``"add"``, ``"remaining"`` or ``"remove"``; see
            ``Graph.with_self_loops``. ``None`` is ``"remaining"``, as in PyG, or ``"keep"`` without ``normalize``.

    Shapes:
        x: [N, C].
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``.
        edge_weight: [E].
        batch: [N], sorted.
        source: [N, C], x^(0); x by default.
        output: [N, C].

    Examples:
        >>> GCNIIConv(4, alpha=0.1, theta=0.5, layer=1)(x, edge_index, source=x).shape
        torch.Size([6, 4])
    """

    references = ("chen2020gcnii",)
    pyg_weights = ((r"^weight[12]$", "weight"),)

    def __init__(
        self,
        channels: Count,
        alpha: float = 0.1,
        theta: PositiveNumber | None = None,
        layer: Count | None = None,
        *,
        normalize: bool = True,
        self_loops: SelfLoops | None = None,
    ) -> None:
        adjacency = _gcn_adjacency(self_loops, normalize)
        super().__init__(
            channels, channels, adjacency, teleport(alpha), transform=False, bias=False
        )
        if (theta is None) != (layer is None):
            raise ValueError(
                f"theta and layer go together (β = log(θ/layer + 1)); got theta={theta}, layer={layer}."
            )
        # β = 1 without θ: the map is then W, as in PyG.
        # A number, not a parameter: it falls with the depth l of the layer.
        self.mapping = 1.0
        if theta is not None and layer is not None:
            self.mapping = math.log(theta / layer + 1)
        # One matrix for state and source, whose sum it multiplies.
        self.weight = nn.Parameter(torch.empty(channels, channels))
        self._draw()

    def _draw(self) -> None:
        glorot(self.weight)

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        # ((1 − β) I + β W) in one pass over the state.
        return torch.addmm(
            out, out, self.weight, beta=1 - self.mapping, alpha=self.mapping
        )
