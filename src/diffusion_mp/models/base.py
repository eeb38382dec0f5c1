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
Head = Literal["dot", "mlp"]
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


class Readout(nn.Module):
    """What a model makes of its last states: logits of nodes, logits of graphs, or scores of pairs of nodes.

    Logits of a graph are read from the mean of its nodes, which is zero for an empty graph. Scores are ⟨z_u, z_v⟩, as
    in PyG's ``InnerProductDecoder``; or ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels, so that a binary cross-entropy starts
    near log 2.

    Args:
        task: What is predicted, ``"node"``, ``"graph"`` or ``"link"``.
        channels: Number of channels C of the states, which is checked for pairs.
        mlp: The MLP that reads the states, or their means. ``None``: they are the prediction, as for nodes by default.

    Shapes:
        x: [N, C].
        pairs: [2, L], for ``task="link"``.
        output: [N, out_channels], [B, out_channels] or [L].
    """

    def __init__(
        self,
        task: Task = "node",
        channels: int | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.task = task
        self.channels = channels
        self.mlp = mlp

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None = None) -> Tensor:
        """Return the predictions for states [N, C]; of ``pairs``, the ``edge_label_index`` of a call, for links."""
        if self.task == "link":
            return self.scores(x, pairs)
        if self.task == "graph":
            # Sums over nodes are taken in float32 at least: in half precision, many small terms would be lost.
            batch = graph.batch.to(x.device)
            mean = global_mean_pool(widened(x), batch, graph.num_graphs)
            x = mean.to(x.dtype)
        return x if self.mlp is None else self.mlp(x)

    def scores(self, z: Tensor, pairs: Tensor | None) -> Tensor:
        """Return the scores of pairs of nodes."""
        scale = 1.0
        if self.mlp is not None:
            z = self.mlp(z)
            # Without the root a score grows with the channels, and training starts far from log 2.
            scale = z.size(1) ** -0.5
        u, v = checks.check_pairs(
            pairs, "edge_label_index", z.size(0), z.device, "[2, L] of int64"
        )
        return (z[u] * z[v]).sum(1) * scale


def two_layers(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_channels)
    )


def make_readout(channels: int, out_channels: int, task: Task, head: Head) -> Readout:
    """Return the readout of a task, which reads hidden states of ``channels`` where it has an MLP."""
    # Nodes are read by one linear map, as in the papers; the mean of a graph is too little for a linear map to read.
    if task == "graph" or (task == "link" and head == "mlp"):
        return Readout(task, channels, two_layers(channels, out_channels))
    return Readout(task, out_channels)


def output_layers(
    channels: int, out_channels: int, task: Task, head: Head = "dot"
) -> tuple[nn.Module, Readout]:
    """Return a linear map of states to the output and the readout; the identity before a readout with an MLP."""
    readout = make_readout(channels, out_channels, task, head)
    if readout.mlp is None:
        return nn.Linear(channels, out_channels), readout
    return nn.Identity(), readout


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
    head: Readout

    def __init__(
        self, in_channels: Channels, hidden_channels: Count, out_channels: Count
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        # States are the output, unless a model sets another. Unregistered, so that parts keep the order in which a
        # model makes them.
        self.__dict__["head"] = Readout()
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
        others["edge_attr"] = edge_attr
        if edge_label_index is None and self.head.task == "link":
            raise ValueError(
                "edge_label_index is needed for a link task: [2, L], the pairs to score; got None. The states alone "
                "are model.encode(x, edge_index)."
            )
        if edge_label_index is not None:
            self._check_link("edge_label_index")
        # A coupling holds features of all nodes: it is kept only for a caller who asks for it.
        couplings: list[Coupling] = []
        collect: Collect = discard
        # `inputs_to_graph` refuses what is no flag.
        if return_coupling is True:
            collect = couplings.append
        states, graph = self._states(
            x, edge_index, edge_weight, batch, return_coupling, others, collect
        )
        output = self.head(states, graph, edge_label_index)
        if return_coupling:
            return output, couplings
        return output

    def encode(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the states z [N, channels] from which :meth:`decode` scores any pairs of nodes, for link tasks.

        Args:
            x: Features of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            inputs: Further inputs that the model reads, such as ``edge_attr``.
        """
        self._check_link("encode")
        states, _ = self._states(
            x, edge_index, edge_weight, batch, False, inputs, discard
        )
        return states

    def decode(self, z: Tensor, edge_label_index: Tensor) -> Tensor:
        """Return the scores [L] of pairs of nodes, the logits of an edge between them, for link tasks.

        ``decode(encode(x, edge_index), pairs)`` is ``model(x, edge_index, edge_label_index=pairs)``.

        Args:
            z: States of the nodes, from :meth:`encode`.
            edge_label_index: The pairs to score, [2, L].
        """
        self._check_link("decode")
        checks.check_state(z, "z", self.head.channels)
        return self.head.scores(z, edge_label_index)

    def _check_link(self, what: str) -> None:
        if self.head.task != "link":
            raise ValueError(
                f"{what} belongs to task='link'; this {type(self).__name__} is for nodes or graphs."
            )

    def _states(
        self,
        x: Tensor,
        edge_index: Edges,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        return_coupling: bool,
        others: dict[str, Any],
        collect: Collect,
    ) -> tuple[Tensor, Graph]:
        """Return the output of :meth:`propagate`, which the head reads, and the graph."""
        graph = self._graph(x, edge_index, edge_weight, batch, others, return_coupling)
        # Before any layer, so that an explainer's mask acts in all of them.
        graph = self.edge_mask(graph)
        if torch.compiler.is_dynamo_compiling():
            # Without fullgraph=True its graph ends where the number of graphs is read: here, and not within a block.
            _ = graph.segments
        collect = self.edge_mask.listening(graph, collect)
        inputs = {name: others[name] for name in self.reads if name in others}
        return self.propagate(x, graph, collect, **inputs), graph

    def _graph(
        self,
        x: Tensor,
        edge_index: Edges,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        others: dict[str, Any],
        return_coupling: bool = False,
    ) -> Graph:
        """Check the inputs of a call, refuse those that the model does not read, and return the graph."""
        unread = {name: others[name] for name in others if name not in self.reads}
        return self.inputs_to_graph(
            x,
            edge_index,
            edge_weight,
            batch,
            return_coupling,
            unread,
            others.get("edge_attr"),
        )

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
        if self.head.task == "link" and x is not None:
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
    head: Head


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
            ``"link"``: score pairs of nodes.
        head: Score of a pair in link tasks: ``"dot"``, ⟨z_u, z_v⟩; ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels.
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
        head: Head = "dot",
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
            states * hidden_channels, out_channels, task, head
        )
