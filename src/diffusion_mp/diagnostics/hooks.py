"""Watching a model run, and leaving it as it was: what the collectors of this package share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.errors import describe


@dataclass(frozen=True)
class Call:
    """One call of a module on sequences: ``module(x, mask)`` gave ``out``."""

    x: Tensor
    mask: Tensor | None
    out: Tensor


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the body; then every module is in the mode it was in, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """A forward hook ``hook(module, args, kwargs, output)`` for the body, removed also after an error."""
    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Call]]:
    """The calls of a module in the body, filled while it runs."""
    calls: list[Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs.get("x")
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            raise TypeError(
                f"a module to be diagnosed must be called as module(x, mask) and give a tensor; "
                f"{type(module).__name__} got {describe(x)} and gave {describe(output)}."
            )
        calls.append(Call(x.detach(), mask, output.detach()))

    with hooked(module, record):
        yield calls


def tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of x [B, L, C] that are tokens, [N, C], in at least float32."""
    rows = x.flatten(0, 1) if mask is None else x[mask]
    return rows.to(torch.promote_types(x.dtype, torch.float32))
