"""Registration of the bare product: it is trilinear, so its derivative is itself with the arguments exchanged."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.linear_attention import reference, segmented
from diffusion_mp.kernels.precision import accumulating

BACKENDS = Backends("linear_product", segmented)


@torch.library.custom_op("diffusion_mp::linear_product", mutates_args=())
def _linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Optional[Tensor], backend: str) -> Tensor:  # noqa: UP045 (schema inference)
    out: Tensor = BACKENDS.run("linear_product", backend, q, k, v, ptr)
    return out


@_linear_product.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, backend: str) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ptr = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _linear_product(grad, v, k, ptr, ctx.backend) if need[0] else None,
        _linear_product(v, grad, q, ptr, ctx.backend) if need[1] else None,
        _linear_product(k, q, grad, ptr, ctx.backend) if need[2] else None,
        None,
        None,
    )


_linear_product.register_autograd(_backward, setup_context=_setup)


def linear_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, in O(N F D) (Wu, Wipf & Yan 2025, Eq. 19).

    Args:
        q, k: feature maps of receivers and senders.
        v: values.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph.
        backend: who computes it; see :mod:`diffusion_mp.kernels.dispatch`.

    Differentiable any number of times. Half precision accumulates in float32; the result has the dtype of ``v``.
    """
    (q, k, v), dtype = accumulating(q, k, v)
    name = requested("linear_product", backend)
    if name == "reference":
        return reference.linear_product(q, k, v, ptr).to(dtype)
    return _linear_product(q, k, v, ptr, name).to(dtype)
