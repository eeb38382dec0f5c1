"""The fast path: torch's CSR product, and sampled inner products in bounded chunks of edges."""

import warnings
from functools import cache

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.spmm.entries import Entries
from diffusion_mp.pattern import Compressed

# Entries gathered at once by the sampled product: 64 MiB in float32.
CHUNK = 1 << 24


def spmm(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """CSR times dense, head by head; one weight for all heads is one product over all channels.

    A weight for every channel leaves nothing to share: the messages are added up as they are.
    """
    nodes, heads, channels = v.shape
    if channels == 1 and heads > 1 and weight.size(1) > 1:
        sums = torch.zeros(nodes, heads, dtype=v.dtype, device=v.device)
        return sums.index_add_(0, entries.row, v.squeeze(2)[entries.col].mul_(weight)).unsqueeze(2)
    if entries.row.numel() == 0:
        return empty_like(v).zero_()
    ptr, order = entries.row_ptr, entries.row_order
    if ptr is None:  # nobody expected this product
        ptr, order = Compressed(entries.row, entries.col, nodes).ptr_and_order
    columns, weight = entries.col[order].to(ptr.dtype), weight[order]
    if weight.size(1) == 1:
        return _product(ptr, columns, weight[:, 0], v.reshape(nodes, heads * channels)).view_as(v)
    products = [_product(ptr, columns, weight[:, h].contiguous(), v[:, h]) for h in range(heads)]
    return torch.stack(products, dim=1)


def _product(ptr: Tensor, columns: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    _let_torch_warn()
    size = (v.size(0), v.size(0))
    return torch.sparse_csr_tensor(ptr, columns, weight, size=size, check_invariants=False) @ v.contiguous()


@cache
def _let_torch_warn() -> None:
    """Unheard: torch announces once per process that its CSR tensors are in beta. The product used here is tested."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)


def sddmm(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """a_row·b_col per entry and head, without the [E, H, D] of all messages at once."""
    out = a.new_empty(entries.row.numel(), a.size(1))
    chunk = max(1, CHUNK // max(1, a.size(1) * a.size(2)))
    for first in range(0, out.size(0), chunk):
        part = slice(first, first + chunk)
        out[part] = a[entries.row[part]].mul_(b[entries.col[part]]).sum(2)
    return out
