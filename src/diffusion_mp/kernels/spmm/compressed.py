"""The fast path: torch's products with compressed rows, and its inner products at their entries."""

import warnings
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from diffusion_mp.graph_ops import compress
from diffusion_mp.kernels.spmm import reference
from diffusion_mp.kernels.spmm.entries import Entries

# Entries of several heads that are multiplied at once: their weights are 1 MiB in float32.
AT_ONCE = 1 << 18


def spmm(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """Compressed rows times dense; one weight for all heads is one product over all channels.

    A weight for every channel leaves nothing to share: the messages are added up as they are.
    """
    _, heads, channels = v.shape
    if channels == 1 and heads > 1 and weight.size(1) > 1:
        sums = v.new_zeros(entries.rows, heads)
        return sums.index_add_(0, entries.row, v.squeeze(2)[entries.col].mul_(weight)).unsqueeze(2)
    if v.numel() == 0 or entries.row.numel() == 0:
        return v.new_zeros(entries.rows, heads, channels)
    ptr, moved, other = _by_row(entries)
    if weight.size(1) == 1:
        return _product(ptr, other, _in_order(weight[:, 0], moved), v.flatten(1)).view(-1, heads, channels)
    out = v.new_empty(entries.rows, heads, channels)
    ordered, senders = _in_order(weight, moved), v.reshape(-1, channels)
    for some in _at_once(heads, entries):
        product = _product(*_stacked(ptr, other, some, heads), torch.cat(ordered[:, some].unbind(1)), senders)
        out[:, some] = product.view(-1, entries.rows, channels).transpose(0, 1)
    return out


def sddmm(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """a_row·b_col per entry and head, along compressed rows: no message is written.

    Torch takes no more entries than a matrix has places; parallel edges of so small a graph are multiplied one by one.
    """
    _, heads, channels = a.shape
    count = entries.row.numel()
    if a.numel() == 0 or not 0 < count <= entries.rows * entries.cols:
        return reference.sddmm(entries, a, b)
    ptr, moved, other = _by_row(entries)
    out, senders = a.new_empty(count, heads), b.reshape(-1, channels)
    for some in _at_once(heads, entries):
        receivers = a[:, some].transpose(0, 1).reshape(-1, channels)
        zero = a.new_zeros(count * (some.stop - some.start))
        products = matrix(*_stacked(ptr, other, some, heads), zero, len(senders))
        torch.sparse.sampled_addmm(products, receivers, senders.t(), out=products)
        by_head = products.values().view(-1, count).t()
        if moved is None:
            out[:, some] = by_head
        else:
            out[:, some].index_copy_(0, moved.long(), by_head)
    return out


def _by_row(entries: Entries) -> tuple[Tensor, Tensor | None, Tensor]:
    """The compressed form by row, found here where nobody expected to need it."""
    if entries.row_ptr is None or entries.row_other is None:
        return compress(entries.row, entries.col, entries.rows)
    return entries.row_ptr, entries.row_moved, entries.row_other


def _in_order(weight: Tensor, moved: Tensor | None) -> Tensor:
    return weight.contiguous() if moved is None else weight.index_select(0, moved)


def _at_once(heads: int, entries: Entries) -> Iterator[slice]:
    """The heads in runs that are worth one call: those of a small graph all at once, those of a large one by one."""
    run = max(1, AT_ONCE // max(entries.rows, entries.row.numel()))
    return (slice(first, min(first + run, heads)) for first in range(0, heads, run))


def _stacked(ptr: Tensor, other: Tensor, some: slice, heads: int) -> tuple[Tensor, Tensor]:
    """Boundaries and columns of the rows of some heads, one head after the other; columns number node and head."""
    if heads == 1:
        return ptr, other
    head = torch.arange(some.start, some.stop, dtype=ptr.dtype, device=ptr.device).unsqueeze(1)
    starts = (head - some.start) * other.numel() + ptr[:-1]
    end = ptr.new_tensor([len(head) * other.numel()])
    return torch.cat([starts.flatten(), end]), (other * heads + head).flatten()


def _product(ptr: Tensor, columns: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """Σ_e w_e v_column(e) over the entries e of every row.

    In single precision on a CPU torch is fastest with weighted bags of rows, whose kernel fetches rows ahead.
    """
    if v.dtype == torch.float32 and v.device.type == "cpu":
        v = v.detach()  # of what requires a gradient the bags would be numbered
        return embedding_bag(columns, v, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True)
    return matrix(ptr, columns, weight, len(v)) @ v


def matrix(ptr: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Torch's matrix of compressed rows."""
    _let_torch_warn()
    return torch.sparse_csr_tensor(ptr, columns, values, size=(len(ptr) - 1, width), check_invariants=False)


@cache
def _let_torch_warn() -> None:
    """Unheard: torch announces once per process that its CSR tensors are in beta. The products used here are tested."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)
