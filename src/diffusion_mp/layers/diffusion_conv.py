"""``DiffusionConv``: the generic layer, one step of an energy-constrained diffusion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import Certificate, certify
from diffusion_mp.energies.certification import broken_parameter
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import check_edge_order
from diffusion_mp.kernels.noise import dropout
from diffusion_mp.layers.features import FeatureLinear, channels_at_first
from diffusion_mp.layers.pyg import INPUTS, KnowsPyGNames, between, refuse_inputs
from diffusion_mp.modules import Resettable
from diffusion_mp.updates import ExplicitEuler, StateUpdate


class GraphLayer(KnowsPyGNames, Resettable):
    """Base of layers and models, which are called as ``module(x, edge_index, edge_weight, batch, …)``."""

    in_channels: int
    check_features: Callable[..., None] = staticmethod(errors.check_state)
    """The check of x; a model sets `check_input`, for a sparse x, in a first layer in which W_V alone reads x."""

    def inputs_to_graph(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        return_coupling: bool = False,
        others: Mapping[str, Any] = {},
        edge_attr: Tensor | None = None,
    ) -> Graph:
        """Check the inputs that all take, refuse ``others``, and return the graph."""
        if others:
            refuse_inputs(self, others)
        if edge_attr is not None:
            check_edge_order(edge_index, edge_attr)
        if type(return_coupling) is not bool:
            errors.check_flags(return_coupling=return_coupling)
        if self.in_channels == -1:
            self._find_channels(x)
        self.check_features(x, channels=self.in_channels, module=self)
        if (
            type(edge_index) is Graph
            and edge_weight is batch is None
            and edge_index.num_nodes == x.size(0)
            and (edge_index.edge_index is None or edge_index.edge_index.device == x.device)
        ):
            return edge_index
        return Graph.coerce(x, edge_index, edge_weight, batch)

    def _find_channels(self, x: Tensor) -> None:
        self.in_channels = channels_at_first(self, x)


class DiffusionConv(GraphLayer):
    r"""A layer of any diffusivity and update: x → coupling S = F(x) → next state (Wu, Wipf & Yan 2025, Eqs. 17, 22).

    With the linear map h = W_V, per head, and the explicit update:
    x′_i = (1 − τ Σ_j s_ij) h(x_i) + τ Σ_j s_ij h(x_j). Heads are averaged (Eq. 62) or concatenated.

    Args:
        in_channels, out_channels: channels of x (-1: those of the first call), and of the values of each head.
        diffusivity, update: compute the coupling and move the state; ``ExplicitEuler(0.5)`` by default.
        heads: H. A single head, of the layer or of the diffusivity, broadcasts against several.
        concat: concatenate the heads to [N, H · out_channels] instead of averaging them to [N, out_channels].
        transform: apply W_V; without it the state itself propagates, and input and output have the same channels.
        bias, value_bias: add a bias to the output; h(x) = W_V x + b_V, which needs ``transform``.
        keep: the state that the update starts from: ``"values"``, h(x) (Eq. 22), or ``"state"``, x (Eq. 63).
        reads: input of the diffusivity: ``"state"``, x; ``"values"``, h(x), as in GAT and as Proposition 9 requires
            (docs/errata.md, D23); or ``"features"``, passed with every call and constant while the state moves.
        steps: number of updates with the same coupling (the K of SGC and APPNP).
        dropout: rate on the propagated values only, not on the input of the diffusivity or the state that is kept.
        validate: check x for NaN and infinity at every call, which takes a pass over it.

    Shapes:
        - x: [N, in_channels]; edge_index: [2, E], a sparse CSR tensor, a ``Graph`` or ``None``; edge_weight: [E];
          batch: [N], sorted; source: as the output, by default the state that the first step starts from.
        - features: [N, F], if and only if ``reads="features"``; edge_attr: [E, edge_dim]; previous: [N, in_channels],
          the x of the step before, for updates with ``StateUpdate.takes_previous``.
        - x may be the pair of states ([N_src, in_channels], [N_dst, in_channels]), with edges from the first to the
          second, for couplings of observed edges without symmetric normalisation or added self-loops.
        - output: [N, out_channels], or [N, H · out_channels] with ``concat``; for a pair [N_dst, …].

    Examples:
        >>> conv = DiffusionConv(4, 8, 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"))
        >>> out, S = conv(x, edge_index, return_coupling=True)  # S @ v propagates values v as the layer did
        >>> out.shape
        torch.Size([6, 8])
    """

    is_diffusion_layer = True

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
        if isinstance(in_channels, (tuple, list)):
            raise TypeError(
                f"in_channels must be one integer, got {errors.describe(in_channels)}: states of two kinds of nodes "
                f"pass through the same W_V, and have the same channels. Put a Linear before one of them if not."
            )
        lazy = (
            errors.found_later(in_channels)
            and keep == "values"
            and (transform or out_channels == -1)
        )
        errors.check_counts(
            heads=heads, steps=steps, **({} if lazy else {"in_channels": in_channels})
        )
        errors.check_counts(**({} if lazy and not transform else {"out_channels": out_channels}))
        errors.check_choice(keep, "keep", ["values", "state"])
        errors.check_choice(reads, "reads", ["state", "values", "features"])
        errors.check_probability(dropout, "dropout")
        errors.check_flags(
            concat=concat, transform=transform, bias=bias, validate=validate, value_bias=value_bias
        )
        errors.check_kind(diffusivity, "diffusivity", Diffusivity, "a Diffusivity")
        errors.check_kind(update, "update", (StateUpdate, NoneType), "a StateUpdate")
        if 1 not in (heads, diffusivity.heads) and heads != diffusivity.heads:
            raise ValueError(
                f"heads must be 1 or the diffusivity's {diffusivity.heads}; got {heads}."
            )
        if concat:
            total = out_channels * max(heads, diffusivity.heads)
        else:
            total = out_channels
        if (keep == "state" or not transform) and in_channels != total:
            if transform:
                cause = "keep='state' adds x to the output"
            else:
                cause = "transform=False propagates x itself"
            same = f"in_channels must equal the output's channels {total}"
            raise ValueError(f"{cause}, so {same}; got in_channels={in_channels}.")
        if value_bias and not transform:
            got = "got value_bias=True with transform=False"
            raise ValueError(
                f"value_bias is added to what W_V gives, and there is none; {got}. Leave one of them out."
            )
        self.in_channels = in_channels
        self.heads = heads
        self.out_channels = self.head_channels = out_channels
        self.concat = concat
        self.keep = keep
        self.reads = reads
        self.steps = steps
        self.dropout = dropout
        self.validate = validate
        self.diffusivity = diffusivity
        self.update = ExplicitEuler(0.5) if update is None else update
        self.value: FeatureLinear | None = None
        if transform:
            self.value = FeatureLinear(
                in_channels, heads * out_channels, bias=value_bias, weight_initializer="glorot"
            )
        self.bias = nn.Parameter(torch.zeros(total)) if bias else None

    def _draw(self) -> None:
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
        """Return the next state; with ``return_coupling`` also the coupling S, an operator applied as ``S @ v``.

        With ``return_attention_weights`` also the pair (edges [2, E], entries of S [E, H]), as in PyG, with added
        self-loops; an observed self-loop that was replaced has entry 0.
        """
        if return_attention_weights is not None:
            errors.check_flags(return_attention_weights=return_attention_weights)
        if isinstance(x, tuple):
            others |= {"batch": batch, "source": source, "features": features, "previous": previous}
            others |= {
                "return_coupling": return_coupling,
                "return_attention_weights": return_attention_weights,
            }
            return between(
                self,
                DiffusionConv.forward,
                x,
                edge_index,
                edge_weight,
                edge_attr=edge_attr,
                **others,
            )
        graph = self.inputs_to_graph(
            x, edge_index, edge_weight, batch, return_coupling, others, edge_attr
        )
        if self.validate:
            errors.check_finite(x, "x")
        if self.value is None:
            values = self._by_head(x)
        else:
            values = self.value(x).unflatten(1, (self.heads, -1))
        coupling = self.diffusivity(self._read(x, values, features), graph, edge_attr)
        before = None if previous is None else self._previous(previous)
        out = self.output(self._evolve(x, values, coupling, source, before), x)
        results = [out, coupling] if return_coupling else [out]
        if return_attention_weights:
            results.append(_attention_weights(self, coupling))
        return tuple(results) if len(results) > 1 else out

    def _find_channels(self, x: Tensor) -> None:
        super()._find_channels(x)
        if self.value is None:
            self.out_channels = self.head_channels = self.in_channels
        elif (
            isinstance(self.value, FeatureLinear)
            and self.in_channels != -1
            and is_lazy(self.value.weight)
        ):
            # So that the checks see its dtype.
            self.value.initialize_parameters(self.value, (x,))

    def _by_head(self, x: Tensor) -> Tensor:
        """A state [N, C] by head: cut into heads that are concatenated again, or one head that broadcasts."""
        if self.concat:
            return x.unflatten(1, (-1, self.head_channels))
        return x.unsqueeze(1)

    def _read(self, x: Tensor, values: Tensor, features: Tensor | None) -> Tensor:
        if (self.reads == "features") != (features is not None):
            if features is None:
                came = "none came"
            else:
                came = f"features came with reads={self.reads!r}"
            raise ValueError(
                f"features must come if and only if the layer was built with reads='features'; {came}. They are what "
                f"the diffusivity reads in place of the state, [num_nodes, channels]."
            )
        if features is None:
            if self.reads == "values" or x.layout is not torch.strided:
                return values.flatten(1)
            return x
        errors.check_rows(features, "features", x, module=self)
        return features

    def _previous(self, previous: Tensor) -> Tensor:
        if not self.update.takes_previous:
            way_out = "Leave it out, or take MomentumStep(..., steps=1)."
            raise ValueError(
                f"previous is for updates of two steps; {self.update!r} looks at one state. {way_out}"
            )
        errors.check_state(previous, "previous", self.in_channels, module=self)
        if self.value is None:
            return self._by_head(previous)
        return self.value(previous).unflatten(1, (self.heads, -1))

    def _evolve(
        self,
        x: Tensor,
        values: Tensor,
        coupling: Coupling,
        source: Tensor | None,
        previous: Tensor | None,
    ) -> Tensor:
        if self.value is None or self.keep == "values":
            state = values
        else:
            state = self._by_head(x)
        if source is not None:
            errors.check_state(
                source, "source", state.size(2) * (state.size(1) if self.concat else 1), module=self
            )
            errors.check_device(source, "source", state.device, "x")
            source = self._by_head(source)
        elif self.update.beta:
            source = state
        for _ in range(self.steps):
            if self.dropout and self.training:
                moving = dropout(values, self.dropout)
            else:
                moving = values
            if self.update.takes_previous:
                options = {"previous": previous}
            else:
                options = {}
            state = self.update(state, coupling, moving, source, **options)
            previous = values
            values = state
        if self.concat:
            return state.flatten(1)
        return state.squeeze(1) if state.size(1) == 1 else state.mean(1)

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        """Finish the new state ``out`` [N, C] of the input ``x``: add the bias. Subclasses extend it."""
        return out if self.bias is None else out + self.bias

    @property
    def why_uncertified(self) -> str | None:
        """The reason why no theorem covers this layer at any state, or ``None`` where the state decides."""
        name = type(self).__name__
        diffusivity = self.diffusivity
        by = type(self.update).__name__
        if not isinstance(self.update, ExplicitEuler):
            return f"{name} moves the state by {by}, and they are about ExplicitEuler (CertifiedConv has Theorem T1)."
        if self.value is not None:
            return f"{name} transforms what it propagates; transform=False moves the state itself."
        if self.bias is not None:
            return f"{name} adds a bias to the new state; bias=False leaves it out."
        if type(self).output is not DiffusionConv.output:
            return f"{name} adds terms of its own to the new state."
        if diffusivity.heads > 1 and not self.concat:
            return f"{name} takes the mean of {diffusivity.heads} heads, each of which has an energy of its own."
        if (
            diffusivity.penalty is None
            and not diffusivity.symmetric
            and diffusivity.depends_on != "nothing"
        ):
            return f"{type(diffusivity).__name__}: {diffusivity.why_no_penalty}"
        return None

    @torch.no_grad()
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
        """Certify one step, with any ``source``, by Theorem 7 (of a penalty) or 1 (of any other symmetric coupling)."""
        if x is None:
            graph = None
        else:
            graph = Graph.coerce(x, edge_index, edge_weight, batch)
        update = self.update
        diffusivity = self.diffusivity
        if isinstance(update, ExplicitEuler):
            tau = float(update.step_size)
        else:
            tau = math.nan
        why = self.why_uncertified or broken_parameter(self)
        if x is None or graph is None or why is not None or not isinstance(update, ExplicitEuler):
            reason = (
                why or "that depends on the state and the graph: pass them, certify(model, data)."
            )
            return Certificate.refused("Theorems 1 and 7", tau, reason)
        read = self._read(x, x, features)
        known = (
            diffusivity.penalty is not None
            and not diffusivity.needs_graph
            and self.reads != "features"
        )
        if known and self.steps == 1:
            return certify(
                diffusivity, x, tau, form=update.form, leak=update.leak, ptr=graph.segments
            )
        coupling = diffusivity(read, graph)
        return certify(coupling, None, tau, form=update.form, leak=update.leak)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, keep={self.keep!r}, reads={self.reads!r}"


def _attention_weights(layer: nn.Module, coupling: Coupling) -> tuple[Tensor, Tensor]:
    """The edges [2, E] and entries [E, H] of a coupling that stores its entries."""
    if not isinstance(coupling, SparseCoupling):
        raise ValueError(
            f"return_attention_weights needs a coupling that holds its entries one by one; that of "
            f"{type(layer).__name__} is a {type(coupling).__name__}. {INPUTS['return_attention_weights']}"
        )
    # Copies: the edges may be those of the caller, and the weights are kept with the graph.
    return coupling.graph.edges.clone(), coupling.weight.clone()
