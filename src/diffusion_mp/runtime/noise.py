"""Dropout, and Gumbel noise as a function of an explicit state, without generator objects or global state."""

import threading
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.torch_private import in_backward_pass

#: The number of random bits that decide about an entry.
BITS = 16


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Set every entry to zero with probability ``rate``, and divide the others by 1 − rate (Srivastava et al. 2014).

    On the CPU an entry uses 16 bits of torch's generator, and torch's dropout uses 64; this takes a fifth of the time.
    The rate is there the nearest multiple of 2⁻¹⁶, and the expectation is exact for this rate. In a sparse matrix the
    stored entries are dropped. Without ``training`` x is returned.
    """
    if not training or not rate:
        return x
    if x.layout is not torch.strided:
        x = x.to_sparse_csr()
        parts = x.crow_indices(), x.col_indices(), dropout(x.values(), rate)
        return torch.sparse_csr_tensor(*parts, size=x.shape, check_invariants=False)
    kept = round((1 - rate) * 2**BITS)
    if x.device.type != "cpu" or not 0 < kept < 2**BITS or not values_only():
        return functional.dropout(x, rate)
    words = torch.empty(-(-x.numel() * BITS // 64), dtype=torch.int64).random_(
        -(1 << 63), None
    )
    drawn = words.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (drawn < kept - (1 << BITS - 1)).to(x.dtype).mul_(2**BITS / kept)


# Nodes per seed. A run is always drawn completely, since the order of a generator's
# numbers may depend on how many are drawn: so any part of the nodes gets the noise that
# it has in the full graph.
RUN = 1024
# Between the seeds of runs, 2³² over the golden ratio: multiples lie far apart in the
# 32 bits of torch's seeds on the CPU. Of 10⁵ runs no two share a seed within 11 702
# steps; the first do at a distance of 11 703.
STRIDE = 0x9E3779B9
# Held while a state is read and advanced: no two threads may read the same one.
_ADVANCE = threading.Lock()


@torch.library.custom_op("diffusion_mp::take_step", mutates_args=("state",))
def take_step(state: Tensor) -> Tensor:
    """Return a copy of the state [seed, step], and advance the state by a step; safe among threads."""
    if in_backward_pass():
        raise RuntimeError(
            "activation checkpointing would draw other noise in the backward pass than in the forward pass. Take "
            "num_samples=0, or do not checkpoint attention with noise."
        )
    with _ADVANCE:
        now = state.clone()
        state[1] += 1
    return now


@take_step.register_fake
def _(state: Tensor) -> Tensor:
    return torch.empty_like(state)


# Sizes instead of a tensor like the result: with a batched one `vmap` could not call
# it.
@torch.library.custom_op(
    "diffusion_mp::gumbel",
    mutates_args=(),
    schema="(Tensor state, SymInt[] shape, SymInt first, ScalarType dtype, Device device) -> Tensor",
)
def _gumbel(
    state: Tensor,
    shape: Sequence[int],
    first: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    seed, step = state.tolist()
    noise = torch.empty(shape, dtype=dtype, device=device)
    last = first + shape[0]
    for run in range(first // RUN, -(-last // RUN)):
        generator = torch.Generator(device).manual_seed(seed + step + STRIDE * run)
        drawn = noise.new_empty(RUN, *noise.shape[1:]).exponential_(generator=generator)
        start = run * RUN
        begin = max(first, start)
        end = min(last, start + RUN)
        noise[begin - first : end - first] = drawn[begin - start : end - start]
    return noise.log_().neg_()


@_gumbel.register_fake
def _(
    state: Tensor,
    shape: Sequence[int],
    first: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def gumbel(
    state: Int[Tensor, " two"],
    like: Float[Tensor, "N H _"],
    samples: int,
    first: int = 0,
) -> Float[Tensor, "N H K"]:
    """Return noise g ~ Gumbel(0, 1) for every node, head and sample, −log of an exponential variable.

    Equal states give equal noise, bit for bit, and every step gives fresh noise. The noise of nodes first … first + N −
    1 is part of the noise of all nodes. All elements of a batch of ``torch.func.vmap`` have the same noise.

    Args:
        state: [seed, step].
        like: a tensor with the N, H, dtype and device of the result.
        samples: K, the number of samples.
        first: number of the first node. The default 0 is the whole graph.
    """
    return _gumbel(state, [*like.shape[:2], samples], first, like.dtype, like.device)
