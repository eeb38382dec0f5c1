"""Gumbel noise as a function of an explicit state: no generator object to copy, save or trace, no global state."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.library.custom_op("diffusion_mp::gumbel", mutates_args=())
def _gumbel(state: Tensor, like: Tensor, samples: int) -> Tensor:
    seed, step = state.tolist()
    generator = torch.Generator(like.device).manual_seed(seed + step)
    exponential = torch.empty(*like.shape[:2], samples, dtype=like.dtype, device=like.device)
    return exponential.exponential_(generator=generator).log_().neg_()


@_gumbel.register_fake
def _(state: Tensor, like: Tensor, samples: int) -> Tensor:
    return like.new_empty(*like.shape[:2], samples)


def gumbel(state: Int[Tensor, "two"], like: Float[Tensor, "N H _"], samples: int) -> Float[Tensor, "N H K"]:
    """g ~ Gumbel(0, 1) for every node, head and sample, −log of an exponential variable.

    Args:
        state: [seed, step]; equal states give equal noise, bit for bit, and every step fresh noise.
        like: gives N, H, dtype and device.
        samples: K.
    """
    return _gumbel(state, like.detach(), samples)
