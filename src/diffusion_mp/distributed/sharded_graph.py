"""``ShardedGraph``: the part of a graph that one rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from diffusion_mp.checks import (
    UNSIGNED,
    as_device,
    check_has_values,
    check_integer_pairs,
    check_kind,
    describe,
)
from diffusion_mp.couplings import (
    Coupling,
    DistanceCoupling,
    IdentityCoupling,
    PairwiseCoupling,
    PooledCoupling,
    ReweightedCoupling,
    ScaledCoupling,
    SparseCoupling,
    SumCoupling,
    row_normalized,
)
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities.base import Diffusivity, GraphPart
from diffusion_mp.distributed.couplings import HaloCoupling, SummedCoupling
from diffusion_mp.distributed.parallel import all_reduce, all_to_all, check_group
from diffusion_mp.distributed.ring import Ring, RingCoupling, RingDistances
from diffusion_mp.distributed.terms import HaloTerm
from diffusion_mp.energies import EnergyTerm
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import as_edge_weight, as_num_nodes, check_edges

CHUNK = (
    1 << 22
)  # edges that are read at a time, so that a memory-mapped edge_index is never copied

_READS_ALL = (
    "{} may read rows of the state that other processes have. Use one process, or declare depends_on if every row is "
    "read on its own, or along the edges."
)


def _refuse(self: Graph, *args: object, **options: object) -> NoReturn:
    raise ValueError(
        "a ShardedGraph knows the edges that arrive at its nodes, not those that leave them, so it can not turn edges "
        "around, walk along them or change them. Make the graph undirected or k-hop, or change its edges, before it is "
        "sharded."
    )


class ShardedGraph(GraphPart):
    """The part of a graph that one process has: a range of the nodes, with every edge that ends there.

    Rank r has the nodes bounds[r] … bounds[r + 1] − 1, the slice ``rows``. Layers and models run on them unchanged, as
    ``model(x[graph.rows], graph)``. Its edges are ``edge_index[:, graph.positions]``, in this order, and
    ``edge_attr[graph.positions]`` are their features.

    For O(N) couplings the sums over senders (KᵀV, Σk, Σv, the count) are added up over ranks. For couplings over edges,
    a rank fetches the rows that send to it, its *halo*, before the product. For attention to all nodes by a sigmoid, an
    exponential or another function of a distance, blocks of rows travel round the ring of the ranks.

    Every rank must make the same calls in the same order. Everything is once differentiable. Results equal the results
    of one process up to the order of summation. This includes the Gumbel noise of NodeFormer, but not dropout.

    Args:
        edge_index: the edges [2, E] of the whole graph, the same on every rank, possibly memory-mapped. ``None`` if no
            edges were observed.
        num_nodes: number of nodes of the whole graph.
        edge_weight: the weights [E] of the whole graph. By default every edge has the weight one.
        group: the processes. By default all of them.
        device: device of this rank's part. By default the device of ``edge_index``.

    Raises:
        TypeError, ValueError: an operation needs other parts of the graph (undirected or k-hop graphs, pairs).
        RankLostError: another process has ended, or does not answer.

    Examples:
        >>> torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)  # or more
        >>> graph, conv = ShardedGraph(edge_index, 6), GCNConv(4, 3)
        >>> torch.allclose(conv(x[graph.rows], graph), conv(x, edge_index)[graph.rows])
        True
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        edge_index: Tensor | None,
        num_nodes: int,
        edge_weight: Tensor | None = None,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_group(group)
        num_nodes = as_num_nodes(num_nodes)
        if edge_index is not None:
            check_kind(edge_index, "edge_index", Tensor, "a tensor [2, num_edges]")
            check_integer_pairs(
                edge_index, "edge_index"
            )  # converted to int64 a chunk at a time
            check_has_values(edge_index, "edge_index")
            if edge_index.dtype in UNSIGNED:
                edge_index = edge_index.long()
        if edge_weight is not None:
            edge_weight = as_edge_weight(edge_weight, edge_index, num_nodes)
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        if num_nodes < ranks:
            raise ValueError(
                f"num_nodes must be at least {ranks}, a node for each rank; got {num_nodes}."
            )
        # Ranges differ by one node at most.
        self.bounds = [num_nodes * rank // ranks for rank in range(ranks + 1)]
        self.group = group
        self.rows = slice(*self.bounds[rank : rank + 2])
        self.first_node = self.rows.start
        local = self.rows.stop - self.rows.start
        if edge_index is None:
            super().__init__(local)
            self.total_nodes = num_nodes
            return
        # All edges on every rank, so that all ranks raise if one does.
        parts = edge_index.split(CHUNK, 1)
        if edge_weight is None:
            weights = [None] * len(parts)
        else:
            weights = edge_weight.split(CHUNK)
        for edges, values in zip(parts, weights, strict=True):
            check_edges(num_nodes, edges, values, None)
        device = edge_index.device if device is None else as_device(device)

        def inside(node: Tensor) -> Tensor:
            return (node >= self.rows.start) & (node < self.rows.stop)

        arriving = _chosen(edge_index, lambda edges: inside(edges[1]))
        edges = edge_index[:, arriving].long()
        halo = torch.unique(edges[0, ~inside(edges[0])])
        # Self-loops change degrees, so the self-loops of the halo are needed here too.
        loops = _chosen(
            edge_index,
            lambda edges: (edges[0] == edges[1]) & torch.isin(edges[0], halo),
        )

        def numbered(node: Tensor) -> Tensor:
            return torch.where(
                inside(node),
                node - self.first_node,
                local + torch.searchsorted(halo, node),
            ).to(device)

        def weight(edge: Tensor) -> Tensor | None:
            if edge_weight is None:
                return None
            return edge_weight[edge].to(device)

        # Checked above, on all ranks.
        here = numbered(edges)
        weights_here = weight(arriving)
        super().__init__(local, here, weights_here, validate=False)
        self.total_nodes = num_nodes
        self._plan_exchange(halo.to(device))
        # Rows of the halo have no other edges here, so their degrees come from elsewhere.
        options: dict[str, Any] = {
            "full_degree": self._full_degrees(),
            "validate": False,
        }
        nodes = local + halo.numel()
        with_loops = torch.cat([arriving, loops])
        looped = numbered(edge_index[:, with_loops].long())
        self.extended = _Extended(nodes, looped, weight(with_loops), **options)
        # Every edge of the whole graph is in one of these graphs, so that sums over edges add up over ranks.
        self.arriving = Graph(nodes, here, weights_here, **options)
        self.positions = arriving

    def centre(self, x: Float[Tensor, " N *shape"]) -> Float[Tensor, " one *shape"]:
        return self.total(x.detach().sum(0, keepdim=True)) / max(self.total_nodes, 1)

    def total(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the sum of ``x`` over the ranks, on every rank; once differentiable."""
        check_kind(x, "x", Tensor, "a tensor, such as mask.sum()")
        return all_reduce(x, self.group)

    def exchange(
        self, x: Float[Tensor, " N *shape"]
    ) -> Float[Tensor, " extended *shape"]:
        """Return the rows of this rank, followed by the rows of its halo from other ranks; once differentiable."""
        lent = x[self._lent]
        fetched = all_to_all(lent, self._num_lent, self._num_fetched, self.group)
        return torch.cat([x, fetched])

    def collect(
        self, x: Float[Tensor, " extended *shape"]
    ) -> Float[Tensor, " N *shape"]:
        """Return the rows of this rank, to which the ranks that have them in their halos add theirs.

        It is the transpose of :meth:`exchange`, and once differentiable.
        """
        theirs = all_to_all(
            x[self.num_nodes :], self._num_fetched, self._num_lent, self.group
        )
        return x[: self.num_nodes].index_add(0, self._lent, theirs)

    def term(
        self, module: nn.Module, source: State, **inputs: Any
    ) -> EnergyTerm | None:
        """Return the term of an energy of the whole graph that a module makes, as a function of this rank's rows."""
        depends_on = getattr(module, "depends_on", None)
        if depends_on == "graph":
            raise NotImplementedError(_READS_ALL.format(type(module).__name__))
        if depends_on != "edges" or self.edge_index is None:
            return cast("EnergyTerm | None", module(source, self, **inputs))
        term = module(self.exchange(source), self.arriving, **inputs)
        return None if term is None else HaloTerm(term, self)

    def check_term(self, term: EnergyTerm) -> None:
        """Raise unless a term of an energy can be computed from this rank's rows."""
        if term.depends_on == "graph":
            raise NotImplementedError(_READS_ALL.format(repr(term)))

    def couple(self, diffusivity: Diffusivity, x: State) -> Coupling:
        """Return this rank's rows of a coupling of the whole graph."""
        if diffusivity.depends_on == "parts":
            return diffusivity.couple(x, self)  # which calls this method for every part
        if not diffusivity.needs_graph:
            return self.share(diffusivity.couple(x, self))
        if diffusivity.depends_on != "nothing":
            x = self.exchange(x)
        return self.share(diffusivity.couple(x, self.extended))

    def share(self, coupling: Coupling) -> Coupling:
        """Return this rank's rows of the coupling of the whole graph, from the coupling of its part."""
        # Rows that only meet themselves need no other rank.
        if isinstance(coupling, IdentityCoupling):
            return coupling
        if isinstance(coupling, PooledCoupling):
            return SummedCoupling(coupling, self.exchange, self.group)
        if isinstance(coupling, SparseCoupling):
            return HaloCoupling(self.num_nodes, coupling, self.exchange, self.group)
        if (
            isinstance(coupling, PairwiseCoupling)
            and coupling.loops
            and coupling.normalize != "symmetric"
        ):
            return RingCoupling(coupling, Ring(self.total_nodes, self.group))
        if isinstance(coupling, DistanceCoupling):
            ring = Ring(self.total_nodes, self.group)
            centre = self.centre(coupling.key.double())
            return RingDistances(coupling, ring, self.first_node, centre)
        # A mixture of Gaussians is a sum of multiples.
        if isinstance(coupling, SumCoupling):
            return SumCoupling([self.share(term) for term in coupling.terms])
        if isinstance(coupling, ScaledCoupling):
            return ScaledCoupling(
                coupling.scale,
                self.share(coupling.coupling),
                nonnegative=coupling.nonnegative,
            )
        # The sums of rows are those of the part, and are found again. They say nothing about weights of columns.
        if (
            isinstance(coupling, ReweightedCoupling)
            and coupling.row_stochastic
            and coupling.column is None
        ):
            return row_normalized(self.share(coupling.coupling))
        raise TypeError(
            f"a {type(coupling).__name__} can not be taken over several ranks: it is neither a coupling over edges, "
            f"nor one whose product goes through sums over the nodes (PooledCoupling), nor a function of a distance or "
            f"of an inner product for all pairs of nodes. Use such a diffusivity, or one process."
        )

    def to(self, device: object, non_blocking: bool = False) -> NoReturn:
        """Raise ``ValueError``: other ranks send to the device that the constructor was given."""
        raise ValueError(
            f"a ShardedGraph stays on the device it was made for, where other ranks send to; got {describe(device)}. "
            f"Make it there: ShardedGraph(..., device=device)."
        )

    # Sources have the numbers of the halo, which no other graph of as many nodes has.
    within = to_undirected = symmetric_part = reverse = _with_edges = _refuse
    is_symmetric = pattern = property(_refuse)

    def _plan_exchange(self, halo: Tensor) -> None:
        """Find the rows to exchange: ``_lent`` are rows of this rank in the halos of others, in the order of ranks."""
        ends = torch.searchsorted(halo, torch.tensor(self.bounds, device=halo.device))
        one_each = [1] * (len(self.bounds) - 1)
        fetched = ends.diff()
        self._num_fetched = fetched.tolist()
        self._num_lent = all_to_all(fetched, one_each, one_each, self.group).tolist()
        lent = all_to_all(halo, self._num_fetched, self._num_lent, self.group)
        self._lent = lent - self.first_node

    def _full_degrees(self) -> Float[Tensor, "extended two"]:
        """Return the in- and out-degrees of the rows and the halo in the whole graph, in double precision."""
        source, target = self.edges
        weight = self._edge_weights(torch.float64)
        received = weight.new_zeros(self.num_nodes).index_add(0, target, weight)
        sent = weight.new_zeros(self.num_nodes + sum(self._num_fetched))
        # Only this rank knows the edges from its halo, so it sends their weights to the ranks of these nodes.
        sent = self.collect(sent.index_add(0, source, weight))
        return self.exchange(torch.stack([received, sent], dim=1))


class _Extended(Graph):
    """The rows of a rank and of its halo as one graph; rows of the halo are incomplete, and results leave them out."""

    within = to_undirected = symmetric_part = reverse = _refuse


def _chosen(edge_index: Tensor, chooses: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the positions of the chosen edges, reading a chunk at a time."""
    parts = [
        chooses(part).nonzero().flatten() + CHUNK * number
        for number, part in enumerate(edge_index.split(CHUNK, 1))
    ]
    return torch.cat(parts)
