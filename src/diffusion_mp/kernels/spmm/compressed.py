"""The fast path: torch's products with compressed rows, and its inner products at their entries."""

import warnings
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from diffusion_mp.graph_ops import compress
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.spmm import reference
from diffusion_mp.kernels.spmm.entries import Entries

# Entries of several heads that are multiplied at once: their weights are 1 MiB in float32.
AT_ONCE = 1 << 18


def spmm(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """Compressed rows times dense; one weight for all heads is one product over all channels.

    A weight for every channel leaves nothing to share: the messages are added up as they are.
    """
    nodes, heads, channels = v.shape
    if channels == 1 and heads > 1 and weight.size(1) > 1:
        sums = torch.zeros(nodes, heads, dtype=v.dtype, device=v.device)
        return sums.index_add_(0, entries.row, v.squeeze(2)[entries.col].mul_(weight)).unsqueeze(2)
    if v.numel() == 0 or entries.row.numel() == 0:
        return empty_like(v).zero_()
    ptr, moved, other = _rows(entries, nodes)
    if weight.size(1) == 1:
        return _product(ptr, other, _in_order(weight[:, 0], moved), v.reshape(nodes, heads * channels)).view_as(v)
    out, senders = empty_like(v), v.reshape(nodes * heads, channels)
    for some in _at_once(heads, nodes, other.numel()):
        ordered = torch.cat([_in_order(weight[:, h], moved) for h in some])
        product = _product(*_stacked(ptr, other, some, heads), ordered, senders)
        out[:, some.start : some.stop] = product.view(-1, nodes, channels).transpose(0, 1)
    return out


def sddmm(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """a_row·b_col per entry and head, along compressed rows: no message is written.

    Torch takes no more entries than a matrix has places; parallel edges of so small a graph are multiplied one by one.
    """
    nodes, heads, channels = a.shape
    count = entries.row.numel()
    if a.numel() == 0 or not 0 < count <= nodes * nodes:
        return reference.sddmm(entries, a, b)
    ptr, moved, other = _rows(entries, nodes)
    out, senders = a.new_empty(count, heads), b.reshape(nodes * heads, channels)
    for some in _at_once(heads, nodes, count):
        part = slice(some.start, some.stop)
        receivers = a[:, part].transpose(0, 1).reshape(-1, channels)
        products = _matrix(*_stacked(ptr, other, some, heads), a.new_zeros(count * len(some)), len(senders))
        torch.sparse.sampled_addmm(products, receivers, senders.t(), out=products)
        by_head = products.values().view(-1, count).t()
        if moved is None:
            out[:, part] = by_head
        else:
            out[:, part].index_copy_(0, moved.long(), by_head)
    return out


def _rows(entries: Entries, nodes: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """The entries by row, found here where nobody expected to need them."""
    if entries.row_ptr is None or entries.row_other is None:
        return compress(entries.row, entries.col, nodes)
    return entries.row_ptr, entries.row_moved, entries.row_other


def _in_order(weight: Tensor, moved: Tensor | None) -> Tensor:
    return weight.contiguous() if moved is None else weight.index_select(0, moved)


def _at_once(heads: int, nodes: int, count: int) -> Iterator[range]:
    """The heads in runs that are worth one call: small graphs all at once, large ones one by one."""
    run = max(1, AT_ONCE // max(nodes, count))
    return (range(first, min(first + run, heads)) for first in range(0, heads, run))


def _stacked(ptr: Tensor, other: Tensor, some: range, heads: int) -> tuple[Tensor, Tensor]:
    """Boundaries and columns of the rows of some heads, one head after the other; a column counts node and head."""
    if heads == 1:
        return ptr, other
    before, head = (torch.tensor(numbers, dtype=ptr.dtype, device=ptr.device).unsqueeze(1) for numbers in (
        [place * other.numel() for place in range(len(some))], list(some)))
    stacked = torch.cat([(before + ptr[:-1]).flatten(), ptr.new_tensor([len(some) * other.numel()])])
    return stacked, (other * heads + head).flatten()


def _product(ptr: Tensor, columns: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """Σ_e w_e v_column(e) over the entries e of every row.

    In single precision on a CPU torch is fastest with weighted bags of rows, whose kernel fetches rows ahead.
    """
    if v.dtype == torch.float32 and v.device.type == "cpu":  # detached: what trains would count the bags
        bags = embedding_bag(columns, v.detach(), ptr, mode="sum", per_sample_weights=weight, include_last_offset=True)
        return bags
    return _matrix(ptr, columns, weight, len(v)) @ v


def _matrix(ptr: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    _let_torch_warn()
    return torch.sparse_csr_tensor(ptr, columns, values, size=(len(ptr) - 1, width), check_invariants=False)


@cache
def _let_torch_warn() -> None:
    """Unheard: torch announces once per process that its CSR tensors are in beta. The products used here are tested."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)
