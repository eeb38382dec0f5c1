"""Registration: the operation is trilinear, so its derivative is itself with the arguments exchanged."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.linear_attention import segmented
from diffusion_mp.kernels.precision import accumulating, without_autocast


@torch.library.custom_op("diffusion_mp::linear_attention", mutates_args=())
def _linear_attention(q: Tensor, k: Tensor, v: Tensor, ptr: Optional[Tensor]) -> Tensor:  # noqa: UP045 (schema inference)
    with without_autocast(q):
        return segmented.linear_attention(q, k, v, ptr)


@_linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ptr = inputs
    ctx.save_for_backward(q, k, v, ptr)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ptr = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _linear_attention(grad, v, k, ptr) if need[0] else None,
        _linear_attention(v, grad, q, ptr) if need[1] else None,
        _linear_attention(k, q, grad, ptr) if need[2] else None,
        None,
    )


_linear_attention.register_autograd(_backward, setup_context=_setup)


def linear_attention(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], ptr: Tensor | None = None
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, in O(N F D) (Wu, Wipf & Yan 2025, Eq. 19).

    Args:
        q, k: feature maps of receivers and senders.
        v: values.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph.

    Differentiable any number of times. Half precision accumulates in float32; the result has the dtype of ``v``.
    """
    (q, k, v), dtype = accumulating(q, k, v)
    return _linear_attention(q, k, v, ptr).to(dtype)
