"""Products, sums and softmax over observed edges: one message per edge, or by torch's products with compressed rows."""

import warnings
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import embedding_bag

from diffusion_mp.graph.ops import Compressed, Entries, Parts, Pattern, compress
from diffusion_mp.kernels.operation import Backend, Wide, empty_like, operation
from diffusion_mp.runtime.cache import cached_by
from diffusion_mp.runtime.precision import accumulating, quotient, reciprocal

__all__ = ["sddmm", "spmm"]


def _reference_product(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """Return Σ_{e: row(e) = i} w_e v_col(e); weight [E, H] (H may be 1), v [C, H, D]."""
    messages = weight.unsqueeze(2) * v[entries.col]
    zero = v.new_zeros(entries.rows, *messages.shape[1:])
    return zero.index_add(0, entries.row, messages)


def _reference_inner(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    return (a[entries.row] * b[entries.col]).sum(2)


def _fast_product(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """Multiply compressed rows: of all channels with one weight, or of pairs of node and head."""
    _, heads, channels = v.shape
    # Nothing to add up, which not every kernel of torch takes.
    if v.numel() == 0 or entries.row.numel() == 0:
        return v.new_zeros(entries.rows, heads, channels)
    if weight.size(1) == 1:
        # All heads have the same matrix, so they are columns of one product.
        out = _product(entries[4:7], weight, v.flatten(1))
    elif channels == 1:
        # With a weight per channel it takes a third of the time to write the messages out and add them up by row.
        messages = v.squeeze(2).index_select(0, entries.col).mul_(weight)
        ptr, order, other = entries[4:7]
        if order is None:
            order = torch.arange(len(other), dtype=ptr.dtype, device=ptr.device)
        out = _added(ptr, order, messages)
    else:
        out = _product(_by_head(entries, heads), weight, v.reshape(-1, channels))
    return out.view(-1, heads, channels)


def _fast_inner(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """Return a_row·b_col per entry and head along compressed rows; torch allows rows × cols entries at most."""
    _, heads, channels = a.shape
    count = entries.row.numel()
    if channels == 1 and heads > 1:
        # One product per entry and head, which an index of pairs would only slow down.
        ends = a.squeeze(2).index_select(0, entries.row)
        return ends.mul_(b.squeeze(2).index_select(0, entries.col))
    # Parallel edges may be more than that.
    if a.numel() == 0 or not 0 < count <= entries.rows * entries.cols:
        return _reference_inner(entries, a, b)
    form = _by_head(entries, heads)
    inner = _inner(form, a.reshape(-1, channels), b.reshape(-1, channels))
    return inner.view(count, heads)


def _by_head(entries: Entries, heads: int) -> Parts:
    """Return the compressed rows of the matrix whose rows and columns are pairs of node and head; cached."""
    if heads == 1:
        return entries[4:7]

    def pairs() -> Parts:
        head = torch.arange(heads, device=entries.row.device)
        row = entries.row.unsqueeze(1) * heads + head
        col = entries.col.unsqueeze(1) * heads + head
        return compress(row.flatten(), col.flatten(), entries.rows * heads)

    # One index of all heads takes half the time of a product per head, whose columns are not contiguous.
    return cached_by((entries.row_ptr, entries.row_other), heads, pairs)


def _inner(form: Parts, a: Tensor, b: Tensor) -> Tensor:
    """Return a_row·b_column of every entry, in the order of the entries."""
    ptr, moved, columns = form
    # Zeros, to which torch adds the products in place.
    products = matrix(ptr, columns, a.new_zeros(columns.numel()), len(b))
    torch.sparse.sampled_addmm(products, a, b.t(), out=products)
    values = products.values()
    if moved is None:
        return values
    # From the order of rows to the order of the edges.
    return torch.empty_like(values).index_copy_(0, moved.long(), values)


def _product(form: Parts, weight: Tensor, v: Tensor) -> Tensor:
    """Return Σ_e w_e v_column(e) over the entries e of every row; weighted bags, which prefetch rows, are fastest."""
    ptr, moved, columns = form
    weight = weight.flatten()
    if moved is None:
        weight = weight.contiguous()
    else:
        weight = weight.index_select(0, moved)
    # Only there torch has a fast kernel of weighted bags.
    if v.dtype == torch.float32 and v.device.type == "cpu":
        v = v.detach()  # torch would number the bags for a gradient
        return embedding_bag(
            columns,
            v,
            ptr,
            mode="sum",
            per_sample_weights=weight,
            include_last_offset=True,
        )
    return matrix(ptr, columns, weight, len(v)) @ v


def _added(ptr: Tensor, order: Tensor, x: Tensor) -> Tensor:
    """Return the sums over the entries of every row of their x [E, H], where ``order`` lists the entries by row."""
    # A sum is the product with the matrix that has a one for every entry in its row.
    return _product((ptr, None, order), x.new_ones(len(order)), x)


def matrix(ptr: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    _let_torch_warn()
    return torch.sparse_csr_tensor(
        ptr, columns, values, size=(len(ptr) - 1, width), check_invariants=False
    )


@cache
def _let_torch_warn() -> None:
    """Suppress torch's warning that CSR tensors are in beta, which it gives once per process."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Sparse CSR tensor support is in beta"
        )
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)


@operation("spmm", formula=_reference_product, cpu=_fast_product, dtype="v")
def _spmm(entries: Entries, weight: Wide, v: Wide) -> Tensor:
    return v.new_empty(entries.rows, *v.shape[1:])


@operation("sddmm", family="spmm", formula=_reference_inner, cpu=_fast_inner, dtype="b")
def _sddmm(entries: Entries, a: Wide, b: Wide) -> Tensor:
    return a.new_empty(entries.row.size(0), a.size(1))


def _by_weight(
    grad: Tensor,
    entries: Entries,
    weight: Tensor,
    v: Tensor,
    backend: str,
) -> Tensor:
    # One weight for all heads, or one each.
    return _sddmm(entries, grad, v, backend=backend).sum_to_size(weight.shape)


_spmm.derivatives(
    {
        "weight": _by_weight,
        "v": lambda grad, entries, weight, backend: _spmm(
            entries.T, weight, grad, backend=backend
        ),
    }
)
_sddmm.derivatives(
    {
        "a": lambda grad, entries, b, backend: _spmm(entries, grad, b, backend=backend),
        "b": lambda grad, entries, a, backend: _spmm(
            entries.T, grad, a, backend=backend
        ),
    }
)


def spmm(
    pattern: Pattern,
    weight: Float[Tensor, "E heads"],
    v: Float[Tensor, "C H D"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    """Multiply values by a sparse matrix whose entries are given: out_i = Σ_e w_e v_col(e) over the entries e of row i.

    It takes O(E H D).

    Args:
        pattern: where the E entries are, in N rows and C columns, such as ``graph.pattern``.
        weight: w of every entry, with H heads or one head for all.
        v: values of the columns.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        weight: [E, H] or [E, 1].
        v: [C, H, D].
        output: [N, H, D].

    Examples:
        >>> spmm(graph.pattern, torch.ones(12, 1), x.unsqueeze(1)).shape
        torch.Size([6, 1, 4])
    """
    return _spmm(_entries(pattern, v), weight, v, backend=backend)


def sddmm(
    pattern: Pattern,
    a: Float[Tensor, "N H D"],
    b: Float[Tensor, "C H D"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "E H"]:
    """Return the inner product of the two ends of every entry of a sparse matrix, s_e = a_row(e)·b_col(e).

    It takes O(E H D).

    Args:
        pattern: where the E entries are, in N rows and C columns, such as ``graph.pattern``.
        a: features of the rows.
        b: features of the columns.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        a: [N, H, D].
        b: [C, H, D].
        output: [E, H].

    Examples:
        >>> sddmm(graph.pattern, x.unsqueeze(1), x.unsqueeze(1)).shape  # one number per entry
        torch.Size([12, 1])
    """
    return _sddmm(_entries(pattern, b), a, b, backend=backend)


def _entries(pattern: Pattern, sent: Tensor) -> Entries:
    """Return the entries; also by column, if this is known or a gradient of what the columns send needs it."""
    entries = pattern.entries
    # Only a backward pass reads entries by column, and sorting them takes time.
    if entries.col_ptr is None and trained(sent):
        return pattern.both_ways()
    return entries


def trained(x: Tensor) -> bool:
    """Return whether a gradient may be required, which needs sorted entries."""
    return x.requires_grad and torch.is_grad_enabled()


class Rows(NamedTuple):
    """The row of every entry [E], and the bounds [N + 1] and the order [E] of a `Compressed`: the entries by row."""

    node: Tensor
    ptr: Tensor
    order: Tensor

    @classmethod
    def of(cls, rows: Compressed) -> "Rows":
        return cls(rows.node, rows.ptr, rows.order)


def _sums_along(rows: Rows, x: Tensor) -> Tensor:
    return x.new_zeros(rows.ptr.numel() - 1, x.size(1)).index_add(0, rows.node, x)


def _sums_by_product(rows: Rows, x: Tensor) -> Tensor:
    return _added(rows.ptr, rows.order, x) if x.numel() else _sums_along(rows, x)


def _of_row(rows: Rows, x: Tensor) -> Tensor:
    return x.index_select(0, rows.node)


@operation("row_sums", family="spmm", formula=_sums_along, cpu=_sums_by_product)
def _row_sums(rows: Rows, x: Wide) -> Tensor:
    return x.new_empty(rows.ptr.size(0) - 1, x.size(1))


@operation("at_rows", family="spmm", formula=_of_row, cpu=_of_row)
def _at_rows(rows: Rows, x: Wide) -> Tensor:
    return x.new_empty(rows.node.size(0), x.size(1))


_row_sums.derivatives(
    {"x": lambda grad, rows, backend: _at_rows(rows, grad, backend=backend)}
)
_at_rows.derivatives(
    {"x": lambda grad, rows, backend: _row_sums(rows, grad, backend=backend)}
)


def _softmax_along(rows: Rows, logits: Tensor, prior: Tensor | None) -> Tensor:
    if prior is None:
        prior = logits.new_ones(1, 1)
    none = prior == 0
    # Not −∞, which a row of logits −∞ would subtract from itself.
    lowest = torch.finfo(logits.dtype).min
    top = logits.new_full((rows.ptr.numel() - 1, logits.size(1)), lowest)
    index = rows.node.unsqueeze(1).expand_as(logits)
    # The maximum cancels, so it needs no gradient.
    allowed = logits.detach().masked_fill(none, lowest)
    top = top.scatter_reduce(0, index, allowed, "amax")
    # Filled before the exponential, which may overflow for an edge of prior zero: zero times infinity is not zero.
    weight = prior * (logits - _of_row(rows, top)).masked_fill(none, 0.0).exp()
    return quotient(weight, _of_row(rows, _sums_along(rows, weight)))


def _softmax_in_place(rows: Rows, logits: Tensor, prior: Tensor | None) -> Tensor:
    """Return the softmax along compressed rows, in as few passes over [E, H] as torch allows."""
    # torch has the maximum over compressed rows on the CPU only.
    if not logits.numel() or logits.device.type != "cpu":
        return _softmax_along(rows, logits, prior)
    if prior is not None:
        logits = logits.masked_fill(prior == 0, -torch.inf)
    ones = matrix(rows.ptr, rows.order, logits.new_ones(len(logits)), len(logits))
    top = torch.sparse.mm(ones, logits, "amax").clamp_(
        min=torch.finfo(logits.dtype).min
    )
    weight = logits.sub(_of_row(rows, top)).exp_()
    if prior is not None:
        weight *= prior
    # The matrix of the maximum serves for the sum.
    total = ones @ weight
    return weight.mul_(_of_row(rows, reciprocal(total)))


@operation("edge_softmax", family="spmm", formula=_softmax_along, cpu=_softmax_in_place)
def _softmax(rows: Rows, logits: Wide, prior: Wide | None) -> Tensor:
    return empty_like(logits)


def _by_logits(grad: Tensor, rows: Rows, out: Tensor, backend: str) -> Tensor:
    moved = out * grad
    total = _row_sums(rows, moved, backend=backend)
    return moved - out * _at_rows(rows, total, backend=backend)


_softmax.derivatives({"logits": _by_logits})


def row_sums(rows: Compressed, x: Float[Tensor, "E H"]) -> Float[Tensor, "N H"]:
    """Return the sum over the entries of every row, in O(E H)."""
    return _row_sums(Rows.of(rows), x)


def at_rows(rows: Compressed, x: Float[Tensor, "N H"]) -> Float[Tensor, "E H"]:
    """Return the value of its row for every entry, in at least float32 and O(E H)."""
    if trained(x):
        return _at_rows(Rows.of(rows), x)
    # Only gradients, which are sums along the rows, need the order of entries.
    (x,), _ = accumulating(x)
    return x.index_select(0, rows.node)


def edge_softmax(
    rows: Compressed,
    logits: Float[Tensor, "E H"],
    prior: Float[Tensor, "E one"] | None = None,
) -> Float[Tensor, "E H"]:
    """Return prior · exp(logit) divided by its sum along the row, in at least float32 and O(E H).

    Edges of prior zero are ignored, also in the maximum. ``None`` is a prior of one for every edge.
    """
    # The fast pair has the derivative by the logits only; that by a prior is the formula's.
    learned = prior is not None and trained(prior)
    backend = "reference" if learned else "auto"
    return _softmax(Rows.of(rows), logits, prior, backend=backend)
