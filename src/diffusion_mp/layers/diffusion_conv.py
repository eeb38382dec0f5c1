"""``DiffusionConv``: the generic layer, one step of an energy-constrained diffusion."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import Certificate
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_device,
    check_finite,
    check_flags,
    check_kind,
    check_probability,
    check_rows,
    check_state,
    describe,
    found_later,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import check_edge_order
from diffusion_mp.kernels.dropout import dropout
from diffusion_mp.layers.bipartite import between
from diffusion_mp.layers.certificates import layer_certificate, why_uncertified
from diffusion_mp.layers.features import ValueLinear, check_features
from diffusion_mp.layers.pyg_names import KnowsPyGNames, refuse_inputs
from diffusion_mp.updates import ExplicitEuler, StateUpdate


class DiffusionConv(KnowsPyGNames, nn.Module):
    r"""State x → coupling S = F(x) → next state (Wu, Wipf & Yan 2025, Eqs. 17, 22).

    With h the feature transformation W_V, per head, and the explicit update:
    x′_i = (1 − τ Σ_j s_ij) h(x_i) + τ Σ_j s_ij h(x_j). Heads are averaged (Eq. 62) or concatenated.

    Args:
        in_channels: channels of x; -1 for those of the first call, where only W_V looks at x.
        out_channels: channels of a head's values.
        diffusivity: says who influences whom.
        update: moves the state; ``ExplicitEuler(0.5)`` by default.
        heads: H. One head, here or in the diffusivity, is shared by all.
        concat: concatenate the heads to [N, H · out_channels] instead of averaging them to [N, out_channels].
        transform: W_V; without it the state itself propagates and in- and output have the same channels.
        bias: add a bias at the end.
        keep: what the update conserves beside the propagated values: ``"values"``, h(x) (Eq. 22; any channels), or
            ``"state"``, x (Eq. 63; in- and output have the same channels).
        reads: what the diffusivity looks at: ``"state"``, x; ``"values"``, h(x), as GAT does and as Proposition 9
            needs, which the layer as printed does not do (docs/errata.md, D23); or ``"features"``, others that stay
            as they are while the state moves (inputs, positions) and come with every call.
        steps: how often the update is applied with the one coupling inferred (the K of SGC and APPNP).
        dropout: on the propagated values only; never on what the diffusivity reads or the update keeps.
        validate: look for NaN and infinity in x at every call, which takes a pass over it.
        value_bias: h(x) = W_V x + b_V, with ``transform``.

    Shapes:
        - x: [N, in_channels]; edge_index: [2, E], a sparse CSR tensor, a ``Graph`` or ``None``; edge_weight: [E];
          batch: [N], sorted; source: [N, channels of the output], by default the state the first step starts from;
          features: [N, F], with ``reads="features"`` and only there; edge_attr: [E, edge_dim], for a diffusivity that
          reads features of edges; previous: [N, in_channels], the x of the step before, for updates of two steps
          (``StateUpdate.takes_previous``).
        - x of nodes of two kinds: the pair ([N_src, in_channels], [N_dst, in_channels]), with edges from the first to
          the second, where the coupling is of observed edges, without degrees of both ends and without added loops.
        - output: [N, out_channels], or [N, H · out_channels] with ``concat``; for a pair [N_dst, …].

    Raises:
        TypeError, ValueError: the input does not fit; a sentence says what came and what was expected.

    Examples:
        >>> diffusivity = 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym")
        >>> conv = DiffusionConv(4, 8, diffusivity, ExplicitEuler(tau=0.5))
        >>> conv(x, edge_index).shape
        torch.Size([6, 8])
        >>> out, S = conv(x, edge_index, return_coupling=True)  # S @ v is the propagation that was used
    """

    is_diffusion_layer = True
    sparse_features = False
    """Whether x may be sparse: so a model says of its first layer, where W_V alone looks at the features."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        diffusivity: Diffusivity,
        update: StateUpdate | None = None,
        heads: int = 1,
        *,
        concat: bool = False,
        transform: bool = True,
        bias: bool = True,
        keep: Literal["values", "state"] = "values",
        reads: Literal["state", "values", "features"] = "state",
        steps: int = 1,
        dropout: float = 0.0,
        validate: bool = False,
        value_bias: bool = False,
    ) -> None:
        super().__init__()
        lazy = found_later(in_channels) and keep == "values" and (transform or out_channels == -1)
        if isinstance(in_channels, (tuple, list)):
            raise TypeError(
                f"in_channels must be one integer, got {describe(in_channels)}: states of two kinds of nodes pass "
                f"through the same W_V, and have the same channels. Put a Linear before the layer where they have not."
            )
        check_counts(heads=heads, steps=steps, **({} if lazy else {"in_channels": in_channels}))
        check_counts(**({} if lazy and not transform else {"out_channels": out_channels}))
        check_choice(keep, "keep", ["values", "state"])
        check_choice(reads, "reads", ["state", "values", "features"])
        check_probability(dropout, "dropout")
        check_flags(concat=concat, transform=transform, bias=bias, validate=validate, value_bias=value_bias)
        check_kind(diffusivity, "diffusivity", Diffusivity, "a Diffusivity")
        check_kind(update, "update", (StateUpdate, NoneType), "a StateUpdate")
        if 1 not in (heads, diffusivity.heads) and heads != diffusivity.heads:
            raise ValueError(f"heads must be 1 or the diffusivity's {diffusivity.heads}; got {heads}.")
        total = out_channels * max(heads, diffusivity.heads) if concat else out_channels
        if (keep == "state" or not transform) and in_channels != total:
            cause = "keep='state' adds x to the output" if transform else "transform=False propagates x itself"
            raise ValueError(
                f"{cause}, so in_channels must equal the output's channels {total}; got in_channels={in_channels}."
            )
        if value_bias and not transform:
            raise ValueError(
                "value_bias is added to what W_V gives, and there is none; got value_bias=True with transform=False. "
                "Leave one of them out."
            )
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.head_channels = out_channels
        self.concat, self.keep, self.reads, self.steps = concat, keep, reads, steps
        self.dropout, self.validate = dropout, validate
        self.diffusivity = diffusivity
        self.update = ExplicitEuler(0.5) if update is None else update
        self.value = (
            ValueLinear(in_channels, heads * out_channels, bias=value_bias, weight_initializer="glorot")
            if transform
            else None
        )
        self.bias = nn.Parameter(torch.zeros(total)) if bias else None

    @property
    def why_uncertified(self) -> str | None:
        """What keeps every theorem from this layer, as a sentence; ``None`` where the state decides."""
        return why_uncertified(self)

    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Certificate:
        """What a theorem says of this step at a state, as `certify` asks; the source plays no part in it."""
        graph = None if x is None else Graph.coerce(x, edge_index, edge_weight, batch)
        return layer_certificate(self, x, graph, features)

    def reset_parameters(self) -> None:
        """Draw every parameter anew; the bias is zero."""
        self.diffusivity.reset_parameters()
        reset(self.update)
        if self.value is not None:
            self.value.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        features: Tensor | None = None,
        edge_attr: Tensor | None = None,
        previous: Tensor | None = None,
        return_coupling: bool = False,
        return_attention_weights: bool | None = None,
        **others: Any,
    ) -> Any:
        """The next state, and with ``return_coupling`` the operator S that was used: ``S @ v`` is the propagation.

        With ``return_attention_weights`` also the pair of the edges [2, E] that S is of, added self-loops among them,
        and their entries [E, H], as in PyG; an observed loop that another one replaced is there with entry 0.
        """
        if others:
            refuse_inputs(self, others)
        if type(return_coupling) is not bool:
            check_flags(return_coupling=return_coupling)
        if return_attention_weights is not None:
            check_flags(return_attention_weights=return_attention_weights)
        if isinstance(x, tuple):
            given = {"batch": batch, "source": source, "features": features, "previous": previous}
            given["edge_attr"] = edge_attr
            asked = {"return_coupling": return_coupling, "return_attention_weights": return_attention_weights}
            return between(self, x, edge_index, edge_weight, **given, **asked)
        if self.in_channels == -1:
            self._find_channels(x)
        (check_features if self.sparse_features else check_state)(x, channels=self.in_channels, module=self)
        if self.validate:
            check_finite(x, "x")
        if edge_attr is not None:
            check_edge_order(edge_index, edge_attr)
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        values = self._by_head(x) if self.value is None else self.value(x).unflatten(1, (self.heads, -1))
        coupling = self.diffusivity(self._read(x, values, features), graph, edge_attr)
        state = values if self.value is None or self.keep == "values" else self._by_head(x)
        before = None if previous is None else self._previous(previous)
        out = self._evolve(state, values, coupling, self._source(state, source), before)
        out = self.output(self._join(out), x)
        if return_attention_weights:
            pairs = attention_weights(self, coupling)
            return (out, coupling, pairs) if return_coupling else (out, pairs)
        return (out, coupling) if return_coupling else out

    def _find_channels(self, x: Tensor) -> None:
        """They are those of ``x``; what is no state is refused a moment later."""
        if isinstance(x, Tensor) and x.dim() == 2:
            if self.value is None:
                self.in_channels = self.out_channels = self.head_channels = x.size(1)
            else:
                if is_lazy(self.value.weight):  # no state dict has been loaded
                    self.value.initialize_parameters(self.value, (x,))
                self.in_channels = self.value.in_channels

    def _read(self, x: Tensor, values: Tensor, features: Tensor | None) -> Tensor:
        """What the diffusivity looks at."""
        if (self.reads == "features") != (features is not None):
            came = "none came" if features is None else f"features came with reads={self.reads!r}"
            raise ValueError(
                f"features must come if and only if the layer was built with reads='features'; {came}. They are what "
                f"the diffusivity reads in place of the state, [num_nodes, channels]."
            )
        if features is None:
            return values.flatten(1) if self.reads == "values" or x.layout is not torch.strided else x
        check_rows(features, "features", x, module=self)
        return features

    def _previous(self, previous: Tensor) -> Tensor:
        """What propagated one step earlier."""
        if not self.update.takes_previous:
            raise ValueError(
                f"previous is for updates of two steps; {self.update!r} looks at one state. Leave it out, or take "
                f"MomentumStep(..., steps=1)."
            )
        check_state(previous, "previous", self.in_channels, module=self)
        return self._by_head(previous) if self.value is None else self.value(previous).unflatten(1, (self.heads, -1))

    def _evolve(
        self, state: Tensor, values: Tensor, coupling: Coupling, source: Tensor | None, previous: Tensor | None
    ) -> Tensor:
        for _ in range(self.steps):
            moving = dropout(values, self.dropout) if self.dropout and self.training else values
            options = {"previous": previous} if self.update.takes_previous else {}
            state, previous = self.update(state, coupling, moving, source, **options), values
            values = state
        return state

    def _by_head(self, x: Tensor) -> Tensor:
        """A state [N, C] as values: cut into heads if they are concatenated again, else shared by all of them."""
        return x.unflatten(1, (-1, self.head_channels)) if self.concat else x.unsqueeze(1)

    def _join(self, out: Tensor) -> Tensor:
        if self.concat:
            return out.flatten(1)
        return out.squeeze(1) if out.size(1) == 1 else out.mean(1)

    def _source(self, state: Tensor, source: Tensor | None) -> Tensor | None:
        """The source by head; by default where the layer starts from."""
        if source is not None:
            channels = state.size(2) * (state.size(1) if self.concat else 1)
            check_state(source, "source", channels, module=self)
            check_device(source, "source", state.device, "x")
            return self._by_head(source)
        return state if self.update.beta else None

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        """What happens to the new state [N, C] at the end: the bias. Named layers add to it, some from ``x``."""
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, keep={self.keep!r}, reads={self.reads!r}"


def attention_weights(layer: nn.Module, coupling: Coupling) -> tuple[Tensor, Tensor]:
    """The edges [2, E] and entries [E, H] of a coupling that has them one by one; refused for any other."""
    if not isinstance(coupling, SparseCoupling):
        raise ValueError(
            f"return_attention_weights needs a coupling that holds its entries one by one; that of "
            f"{type(layer).__name__} is a {type(coupling).__name__}, an operator that is never written down. Pass "
            f"return_coupling=True: S.at(edge_index) has its entries at these edges, S.to_dense() all of them."
        )
    return coupling.graph.edges, coupling.weight
