"""The fast path: torch's CSR product, and sampled inner products in bounded chunks of edges."""

import warnings

import torch
from torch import Tensor

from diffusion_mp.graph import Pattern

# torch announces once per process that its CSR tensors are in beta; the product used here is tested against the
# reference.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")

# Entries gathered at once by the sampled product: 64 MiB in float32.
CHUNK = 1 << 24


def spmm(pattern: Pattern, weight: Tensor, v: Tensor) -> Tensor:
    """CSR times dense, head by head; one weight for all heads is one product over all channels.

    A weight for every channel leaves nothing to share: the messages are added up as they are.
    """
    nodes, heads, channels = v.shape
    if channels == 1 and heads > 1 and weight.size(1) > 1:
        sums = torch.zeros(nodes, heads, dtype=v.dtype, device=v.device)
        return sums.index_add_(0, pattern.row, v.squeeze(2)[pattern.col].mul_(weight)).unsqueeze(2)
    entries = weight[pattern.row_order]
    columns = pattern.col[pattern.row_order]
    if columns.numel() == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    if entries.size(1) == 1:
        return _product(pattern.row_ptr, columns, entries[:, 0], v.reshape(nodes, heads * channels)).view_as(v)
    products = [_product(pattern.row_ptr, columns, entries[:, h].contiguous(), v[:, h]) for h in range(heads)]
    return torch.stack(products, dim=1)


def _product(ptr: Tensor, columns: Tensor, entries: Tensor, v: Tensor) -> Tensor:
    size = (v.size(0), v.size(0))
    return torch.sparse_csr_tensor(ptr, columns, entries, size=size, check_invariants=False) @ v.contiguous()


def sddmm(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """a_row·b_col per entry and head, without the [E, H, D] of all messages at once."""
    chunk = max(1, CHUNK // max(1, a.size(1) * a.size(2)))
    parts = zip(pattern.row.split(chunk), pattern.col.split(chunk), strict=True)
    return torch.cat([(a[row] * b[col]).sum(2) for row, col in parts])
