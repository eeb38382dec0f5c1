"""Couplings with stored entries: dense matrices and weighted edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from diffusion_mp.checks import (
    check_device,
    check_flags,
    check_has_values,
    check_kind,
    check_tensor,
    describe,
    values_to_check,
)
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import row_bounds
from diffusion_mp.graph.ops import (
    Compressed,
    Pattern,
    entries_at,
    graph_of,
    is_symmetric,
)
from diffusion_mp.kernels.spmm import at_rows, row_sums, spmm
from diffusion_mp.runtime.cache import cached_property, values_only
from diffusion_mp.runtime.precision import accumulating, without_autocast


class DenseCoupling(Coupling):
    r"""s_ij as given, where row i receives: for matrices of your own and small graphs; O(N²) time and memory.

    Args:
        matrix: S, [N, N] or [H, N, N]; or a list with the block of every graph, [n, n] or [H, n, n].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU, of a matrix that is zero between graphs.
        symmetric, row_stochastic, nonnegative: promises about S; ``None`` examines the entries on first access.
        positive_semidefinite: a promise about S, never examined.

    Examples:
        >>> S = DenseCoupling(torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
        >>> S @ torch.tensor([1.0, 3.0]), S.row_stochastic  # row i receives
        (tensor([3., 2.]), True)
    """

    parts = ("blocks",)
    quadratic = True

    def __init__(
        self,
        matrix: Tensor | Sequence[Tensor],
        ptr: Tensor | None = None,
        *,
        symmetric: bool | None = None,
        row_stochastic: bool | None = None,
        nonnegative: bool | None = None,
        positive_semidefinite: bool = False,
    ) -> None:
        if isinstance(matrix, (list, tuple)):
            if ptr is not None:
                raise ValueError(
                    "ptr goes with one matrix of all nodes; a list of blocks implies its own boundaries."
                )
            if not matrix:
                raise ValueError(
                    "matrix must hold a block at least; got an empty list."
                )
            blocks = [_square(block, f"matrix[{k}]") for k, block in enumerate(matrix)]
            ptr = torch.tensor([0, *(block.size(1) for block in blocks)]).cumsum(0)
        else:
            whole = _square(cast("Tensor", matrix), "matrix")
            bounds = row_bounds(ptr, whole.size(1))
            if bounds is None:
                blocks = [whole]
            else:
                blocks = _diagonal_blocks(whole, bounds)
        first = blocks[0]
        for block in blocks:
            check_device(block, "every block", first.device, "the first")
            if block.size(0) != first.size(0) or block.dtype != first.dtype:
                both = f"{describe(first)} and {describe(block)}"
                raise ValueError(
                    f"all blocks must have one number of heads and one dtype; got {both}."
                )

        promised = {
            "symmetric": symmetric,
            "row_stochastic": row_stochastic,
            "nonnegative": nonnegative,
        }
        for name, promise in promised.items():
            if promise is not None:
                check_flags(**{name: promise})
                setattr(self, name, promise)
        check_flags(positive_semidefinite=positive_semidefinite)
        super().__init__(
            sum(block.size(1) for block in blocks), first.size(0), first, ptr
        )
        self.examines = None in promised.values()
        self.positive_semidefinite = positive_semidefinite
        if positive_semidefinite:
            self.symmetric = True
        self.blocks = blocks

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

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        with without_autocast(v):
            parts = v.split([block.size(1) for block in self.blocks])
            moved = []
            for block, part in zip(self.blocks, parts, strict=True):
                (entries, values), _ = accumulating(block, part)
                moved.append((entries @ values.transpose(0, 1)).transpose(0, 1))
            return torch.cat(moved).to(v.dtype)

    def _transpose(self) -> Coupling:
        turned = [block.mT for block in self.blocks]
        known = vars(self).get("nonnegative")
        return DenseCoupling(
            turned[0] if self.ptr is None else turned, nonnegative=known
        )

    def degree(self) -> Float[Tensor, "N heads"]:
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.cat([block.sum(2, dtype=wide).T for block in self.blocks])

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        if self.ptr is None:
            return self.blocks[0][:, target, source].T
        entries = self.blocks[0].new_zeros(source.numel(), self.heads)
        member = graph_of(self.ptr, edge_index)
        for graph, (start, block) in enumerate(
            zip(self.ptr.tolist(), self.blocks, strict=False)
        ):
            chosen = (member == graph).all(0).nonzero().squeeze(1)
            entries = entries.index_put(
                (chosen,), block[:, target[chosen] - start, source[chosen] - start].T
            )
        return entries

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        return torch.stack(
            [
                torch.block_diag(*parts)
                for parts in zip(*(b.unbind() for b in self.blocks), strict=True)
            ]
        )


def _square(matrix: Tensor, name: str) -> Float[Tensor, "H N N"]:
    shape = "[num_nodes, num_nodes] or [heads, num_nodes, num_nodes]"
    check_tensor(matrix, name, shape)
    square = matrix.unsqueeze(0) if matrix.dim() == 2 else matrix
    if square.dim() != 3 or square.size(1) != square.size(2) or not square.size(0):
        raise ValueError(f"{name} must be {shape}; got {describe(matrix)}.")
    return square


def _diagonal_blocks(matrix: Float[Tensor, "H N N"], ptr: Tensor) -> list[Tensor]:
    """The blocks of the graphs. Raise if an entry outside of them is not zero."""
    blocks = [
        matrix[:, start:stop, start:stop] for start, stop in pairwise(ptr.tolist())
    ]
    if matrix.is_meta or not values_to_check():
        return blocks
    beside = int(matrix.count_nonzero()) - sum(
        int(block.count_nonzero()) for block in blocks
    )
    if beside:
        way_out = "Leave ptr out for one graph, or pass the list of blocks."
        raise ValueError(
            f"matrix must be zero between the graphs of ptr; {beside} entries there are not. {way_out}"
        )
    return blocks


def _is_symmetric(block: Tensor) -> bool:
    rounding = (
        64 * torch.finfo(block.dtype).eps * (block.abs().max() if block.numel() else 0)
    )
    return bool(((block - block.mT).abs() <= rounding).all())


def _sums_to_one(block: Tensor) -> bool:
    """Whether every row sums to one up to rounding, or is zero."""
    rows = block.sum(2, dtype=torch.promote_types(block.dtype, torch.float32))
    rounding = (
        4
        * torch.finfo(block.dtype).eps
        * block.abs().sum(2).to(rows.dtype).clamp(min=1)
    )
    return bool((((rows - 1).abs() <= rounding) | (block == 0).all(2)).all())


class SparseCoupling(Coupling):
    r"""The weights of observed edges j → i; multi-edges add up, and an isolated node has a zero row.

    Args:
        graph, weight: the edges, and [E] or [E, H] in their order; ``None`` takes the graph's own weights.
        symmetric: a promise; ``None`` examines the entries on first access, in O(E log E).
        row_stochastic, nonnegative: promises about S, see `Coupling`.

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
        symmetric: bool | None = None,
        row_stochastic: bool = False,
        nonnegative: bool = False,
    ) -> None:
        check_kind(graph, "graph", Graph, "a Graph")
        own = weight is None
        if weight is not None:
            shape = "[num_edges] or [num_edges, heads]"
            check_tensor(weight, "weight", shape, graph.edges.device, "the graph")
            if weight.dim() not in (1, 2) or weight.size(0) != graph.num_edges:
                raise ValueError(
                    f"weight must be {shape} with {graph.num_edges} edges; got {describe(weight)}."
                )
        else:
            given = graph.edge_weight
            if given is None:
                weight = torch.ones(graph.num_edges, device=graph.edges.device)
            else:
                weight = given
        by_head = weight if weight.dim() == 2 else weight.unsqueeze(1)
        check_flags(row_stochastic=row_stochastic, nonnegative=nonnegative)
        super().__init__(graph.num_nodes, by_head.size(1), by_head)
        self.graph = graph
        self.weight = by_head
        self.own = own
        self.row_stochastic = row_stochastic
        self.nonnegative = nonnegative
        self.examines = symmetric is None
        if symmetric is not None:
            check_flags(symmetric=symmetric)
            self.symmetric = symmetric

    @cached_property
    def ptr(self) -> Tensor | None:
        return None if self.graph.is_single else self.graph.segments

    @cached_property
    def symmetric(self) -> bool:
        check_has_values(self.graph.edges, "edge_index")
        if self.own:  # the graph keeps the answer
            return self.graph.is_symmetric
        return is_symmetric(self.graph.edges, self.weight, self.num_nodes)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return spmm(self.graph.pattern, self.weight, v)

    def transformed(
        self,
        v: Float[Tensor, "N C"],
        matrix: Float[Tensor, "heads C C"] | Float[Tensor, "heads C"] | None,
        hops: int = 1,
    ) -> Float[Tensor, "N C"]:
        """Return Σ_h S_h^hops v M_hᵀ; a row of v is multiplied only by the matrices of the heads that it sends in."""
        # The number of these rows depends on values. A weight of zero has a gradient too.
        if (
            matrix is None
            or self.heads == 1
            or hops > 1
            or self.weight.requires_grad
            or not values_only()
        ):
            return super().transformed(v, matrix, hops)
        pattern, places, senders, counts = self._senders
        rows = zip(at_rows(senders, v).split(counts), matrix, strict=True)
        sent = torch.cat(
            [
                some * by if by.dim() == 1 else functional.linear(some, by)
                for some, by in rows
            ]
        )
        return spmm(
            pattern, self.weight.take(places).unsqueeze(1), sent.unsqueeze(1)
        ).squeeze(1)

    @cached_property
    def _senders(self) -> tuple[Pattern, Tensor, Compressed, list[int]]:
        """Return the nonzero entries, with pairs of head and sender as columns: their pattern and their places in the
        weight, and of the pairs, sorted by head, the sender and the number of each head."""
        edge, head = self.weight.detach().nonzero(as_tuple=True)
        source, target = (end.index_select(0, edge) for end in self.graph.edges)
        pairs, place = torch.unique(head * self.num_nodes + source, return_inverse=True)
        size = self.num_nodes
        found = len(pairs)
        pattern = Pattern(
            Compressed(target, place, size), Compressed(place, target, found)
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
        reversed_graph = self.graph.derived("reversed", self.graph.reverse)
        return SparseCoupling(reversed_graph, self.weight, nonnegative=self.nonnegative)

    def degree(self) -> Float[Tensor, "N heads"]:
        total = self.weight.to(torch.promote_types(self.dtype, torch.float32))
        if self.heads > 1:  # many columns are added faster along compressed rows
            return row_sums(self.graph.pattern.by_row, total)
        return total.new_zeros(self.num_nodes, 1).index_add(
            0, self.graph.edges[1], total
        )

    def diagonal(self) -> Float[Tensor, "N heads"]:
        source, target = self.graph.edges
        own = self.weight * (source == target).unsqueeze(1)
        return own.new_zeros(self.num_nodes, self.heads).index_add(0, target, own)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return entries_at(edge_index, self.graph.edges, self.weight, self.num_nodes)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        source, target = self.graph.edges
        dense = self.weight.new_zeros(self.num_nodes, self.num_nodes, self.heads)
        return dense.index_put((target, source), self.weight, accumulate=True).permute(
            2, 0, 1
        )
