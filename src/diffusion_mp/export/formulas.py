"""What the registered operations compute, in operations of torch whose number does not depend on the sizes.

For one graph most references do that already. A batch is made one graph of as many nodes as its largest one has, whose
heads are the heads of all its graphs; nodes that a shorter graph lacks are there and send nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels.linear_attention import reference as linear
from diffusion_mp.kernels.log_linear_attention import reference as log_linear
from diffusion_mp.kernels.neumann.stencil import positions
from diffusion_mp.kernels.pairwise import scores as pairwise
from diffusion_mp.kernels.pairwise.scores import PairwiseRows, Weighting
from diffusion_mp.kernels.sparse_flow import reference as sparse_flow
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms


def batch_pointers(batch: Tensor) -> Tensor:
    """Row boundaries [B+1] of a sorted ``batch`` vector."""
    return _bounds(batch, _number(pad(batch, (1, 0), value=-1).max() + 2))


def compress(node: Tensor, opposite: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds, order and other ends of the edges by node; places make the keys different, so that any sort is stable."""
    edges = node.size(0)
    order = (node * edges + torch.arange(edges, device=node.device)).argsort()
    return _bounds(node, num_nodes + 1), order, opposite[order]


def walk_pairs(edge_index: Tensor, weight: Tensor, num_nodes: int, hops: int) -> Tensor:
    """Every pair with a walk of 1 to ``hops`` edges of positive weight, from the matrix of all pairs; O(N²) memory."""
    source, target = edge_index
    step = weight.new_zeros(num_nodes, num_nodes).index_put((source, target), (weight > 0).to(weight), accumulate=True)
    step = (step > 0).to(weight)
    reached = step
    for _ in range(hops - 1):
        reached = ((reached @ step + step) > 0).to(weight)
    return reached.nonzero().t()


def repeat_interleave(x: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: Size | None = None) -> Tensor:
    """Every entry so many times; torch makes ONNX of its own only where no size is given."""
    return (x.flatten() if dim is None else x).index_select(dim or 0, numbers(repeats, output_size=output_size))


def numbers(repeats: Tensor, *, output_size: Size | None = None) -> Tensor:
    """Every number 0, 1, … so many times."""
    ends = repeats.cumsum(0)
    size = _number(repeats.sum()) if output_size is None else output_size
    return ends.new_zeros(size + 1).index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]


def _number(count: Tensor) -> Size:
    """As a size, which is a symbol while torch traces."""
    number: Size = count.item()  # type: ignore[assignment]
    torch._check(number >= 0)
    return number


def _bounds(number: Tensor, length: Size) -> Tensor:
    """[length]: where the members of every number begin and end when they are sorted by it."""
    return number.new_zeros(length).index_add(0, number + 1, torch.ones_like(number)).cumsum(0)


class Stacked:
    """The graphs of a batch side by side, as heads of one graph that has as many nodes as the largest of them."""

    def __init__(self, ptr: Tensor, num_nodes: int, device: torch.device) -> None:
        self.ptr = ptr = ptr.to(device)
        self.graph = numbers(ptr.diff(), output_size=num_nodes)
        self.place = torch.arange(num_nodes, device=device) - ptr[self.graph]
        self.graphs, self.size = ptr.size(0) - 1, _number(ptr.diff().max())

    def __call__(self, x: Tensor, absent: float = 0.0) -> Tensor:
        """[N, H, …] → [n, B H, …]; who is not there has ``absent``."""
        stack = x.new_full((self.size, self.graphs, *x.shape[1:]), absent)
        return stack.index_put((self.place, self.graph), x).flatten(1, 2)

    def marked(self, x: Tensor) -> Tensor:
        """With one more feature, that of senders: zero, and −∞ where nobody is."""
        return torch.cat([self(x), self(x.new_zeros(*x.shape[:-1], 1), -torch.inf)], -1)

    def back(self, x: Tensor) -> Tensor:
        """[n, B H, …] → [N, H, …]."""
        return x.unflatten(1, (self.graphs, x.size(1) // self.graphs))[self.place, self.graph]


def _looking(q: Tensor) -> Tensor:
    """With one more feature, that of receivers: they see by it who is there."""
    return pad(q, (0, 1), value=1.0)


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Σ_j (q_i·k_j) v_j through the sums over senders."""
    if ptr is not None:
        stack = Stacked(ptr, v.size(0), v.device)
        return stack.back(linear_product(stack(q), stack(k), stack(v), None))
    return torch.einsum("ihf,hfd->ihd", q, torch.einsum("jhf,jhd->hfd", k, v))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, terms: linear.Terms) -> linear.LinearRows:
    """As a quotient of such products."""
    return linear.attention(q, k, v, terms, linear_product)


def log_linear_attention(
    receivers: log_linear.Receivers, senders: log_linear.Senders, ptr: Tensor | None
) -> log_linear.LogLinearRows:
    """The sums over the senders, and the rows that read them."""
    if ptr is None:
        return log_linear.read(receivers, log_linear.pool(senders))
    stack = Stacked(ptr, senders.v.size(0), senders.v.device)
    log_q, row_shift = receivers
    asking = log_linear.Receivers(stack(log_q), None if row_shift is None else stack(row_shift))
    log_k, col_shift, v = senders
    sums = log_linear.pool(log_linear.Senders(stack(log_k), stack(col_shift, -torch.inf), stack(v)))
    return log_linear.LogLinearRows(*map(stack.back, log_linear.read(asking, sums)))


def pairwise_attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> PairwiseRows:
    """Over all pairs of a graph."""
    if ptr is None:
        return pairwise.pairwise_attention(q, k, v, None, score)
    stack = Stacked(ptr, v.size(0), v.device)
    out, lse = pairwise.pairwise_attention(_looking(stack(q)), stack.marked(k), stack(v), None, score)
    return PairwiseRows(stack.back(out), lse)


def pairwise_logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, loops: bool) -> Tensor:
    """Over all pairs of a graph."""
    if ptr is None:
        return pairwise.pairwise_logsumexp(q, k, None, score, loops)
    stack = Stacked(ptr, q.size(0), q.device)
    return stack.back(pairwise.pairwise_logsumexp(_looking(stack(q)), stack.marked(k), None, score, loops))


def pairwise_product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Over all pairs of a graph."""
    if weighting.ptr is None:
        return pairwise.pairwise_product(q, k, v, weighting)
    stack = Stacked(weighting.ptr, v.size(0), v.device)
    row_shift, col_shift = weighting[:2]
    stacked = weighting._replace(
        row_shift=stack(row_shift), col_shift=None if col_shift is None else stack(col_shift), ptr=None
    )
    return stack.back(pairwise.pairwise_product(_looking(stack(q)), stack.marked(k), stack(v), stacked))


def _stacked_features(stack: Stacked, features: Features) -> Features:
    q, k, friction_q, friction_k = features
    return Features(_looking(stack(q)), stack.marked(k), _looking(stack(friction_q)), stack.marked(friction_k))


def sparse_flow_potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """Every row solved by sorting."""
    if ptr is None:
        return sparse_flow.sparse_flow_potentials(features, lam, leak, None)
    stack = Stacked(ptr, lam.size(0), lam.device)
    found = sparse_flow.sparse_flow_potentials(_stacked_features(stack, features), stack(lam), stack(leak), None)
    rows = RowPotentials(*map(stack.back, found))
    return rows._replace(best=rows.best + stack.ptr[stack.graph].unsqueeze(1))


def sparse_flow_product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Over all pairs of a graph."""
    if ptr is None:
        return sparse_flow.sparse_flow_product(features, v, terms, None, transpose)
    stack = Stacked(ptr, v.size(0), v.device)
    placed = terms._replace(best=terms.best - stack.ptr[stack.graph].unsqueeze(1))
    stacked = RowTerms(*map(stack, placed))
    features = _stacked_features(stack, features)
    return stack.back(sparse_flow.sparse_flow_product(features, stack(v), stacked, None, transpose))


def sparse_flow_support(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, target: Tensor
) -> sparse_flow.Support:
    """The edges of every node solved by sorting: edges are to nodes what nodes are to graphs."""
    nodes, heads = lam.shape
    ptr, order, _ = compress(target, target, nodes)
    stack = Stacked(ptr, target.size(0), s.device)

    def rows(entries: Tensor, absent: float) -> Tensor:
        return stack(entries[order], absent).t().unflatten(0, (nodes, heads))

    log_c = rows(s + resistance[target], -torch.inf)
    log_theta = rows(lam[target].log() + (u - friction[target]), 0.0)
    active = sparse_flow.flowing(log_c, log_theta, leak.unsqueeze(2))
    best = pad(log_c.masked_fill(~active, -torch.inf), (0, 1), value=-torch.inf).argmax(2)
    entry = (ptr[:-1].unsqueeze(1) + best).clamp(max=target.size(0))
    in_order = active.flatten(0, 1).t().unflatten(1, (nodes, heads))[stack.place, stack.graph]
    return sparse_flow.Support(torch.zeros_like(in_order).index_put((order,), in_order), pad(order, (0, 1))[entry])


def neumann_transform(v: Tensor, periodic: bool, inverse: bool, ptr: Tensor | None) -> Tensor:
    """The orthonormal Hartley transform of every sequence, or the DCT-II: a matrix between all rows."""
    place, length = positions(ptr, v.size(0), v.device)
    length = torch.as_tensor(length).expand(v.size(0))
    start = torch.arange(v.size(0), device=v.device) - place
    n = length.to(v.dtype).unsqueeze(1)
    if periodic:
        angle = 2 * math.pi * (place.unsqueeze(1) * place % length.unsqueeze(1)).to(v.dtype) / n
        basis = (angle.cos() + angle.sin()) / n.sqrt()
    else:
        twice = (place.unsqueeze(1) * (2 * place + 1)) % (4 * length.unsqueeze(1))
        angle = math.pi * twice.to(v.dtype) / (2 * n)
        basis = angle.cos() * (2 - (place == 0).to(v.dtype).unsqueeze(1)).sqrt() / n.sqrt()
    basis = torch.where(start.unsqueeze(1) == start, basis, 0.0)
    return torch.einsum("im,ihd->mhd" if inverse else "mi,ihd->mhd", basis, v)
