"""Base classes of models: ``GraphModel``, ``LayerStack`` and ``BlockStack``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import Certificate
from diffusion_mp.energies.certification import layer_certificates
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_edge_rows,
    check_flags,
    check_kind,
    check_probability,
    describe,
    found_later,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import check_edge_order
from diffusion_mp.layers import LaplacianEncoder
from diffusion_mp.layers.features import channels_at_first, check_input, input_linear
from diffusion_mp.layers.pyg import KnowsPyGNames, refuse_inputs, refuse_proxy
from diffusion_mp.models.ends import HEADS, FeatureEncoder, Head, Task, check_no_pairs, feature_columns, output_layers
from diffusion_mp.updates import CertifiedStep

#: A function that is called with the coupling of every step.
Record = Callable[[Coupling], None]
Encodings = Tensor | tuple[Tensor, ...]


def forget(coupling: Coupling) -> None:
    """Ignore a coupling: the record of a call that does not return couplings, so that none is kept alive."""


def recorded(record: Record, layer: nn.Module, x: Tensor, graph: Graph, **inputs: Any) -> Any:
    """Return the output of a layer without its coupling, which is recorded."""
    *states, coupling = layer(x, graph, return_coupling=True, **inputs)
    record(coupling)
    return states[0] if len(states) == 1 else tuple(states)


class EdgeMask(MessagePassing):
    """The interface to PyG's explainers.

    A learned edge mask [E] multiplies the weights a_ij. Message hooks, such as those of AttentionExplainer, receive the
    entries of every coupling at the observed edges.
    """

    def forward(self, graph: Graph) -> Graph:
        """Return the graph, with masked weights while a model is being explained."""
        mask = self._edge_mask
        if not self.explain or mask is None or graph.edge_index is None:
            return graph
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        weight, rows = graph.weights(mask) * mask, {"ptr": graph.segments, "full_degree": graph.full_degree}
        return Graph(graph.num_nodes, graph.edges, weight, **rows, validate=False)

    def listening(self, graph: Graph, record: Record) -> Record:
        """Return a record that also passes attention weights to the registered message hooks."""
        hooks = self._message_forward_hooks
        if not hooks or graph.edge_index is None:
            return record

        def record_and_call(coupling: Coupling) -> None:
            record(coupling)
            for hook in hooks.values():
                hook(self, ({"alpha": coupling.at(graph.edges)},), None)

        return record_and_call


def with_every_gradient(out: Tensor, model: nn.Module) -> Tensor:
    """Return ``out`` with a dependence on every parameter, so that unused parameters have zero gradients.

    DistributedDataParallel waits for the gradient of every parameter, but an input without edges leaves parameters
    unused, and so does the edge state after the last block.
    """
    together = distributed.is_available() and distributed.is_initialized()
    if not (together and torch.is_grad_enabled() and out.requires_grad):
        return out
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return out + torch.cat([parameter.flatten()[:0].to(out) for parameter in trained]).sum()


class GraphModel(KnowsPyGNames, nn.Module, ABC):
    """Base of models in the calling convention of PyG; a subclass implements :meth:`propagate`.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits (or embeddings);
            ``in_channels=-1`` is inferred from the first call, in models that begin with a linear map of the features.

    Models with a ``task`` predict for every node by default. For ``"graph"`` an MLP reads the mean over the nodes of
    each graph. For ``"link"`` it reads nodes, and the score of a pair is the inner product of its two embeddings,
    divided by √out_channels.

    Shapes:
        x: [N, in_channels], dense, or sparse (CSR, CSC or COO) for models that begin with a linear map of the features
        alone; edges and batch as in :class:`DiffusionConv`; edge_attr: [E, edge_dim], in models that read features of
        edges; edge_label_index: [2, L], the pairs to score with ``"link"``;
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
        """Return logits [N, out_channels], or the input of ``head``, for checked inputs; record every coupling."""

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
        """Return logits or scores; with ``return_coupling`` also the coupling of every layer."""
        features = {} if edge_attr is None else {"edge_attr": edge_attr}
        inputs, refused = (features, others) if self.reads_edge_attr else ({}, others | features)
        graph = (edge_index, edge_weight, batch)
        return self._predict(x, graph, inputs, refused, edge_label_index, return_coupling)

    def _predict(
        self,
        x: Tensor,
        edges: tuple[Tensor | Graph | None, Tensor | None, Tensor | None],
        inputs: dict[str, Any],
        refused: dict[str, Any],
        edge_label_index: Tensor | None,
        return_coupling: bool,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Check the inputs of a call, propagate (with the further ``inputs`` of `propagate`) and apply the head."""
        refuse_proxy(self, x)
        refuse_inputs(self, refused)
        check_edge_order(edges[0], inputs.get("edge_attr"))
        check_flags(return_coupling=return_coupling)
        self._check_features(x)
        graph = self.edge_mask(Graph.coerce(x, *edges))
        couplings: list[Coupling] = []
        record = self.edge_mask.listening(graph, couplings.append if return_coupling else forget)
        logits = self.propagate(x, graph, record, **inputs)
        if self.head is None:
            check_no_pairs(edge_label_index)
        else:
            logits = self.head(logits, graph, edge_label_index)
        logits = with_every_gradient(logits, self)
        return (logits, couplings) if return_coupling else logits

    def _check_features(self, x: Tensor) -> None:
        """Raise unless the features fit the model; the first call infers ``in_channels=-1``."""
        if self.in_channels == -1:
            self.in_channels = channels_at_first(self, x)
        check_input(x, channels=self.in_channels, module=self)

    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Certificate:
        """Return whether all layers descend one energy at this input; models that do override this (see `certify`).

        By default the certificate is refused, with the parts that no energy covers and the certificates of the layers.
        """
        reason = f"in {type(self).__name__} {'; '.join(uncertified_parts(self))}."
        layers = layer_certificates(self, x, edge_index, edge_weight, batch)
        return Certificate(theorem="Theorem T1", holds=False, reason=reason, layers=layers)

    def reset_parameters(self) -> None:
        """Reset all parameters, in the order of the constructor."""
        for child in self.children():
            reset(child)


class LayerStack(GraphModel):
    """Base of models with an input layer, ``num_layers`` layers with a norm after each, and an output layer.

    Args:
        in_channels, hidden_channels, out_channels: as in :class:`GraphModel`.
        num_layers: K.
        conv: function that builds a layer.
        layer_norm: normalise after the input layer and after every layer.
        dropout: dropout rate.
        states: number of concatenated states that the output layer reads.
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


class BlockStack(GraphModel):
    r"""Base of models with states of nodes and edges: x⁰ = [W x ‖ PE], e⁰ = W_e e, (x, e) ← block(x, e, A), head(x).

    With a PyG ``Data`` object:

    ```python
    model(data.x, data.edge_index, batch=data.batch, edge_attr=data.edge_attr,
          pe=(data.laplacian_eigenvectors, data.laplacian_eigenvalues, data.laplacian_mask))
    ```

    Args:
        in_channels: of floating-point features, -1 to infer them from the first call; for integer features a list
            with the number of categories of every column.
        hidden_channels: of the states of nodes and edges.
        out_channels: of the predictions, or for links of the embeddings.
        num_layers: number of blocks.
        block: function that builds a block, a module called as ``block(x, graph, edge_attr=..., return_coupling=True)``
            such as :class:`GPSBlock`.
        edge_dim: channels of edge features, as ``in_channels``; ``None``: no edge features, e⁰ is one learned vector.
        pe_channels: channels of the positional encoding, a part of ``hidden_channels``; 0: none.
        pe_encoder: module that computes the encoding from ``pe``; :class:`LaplacianEncoder` by default.
        task: ``"node"``, ``"graph"`` or ``"link"``, see :class:`GraphModel`.

    Shapes:
        - x, edges and batch as in :class:`GraphModel`, x [N, columns] of integers for categories; edge_attr:
          [E, edge_dim] in the order of ``edge_index``; pe: a tensor or a tuple of tensors, a row per node;
          edge_label_index: [2, L].
        - output: raw logits [N, out_channels], [B, out_channels], or scores [L].

    Raises:
        TypeError, ValueError: an option or the input does not fit.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        block: Callable[[], nn.Module],
        *,
        edge_dim: int | Sequence[int] | None = None,
        pe_channels: int = 0,
        pe_encoder: nn.Module | None = None,
        task: Task = "node",
    ) -> None:
        super().__init__(feature_columns(in_channels, "in_channels"), hidden_channels, out_channels)
        check_counts(num_layers=num_layers)
        check_choice(task, "task", HEADS)
        if edge_dim is not None:
            feature_columns(edge_dim, "edge_dim")
        if type(pe_channels) is not int or pe_channels:
            check_counts(pe_channels=pe_channels)
        check_kind(pe_encoder, "pe_encoder", (nn.Module, NoneType), "a module that makes the encodings")
        if not 0 <= pe_channels < hidden_channels:
            raise ValueError(
                f"pe_channels must lie in 0..{hidden_channels - 1}, a part of hidden_channels; got {pe_channels}."
            )
        if pe_encoder is not None and not pe_channels:
            raise ValueError("pe_encoder needs pe_channels, the number of channels it gives; got pe_channels=0.")
        self.pe_channels = pe_channels
        self.encoder = FeatureEncoder(in_channels, hidden_channels - pe_channels)
        self.pe_encoder = (pe_encoder or LaplacianEncoder(pe_channels)) if pe_channels else None
        self.edge_encoder = None if edge_dim is None else FeatureEncoder(edge_dim, hidden_channels, "edge_attr")
        self.edge_start = nn.Embedding(1, hidden_channels) if edge_dim is None else None
        self.blocks = nn.ModuleList(block() for _ in range(num_layers))
        self.head = HEADS[task](hidden_channels, out_channels)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
        edge_label_index: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Return predictions; with ``return_coupling`` also the coupling of every block."""
        inputs = {"edge_attr": edge_attr, "pe": pe}
        graph = (edge_index, edge_weight, batch)
        return self._predict(x, graph, inputs, others, edge_label_index, return_coupling)

    def _check_features(self, x: Tensor) -> None:
        """Raise unless x has a row per node; the encoder checks its columns."""
        check_kind(x, "x", Tensor, f"a tensor [num_nodes, {self.in_channels}]")
        if not x.dim():
            raise ValueError(f"x must be [num_nodes, {self.in_channels}]; got {describe(x)}.")

    def propagate(
        self,
        x: Tensor,
        graph: Graph,
        record: Record,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
    ) -> Tensor:
        x, edges = self._placed(self.encoder(x), pe), self._edges(graph, edge_attr)
        if self.in_channels == -1:
            self.in_channels = self.encoder.channels
        for block in self.blocks:
            if edges is None:
                x = recorded(record, block, x, graph)
            else:
                x, edges = recorded(record, block, x, graph, edge_attr=edges)
        return x

    def _placed(self, x: Tensor, pe: Encodings | None) -> Tensor:
        """Return the states concatenated with the positional encoding."""
        if (self.pe_encoder is None) != (pe is None):
            raise ValueError(
                "pe must be passed to a model with pe_channels, and only to one; "
                f"got {'none' if pe is None else 'one'} with pe_channels={self.pe_channels}."
            )
        if self.pe_encoder is None or pe is None:
            return x
        for part in pe if isinstance(pe, tuple) and pe else (pe,):
            if not isinstance(part, Tensor) or not (part.is_floating_point() or part.dtype == torch.bool):
                raise TypeError(
                    f"pe must be floating-point tensors, and masks of bool, with a row per node; got {describe(part)}."
                )
            if part.shape[:1] != x.shape[:1] or part.device != x.device:
                raise ValueError(f"pe must have {x.size(0)} rows on {x.device}, one per node; got {describe(part)}.")
        try:
            encoded = cast("Tensor", self.pe_encoder(*pe) if isinstance(pe, tuple) else self.pe_encoder(pe))
        except (TypeError, ValueError) as error:
            raise type(error)(f"pe must be what {type(self.pe_encoder).__name__} reads: {error}") from error
        if encoded.shape != (x.size(0), self.pe_channels):
            raise ValueError(
                f"the encoding of pe must be [{x.size(0)}, {self.pe_channels}], one row per node; "
                f"got {describe(encoded)}."
            )
        return torch.cat([x, encoded], 1)

    def _edges(self, graph: Graph, edge_attr: Tensor | None) -> Tensor | None:
        """Return the initial edge states, ``None`` without observed edges."""
        if (self.edge_encoder is not None) != (edge_attr is not None) and graph.edge_index is not None:
            raise ValueError(
                "edge_attr must be passed to a model with edge_dim, and only to one; "
                f"got {'none' if edge_attr is None else describe(edge_attr)}."
            )
        if graph.edge_index is None:
            if edge_attr is not None:
                raise ValueError("edge_attr needs edge_index; got edge_attr alone.")
            return None
        if self.edge_encoder is None or edge_attr is None:
            start = cast("nn.Embedding", self.edge_start)
            return start.weight.expand(graph.num_edges, -1)
        check_edge_rows(edge_attr, graph.num_edges)
        return self.edge_encoder(edge_attr)


def uncertified_parts(model: nn.Module) -> list[str]:
    """Return the parts of a model that violate Theorem T1, one of every kind, as phrases for a message."""
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
