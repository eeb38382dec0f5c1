"""Questions to torch that have no public name, each with the versions in which the private name was seen.

No other module uses a name of torch that begins with an underscore, so that a new version of torch is checked here.
"""

from typing import Any

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad

# Parsed once, which takes twenty times as long as the question.
_MANY_GRADIENTS: Any = torch._C._parse_dispatch_key("VmapMode")


def transforms_active() -> bool:
    """Return whether a transform of ``torch.func`` runs: ``grad``, ``vjp``, ``vmap``, … (torch 2.6 to 2.14)."""
    return torch._C._are_functorch_transforms_active()


def forward_mode_active() -> bool:
    """Return whether forward-mode derivatives are computed, by ``torch.func`` or dual numbers (torch 2.6 to 2.14)."""
    return forward_ad._current_level >= 0


def dispatch_mode_active() -> bool:
    """Return whether a ``TorchDispatchMode`` sees every operation, as fake tensors do (torch 2.6 to 2.14)."""
    return torch._C._len_torch_dispatch_stack() > 0


def differentiated_inside() -> bool:
    """Return `transforms_active` or `forward_mode_active`, in a single call (torch 2.6 to 2.14)."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def values_only(*, captured: bool = False) -> bool:
    """Return whether torch computes values only: it does not compile, transform, record or capture (torch 2.6 to 2.14).

    Gradients that are batched are transforms, too: ``autograd.grad(is_grads_batched=True)`` batches them, and so does
    ``torch.autograd.functional.hessian(vectorize=True)``, both by other means than ``torch.func.vmap``.

    With ``captured`` torch may capture a CUDA graph: calls then run as they come, but no values can be read.
    """
    # Every operation asks, so the questions above are repeated here, where each call would cost as much as an answer.
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_MANY_GRADIENTS)
    ):
        return False
    return captured or not (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


def one_view(a: Tensor, b: Tensor) -> bool:
    """Return whether a can stand for b, in gradients too: both are one view of one tensor (torch 2.6 to 2.14).

    The answer is ``False`` where nothing can be said, as for views of views.
    """
    if a is b:
        return True
    if not values_only() or type(a) is not Tensor or type(b) is not Tensor:
        return False
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype:
        return False
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    if not torch.is_grad_enabled() or not (a.requires_grad or b.requires_grad):
        return True
    # Memory alone does not tell where a gradient goes: ``x.detach()`` shares the memory of x.
    first = a.grad_fn
    second = b.grad_fn
    if first is None or second is None:
        return False
    names = {type(first).__name__, type(second).__name__}
    views = {"ViewBackward0", "UnsqueezeBackward0"}
    return names <= views and first.next_functions == second.next_functions


def in_backward_pass() -> bool:
    """Return whether this thread runs a backward pass of autograd (torch 2.6 to 2.14)."""
    return torch._C._current_graph_task_id() != -1


def check_size(size: int | SymInt) -> None:
    """Tell ``torch.export`` that a size read from a tensor is not negative (``torch._check``, torch 2.6 to 2.14)."""
    torch._check(size >= 0)
