"""``DiffusionConv``: the generic layer, one step of an energy-constrained diffusion."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffusion_mp import checks
from diffusion_mp.checks import Channels, Count, Probability
from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import Certificate, certify
from diffusion_mp.energies.certification import broken_parameter
from diffusion_mp.graph import Graph
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.layers.pyg import between
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.updates import ExplicitEuler, StateUpdate


class DiffusionConv(GraphLayer):
    r"""A layer of any diffusivity and update: x → coupling S = F(x) → next state (Wu, Wipf & Yan 2025, Eqs. 17, 22).

    With the linear map h = W_V, per head, and the explicit update:

        x′_i = (1 − τ Σ_j s_ij) h(x_i) + τ Σ_j s_ij h(x_j)

    Heads are averaged (Eq. 62) or concatenated.

    Args:
        in_channels: Number of channels of x; -1 takes it from the first call.
        out_channels: Number of channels of the values of each head.
        diffusivity: Computes the coupling S from the state.
        update: Moves the state by the coupling. ``None`` is ``ExplicitEuler(0.5)``, half a step.
        heads: Number of heads H. A single head, of the layer or of the diffusivity, broadcasts against several.
        concat: Concatenate the heads to [N, H · out_channels] instead of averaging them to [N, out_channels]. By
            default heads are averaged, as in Eq. 62.
        transform: Apply W_V. Without W_V the state itself propagates, and input and output have the same channels.
        bias: Add a bias to the output, after the last step, so that the bias is not propagated.
        keep: The state from which the update starts: ``"values"``, h(x) (Eq. 22); or ``"state"``, x (Eq. 63).
        reads: The input of the diffusivity: ``"state"``, x; or ``"values"``, h(x), as in GAT and as Proposition 9
            requires (docs/errata.md, D23).
        steps: Number of updates with the same coupling (the K of SGC and APPNP).
        dropout: Dropout rate on the propagated values. Dropout acts neither on the input of the diffusivity, which
            would change the energy, nor on the state that is kept, whose dropped entries would be lost.
        value_bias: Add a bias to the values, h(x) = W_V x + b_V; requires ``transform``.

    Shapes:
        x: [N, in_channels]; or the pair ([N_src, in_channels], [N_dst, in_channels]) with edges from the first to the
            second, for couplings of observed edges without symmetric normalisation or added self-loops.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None`` if no edges were observed.
        edge_weight: [E].
        batch: [N], sorted.
        source: The shape of the output; by default the state from which the first step starts.
        edge_attr: [E, edge_dim].
        previous: [N, in_channels], the x of the step before, for updates with ``StateUpdate.takes_previous``.
        output: [N, out_channels], or [N, H · out_channels] with ``concat``; [N_dst, …] for a pair.

    Examples:
        >>> conv = DiffusionConv(4, 8, 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"))
        >>> out, S = conv(x, edge_index, return_coupling=True)  # S @ v propagates values v as the layer did
        >>> out.shape
        torch.Size([6, 8])
    """

    # Diagnostics find layers by this attribute, since PDEDiffusion1d, for one, is not a DiffusionConv.
    is_diffusion_layer = True

    def __init__(
        self,
        in_channels: Channels,
        out_channels: Channels,
        diffusivity: Diffusivity,
        update: StateUpdate | None = None,
        heads: Count = 1,
        *,
        concat: bool = False,
        transform: bool = True,
        bias: bool = True,
        keep: Literal["values", "state"] = "values",
        reads: Literal["state", "values"] = "state",
        steps: Count = 1,
        dropout: Probability = 0.0,
        value_bias: bool = False,
    ) -> None:
        super().__init__()
        # With -1, W_V finds the channels at the first call; without W_V the channels of x are those of the output.
        if transform:
            checks.check_counts(out_channels=out_channels)
        # One head broadcasts: all values through one coupling, or the same values through every head of it.
        if 1 not in (heads, diffusivity.heads) and heads != diffusivity.heads:
            raise ValueError(
                f"heads must be 1 or the diffusivity's {diffusivity.heads}; got {heads}."
            )
        total = out_channels
        if concat:
            total = out_channels * max(heads, diffusivity.heads)
        if in_channels != total and not (transform and keep == "values"):
            raise ValueError(
                f"x itself is a part of the output with transform=False or keep='state', so in_channels must equal the "
                f"output's channels {total}; got in_channels={in_channels}."
            )
        if value_bias and not transform:
            raise ValueError(
                "value_bias is added to what W_V gives, and there is none; got value_bias=True with transform=False. "
                "Leave one of them out."
            )
        self.in_channels = in_channels
        self.heads = heads
        self.out_channels = out_channels
        # Those of one head, also where a subclass mixes the heads to other out_channels.
        self.head_channels = out_channels
        self.concat = concat
        self.keep = keep
        self.reads = reads
        self.steps = steps
        self.dropout = dropout
        self.diffusivity = diffusivity
        self.update = update or ExplicitEuler(0.5)
        self.value: FeatureLinear | None = None
        if transform:
            self.value = FeatureLinear(
                in_channels,
                heads * out_channels,
                bias=value_bias,
                weight_initializer="glorot",
            )
        # One bias for the joined heads, added after the last step, so that it is not propagated.
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
        edge_attr: Tensor | None = None,
        previous: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Any:
        """Return the next state; with ``return_coupling`` also the coupling S, an operator applied as ``S @ v``.

        Args:
            x: States of the nodes, or a pair of states of senders and receivers.
            edge_index: Observed edges. ``None``: no edges were observed, so only an attention over all pairs acts.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            source: The source h of the update; by default the state from which the first step starts (Eq. 10).
            edge_attr: Features of the edges, for diffusivities that read them.
            previous: The state before x, for updates of two steps.
            return_coupling: Return the coupling too. By default it is dropped, since it holds features of all nodes.
        """
        if isinstance(x, tuple):
            others |= {"batch": batch, "source": source, "previous": previous}
            others |= {"edge_attr": edge_attr, "return_coupling": return_coupling}
            # A subclass's forward has called this one, so `between` must not call it again.
            forward = partial(DiffusionConv.forward, self)
            return between(self, forward, x, edge_index, edge_weight, **others)
        graph = self.inputs_to_graph(
            x, edge_index, edge_weight, batch, return_coupling, others, edge_attr
        )
        values = self._values(x)
        read = x
        # Only W_V reads a sparse x: everything else needs dense rows.
        if self.reads == "values" or x.layout is not torch.strided:
            read = values.flatten(1)
        coupling = self.diffusivity(read, graph, edge_attr)
        if previous is not None:
            previous = self._values_before(previous, x)
        moved = self._evolve(x, values, coupling, source, previous)
        out = self.output(moved, x)
        # Not by default: it would keep features of all nodes alive.
        if return_coupling:
            return out, coupling
        return out

    def _find_channels(self, x: Tensor) -> None:
        super()._find_channels(x)
        # Without W_V the state itself is the output.
        if self.value is None:
            self.out_channels = self.in_channels
            self.head_channels = self.in_channels

    def _by_head(self, x: Tensor) -> Tensor:
        """Return a state [N, C] by head: cut into the heads that are concatenated, or one head that broadcasts."""
        if self.concat:
            return x.unflatten(1, (-1, self.head_channels))
        return x.unsqueeze(1)

    def _values(self, x: Tensor) -> Tensor:
        """Return the values that propagate, by head: h(x), or x itself."""
        if self.value is None:
            return self._by_head(x)
        # W_V holds its heads one after the other, so that all of them are one product.
        return self.value(x).unflatten(1, (self.heads, -1))

    def _values_before(self, previous: Tensor, x: Tensor) -> Tensor:
        if not self.update.takes_previous:
            raise ValueError(
                f"previous is for updates of two steps; {self.update!r} looks at one state. Leave it out, or take "
                f"MomentumStep(..., steps=1)."
            )
        checks.check_state(previous, "previous", self.in_channels, module=self)
        checks.check_rows(previous, "previous", x)
        return self._values(previous)

    def _evolve(
        self,
        x: Tensor,
        values: Tensor,
        coupling: Coupling,
        source: Tensor | None,
        previous: Tensor | None,
    ) -> Tensor:
        """Move the state ``steps`` times with the same coupling, and join its heads."""
        state = values
        if self.value is not None and self.keep == "state":
            state = self._by_head(x)
        if source is not None:
            if not self.update.takes_source:
                raise ValueError(
                    f"source must be left out, since {type(self.update).__name__} has no source term; got "
                    f"{checks.describe(source)}."
                )
            # A source is passed as the output is returned, with the heads side by side.
            channels = state.size(2)
            if self.concat:
                channels = state.size(1) * channels
            checks.check_state(source, "source", channels, module=self)
            checks.check_rows(source, "source", x)
            source = self._by_head(source)
        # The initial state is the usual source (Eq. 10), so a layer with β needs no further argument.
        elif self.update.beta:
            source = state
        # Own updates of users, written for one state, take no ``previous``.
        further = {}
        # `step` in place of a call of the update: what this layer has made is not checked once more.
        self.update.check(coupling)
        for _ in range(self.steps):
            # New noise for every step, and none in what the update keeps: a dropped entry would be gone for good.
            moving = values
            if self.dropout and self.training:
                moving = dropout(values, self.dropout)
            if self.update.takes_previous:
                further["previous"] = previous
            state = self.update.step(state, coupling, moving, source, **further)
            previous = values
            values = state
        if self.concat:
            return state.flatten(1)
        # A view, where the mean of one head would be a copy.
        return state.squeeze(1) if state.size(1) == 1 else state.mean(1)

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the output of the layer from the new state ``out`` [N, C] and the input ``x``: add the bias.

        Subclasses extend this method, to mix heads or to add a residual.
        """
        return out if self.bias is None else out + self.bias

    # A chain of questions and no table: each has a sentence of its own, with names in it.
    @property
    def why_uncertified(self) -> str | None:
        """The reason why no theorem covers this layer at any state; ``None`` if this depends on the state."""
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
    ) -> Certificate:
        """Certify one step, with any ``source``, by Theorem 7 (of a penalty) or 1 (of any other symmetric coupling).

        Args:
            x: States of the nodes. ``None`` decides whether the layer can have a certificate at all.
            edge_index: Observed edges, as in a call.
            edge_weight: Weights of the edges, as in a call.
            batch: Number of the graph of every node, as in a call.
            source: Accepted, since the theorems hold for any source.
        """
        update = self.update
        diffusivity = self.diffusivity
        # A certificate speaks of the τ of this moment, also where τ is learned.
        tau = float(update.step_size) if isinstance(update, ExplicitEuler) else math.nan
        reason = self.why_uncertified or broken_parameter(self)
        if x is None and not reason:
            reason = "that depends on the state and the graph: pass them, certify(model, data)."
        if x is None or reason:
            return Certificate.refused("Theorems 1 and 7", tau, str(reason))
        assert isinstance(update, ExplicitEuler)  # see `why_uncertified`
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        certified = partial(certify, tau=tau, form=update.form, leak=update.leak)
        # A penalty of the state itself has an energy also where its coupling is divided by its row sums.
        if (
            diffusivity.penalty is not None
            and not diffusivity.needs_graph
            and self.steps == 1
        ):
            return certified(diffusivity, x, ptr=graph.segments)
        return certified(diffusivity(x, graph), None)
