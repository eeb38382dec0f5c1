"""Couplings with stored entries: dense matrices and weighted edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from diffusion_mp.checks import (
    check_has_values,
    check_kind,
    check_tensor,
    describe,
    values_to_check,
)
from diffusion_mp.couplings.base import PROMISES, Coupling, TransposedCoupling
from diffusion_mp.couplings.shapes import (
    ByRow,
    Entries,
    Maps,
    Matrices,
    Pairs,
    State,
    Values,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import (
    Compressed,
    Pattern,
    entries_at,
    is_symmetric,
)
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.spmm import at_rows, row_sums, spmm
from diffusion_mp.runtime.cache import cached_property, values_only
from diffusion_mp.runtime.precision import accumulating, wide_dtype, without_autocast


class DenseCoupling(Coupling):
    """Store the entries s_ij, for matrices of your own and for small graphs.

    Row i receives. A product costs O(N²) time and memory.

    Args:
        matrix: the entries, [N, N] or [H, N, N].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU, if the matrix is zero between graphs. ``None`` is one
            graph.

    Options:
        symmetric: whether S = Sᵀ for every head. ``None``, the default, examines the entries on first access.
        row_stochastic: whether every row sums to one, except for rows of zeros. ``None``, the default, examines the
            entries on first access.
        nonnegative: whether no entry is negative. ``None``, the default, examines the entries on first access.
        positive_semidefinite: whether xᵀSx ≥ 0 for all x, and S = Sᵀ. ``None``, the default, promises nothing.

    Raises:
        ValueError: the matrix has another shape, or nonzero entries between graphs.

    Examples:
        >>> S = DenseCoupling(torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
        >>> S @ torch.tensor([1.0, 3.0]), S.row_stochastic  # row i receives
        (tensor([3., 2.]), True)
    """

    parts = ("blocks",)
    quadratic = True

    def __init__(
        self,
        matrix: Tensor,
        ptr: Tensor | None = None,
        **promises: bool | None,
    ) -> None:
        shape = "[num_nodes, num_nodes] or [heads, num_nodes, num_nodes]"
        check_tensor(matrix, "matrix", shape)
        square = matrix.unsqueeze(0) if matrix.dim() == 2 else matrix
        if square.dim() != 3 or square.size(1) != square.size(2) or not square.size(0):
            raise ValueError(f"matrix must be {shape}; got {describe(matrix)}.")
        super().__init__(square.size(1), square.size(0), square, ptr, **promises)
        # Whether a matrix is semi-definite is not examined: eigenvalues take O(N³).
        self.examines = any(promises.get(name) is None for name in PROMISES[:3])
        # Blocks, since 0 · NaN would carry NaN to other graphs.
        self.blocks = [
            square[:, rows, rows] for rows in slices(self.ptr, self.num_nodes)
        ]
        if self.ptr is not None and not matrix.is_meta and values_to_check():
            inside = sum(int(block.count_nonzero()) for block in self.blocks)
            if int(matrix.count_nonzero()) > inside:
                raise ValueError(
                    "matrix must be zero between the graphs of ptr, and has other entries there. Leave ptr out for one "
                    "graph."
                )

    def _every(self, examine: Callable[[Tensor], bool]) -> bool:
        check_has_values(self.blocks[0], "matrix")
        return all(examine(block) for block in self.blocks)

    @cached_property
    def symmetric(self) -> bool:
        return self._every(_is_symmetric)

    @cached_property
    def row_stochastic(self) -> bool:
        return self._every(_sums_to_one)

    @cached_property
    def nonnegative(self) -> bool:
        return self._every(lambda block: bool((block >= 0).all()))

    def _product(self, v: Values, *, transpose: bool = False) -> Values:
        # Autocast would round the entries, and a constant state would not stay constant.
        with without_autocast(v):
            received = []
            sent = v.split([block.size(1) for block in self.blocks])
            for block, part in zip(self.blocks, sent, strict=True):
                (entries, values), _ = accumulating(block, part)
                if transpose:
                    entries = entries.mT
                received.append((entries @ values.transpose(0, 1)).transpose(0, 1))
            return torch.cat(received).to(v.dtype)

    def _transpose(self) -> Coupling:
        return TransposedCoupling(self)

    def degree(self) -> ByRow:
        wide = wide_dtype(self.dtype)
        return torch.cat([block.sum(2, dtype=wide).T for block in self.blocks])

    def _at(self, edge_index: Pairs) -> Entries:
        source, target = edge_index
        # A listed pair may join two graphs, between which no block has an entry.
        entries = self.blocks[0] if self.ptr is None else self._dense()
        return entries[:, target, source].T

    def _dense(self) -> Matrices:
        heads = zip(*(block.unbind() for block in self.blocks), strict=True)
        return torch.stack([torch.block_diag(*blocks) for blocks in heads])


def _is_symmetric(block: Tensor) -> bool:
    # Relative to the largest entry, at whose size sums that cancel were rounded.
    rounding = (
        64 * torch.finfo(block.dtype).eps * (block.abs().max() if block.numel() else 0)
    )
    return bool(((block - block.mT).abs() <= rounding).all())


def _sums_to_one(block: Tensor) -> bool:
    """Return whether every row sums to one up to rounding, or is zero."""
    # In at least float32: half precision cannot count beyond 2048 entries.
    rows = block.sum(2, dtype=wide_dtype(block.dtype))
    rounding = (
        4
        * torch.finfo(block.dtype).eps
        * block.abs().sum(2).to(rows.dtype).clamp(min=1)
    )
    return bool((((rows - 1).abs() <= rounding) | (block == 0).all(2)).all())


def _check_weight(weight: Tensor, graph: Graph) -> None:
    shape = "[num_edges] or [num_edges, heads]"
    check_tensor(weight, "weight", shape, graph.edges.device, "the graph")
    if weight.dim() not in (1, 2) or weight.size(0) != graph.num_edges:
        raise ValueError(
            f"weight must be {shape} with {graph.num_edges} edges; got {describe(weight)}."
        )


class SparseCoupling(Coupling):
    """Couple the ends of observed edges j → i by weights.

    The weights of parallel edges add up. An isolated node has a zero row.

    Args:
        graph: the graph of the edges.
        weight: the weights [E] or [E, H], in the order of the edges. ``None`` takes the weights of the graph itself,
            ones if the graph is unweighted.

    Options:
        symmetric: whether S = Sᵀ for every head. ``None``, the default, examines the entries on first access, in O(E
            log E).
        row_stochastic: whether every row sums to one, except for rows of zeros. ``None``, the default, promises
            nothing.
        nonnegative: whether no entry is negative. ``None``, the default, promises nothing.
        positive_semidefinite: whether xᵀSx ≥ 0 for all x, and S = Sᵀ. ``None``, the default, promises nothing.

    Examples:
        >>> (SparseCoupling(graph, torch.ones(12)) @ x.unsqueeze(1)).shape
        torch.Size([6, 1, 4])
    """

    parts: ClassVar[tuple[str, ...]] = ("graph", "weight")

    def __init__(
        self,
        graph: Graph,
        weight: Tensor | None = None,
        *,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        if not _checked:
            check_kind(graph, "graph", Graph, "a Graph")
        #: Whether the weights are the graph's own weights. If so, the graph caches whether they are symmetric.
        self.own = weight is None
        if weight is None:
            weight = graph.edge_weight
        if weight is None:
            weight = torch.ones(graph.num_edges, device=graph.edges.device)
        if not _checked:
            _check_weight(weight, graph)
        by_head = weight if weight.dim() == 2 else weight.unsqueeze(1)
        super().__init__(
            graph.num_nodes,
            by_head.size(1),
            by_head,
            None,
            _checked=_checked,
            **promises,
        )
        self.graph = graph
        self.weight = by_head
        self.examines = promises.get("symmetric") is None

    @cached_property
    def ptr(self) -> Tensor | None:
        return None if self.graph.is_single else self.graph.segments

    @cached_property
    def symmetric(self) -> bool:
        # The graph keeps the answer for all layers that read it.
        if self.own:
            return self.graph.is_symmetric
        check_has_values(self.graph.edges, "edge_index")
        return is_symmetric(self.graph.edges, self.weight, self.num_nodes)

    def _product(self, v: Values) -> Values:
        # The sorted edges are kept by the graph, and shared by all couplings on it.
        return spmm(self.graph.pattern, self.weight, v)

    def transformed(
        self,
        v: State,
        matrix: Maps | None,
        hops: int = 1,
    ) -> State:
        """Return Σ_h S_h^hops v M_hᵀ, where each head h applies its own matrix M_h to the state.

        A row of v is multiplied only by the matrices of the heads in which it sends.

        Args:
            v: state [N, C].
            matrix: the matrices M [H, C, C], or their diagonals [H, C]. ``None`` is the identity for every head.
            hops: power of S; one product by default.

        Returns:
            The sum over the heads, [N, C].
        """
        # The number of these rows depends on values. A zero weight has a gradient too.
        if (
            matrix is None
            or self.heads == 1
            or hops > 1
            or self.weight.requires_grad
            or not values_only()
        ):
            return super().transformed(v, matrix, hops)
        pattern, places, senders, counts = self._senders
        apply = torch.mul if matrix.dim() == 2 else functional.linear
        rows = zip(at_rows(senders, v).split(counts), matrix, strict=True)
        sent = torch.cat(
            [apply(some, by) for some, by in rows],
        )
        return spmm(
            pattern, self.weight.take(places).unsqueeze(1), sent.unsqueeze(1)
        ).squeeze(1)

    @cached_property
    def _senders(self) -> tuple[Pattern, Tensor, Compressed, list[int]]:
        """Return the nonzero entries with pairs of a head and a sender as columns.

        These are their pattern, their places in the weight, and, for the pairs sorted by head, the sender and the
        number of pairs of each head.
        """
        edge, head = self.weight.detach().nonzero(as_tuple=True)
        source, target = (end.index_select(0, edge) for end in self.graph.edges)
        pairs, position = torch.unique(
            # One number for a head and a sender, by which the pairs are sorted by head.
            head * self.num_nodes + source,
            return_inverse=True,
        )
        size = self.num_nodes
        count = len(pairs)
        pattern = Pattern(
            Compressed(target, position, size), Compressed(position, target, count)
        )
        heads = pairs // size
        counts = torch.bincount(heads, minlength=self.heads).tolist()
        return (
            pattern,
            edge * self.heads + head,
            Compressed(pairs % size, heads, size),
            counts,
        )

    def _transpose(self) -> Coupling:
        # Kept by the graph, since every transpose and every gradient needs its edges in this order.
        reversed_graph = self.graph.derived("reversed", self.graph.reverse)
        return SparseCoupling(reversed_graph, self.weight, nonnegative=self.nonnegative)

    def degree(self) -> ByRow:
        total = self.weight.to(wide_dtype(self.dtype))
        # A sum over many edges leaves the range of half precision.
        if self.heads > 1:  # sums of many columns are faster along compressed rows
            return row_sums(self.graph.pattern.by_row, total)
        return total.new_zeros(self.num_nodes, 1).index_add(
            0, self.graph.edges[1], total
        )

    def _at(self, edge_index: Pairs) -> Entries:
        return entries_at(edge_index, self.graph.edges, self.weight, self.num_nodes)

    def _dense(self) -> Matrices:
        source, target = self.graph.edges
        dense = self.weight.new_zeros(self.num_nodes, self.num_nodes, self.heads)
        # Parallel edges add up.
        return dense.index_put((target, source), self.weight, accumulate=True).permute(
            2, 0, 1
        )
