"""The fast path: torch's products with compressed rows, and its sampled inner products."""

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from diffusion_mp.graph_ops import compress
from diffusion_mp.kernels.spmm import reference
from diffusion_mp.kernels.spmm.entries import Entries


def spmm(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """Compressed rows times dense, head by head; one weight for all heads is one product over all channels.

    A weight for every channel leaves nothing to share: the messages are added up as they are.
    """
    _, heads, channels = v.shape
    if channels == 1 and heads > 1 and weight.size(1) > 1:
        sums = v.new_zeros(entries.rows, heads)
        return sums.index_add_(0, entries.row, v.squeeze(2)[entries.col].mul_(weight)).unsqueeze(2)
    if v.numel() == 0 or entries.row.numel() == 0:
        return v.new_zeros(entries.rows, heads, channels)
    ptr, moved, other = _rows(entries)
    if weight.size(1) == 1:
        return _product(ptr, other, _in_order(weight[:, 0], moved), v.flatten(1)).view(-1, heads, channels)
    out = v.new_empty(entries.rows, heads, channels)
    for h in range(heads):
        out[:, h] = _product(ptr, other, _in_order(weight[:, h], moved), v[:, h])
    return out


def _in_order(weight: Tensor, moved: Tensor | None) -> Tensor:
    return weight.contiguous() if moved is None else weight.index_select(0, moved)


def _product(ptr: Tensor, columns: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """Σ_e w_e v_column(e) over the entries e of every row; the weighted sums of bags of rows are what torch has of its
    fastest for that on a CPU (it fetches rows ahead), in float32."""
    if v.dtype == torch.float32 and v.device.type == "cpu":
        return embedding_bag(columns, v, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True)
    return _matrix(ptr, columns, weight, v.size(0)) @ v.contiguous()


def _matrix(ptr: Tensor, columns: Tensor, weight: Tensor, cols: int) -> Tensor:
    _let_torch_warn()
    return torch.sparse_csr_tensor(ptr, columns, weight, size=(ptr.numel() - 1, cols), check_invariants=False)


@cache
def _let_torch_warn() -> None:
    """Unheard: torch announces once per process that its CSR tensors are in beta. The products used here are tested."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)


def sddmm(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """a_row·b_col per entry and head, along compressed rows: no message is written.

    Torch takes no more entries than a matrix has places; parallel edges of so small a graph are multiplied one by one.
    """
    heads, count = a.size(1), entries.row.numel()
    if a.numel() == 0 or not 0 < count <= entries.rows * entries.cols:
        return reference.sddmm(entries, a, b)
    ptr, moved, other = _rows(entries)
    out = a.new_empty(count, heads)
    for h in range(heads):
        products = _matrix(ptr, other, a.new_zeros(count), entries.cols)
        torch.sparse.sampled_addmm(products, a[:, h], b[:, h].t(), out=products)
        if moved is None:
            out[:, h] = products.values()
        else:
            out[:, h].index_copy_(0, moved.long(), products.values())
    return out


def _rows(entries: Entries) -> tuple[Tensor, Tensor | None, Tensor]:
    """The entries by row, found here where nobody expected to need them."""
    if entries.row_ptr is None or entries.row_other is None:
        return compress(entries.row, entries.col, entries.rows)
    return entries.row_ptr, entries.row_moved, entries.row_other
