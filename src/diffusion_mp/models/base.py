"""What every model is: features and a graph in, logits out, and on request the operators of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import Certificate
from diffusion_mp.energies.certification import layer_certificates
from diffusion_mp.errors import check_counts, check_flags, check_probability, found_later
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import check_edge_order
from diffusion_mp.layers.features import channels_at_first, check_features, input_linear
from diffusion_mp.layers.pyg import KnowsPyGNames, refuse_inputs, refuse_proxy
from diffusion_mp.models.heads import Head, Task, check_no_pairs, output_layers
from diffusion_mp.updates import CertifiedStep

#: What a model tells the coupling of every step.
Record = Callable[[Coupling], None]


def forget(coupling: Coupling) -> None:
    """The record of a call that did not ask for couplings: no coupling, and no state it was made of, is kept."""


def recorded(record: Record, layer: nn.Module, x: Tensor, graph: Graph, **inputs: Any) -> Any:
    """What a layer returns for a state, its coupling being told to the record instead."""
    *states, coupling = layer(x, graph, return_coupling=True, **inputs)
    record(coupling)
    return states[0] if len(states) == 1 else tuple(states)


class EdgeMask(MessagePassing):
    """Where PyG's explainers put the mask [E] of the edges that they learn: it multiplies the weights a_ij.

    And where its AttentionExplainer listens: it hears the entries of every coupling at the observed edges.
    """

    def forward(self, graph: Graph) -> Graph:
        """The graph, with its weights masked while a model is being explained."""
        mask = self._edge_mask
        if not self.explain or mask is None or graph.edge_index is None:
            return graph
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        weight, rows = graph.weights(mask) * mask, {"ptr": graph.segments, "full_degree": graph.full_degree}
        return Graph(graph.num_nodes, graph.edges, weight, **rows, validate=False)

    def listening(self, graph: Graph, record: Record) -> Record:
        """The record, which tells the attention weights to whoever listens to messages (``_message_forward_hooks``)."""
        hooks = self._message_forward_hooks
        if not hooks or graph.edge_index is None:
            return record

        def told(coupling: Coupling) -> None:
            record(coupling)
            for hook in hooks.values():
                hook(self, ({"alpha": coupling.at(graph.edges)},), None)

        return told


def with_every_gradient(out: Tensor, model: nn.Module) -> Tensor:
    """``out``, on which every parameter of the model has a gradient, of zero where nothing depends on it.

    Processes that train one model together (DistributedDataParallel) wait for the gradient of every parameter, but an
    input without edges does not need what reads edges, and nobody reads the edges' state after the last block.
    """
    together = distributed.is_available() and distributed.is_initialized()
    if not (together and torch.is_grad_enabled() and out.requires_grad):
        return out
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return out + torch.cat([parameter.flatten()[:0].to(out) for parameter in trained]).sum()


class GraphModel(KnowsPyGNames, nn.Module, ABC):
    """A model in PyG's calling convention; a new one writes :meth:`propagate`.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits (or embeddings);
            ``in_channels`` -1 for those of the first call, where a linear map of the features comes first.

    Models with a ``task`` predict for every node; for ``"graph"`` an MLP reads the mean over the nodes of each graph;
    for ``"link"`` it reads nodes, and the score of a pair is the inner product of what it gives for the two, divided by
    √out_channels.

    Shapes:
        x: [N, in_channels], dense, or sparse (CSR, CSC or COO) for models that begin with a linear map of the features
        alone; edges and batch as in :class:`DiffusionConv`; edge_attr: [E, edge_dim], where a model reads features of
        edges; edge_label_index: [2, L], the pairs that ``"link"`` scores;
        output: raw logits [N, out_channels], for graphs [B, out_channels], and for links scores [L].
    """

    reads_edge_attr = False
    """Whether :meth:`propagate` takes ``edge_attr``, features of edges."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        known = {} if found_later(in_channels) else {"in_channels": in_channels}
        check_counts(**known, hidden_channels=hidden_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.head: Head | None = None
        self.edge_mask = EdgeMask()

    @abstractmethod
    def propagate(self, x: Tensor, graph: Graph, record: Record) -> Tensor:
        """The logits [N, out_channels], or the states that ``head`` reads, for features and a graph that were checked;
        every coupling is recorded."""

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        edge_label_index: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Logits or scores; with ``return_coupling`` also the operator of every layer."""
        refuse_proxy(self, x)
        features = {} if edge_attr is None else {"edge_attr": edge_attr}
        refuse_inputs(self, others if self.reads_edge_attr else others | features)
        check_edge_order(edge_index, edge_attr)
        check_flags(return_coupling=return_coupling)
        self._check_features(x)
        graph = self.edge_mask(Graph.coerce(x, edge_index, edge_weight, batch))
        couplings: list[Coupling] = []
        record = self.edge_mask.listening(graph, couplings.append if return_coupling else forget)
        logits = self.propagate(x, graph, record, **features)
        if self.head is None:
            check_no_pairs(edge_label_index)
        else:
            logits = self.head(logits, graph, edge_label_index)
        logits = with_every_gradient(logits, self)
        return (logits, couplings) if return_coupling else logits

    def _check_features(self, x: Tensor) -> None:
        """Raise unless the features fit the model, whose channels the first call may find."""
        if self.in_channels == -1:
            self.in_channels = channels_at_first(self, x)
        check_features(x, channels=self.in_channels, module=self)

    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Certificate:
        """Whether every layer descends one energy at this input, as `certify` asks; a model that does overrides this.

        By itself it is refused, with the parts that no energy knows, and with what is known of every layer alone.
        """
        reason = f"in {type(self).__name__} {'; '.join(uncertified_parts(self))}."
        layers = layer_certificates(self, x, edge_index, edge_weight, batch)
        return Certificate(theorem="Theorem T1", holds=False, reason=reason, layers=layers)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        for child in self.children():
            reset(child)


class LayerStack(GraphModel):
    """An input layer, ``num_layers`` layers with a norm after each, an output layer; a model says how they follow.

    Args:
        in_channels, hidden_channels, out_channels: as in :class:`GraphModel`.
        num_layers: K.
        conv: makes a layer.
        layer_norm: normalise after the input layer and after every layer.
        dropout: rate; the model says of what.
        states: how many states the output layer reads side by side.
        task: ``"node"``, ``"graph"`` or ``"link"``, see :class:`GraphModel`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        conv: Callable[[], nn.Module],
        *,
        layer_norm: bool,
        dropout: float,
        states: int = 1,
        task: Task = "node",
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_layers=num_layers)
        check_flags(layer_norm=layer_norm)
        check_probability(dropout, "dropout")
        self.dropout = dropout
        self.encoder = input_linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(conv() for _ in range(num_layers))
        self.norms = nn.ModuleList(
            nn.LayerNorm(hidden_channels) if layer_norm else nn.Identity() for _ in range(num_layers + 1)
        )
        self.decoder, self.head = output_layers(states * hidden_channels, out_channels, task)


def uncertified_parts(model: nn.Module) -> list[str]:
    """The parts of a model that keep Theorem T1 from it, one of every kind, as parts of a sentence."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        update = getattr(module, "update", None)
        if "Norm" in kind:
            found.setdefault("norm", f"{name} ({kind}) rescales states, which no energy knows")
        elif getattr(module, "is_diffusion_layer", False) and not isinstance(update, CertifiedStep):
            by = f"by {type(update).__name__}" if isinstance(update, nn.Module) else "by a rule of its own"
            values = ", and transforms what it propagates" if getattr(module, "value", None) is not None else ""
            found.setdefault(kind, f"{name} ({kind}) moves the state {by} instead of a CertifiedStep{values}")
    return list(found.values()) or ["no layer is a CertifiedStep"]
