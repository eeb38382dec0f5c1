"""What registrations of custom operations share: results shaped as inputs, and an end at the second derivative."""

from typing import Any, NoReturn

import torch
from torch import Tensor


def empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous results with the shapes of ``tensors``, for fake implementations."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


def once_differentiable(*backwards: Any, name: str, instead: str) -> None:
    """Let the backward operations of ``name`` answer a second derivative with a sentence that says what to do."""

    def refuse(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            f"{name} is once differentiable: its backward recomputes in blocks and has no derivative itself. "
            f"For second derivatives {instead}."
        )

    for backward in backwards:
        backward.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)
