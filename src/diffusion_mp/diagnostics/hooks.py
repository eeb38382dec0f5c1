"""Watching a model run, and leaving it as it was: what everything in this package that looks into a model shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics.roughness import roughness
from diffusion_mp.errors import describe


@dataclass(frozen=True)
class Call:
    """One call of a module: ``module(x, mask)`` gave ``out``."""

    x: Tensor
    mask: Tensor | None
    out: Tensor

    def roughness(self) -> float:
        """𝓔(x), summed over all sequences."""
        return float(roughness(self.x, self.mask).sum())

    def square(self) -> float:
        """‖x‖² over the tokens of all sequences."""
        return float(tokens(self.x, self.mask).square().sum())

    def relative_roughness(self) -> float:
        """𝓔(x)/‖x‖², at most 2; 0 where x is zero."""
        square = self.square()
        return self.roughness() / square if square else 0.0

    def moved(self) -> Tensor:
        """out − x of the tokens, [N, C]."""
        return tokens(self.out, self.mask) - tokens(self.x, self.mask)


def declared(model: nn.Module, mark: str) -> dict[str, nn.Module]:
    """The modules of a model, by name, that say ``mark = True`` of themselves."""
    return {name: module for name, module in model.named_modules() if getattr(module, mark, False)}


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
def hooked(modules: Mapping[str, nn.Module], hook: Callable[[str, Any, Any, Any], Tensor | None]) -> Iterator[None]:
    """For the body, ``hook(name, x, mask, output)`` follows every call ``module(x, mask)`` of the modules.

    A tensor that it gives replaces the output. The hooks are removed also after an error.
    """

    def forward_hook(name: str) -> Callable[..., Tensor | None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
            x = args[0] if args else kwargs.get("x")
            mask = args[1] if len(args) > 1 else kwargs.get("mask")
            return hook(name, x, mask, output)

        return after

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(forward_hook(name), with_kwargs=True).remove)
        yield


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """The calls of every module in the body, on sequences, filled while it runs."""
    calls: dict[str, list[Call]] = {name: [] for name in modules}

    def record(name: str, x: Any, mask: Any, out: Any) -> None:
        if not isinstance(x, Tensor) or not isinstance(out, Tensor):
            raise TypeError(
                f"a module to be diagnosed must be called as module(x, mask) and give a tensor; "
                f"{type(modules[name]).__name__} got {describe(x)} and gave {describe(out)}."
            )
        calls[name].append(Call(x.detach(), mask, out.detach()))

    with hooked(modules, record):
        yield calls


def tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of x [B, L, C] that are tokens, [N, C], in at least float32."""
    rows = x.flatten(0, 1) if mask is None else x[mask]
    return rows.to(torch.promote_types(x.dtype, torch.float32))
