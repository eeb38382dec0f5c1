"""``in_plain_torch``: an exported program without operations of this library, for graphs of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn.functional import pad

from diffusion_mp.checks import check_kind
from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels import (
    linear_attention,
    neumann,
    pairwise,
    sparse_flow,
    spmm,
)
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.neumann import stencil
from diffusion_mp.kernels.neumann.stencil import positions
from diffusion_mp.kernels.operation import Operation
from diffusion_mp.kernels.sparse_flow import reference
from diffusion_mp.kernels.sparse_flow.reference import distinct, support_by_sorting
from diffusion_mp.kernels.sparse_flow.rows import RowProblem
from diffusion_mp.runtime.precision import quotient, unit_vectors
from diffusion_mp.runtime.torch_private import check_size

Formula = Callable[..., Any]


def in_plain_torch(program: ExportedProgram) -> ExportedProgram:
    """Write out every operation of this library in an exported program as operations of torch.

    The program that is returned runs where the library is not installed, for graphs of all sizes, and torch converts it
    to ONNX:

        program = torch.export.export(model.eval(), (x, edge_index), dynamic_shapes=sizes)
        torch.onnx.export(in_plain_torch(program), f="model.onnx")

    Attention over pairs then holds all pairs of a graph in memory, and a batch is padded to its largest graph.

    Args:
        program: the result of ``torch.export.export``.

    Examples:
        >>> model = DIFFormerConv(4, 3).eval()
        >>> plain = in_plain_torch(torch.export.export(model, (x, edge_index)))
        >>> any("diffusion_mp" in str(node.target) for node in plain.graph.nodes)
        False
    """
    check_kind(program, "program", ExportedProgram, "what torch.export.export returns")
    aten = torch.ops.aten
    library = torch.ops.diffusion_mp
    table: dict[Any, Formula] = {
        aten.repeat_interleave.Tensor: _numbers,
        aten.repeat_interleave.self_Tensor: _repeat_interleave,
        aten.logsumexp.default: _logsumexp,
        library.batch_pointers.default: batch_pointers,
        library.compress.default: compress,
        library.walk_pairs.default: walk_pairs,
    }
    for operation, formula in FORMULAS.items():
        registered, run = operation.written_out(formula)
        table[registered] = run
    return program.run_decompositions(table)


def batch_pointers(batch: Tensor) -> Tensor:
    """Return the row boundaries [B+1] of a sorted ``batch`` vector."""
    # Padded, since a batch without nodes has no last graph.
    last = pad(batch, (1, 0), value=-1).max()
    return _bounds(batch, _number(last + 2))


def compress(
    node: Tensor,
    opposite: Tensor,
    num_nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds, order and other ends of the edges by node; distinct keys make any sort stable."""
    order = distinct(node).argsort()
    return _bounds(node, num_nodes + 1), order, opposite[order]


def walk_pairs(
    edge_index: Tensor,
    weight: Tensor,
    num_nodes: int,
    hops: int,
) -> Tensor:
    """Return every pair with a walk of 1 to ``hops`` edges of positive weight; O(N²) memory."""
    source, target = edge_index
    present = (weight > 0).to(weight)
    step = weight.new_zeros(num_nodes, num_nodes)
    step = step.index_put((source, target), present, accumulate=True)
    step = (step > 0).to(weight)
    reached = step
    for _ in range(hops - 1):
        # Reachable or not: the numbers of walks would overflow.
        longer = reached @ step + step
        reached = (longer > 0).to(weight)
    return reached.nonzero().t()


def _repeat_interleave(
    x: Tensor,
    repeats: Tensor,
    dim: int | None = None,
    *,
    output_size: Size | None = None,
) -> Tensor:
    """Return repeated entries; torch converts its own function to ONNX only without a size."""
    if dim is None:
        x = x.flatten()
        dim = 0
    return x.index_select(dim, _numbers(repeats, output_size=output_size))


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """Return log Σ exp x; torch's own function asks whether x is empty, which symbolic sizes cannot answer."""
    # With one entry more, since an empty row has no largest.
    nothing = x.narrow(dim[0], 0, 0)
    zero = nothing.sum(dim, keepdim=True)
    x = torch.cat([x, zero - torch.inf], dim[0])
    # A row without entries: −∞ less −∞ is not a number.
    top = x.amax(dim, keepdim=True)
    top = top.clamp(min=torch.finfo(x.dtype).min)
    total = (x - top).exp().sum(dim, keepdim=True)
    out = total.log() + top
    if keepdim:
        return out
    return out.squeeze(dim)


def _numbers(repeats: Tensor, *, output_size: Size | None = None) -> Tensor:
    """Return the numbers 0, 1, …, each repeated as ``repeats`` says."""
    ends = repeats.cumsum(0)
    if output_size is None:
        output_size = _number(repeats.sum())
    # Entry e of the result is how many numbers have ended at e or before: the converter has sums, and no loops.
    steps = ends.new_zeros(output_size + 1)
    steps = steps.index_add(0, ends, torch.ones_like(ends))
    return steps.cumsum(0)[:-1]


def _number(count: Tensor) -> Size:
    """Return a count as a size, which is a symbol while torch traces."""
    number: Size = count.item()  # type: ignore[assignment]
    check_size(number)
    return number


def _largest(bounds: Tensor) -> Size:
    """Return the number of members of the largest group, as a size."""
    # One at least: torch has no maximum of nothing, and the formulas no rows without entries.
    sizes = pad(bounds.diff(), (0, 1), value=1)
    return _number(sizes.max())


def _bounds(number: Tensor, length: Size) -> Tensor:
    """Return where the group of every number begins and ends when members are sorted by number, [length]."""
    counts = number.new_zeros(length)
    counts = counts.index_add(0, number + 1, torch.ones_like(number))
    return counts.cumsum(0)


class Stacked:
    """The graphs of a batch, stacked as heads of one graph that has as many nodes as the largest of them."""

    def __init__(self, ptr: Tensor, num_nodes: int, device: torch.device) -> None:
        ptr = ptr.to(device)
        graph = _numbers(ptr.diff(), output_size=num_nodes)
        first = ptr[graph]
        row = torch.arange(num_nodes, device=device)
        self.place = (row - first, graph)
        self.first = first.unsqueeze(1)
        self.graphs = ptr.size(0) - 1
        self.size = _largest(ptr)

    def __call__(self, x: Tensor, absent: float = 0.0) -> Tensor:
        """Return x [N, H, …] as [n, B H, …], with ``absent`` for missing nodes."""
        shape = (self.size, self.graphs, *x.shape[1:])
        rows = x.new_full(shape, absent)
        rows = rows.index_put(self.place, x)
        return rows.flatten(1, 2)

    def back(self, x: Tensor) -> Tensor:
        heads = x.size(1) // self.graphs
        by_graph = x.unflatten(1, (self.graphs, heads))
        return by_graph[self.place]

    def argument(self, name: str, x: Any, masked: bool) -> Any:
        """Stack an argument of an operation, so that missing nodes send nothing."""
        # Stacked graphs are heads of one graph, whose rows need no boundaries.
        if name == "ptr":
            return None
        if not isinstance(x, Tensor):
            return x
        if masked and name in ("q", "friction_q"):
            # One more feature of ones, which meets the 0 or −∞ of the keys below.
            return pad(self(x), (0, 1), value=1.0)
        if masked and name in ("k", "friction_k"):
            # A feature of 0, or of −∞ for missing nodes, whose scores are −∞ then.
            zero = x.new_zeros(*x.shape[:-1], 1)
            absent = self(zero, -torch.inf)
            return torch.cat([self(x), absent], -1)
        if name == "col_shift":
            return self(x, -torch.inf)
        # Numbers of nodes are counted from the first of their graph.
        if name == "best":
            return self(x - self.first)
        return self(x)

    def result(self, name: str, x: Tensor) -> Tensor:
        """Return the rows of a result; a result with one dimension, which the formula leaves empty, is unchanged."""
        if x.dim() < 2:
            return x
        rows = self.back(x)
        if name == "best":
            rows = rows + self.first
        return rows


def for_batches(
    operation: Operation[Any],
    reference: Formula | None = None,
    *,
    masked: bool = True,
) -> Formula:
    """Return the reference for one graph or a stacked batch; with ``masked`` the scores of missing nodes are −∞."""
    compute = reference or operation.formula
    signature = operation.signature
    names = [name.rpartition(".")[2] for name in signature.flat]

    def formula(*args: Any) -> Any:
        flat, _, _ = signature.bind(args, narrow=False)
        ptr = flat[names.index("ptr")]
        if ptr is None:
            return compute(*args)
        stack = Stacked(ptr, flat[0].size(0), flat[0].device)
        arguments = [
            stack.argument(name, x, masked) for name, x in zip(names, flat, strict=True)
        ]
        out = compute(*signature.unflatten(arguments))
        if not signature.several:
            return stack.back(out)
        results = map(stack.result, signature.results, out)
        return signature.returned(*results)

    return formula


def _product_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor | None,
) -> Tensor:
    """Return the bare product of one graph or of a stack, with any number of heads."""
    # Not the reference, which asks whether there is one head: in a stack, whether there is one graph.
    pooled = torch.einsum("jhf,jhd->hfd", k, v)
    return torch.einsum("ihf,hfd->ihd", q, pooled)


_linear_product = for_batches(
    linear_attention.trilinear, _product_by_head, masked=False
)


def _linear_rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the rows as quotients of bare products, to which the missing nodes of a stack add nothing.

    With q′_i = [q_i, c], k′_j = [k_j, 1] and v′_j = [v_j, 1], the last channel of Σ_j (q′_i·k′_j) v′_j is the sum of
    the scores c + q_i·k_j of row i.
    """
    if terms.unit:
        q = unit_vectors(q)
        k = unit_vectors(k)
    one = torch.ones_like(v[:, :, :1])
    # The number of nodes of each graph, by the product that leaves out missing ones.
    own = terms.own * _linear_product(one, one, one, terms.ptr)
    queries = torch.cat([q, terms.constant * one], 2)
    keys = torch.cat([k, one], 2)
    values = torch.cat([v, one], 2)
    total = _linear_product(queries, keys, values, terms.ptr)
    total = total + own * values
    out = quotient(total[..., :-1], total[..., -1:])
    empty = out.new_empty(0)
    return LinearRows(out, empty, empty)


def _sparse_flow_support(problem: RowProblem, target: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for the edges of every node, padded to the most edges of a node, a size that only the program knows."""
    nodes = problem.lam.size(0)
    width = _largest(_bounds(target, nodes + 1))
    return support_by_sorting(problem, target, width)


def _neumann_transform(
    v: Tensor,
    periodic: bool,
    inverse: bool,
    ptr: Tensor | None,
) -> Tensor:
    """Return the orthonormal Hartley transform of every sequence, or the DCT-II, by a matrix between all rows."""
    position, length = positions(ptr, v.size(0), v.device)
    node = torch.arange(v.size(0), device=v.device)
    start = node - position
    row = position.unsqueeze(1)
    total = torch.as_tensor(length).expand(v.size(0))
    total = total.unsqueeze(1)
    # Multiples of the period are taken off in integers, which have no rounding.
    if periodic:
        turn = row * position % total
        angle = 2 * math.pi * turn.to(v.dtype) / total
        basis = angle.cos() + angle.sin()
        square = 1 / total.to(v.dtype)
    else:
        turn = row * (2 * position + 1) % (4 * total)
        angle = math.pi / 2 * turn.to(v.dtype) / total
        basis = angle.cos()
        # All waves but the constant one have the mean square ½.
        constant = (row == 0).to(v.dtype)
        square = (2 - constant) / total.to(v.dtype)
    # Rows of other sequences have another start.
    together = start.unsqueeze(1) == start
    basis = torch.where(together, basis * square.sqrt(), 0.0)
    if inverse:
        basis = basis.mT
    return torch.einsum("mi,ihd->mhd", basis, v)


#: Every operation of a forward pass and its formula; ``None`` is its reference.
FORMULAS: dict[Operation[Any], Formula | None] = {
    spmm._spmm: None,
    spmm._sddmm: None,
    spmm._row_sums: None,
    spmm._at_rows: None,
    spmm._softmax: None,
    neumann._product: None,
    neumann._inner: None,
    linear_attention.trilinear: _linear_product,
    linear_attention.linear_rows: _linear_rows,
    pairwise._attention: for_batches(pairwise._attention),
    pairwise._product: for_batches(pairwise._product),
    sparse_flow._potentials: for_batches(sparse_flow._potentials),
    sparse_flow._product: for_batches(sparse_flow._product),
    reference._support: _sparse_flow_support,
    stencil._transform: _neumann_transform,
}
