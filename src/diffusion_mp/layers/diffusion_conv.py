"""``DiffusionConv``: the generic layer, one step of an energy-constrained diffusion."""

from __future__ import annotations

from types import NoneType
from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.dropout import dropout
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
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers.features import ValueLinear, check_features
from diffusion_mp.updates import ExplicitEuler, StateUpdate


class DiffusionConv(nn.Module):
    r"""State x → coupling S = F(x) → next state (Wu, Wipf & Yan 2025, Eqs. 17, 22).

    With h the feature transformation W_V, per head, and the explicit update:
    x′_i = (1 − τ Σ_j s_ij) h(x_i) + τ Σ_j s_ij h(x_j). Heads are averaged (Eq. 62) or concatenated.

    Args:
        in_channels: channels of x.
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

    Shapes:
        - x: [N, in_channels]; edge_index: [2, E], a sparse CSR tensor, a ``Graph`` or ``None``; edge_weight: [E];
          batch: [N], sorted; source: [N, channels of the output], by default the state the first step starts from;
          features: [N, F], with ``reads="features"`` and only there.
        - output: [N, out_channels], or [N, H · out_channels] with ``concat``.

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
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads, steps=steps)
        check_choice(keep, "keep", ["values", "state"])
        check_choice(reads, "reads", ["state", "values", "features"])
        check_probability(dropout, "dropout")
        check_flags(concat=concat, transform=transform, bias=bias, validate=validate)
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
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.head_channels = out_channels
        self.concat, self.keep, self.reads, self.steps = concat, keep, reads, steps
        self.dropout, self.validate = dropout, validate
        self.diffusivity = diffusivity
        self.update = ExplicitEuler(0.5) if update is None else update
        self.value = (
            ValueLinear(in_channels, heads * out_channels, bias=False, weight_initializer="glorot")
            if transform
            else None
        )
        self.bias = nn.Parameter(torch.zeros(total)) if bias else None

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
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        features: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, Coupling]:
        """The next state, and with ``return_coupling`` the operator S that was used: ``S @ v`` is the propagation."""
        if type(return_coupling) is not bool:
            check_flags(return_coupling=return_coupling)
        (check_features if self.sparse_features else check_state)(x, channels=self.in_channels, module=self)
        if self.validate:
            check_finite(x, "x")
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        values = self._by_head(x) if self.value is None else self.value(x).unflatten(1, (self.heads, -1))
        coupling = self.diffusivity(self._read(x, values, features), graph)
        state = values if self.value is None or self.keep == "values" else self._by_head(x)
        out = self._evolve(state, values, coupling, self._source(state, source))
        out = self.output(self._join(out), x)
        return (out, coupling) if return_coupling else out

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

    def _evolve(self, state: Tensor, values: Tensor, coupling: Coupling, source: Tensor | None) -> Tensor:
        for step in range(self.steps):
            moving = values if step == 0 else state
            if self.dropout and self.training:
                moving = dropout(moving, self.dropout)
            state = self.update(state, coupling, moving, source)
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
