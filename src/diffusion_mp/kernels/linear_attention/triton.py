"""The GPU path: two kernels forward and two backward, each of which reads its rows once.

The state of n rows x̃ (k, or k/‖k‖) and y is [[M, m], [rᵀ, n]], [F + 1, D + 1], with M = Σ x̃ yᵀ, m = Σ w x̃ and r = Σ y,
summed in a fixed order without atomics. Forward the state of k and v, all w = 1, meets q. Backward, with
g_i = grad_i/d_i and w_i = −grad_i·out_i/d_i, this state, recomputed in a batch, meets q. The state of q and g, summed
in the same pass, meets k and v.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import contiguous, padded, tiles
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.triton_rows import load, precision, run, store

# The smallest normal number: a vector whose entries are all below it counts as zero.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Programs that share the rows: some for each processor of a large GPU.
PROGRAMS = 1024


@triton.jit
@no_type_check
def _vectors(x, row, inside, head, H, f, F, UNIT: tl.constexpr):
    """Rows of x, or x/‖x‖, zero for zero, and the factors of that: one by the largest entry, for squares in range."""
    vectors = load(x, row, inside, head, H, f, F, tl.float32)
    if UNIT:
        size = tl.max(tl.abs(vectors), axis=1)[:, None]
        # Division by zero is avoided in both branches of a choice, since both are computed.
        size = tl.where(size < TINY, 0.0, 1.0 / tl.where(size < TINY, 1.0, size))
        vectors *= size
        square = tl.sum(vectors * vectors, axis=1)[:, None]
        norm = tl.where(square == 0, 0.0, tl.rsqrt(tl.where(square == 0, 1.0, square)))
        return vectors * norm, size, norm
    else:
        return vectors, 1.0, 1.0


@triton.jit
@no_type_check
def _through_unit(gradient, x, size, norm):
    """The gradient of a row from the gradient of its unit vector x."""
    # The part along x changes the norm only, which is divided out.
    return (gradient - tl.sum(gradient * x, axis=1)[:, None] * x) * norm * size


@triton.jit
@no_type_check
def _own(
    table,
    nodes,
    rows,
    H,
    PARTS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program's part of D, its head and run, the bounds and the graph of that, and its features and channels."""
    # In 64 bits, which offsets into large tensors need.
    program = tl.program_id(0).to(tl.int64)
    part = program % PARTS
    head = program // PARTS % H
    tile = program // (PARTS * H)
    first, last, _, _, graph = run(table, tile, nodes, rows)
    return (
        part,
        head,
        tile,
        first,
        last,
        graph,
        tl.arange(0, BLOCK_F),
        part * BLOCK_D + tl.arange(0, BLOCK_D),
    )


@triton.jit
@no_type_check
def _block(state, f, d, F, D):
    """M of rows f and columns d."""
    return tl.load(
        state + f[:, None] * (D + 1) + d[None, :],
        mask=(f[:, None] < F) & (d[None, :] < D),
        other=0.0,
    )


@triton.jit
@no_type_check
def _load_state(states, graph, head, H, f, d, F, D):
    """Where the state of a graph and head is; M of rows f and columns d, m, r and n. What is not used is not read."""
    at = states + (graph * H + head) * (F + 1) * (D + 1)
    left = tl.load(at + f * (D + 1) + D, mask=f < F, other=0.0)
    right = tl.load(at + F * (D + 1) + d, mask=d < D, other=0.0)
    return at, _block(at, f, d, F, D), left, right, tl.load(at + F * (D + 1) + D)


@triton.jit
@no_type_check
def _store_state(at, outer, left, right, size, f, d, F, D):
    """M, m, r and n of the rows of a run, for a part of D; all parts have the same m and n."""
    tl.store(
        at + f[:, None] * (D + 1) + d[None, :],
        outer,
        mask=(f[:, None] < F) & (d[None, :] < D),
    )
    tl.store(at + F * (D + 1) + d, right, mask=d < D)
    tl.store(at + f * (D + 1) + D, left, mask=f < F)
    tl.store(at + F * (D + 1) + D, size.to(tl.float32))


@triton.jit
@no_type_check
def _inverse(den, row, inside, head, H):
    """1/d_i, 0 where d_i = 0."""
    # A row without any weight is zero, and sends no gradient.
    dens = tl.load(den + row * H + head, mask=inside, other=0.0)
    return tl.where(dens == 0, 0.0, 1.0 / tl.where(dens == 0, 1.0, dens))[:, None]


@triton.jit
@no_type_check
def _pool(
    k,
    v,
    states,
    table,
    nodes,
    rows,
    H,
    F,
    D,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The state of one run of senders, for one head and BLOCK_D channels of v."""
    _part, head, tile, first, last, _graph, f, d = _own(
        table, nodes, rows, H, PARTS, BLOCK_F, BLOCK_D
    )
    outer = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    left = tl.zeros([BLOCK_F], tl.float32)
    right = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        ks, _size, _norm = _vectors(k, row, inside, head, H, f, F, UNIT)
        vs = load(v, row, inside, head, H, d, D, tl.float32)
        # Sums stay in registers, and only the state of the run is written.
        outer = tl.dot(tl.trans(ks), vs, outer, input_precision=PRECISION)
        left += tl.sum(ks, axis=0)
        right += tl.sum(vs, axis=0)
    at = states + (tile * H + head) * (F + 1) * (D + 1)
    _store_state(at, outer, left, right, last - first, f, d, F, D)


@triton.jit
@no_type_check
def _read(
    q,
    v,
    state,
    out,
    den,
    table,
    nodes,
    rows,
    H,
    F,
    D,
    constant,
    own,
    OWN: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(Mᵀq̃ + c r + own n v)/d for a run of receivers, and d = m·q̃ + (c + own) n."""
    part, head, _tile, first, last, graph, f, d = _own(
        table, nodes, rows, H, PARTS, BLOCK_F, BLOCK_D
    )
    _state, outer, left, right, number = _load_state(state, graph, head, H, f, d, F, D)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        qs, _size, _norm = _vectors(q, row, inside, head, H, f, F, UNIT)
        result = (
            tl.dot(qs, outer, input_precision=PRECISION) + constant * right[None, :]
        )
        if OWN:
            # Read only here: without weight on itself a receiver has no use for its own value.
            result += own * number * load(v, row, inside, head, H, d, D, tl.float32)
        total = tl.sum(qs * left[None, :], axis=1) + (constant + own) * number
        # The denominator is replaced where it is zero, since both branches of a choice are computed.
        result = tl.where(
            total[:, None] == 0, 0.0, result / tl.where(total == 0, 1.0, total)[:, None]
        )
        store(out, row, inside, head, H, d, D, result)
        # All parts of D have the same denominators. One of them writes.
        if part == 0:
            tl.store(den + row * H + head, total, mask=inside)


@triton.jit
@no_type_check
def _receivers(
    q,
    grad,
    out,
    den,
    state,
    states,
    dq,
    table,
    nodes,
    rows,
    H,
    F,
    D,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq̃ = M g + w m for a run of receivers, through the norm of q; and the state of q̃, g and w for a part of D."""
    part, head, tile, first, last, graph, f, d = _own(
        table, nodes, rows, H, PARTS, BLOCK_F, BLOCK_D
    )
    state, block, m, _r, _number = _load_state(state, graph, head, H, f, d, F, D)
    outer = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    left = tl.zeros([BLOCK_F], tl.float32)
    right = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        inverse = _inverse(den, row, inside, head, H)
        qs, size, norm = _vectors(q, row, inside, head, H, f, F, UNIT)
        weight = tl.zeros([BLOCK_N], tl.float32)
        dqs = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
        for other in tl.static_range(PARTS):
            # Inner products with grad and out go over all channels, also those of other programs.
            e = other * BLOCK_D + tl.arange(0, BLOCK_D)
            gs = inverse * load(grad, row, inside, head, H, e, D, tl.float32)
            weight -= tl.sum(
                gs * load(out, row, inside, head, H, e, D, tl.float32), axis=1
            )
            if part == 0:
                if PARTS > 1:
                    # The columns of M for these channels, which a single part has read already.
                    block = _block(state, f, e, F, D)
                dqs = tl.dot(gs, tl.trans(block), dqs, input_precision=PRECISION)
        if part == 0:
            dqs += weight[:, None] * m[None, :]
            if UNIT:
                dqs = _through_unit(dqs, qs, size, norm)
            store(dq, row, inside, head, H, f, F, dqs)
        # ``gs`` is now that of the last part; this program sums its own.
        if PARTS > 1:
            gs = inverse * load(grad, row, inside, head, H, d, D, tl.float32)
        outer = tl.dot(tl.trans(qs), gs, outer, input_precision=PRECISION)
        left += tl.sum(weight[:, None] * qs, axis=0)
        right += tl.sum(gs, axis=0)
    at = states + (tile * H + head) * (F + 1) * (D + 1)
    _store_state(at, outer, left, right, last - first, f, d, F, D)


@triton.jit
@no_type_check
def _senders(
    k,
    v,
    grad,
    den,
    state,
    dk,
    dv,
    table,
    nodes,
    rows,
    H,
    F,
    D,
    constant,
    own,
    OWN: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dk̃ = M v + m for a run of senders, through the norm of k; and dv = Mᵀk̃ + c r + own n g for a part of D."""
    part, head, _tile, first, last, graph, f, d = _own(
        table, nodes, rows, H, PARTS, BLOCK_F, BLOCK_D
    )
    state, outer, left, right, number = _load_state(state, graph, head, H, f, d, F, D)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        ks, size, norm = _vectors(k, row, inside, head, H, f, F, UNIT)
        dvs = tl.dot(ks, outer, input_precision=PRECISION) + constant * right[None, :]
        if OWN:
            gs = load(grad, row, inside, head, H, d, D, tl.float32)
            dvs += own * number * _inverse(den, row, inside, head, H) * gs
        store(dv, row, inside, head, H, d, D, dvs)
        if part == 0:
            # dk sums over all channels, so the program of one part of D computes it.
            dks = tl.zeros([BLOCK_N, BLOCK_F], tl.float32) + left[None, :]
            for other in tl.static_range(PARTS):
                e = other * BLOCK_D + tl.arange(0, BLOCK_D)
                block = outer
                if PARTS > 1:
                    block = _block(state, f, e, F, D)
                vs = load(v, row, inside, head, H, e, D, tl.float32)
                dks = tl.dot(vs, tl.trans(block), dks, input_precision=PRECISION)
            if UNIT:
                dks = _through_unit(dks, ks, size, norm)
            store(dk, row, inside, head, H, f, F, dks)


class _Launch:
    """The runs of rows of one operation on k [N, H, F] and v [N, H, D], and the arguments of all its kernels."""

    def __init__(self, k: Tensor, v: Tensor, terms: Terms) -> None:
        (nodes, heads, features), channels = k.shape, v.size(2)
        # Enough rows for the states of all runs to be small compared to the inputs.
        least = max(128, 2 * padded(features), 2 * padded(channels))
        rows = max(least, triton.next_power_of_2(triton.cdiv(nodes * heads, PROGRAMS)))
        self.runs = tiles(terms.ptr, nodes, rows, k.device)
        self.rows = (*self.runs.bounds, rows)
        self.sizes = (heads, features, channels)
        self.shares: dict[str, Any] = {
            "constant": terms.constant,
            "own": terms.own,
            "OWN": terms.own != 0,
        }
        wide = padded(features)
        # A program holds its part of the state, F rows of so many channels, in registers.
        block = min(64 if wide <= 64 else 32, padded(channels))
        parts = max(
            1, triton.cdiv(channels, block)
        )  # denominators also where there is no channel
        self.grid = (self.runs.number * heads * parts,)
        self.options: dict[str, Any] = {
            "UNIT": terms.unit,
            "PRECISION": precision(k.dtype, min(wide, block)),
            "PARTS": parts,
            # A tile of rows shares the registers with the state, so wide rows come fewer at a time.
            "BLOCK_N": 64 if wide <= 64 else 32 if wide <= 128 else 16,
            "BLOCK_F": wide,
            "BLOCK_D": block,
            # Wide rows need the registers of more warps.
            "num_warps": 4 if wide <= 64 else 8,
            # The second stage loads the next tile during a product, in as much shared memory again.
            "num_stages": 2 if wide <= 64 and _ample(k.device) else 1,
        }

    def __call__(self, kernel: Any, *tensors: Tensor, **options: Any) -> None:
        kernel[self.grid](*tensors, *self.rows, *self.sizes, **self.options, **options)

    def pool(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the state of every graph and head, [B, H, F + 1, D + 1] in float32."""
        states = self.states(k)
        self(_pool, k, v, states)
        return self.by_graph(states)

    def states(self, like: Tensor) -> Tensor:
        """Return memory for the states of all runs."""
        heads, features, channels = self.sizes
        return like.new_empty(
            self.runs.number, heads, features + 1, channels + 1, dtype=torch.float32
        )

    def by_graph(self, states: Tensor) -> Tensor:
        """Return the sums over the runs of every graph."""
        offset = self.runs.offset
        if offset is None:
            if len(states) == 1:
                return states
            return states.sum(0, keepdim=True)
        # As many runs as graphs: every graph is one run.
        if len(states) == len(offset) - 1:
            return states
        return torch.segment_reduce(states.flatten(1), "sum", offsets=offset).unflatten(
            1, states.shape[1:]
        )


def _ample(device: torch.device) -> bool:
    """Return whether programs may take more shared memory than on GPUs for desktops, which have 99 KiB."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
    else:
        properties = None
    # Which older versions of torch lack.
    return getattr(properties, "shared_memory_per_block_optin", 0) > 2**17


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the result in the dtype of v, and in float32 the denominators and the pooled sums of a single graph."""
    q, k, v = contiguous(q, k, v)
    out = empty_like(v)
    den = torch.empty(v.shape[:2], dtype=torch.float32, device=v.device)
    with torch.cuda.device_of(q):
        # Triton launches on the current device, which need not be the device of the tensors.
        launch = _Launch(k, v, terms)
        pooled = launch.pool(k, v)
        launch(_read, q, v, pooled, out, den, **launch.shares)
    if terms.ptr is None:
        return LinearRows(out, den, pooled.squeeze(0))
    # The backward pass of a batch pools again, since the sums of many small graphs may be larger than v.
    return LinearRows(out, den, pooled.new_empty(0, *pooled.shape[2:]))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, ...]:
    grad, q, k, v, values, den = contiguous(grad, q, k, v, out.values, out.den)
    dq, dk, dv = empty_like(q, k, v)
    with torch.cuda.device_of(q):
        launch = _Launch(k, v, terms)
        # Of a single graph the forward pass has kept the state. Those of a batch would be many, and are recomputed.
        of_senders = out.pooled if terms.ptr is None else launch.pool(k, v)
        states = launch.states(q)
        launch(_receivers, q, grad, values, den, of_senders, states, dq)
        of_receivers = launch.by_graph(states)
        launch(_senders, k, v, grad, den, of_receivers, dk, dv, **launch.shares)
    return dq, dk, dv
