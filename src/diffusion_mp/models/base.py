"""Base classes of models, with their encoders of features and their heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, global_mean_pool

from diffusion_mp import checks
from diffusion_mp.checks import Channels, Count, Probability
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import Certificate
from diffusion_mp.energies.certification import layer_certificates
from diffusion_mp.graph import Graph
from diffusion_mp.layers.features import FeatureLinear, channels_at_first, check_input
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.runtime.precision import widened
from diffusion_mp.updates import CertifiedStep

Edges = Tensor | Graph | None
Task = Literal["node", "graph", "link"]
Collect = Callable[[Coupling], None]  # called with the coupling of every layer


def discard(coupling: Coupling) -> None:
    """Do nothing. Passed as ``collect`` when couplings are not returned, so that none is kept alive."""


def run_layer(
    collect: Collect, layer: nn.Module, x: Tensor, graph: Graph, **inputs: Any
) -> Any:
    """Return the output of a layer, and pass its coupling, or the couplings of all its steps, to ``collect``."""
    if collect is discard:
        # Couplings are kept only if somebody takes them: NodeFormer's hold its features in memory, and every step of a
        # CertifiedBlock computes its couplings by a product.
        return layer(x, graph, **inputs)
    *states, couplings = layer(x, graph, return_coupling=True, **inputs)
    if not isinstance(couplings, list):  # a list has one for every step
        couplings = [couplings]
    for coupling in couplings:
        collect(coupling)
    if len(states) == 1:
        return states[0]
    return tuple(states)


def feature_columns(channels: int | Sequence[int], name: str) -> int:
    """Return the number of columns of features: ``channels`` numbers (-1: unknown), or categories (a list of sizes)."""
    if isinstance(channels, str) or not isinstance(channels, Sequence):
        # -1 waits for the first call.
        if not checks.found_later(channels):
            checks.check_counts(**{name: channels})
        return channels
    if not channels:
        raise ValueError(
            f"{name} must be a number of channels or a list with a table size per column; got none."
        )
    checks.check_counts(
        **{f"{name}[{column}]": size for column, size in enumerate(channels)}
    )
    return len(channels)


class FeatureEncoder(nn.Module):
    """W x + b for features [N, channels], dense or sparse; or Σ_f T_f[x_f] for integers, one table per column.

    Args:
        channels: Number of channels, -1 to take it from the first call; or a list with the number of categories of
            every column.
        out_channels: Number of channels C of the state.
        name: Name of ``channels`` in the model, for messages.

    Shapes:
        x: [N, channels] of floating point; or [N, F] of integers, also [N] for one column.
        output: [N, C].
    """

    def __init__(
        self,
        channels: int | Sequence[int],
        out_channels: int,
        name: str = "in_channels",
    ) -> None:
        super().__init__()
        self.channels = feature_columns(channels, name)
        self.sizes: tuple[int, ...] | None = None
        self.linear: nn.Module | None = None
        # Registered in both cases, so that state dicts differ only in tables.
        self.tables = nn.ModuleList()
        if isinstance(channels, int):
            self.linear = FeatureLinear(channels, out_channels)
        else:
            self.sizes = tuple(channels)
            self.tables.extend(nn.Embedding(size, out_channels) for size in channels)

    def forward(self, x: Tensor, name: str = "x") -> Tensor:
        """Return the states [N, out_channels]; ``name`` is the name of the input in messages."""
        if self.linear is not None:
            if self.channels == -1:
                self.channels = channels_at_first(self, x)
            check_input(x, name, channels=self.channels, module=self)
            return self.linear(x)
        columns = self._columns(x, name).unbind(1)
        encoded = [
            table(column) for table, column in zip(self.tables, columns, strict=True)
        ]
        # A sum, as in the encoders of OGB: the state is as wide for one column as for many.
        return reduce(torch.add, encoded)

    def _columns(self, x: Tensor, name: str) -> Tensor:
        """Return x as [N, F]. Categories are checked unless ``torch.compile`` traces."""
        checks.check_kind(
            x, name, Tensor, f"a tensor [rows, {self.channels}] of integers"
        )
        if x.dtype not in checks.INTEGERS:
            raise TypeError(
                f"{name} must hold categories (integers); got {checks.describe(x)}. Use {name}.long()."
            )
        columns = x
        # One column may come without its dimension, as in some data sets of PyG.
        if x.dim() == 1:
            columns = x.unsqueeze(1)
        if columns.dim() != 2 or columns.size(1) != self.channels:
            raise ValueError(
                f"{name} must be [rows, {self.channels}], one column per table; got {checks.describe(x)}."
            )
        device = self.tables[0].weight.device
        checks.check_device(x, name, device, f"the tables of {name}")  # type: ignore[arg-type]
        columns = columns.long()
        # An index outside of a table ends a CUDA process; but to look at values would end the graph of a compiler.
        if not columns.is_meta and checks.values_to_check():
            for number, size in enumerate(self.sizes or ()):
                checks.check_range(
                    columns[:, number], f"column {number} of {name}", size, "categories"
                )
        return columns


class NodeHead(nn.Module):
    """Logits of every node by an MLP, W₂ ReLU(W₁ x); also the base of the heads of other tasks.

    Args:
        channels: Number of channels C of the state.
        out_channels: Number of logits.

    Shapes:
        x: [N, C].
        output: [N, out_channels].
    """

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_channels)
        )

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        """Return the predictions for states [N, C]; ``pairs`` [2, L] belong to link tasks only."""
        check_no_pairs(pairs)
        return self.mlp(x)


class GraphHead(NodeHead):
    """Logits of every graph [B, out_channels] from the mean of its nodes, which is zero for an empty graph."""

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        # Sums over nodes are taken in float32 at least: in half precision, many small terms would be lost.
        mean = global_mean_pool(widened(x), graph.batch.to(x.device), graph.num_graphs)
        return super().forward(mean.to(x.dtype), graph, pairs)


class LinkHead(NodeHead):
    """Scores of pairs [L]: ⟨MLP(x_u), MLP(x_v)⟩ / √out_channels, so that a binary cross-entropy starts near log 2."""

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        if pairs is None:
            raise ValueError(
                "edge_label_index is needed for a link task: [2, L], the pairs to score; got None."
            )
        pairs = checks.check_pairs(
            pairs, "edge_label_index", x.size(0), x.device, "[2, L] of int64"
        )
        embedding = self.mlp(x)
        products = embedding[pairs[0]] * embedding[pairs[1]]
        # Without the root a score grows with the channels, and training starts far from log 2.
        return products.sum(1) * embedding.size(1) ** -0.5


HEADS: dict[str, type[NodeHead]] = {
    "node": NodeHead,
    "graph": GraphHead,
    "link": LinkHead,
}


def check_no_pairs(pairs: Tensor | None) -> None:
    if pairs is not None:
        raise ValueError(
            "edge_label_index belongs to task='link'; leave it out for nodes and graphs."
        )


def output_layers(
    channels: int, out_channels: int, task: Task
) -> tuple[nn.Module, NodeHead | None]:
    """Return a linear map of states to logits and no head; for graphs and links, the identity and a head."""
    checks.check_choice(task, "task", HEADS)
    # For nodes one linear map, as in the papers; the mean of a graph or a pair is too little for a linear map to read.
    if task == "node":
        return nn.Linear(channels, out_channels), None
    return nn.Identity(), HEADS[task](channels, out_channels)


class EdgeMask(MessagePassing):
    """The interface to PyG's explainers: an edge mask [E] multiplies the weights a_ij; message hooks get attention."""

    def forward(self, graph: Graph) -> Graph:
        """Return the graph, with masked weights while a model is being explained."""
        mask = self._edge_mask
        # An explainer sets a mask and takes it away again; most calls have none.
        if not self.explain or mask is None or graph.edge_index is None:
            return graph
        # An explainer learns logits, and afterwards applies a mask of numbers in [0, 1].
        if self._apply_sigmoid:
            mask = mask.sigmoid()
        return graph.with_weights(graph.weights(mask) * mask)

    def listening(self, graph: Graph, collect: Collect) -> Collect:
        """Return a function that also passes the entries at the observed edges to the registered message hooks."""
        # AttentionExplainer of PyG hooks the messages of MessagePassing modules and reads "alpha". Here no message is
        # made one by one, so the entries at the observed edges are computed for it.
        hooks = self._message_forward_hooks
        if not hooks or graph.edge_index is None:
            return collect

        def collect_and_call(coupling: Coupling) -> None:
            collect(coupling)
            for hook in hooks.values():
                hook(self, ({"alpha": coupling.at(graph.edges)},), None)

        return collect_and_call


class GraphModel(GraphLayer, ABC):
    """Base of models in the calling convention of PyG; a subclass implements :meth:`propagate`.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call, in models that begin with a
            linear map of the features.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits, or of channels of an embedding.

    Shapes:
        x: [N, in_channels], dense; or sparse, for models in which only a linear map reads the features.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim], for models that read features of edges.
        edge_label_index: [2, L], the pairs to score in a link task.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.
    """

    reads: tuple[str, ...] = ()
    """Further inputs of a call that :meth:`propagate` takes, such as ``edge_attr``."""
    categories: tuple[int, ...] | None = None
    """Table sizes of the columns of integer features."""

    def __init__(
        self, in_channels: Channels, hidden_channels: Count, out_channels: Count
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        # A model of nodes ends in its own linear map, and has none.
        self.head: NodeHead | None = None
        # A module, since PyG's explainers look for `MessagePassing` among the parts of a model.
        self.edge_mask = EdgeMask()

    @abstractmethod
    def propagate(self, x: Tensor, graph: Graph, collect: Collect) -> Tensor:
        """Return logits [N, out_channels], or the input of ``head``, and pass every coupling to ``collect``."""

    def forward(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        edge_label_index: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Return logits or scores; with ``return_coupling`` also the coupling of every layer.

        Args:
            x: Features of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            edge_attr: Features of the edges, for models that read them.
            edge_label_index: Pairs of nodes to score, for link tasks.
            return_coupling: Return the couplings too. By default they are dropped, since they hold features of all
                nodes.
        """
        if edge_attr is not None:
            others["edge_attr"] = edge_attr
        # What is left is refused below, by name.
        inputs = {name: others.pop(name) for name in self.reads if name in others}
        graph = self.inputs_to_graph(
            x,
            edge_index,
            edge_weight,
            batch,
            return_coupling,
            others,
            inputs.get("edge_attr"),
        )
        # Before any layer, so that an explainer's mask acts in all of them.
        graph = self.edge_mask(graph)
        if torch.compiler.is_dynamo_compiling():
            # Without fullgraph=True its graph ends where the number of graphs is read: here, and not within a block.
            _ = graph.segments
        # A coupling holds features of all nodes: it is kept only for a caller who asks for it.
        couplings: list[Coupling] = []
        collect: Collect = discard
        if return_coupling:
            collect = couplings.append
        collect = self.edge_mask.listening(graph, collect)
        logits = self.propagate(x, graph, collect, **inputs)
        if self.head is None:
            check_no_pairs(edge_label_index)
        else:
            logits = self.head(logits, graph, edge_label_index)
        if return_coupling:
            return logits, couplings
        return logits

    def check_features(self, x: Tensor, *, channels: int, module: nn.Module) -> None:
        # Categories are checked by their tables.
        if self.categories is None:
            check_input(x, channels=channels, module=module)
        elif isinstance(x, Tensor) and not x.dim():
            raise ValueError(
                f"x must be [num_nodes, {channels}]; got {checks.describe(x)}."
            )

    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Certificate:
        """Return whether all layers descend one energy here: no, unless a model overrides this (see `certify`).

        Args:
            x: Features of the nodes. ``None`` looks only at the layers.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
        """
        # One reason for every kind of part that violates Theorem T1.
        reasons: dict[str, str] = {}
        # By class names and attributes: a model may hold modules of PyG, and of its user.
        for name, module in self.named_modules():
            kind = type(module).__name__
            update = getattr(module, "update", None)
            if "Norm" in kind:
                reason = "rescales states, which no energy accounts for"
            elif getattr(module, "is_diffusion_layer", False) and not isinstance(
                update, CertifiedStep
            ):
                reason = f"moves the state by {type(update).__name__} instead of a CertifiedStep"
                if getattr(module, "value", None) is not None:
                    reason += ", and transforms what it propagates"
            else:
                continue
            reasons.setdefault(kind, f"{name} ({kind}) {reason}")
        reason = "; ".join(reasons.values()) or "no layer is a CertifiedStep"
        pairs = None
        if isinstance(self.head, LinkHead) and x is not None:
            # Layers need no pairs.
            pairs = torch.empty(2, 0, dtype=torch.long, device=x.device)
        layers = layer_certificates(
            self, x, edge_index, edge_weight, batch, edge_label_index=pairs
        )
        return Certificate(
            theorem="Theorem T1",
            holds=False,
            reason=f"in {type(self).__name__} {reason}.",
            layers=layers,
        )


class StackOptions(TypedDict, total=False):
    """Options of `LayerStack`; see `GraphModel`."""

    layer_norm: bool
    dropout: Probability
    task: Task


class LayerStack(GraphModel):
    """Base of models with an input layer, a chain of layers with norms, and an output layer.

    Args:
        channels: Numbers of channels of the features, the state and the output.
        num_layers: Number of layers.
        conv: Function that builds a layer.
        states: Number of states that the output layer reads.
        layer_norm: LayerNorm after the input layer and after every layer.
        dropout: Dropout rate.
        task: ``"node"``: predict for every node; ``"graph"``: an MLP reads the mean over the nodes of each graph;
            ``"link"``: a pair scores ⟨MLP(x_u), MLP(x_v)⟩ / √out_channels.
    """

    def __init__(
        self,
        channels: tuple[int, int, int],
        num_layers: int,
        conv: Callable[[], nn.Module],
        *,
        states: int = 1,
        layer_norm: bool = False,
        dropout: Probability = 0.0,
        task: Task = "node",
    ) -> None:
        super().__init__(*channels)
        in_channels, hidden_channels, out_channels = channels
        self.dropout = dropout
        self.encoder = FeatureLinear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(conv() for _ in range(num_layers))
        # Identities stand where norms would, so that `propagate` is the same with and without.
        norm = nn.LayerNorm if layer_norm else nn.Identity
        self.norms = nn.ModuleList(norm(hidden_channels) for _ in range(num_layers + 1))
        self.decoder, self.head = output_layers(
            states * hidden_channels, out_channels, task
        )
