"""``Graph``: observed edges, and which rows belong to which graph of a ragged batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp import checks
from diffusion_mp.graph import arguments
from diffusion_mp.graph.ops import (
    Compressed,
    Pattern,
    batch_pointers,
    compress,
    detached_mean_rows,
    is_symmetric,
    symmetric_entries,
    walk_pairs,
)
from diffusion_mp.graph.part_edge_index import PartEdgeIndex
from diffusion_mp.runtime.cache import (
    TensorCache,
    TensorState,
    may_keep,
    persistent,
    values_only,
)
from diffusion_mp.runtime.precision import widened

T = TypeVar("T")
SelfLoops = Literal["keep", "add", "remove", "remaining"]
SELF_LOOPS = get_args(SelfLoops)


class Graph:
    """Observed edges with weights, over the rows of one or several graphs.

    An edge source j → target i stands for the entry a_ij of the adjacency. Parallel edges add up.

    The graph does not copy the tensors, and keeps what it computes from them: sorted edges, self-loops, and weights
    divided by degrees. It sees and checks changes that torch makes to the tensors, such as ``edge_weight.mul_(2)``. It
    does not see changes through NumPy or ``.data``, which torch does not count, or changes between calls of compiled
    code. Make a new graph after such changes. A derived graph does not change with the graph from which it was derived.

    Args:
        num_nodes: number N of nodes, the rows of the state.
        edge_index: the edges source → target, [2, E] of integers, or PyG's ``EdgeIndex``. ``None`` is without observed
            edges. The edges of a part of a graph, a `PartEdgeIndex`, bring ``full_degree``.
        edge_weight: the weights [E], finite and nonnegative. ``None`` is ones.
        batch: the sorted graph number of every node [N] (PyG's ``Batch.batch``). ``None`` is one graph.
        ptr: row boundaries [B+1] of the graphs (PyG's ``Batch.ptr``), instead of ``batch``. A graph may be empty.
        full_degree: in- and out-degrees [N, 2] in the whole graph, if this graph is a part of it, for :meth:`degree`.
            ``None`` takes the degrees of this graph.
        validate: also check values, such as the ranges of indices and weights. ``torch.compile`` skips this check.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, an index or a weight is out of range, or an edge joins two graphs.

    Examples:
        >>> Graph(6, edge_index).num_edges
        12
    """

    def __init__(
        self,
        num_nodes: int,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        ptr: Tensor | None = None,
        full_degree: Tensor | None = None,
        validate: bool = True,
    ) -> None:
        if batch is not None and ptr is not None:
            raise ValueError("batch and ptr say the same thing; pass one of them.")
        self.num_nodes = arguments.as_num_nodes(num_nodes)
        #: The number of nodes of the larger graph, if this graph is a part of one.
        self.total_nodes = self.num_nodes
        self.edge_index: Tensor | None = None
        if edge_index is not None:
            self.edge_index = arguments.as_edge_index(edge_index)
        self.edge_weight: Tensor | None = None
        if edge_weight is not None:
            self.edge_weight = arguments.as_edge_weight(
                edge_weight, self.edge_index, self.num_nodes
            )
        #: Whether all rows are declared one graph (neither ``batch`` nor ``ptr`` was given).
        self.is_single = batch is None and ptr is None
        self._batch: Tensor | None = None
        if batch is not None:
            self._batch = arguments.as_batch(batch, self.num_nodes)
        self._ptr: Tensor | None = None
        if ptr is not None:
            self._ptr = arguments.as_ptr(ptr)
        if full_degree is None:
            full_degree = arguments.full_degree_of(edge_index)
        if full_degree is not None:
            arguments.check_full_degree(full_degree, self.num_nodes)
        self.full_degree = full_degree
        # The position of each edge of a graph with added loops among the observed edges and the loops.
        self.origin: Tensor | None = None
        # What is computed on first access, and the states of the tensors from which it is computed.
        self._pattern: Pattern | None = None
        self._derived: dict[Hashable, Any] = {}
        self._states: dict[str, TensorState | None] = {}
        self._validate = validate
        # Compiled code has no values to check, and does not change the versions of tensors.
        if not torch.compiler.is_compiling():
            self._check_values()
            self._states = self._states_now()

    def _check_values(self) -> None:
        if not self._validate or not checks.values_to_check():
            return
        if self._batch is not None:
            arguments.check_batch(self.num_nodes, self._batch)
        if self._ptr is not None:
            arguments.check_ptr(self.num_nodes, self._ptr)
        if self.edge_index is not None:
            member = None if self.is_single else self.batch
            arguments.check_edges(
                self.num_nodes, self.edge_index, self.edge_weight, member
            )

    #: The tensors from which everything else of a graph is computed.
    _tensors = ("edge_index", "edge_weight", "_batch", "_ptr", "full_degree")

    def _states_now(self) -> dict[str, TensorState | None]:
        tensors = {name: getattr(self, name) for name in self._tensors}
        return {
            name: None if tensor is None else TensorState(tensor)
            for name, tensor in tensors.items()
        }

    def _refresh(self) -> None:
        """Forget what was computed from tensors that have been changed or replaced since."""
        if torch.compiler.is_compiling():
            return
        if self._states:  # unlike a copy, or a graph made in compiled code
            changed = []
            for name, state in self._states.items():
                tensor = getattr(self, name)
                same = tensor is None if state is None else state.holds(tensor)
                if not same:
                    changed.append(name)
            if not changed:
                return
            # Learned weights change with every step, and a pass over them each time would cost more than the
            # product.
            if not self._learned:
                self._check_values()
            # Sorting the edges is the expensive part, and does not depend on weights.
            if "edge_index" in changed:
                self._pattern = None
            self._derived = {}
        self._states = self._states_now()

    @property
    def _learned(self) -> bool:
        """Whether the weights are learned."""
        return self.edge_weight is not None and self.edge_weight.requires_grad

    def _kept(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, and keep it until the tensors change."""
        self._refresh()
        if name in self._derived:
            return cast("T", self._derived[name])
        value = persistent(make)
        if may_keep():
            self._derived[name] = value
        return value

    def __getstate__(self) -> dict[str, Any]:
        # A tensor in another process counts its own writes, so a copy records the states anew.
        # Everything computed goes with the copy, so that no worker sorts edges again.
        return self.__dict__ | {"_states": {}}

    @classmethod
    def from_sparse(cls, adjacency: Tensor, **kwargs: Any) -> Graph:
        """Make a graph from a sparse adjacency in PyG's layout (``adj_t``): row = target, column = source.

        Args:
            adjacency: square sparse tensor [N, N] of floating point, CSR, CSC or COO.
            kwargs: ``batch``, ``ptr``, ``full_degree`` and ``validate`` of the constructor.
        """
        what = "a sparse tensor of floating point, square [num_nodes, num_nodes]"
        checks.check_kind(adjacency, "adjacency", Tensor, what)
        if adjacency.layout == torch.strided or not adjacency.is_floating_point():
            raise TypeError(
                f"adjacency must be {what}; got {checks.describe(adjacency)}. Pass edge_index, or convert it with "
                f".float() and .to_sparse_csr()."
            )
        if adjacency.shape != 2 * adjacency.shape[:1] or adjacency.dense_dim():
            raise ValueError(
                f"adjacency must be {what}; got {checks.describe(adjacency)}."
            )
        coo = adjacency.to_sparse_coo().coalesce()
        return cls(adjacency.size(0), coo.indices().flip(0), coo.values(), **kwargs)

    @classmethod
    def from_data(cls, data: Any, **kwargs: Any) -> Graph:
        """Make a graph from a PyG ``Data`` or ``Batch`` of one kind of nodes, with ``edge_index`` or ``adj_t``.

        Args:
            data: the ``Data`` or ``Batch``. Its ``edge_weight``, ``batch``, ``ptr`` and ``full_degree`` are read if it
                has them.
            kwargs: ``full_degree`` and ``validate`` of the constructor.
        """
        what = "a torch_geometric Data or Batch, of nodes of one kind"
        checks.check_kind(data, "data", Data, what)
        if data.num_nodes is None:
            raise ValueError(
                "data has no num_nodes and nothing to infer it from; set data.num_nodes or data.x."
            )
        batch = getattr(data, "batch", None)
        ptr = getattr(data, "ptr", None)
        # Batch.subgraph cuts the batch vector of a part, but leaves the row boundaries of the whole batch.
        if ptr is None or (
            batch is not None and int(arguments.as_ptr(ptr)[-1]) != data.num_nodes
        ):
            kwargs["batch"] = batch
        else:
            kwargs["ptr"] = ptr
        kwargs.setdefault("full_degree", getattr(data, "full_degree", None))
        adj_t = getattr(data, "adj_t", None)
        if adj_t is None:
            edge_weight = getattr(data, "edge_weight", None)
            edge_index = getattr(data, "edge_index", None)
            return cls(int(data.num_nodes), edge_index, edge_weight, **kwargs)
        if not isinstance(adj_t, Tensor):
            # A SparseTensor of torch-sparse, which is not a layout of torch.
            adj_t = adj_t.to_torch_sparse_csr_tensor()
        return cls.from_sparse(adj_t, **kwargs)

    @classmethod
    def coerce(
        cls,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Graph:
        """Make a graph from anything that layers take as ``edge_index``. The graphs of the last tensors are cached.

        Args:
            x: state [N, ...], which has one row per node.
            edge_index: edges [2, E], a sparse adjacency, a ``Graph``, which is returned, or ``None``.
            edge_weight: weights [E]. Only for edges [2, E].
            batch: sorted graph number of every node [N]. Not for a ``Graph``.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise checks.torchscript_error()
        if not isinstance(x, Tensor):
            raise checks.wrong_kind(x, "x", "a tensor, one row per node")
        if isinstance(edge_index, Graph):
            if edge_weight is not None or batch is not None:
                raise ValueError(
                    "edge_index is a Graph, which holds its weights and batch; pass no edge_weight or batch beside it."
                )
            graph = edge_index
        elif isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
            if edge_weight is not None:
                raise ValueError(
                    "a sparse adjacency holds its own weights; do not pass edge_weight beside it."
                )
            # Not cached, since torch does not compare sparse tensors. Make a graph once for many calls.
            graph = cls.from_sparse(edge_index, batch=batch)
        else:
            full_degree = arguments.full_degree_of(edge_index)
            if isinstance(edge_index, PartEdgeIndex):
                edge_index = edge_index.as_tensor()
            num_nodes = x.size(0)
            graph = _recent.get(
                (cls, num_nodes),
                (edge_index, edge_weight, batch, full_degree),
                lambda edges, weight, batch, degree: cls(
                    num_nodes, edges, weight, batch=batch, full_degree=degree
                ),
            )
        if graph.num_nodes != x.size(0):
            raise ValueError(
                f"x has {x.size(0)} rows, but the graph has {graph.num_nodes} nodes; they must agree."
            )
        edges = graph.edge_index
        if edges is not None and edges.device != x.device:
            raise checks.wrong_device(edges, "edge_index", x.device, "x")
        return graph

    # A graph that is a part of a larger graph, whose other rows lie elsewhere, overrides these.

    first_node: int = 0
    """Number of the first row in the larger graph."""

    def total(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the sum over all nodes, from the sum over the local rows.

        Args:
            x: sum over the rows of this process.
        """
        return x

    def centre(self, x: Float[Tensor, " N *shape"]) -> Float[Tensor, " rows *shape"]:
        """Return the mean over the rows of each graph, without gradient; [1, ...] for one graph, [N, ...] for a batch.

        Args:
            x: rows [N, ...].
        """
        return detached_mean_rows(x, self.segments)

    def share(self, coupling: Any) -> Any:
        """Return the coupling of the local rows with all nodes, from the coupling among the local rows.

        Args:
            coupling: a `Coupling` of the rows of this process. If the process has all rows, it is the result itself.
        """
        return coupling

    @property
    def segments(self) -> Tensor | None:
        """Row boundaries [B+1] on the CPU, as kernels take them; ``None`` stands for one graph. Cached."""
        if self._batch is None:
            return self._ptr
        batch = self._batch
        # A custom operation, since the number of graphs is a value, which a trace may not read.
        return self._kept("segments", lambda: cast("Tensor", batch_pointers(batch)))

    @property
    def ptr(self) -> Int[Tensor, " graphs_plus_one"]:
        """Row boundaries [B+1] of the graphs, on the CPU."""
        if self.segments is None:
            return torch.tensor([0, self.num_nodes], device="cpu")
        return self.segments

    @property
    def num_graphs(self) -> int:
        """Number B of graphs, including empty graphs."""
        return 1 if self.segments is None else self.segments.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number E of directed edges, where parallel edges count separately."""
        return 0 if self.edge_index is None else self.edge_index.size(1)

    @property
    def batch(self) -> Int[Tensor, " N"]:
        """Graph number of every row, [N]."""
        if self._batch is not None:
            return self._batch
        device = None if self.edge_index is None else self.edge_index.device
        sizes = self.ptr.diff().to(device)
        graphs = torch.arange(sizes.numel(), device=sizes.device)
        # With the size given, torch need not wait for the device.
        return graphs.repeat_interleave(sizes, output_size=self.num_nodes)

    @property
    def edges(self) -> Int[Tensor, "two E"]:
        """``edge_index``, or an empty [2, 0] for a graph without observed edges."""
        if self.edge_index is None:
            return torch.empty(2, 0, dtype=torch.long)
        return self.edge_index

    def weights(self, like: Tensor) -> Float[Tensor, " E"]:
        """Return the edge weights [E], ones if none were given.

        Args:
            like: tensor whose dtype and device the weights get.
        """
        checks.check_kind(like, "like", Tensor, "a tensor")
        return self._edge_weights(like.dtype).to(like.device)

    @property
    def weighted(self) -> bool:
        """Whether an edge has another weight than 1.

        It is computed on first access. While weights are learned, it is ``True``.
        """
        weight = self.edge_weight
        if weight is None:
            return False
        # Where weights cannot be read, they may have any value.
        if self._learned or weight.is_meta or not values_only():
            return True
        return self._kept("weighted", lambda: bool((weight != 1).any()))

    def _edge_weights(self, dtype: torch.dtype | None = None) -> Float[Tensor, " E"]:
        """Return the edge weights in ``dtype``, by default in their own dtype, or in the default dtype for ones."""
        if self.edge_weight is None:
            return torch.ones(self.num_edges, dtype=dtype, device=self.edges.device)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(
                f"edge weights are floating point, and would be cut off as {dtype}."
            )
        return self.edge_weight.to(dtype or self.edge_weight.dtype)

    @property
    def pattern(self) -> Pattern:
        """The edges by target and by source, as the sparse kernels take them; sorted on first access. Cached."""
        self._refresh()
        if self._pattern is not None:
            return self._pattern
        source, target = self.edges
        by_target = Compressed(target, source, self.num_nodes)
        by_source = Compressed(source, target, self.num_nodes)
        pattern = Pattern(by_target, by_source)
        if may_keep():
            self._pattern = pattern
        return pattern

    @property
    def csr(self) -> Compressed:
        """The entries by target: row i of the adjacency holds the senders of i. Cached."""
        return self.pattern.by_row

    @property
    def csc(self) -> Compressed:
        """The entries by source: column j holds the receivers of j. Cached."""
        return self.pattern.by_col

    def prepare(self) -> Graph:
        """Compute the compressed forms now, instead of in the first product and its gradient; return the graph."""
        self.pattern.both_ways()
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """Return the same graph on another device. The compressed forms are computed again there.

        Args:
            device: the device.
            non_blocking: copy asynchronously, as ``Tensor.to`` does.
        """
        edges = self.edge_index
        target = checks.as_device(device, None if edges is None else edges.device)
        graph = copy.copy(self)
        # Row boundaries stay on the CPU, where kernels read them.
        for name in ("edge_index", "edge_weight", "_batch", "full_degree", "origin"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(graph, name, tensor.to(target, non_blocking=non_blocking))
        if all(getattr(graph, name) is getattr(self, name) for name in self._tensors):
            return self
        # The cached forms hold tensors on the old device, and are computed on the new one when needed.
        graph._pattern = None
        graph._derived = {}
        return graph

    def degree(
        self, direction: Literal["in", "out"] = "in", dtype: torch.dtype | None = None
    ) -> Float[Tensor, " N"]:
        """Return the weighted degrees [N]: Σ_j a_ij over incoming edges, or Σ_j a_ji over outgoing edges.

        If ``full_degree`` is known, the degrees are the degrees in the whole graph.

        Args:
            direction: ``"in"``, the default, or ``"out"``.
            dtype: dtype of the degrees. ``None`` is the dtype of the weights, at least float32.
        """
        checks.check_choice(direction, "direction", ["in", "out"])
        checks.check_kind(dtype, "dtype", (torch.dtype, NoneType), "a torch.dtype")
        if self.full_degree is not None:
            # The local edges are fewer than the edges of the whole graph, whose degrees normalise the nodes.
            return self.full_degree[:, int(direction == "out")].to(
                dtype or self.full_degree.dtype
            )
        source, target = self.edges
        weight = self._edge_weights(dtype)
        # Half precision cannot count beyond 2048 edges.
        weight = widened(weight)
        degree = weight.new_zeros(self.num_nodes)
        degree = degree.index_add(0, target if direction == "in" else source, weight)
        return degree.to(dtype or weight.dtype)

    @property
    def is_symmetric(self) -> bool:
        """Whether a_ij = a_ji up to rounding, computed in O(E log E) on first access.

        The answer is kept, except while weights are learned.
        """
        checks.check_has_values(self.edges, "edge_index")
        # Learned weights change between calls, so they are examined each time.
        return self.derived(
            "symmetric",
            lambda: is_symmetric(
                self.edges, self._edge_weights().unsqueeze(1), self.num_nodes
            ),
        )

    def with_self_loops(self, policy: SelfLoops = "remaining") -> Graph:
        """Return a graph with self-loops. Its number of edges depends on no values.

        Args:
            policy: ``"remaining"``, the default: exactly one loop at every node, the mean of its observed loops or of
                weight 1, as in PyG. ``"add"``: one more loop of weight 1 at every node (A + I). ``"remove"``: loops get
                weight 0. ``"keep"``: loops as observed.
        """
        checks.check_choice(policy, "self_loops", SELF_LOOPS)
        if policy == "keep":
            return self
        return self.derived(policy, lambda: self._looped(policy))

    def _looped(self, policy: SelfLoops) -> Graph:
        source, target = self.edges
        is_loop = source == target
        # Without observed loops "remaining" equals "add", which writes no ones and scales no weights.
        if (
            policy == "remaining"
            and not is_loop.is_meta
            and values_only()
            and not is_loop.any()
        ):
            policy = "add"
        weight = self._edge_weights()
        loop_weight = weight.new_ones(self.num_nodes)
        if policy == "add" and self.edge_weight is None:
            return self._and_loops(None, self._full_degree(loop_weight))
        lost = weight.new_zeros(self.num_nodes)
        if policy != "add":
            # Observed loops stay in the list with weight zero. The number of edges then depends on no value, so
            # compiled code serves graphs with and without loops.
            observed = weight * is_loop
            weight = weight - observed
            count = lost.index_add(0, source, is_loop.to(weight.dtype))
            lost = lost.index_add(0, source, observed)
        if policy == "remove":
            return self._with_edges(self.edges, weight, self._full_degree(-lost))
        if policy == "remaining":
            # The mean of several loops of a node, as in PyG. Without a loop the divisor does not matter.
            loop_weight = torch.where(count > 0, lost / count.clamp(min=1), loop_weight)
        return self._and_loops(
            torch.cat([weight, loop_weight]), self._full_degree(loop_weight - lost)
        )

    def _and_loops(self, weight: Tensor | None, full_degree: Tensor | None) -> Graph:
        """Return all edges and a loop at every node, ordered by target, so that no product has to order weights."""
        nodes = torch.arange(self.num_nodes, device=self.edges.device)
        source, target = torch.cat([self.edges, nodes.expand(2, -1)], 1)
        ptr, order, other = compress(target, source, self.num_nodes)
        edges = torch.stack([other.long(), target.index_select(0, order)])
        if weight is not None:
            weight = weight.index_select(0, order)
        graph = self._with_edges(edges, weight, full_degree)
        # Known already, so the first product has nothing to sort.
        graph.csr.parts = (ptr, None, other)
        # Features of edges follow their edges by it.
        graph.origin = order
        return graph

    def _full_degree(self, change: Tensor) -> Tensor | None:
        """Return ``full_degree`` after a change of the loops, which are in every part that contains their node."""
        if self.full_degree is None:
            return None
        return self.full_degree + change.unsqueeze(1)

    def within(self, hops: int) -> Graph:
        """Return the k-hop graph, with every pair that a walk of 1 to ``hops`` edges of positive weight joins.

        Every pair occurs once, with weight 1.

        Args:
            hops: largest number of edges of a walk.
        """
        checks.check_counts(hops=hops)
        checks.check_has_values(self.edges, "edge_index")
        # A small change of the weights does not change whether there is a walk, so there is no gradient.
        walks = (self.edges, self._edge_weights().detach(), self.num_nodes, hops)
        return self.derived(
            f"within {hops}", lambda: self._with_edges(walk_pairs(*walks), None)
        )

    def to_undirected(self) -> Graph:
        """Return the symmetric part ½(A + Aᵀ): both directions of every edge, each with half of its weight."""
        return self.derived("undirected", self._symmetrized)

    def _symmetrized(self) -> Graph:
        weight = self._edge_weights()
        both = torch.cat([self.edges, self.edges.flip(0)], dim=1)
        return self._with_edges(
            both, torch.cat([weight, weight]) * 0.5, self._mean_degree()
        )

    def symmetric_part(self) -> Graph:
        """Return ½(A + Aᵀ) with every pair of nodes once, if weights are not learned and have values to read.

        Otherwise it is the graph of :meth:`to_undirected`, whose products take longer: parallel edges add up.
        """
        if self._learned or not values_only(captured=True):
            return self.to_undirected()
        return self.derived("symmetric part", self._merged)

    def _merged(self) -> Graph:
        edges, weight = symmetric_entries(
            self.edges, self._edge_weights(), self.num_nodes
        )
        return self._with_edges(edges, weight, self._mean_degree())

    def _mean_degree(self) -> Tensor | None:
        """Return ``full_degree`` of the symmetric part, whose directions have the mean of the two degrees."""
        if self.full_degree is None:
            return None
        return self.full_degree.mean(1, keepdim=True).expand(-1, 2)

    def with_weights(self, weight: Float[Tensor, " E"]) -> Graph:
        graph = self._with_edges(self.edges, weight)
        # All weights share the sorted edges.
        graph._pattern = self.pattern
        return graph

    def derived(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, made once so that layers share its compressed forms; made anew while weights are learned.

        Args:
            name: key of the cached result.
            make: computes the result.
        """
        # Derived weights hold an autograd graph, which serves one backward pass.
        if self._learned:
            return make()
        return self._kept(name, make)

    def reverse(self) -> Graph:
        degree = None if self.full_degree is None else self.full_degree.flip(1)
        graph = self._with_edges(self.edges.flip(0), self.edge_weight, degree)
        # The form by target is the form by source of the reversed graph, so nothing is sorted again.
        graph._pattern = self.pattern.T
        return graph

    def _with_edges(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        full_degree: Tensor | None = None,
    ) -> Graph:
        rows = {"batch": self._batch, "ptr": self._ptr, "full_degree": full_degree}
        # The values were checked when this graph was made, so derived values need no second check.
        return Graph(self.num_nodes, edge_index, edge_weight, **rows, validate=False)

    def __repr__(self) -> str:
        sizes = f"num_nodes={self.num_nodes}, num_edges={self.num_edges}, num_graphs={self.num_graphs}"
        return f"{type(self).__name__}({sizes})"


#: Graphs of tensors that layers got instead of a graph; room for edges, weights and batches of some four million edges.
_recent: TensorCache[Graph] = TensorCache(room=1 << 23)
