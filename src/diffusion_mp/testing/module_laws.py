"""What diffusivities and layers are checked for alike: derivatives, parameters, compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from diffusion_mp.testing.instances import Instance, random_instance
from diffusion_mp.testing.laws import expect, expect_close, seeded

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ModuleCase(Generic[M]):
    """A way to build the module, and the sizes of the instances it is tried on."""

    build: Callable[[], M]
    channels: int
    edges: bool
    compile: bool
    seed: int
    fresh: bool

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def module(self, dtype: torch.dtype = torch.float64) -> M:
        with seeded(self.seed):
            return self.build().to(dtype).eval()

    def instance(self, num_nodes: int = 7, generator: torch.Generator | None = None) -> Instance:
        return random_instance(num_nodes, self.channels, generator or self.generator(), edges=self.edges)

    def batch(self) -> list[Instance]:
        generator = self.generator()
        return [self.instance(size, generator) for size in (5, 2, 7, 5)]


def check_first_derivatives(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """gradcheck of ``function`` in the state and in every parameter of the module it calls."""
    leaf = x.clone().requires_grad_()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not function(leaf).requires_grad:  # a fixed operator on fixed values
        return
    # gradcheck moves its inputs in place, so the module's own parameters can be among them
    gradcheck(lambda x, *_: function(x), (leaf, *parameters), atol=1e-6, rtol=1e-5, fast_mode=True)


def check_second_derivatives(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """gradgradcheck of ``function``; a backward declared once-differentiable must say so instead."""
    leaf = x.clone().requires_grad_()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    out = function(leaf)
    if not out.requires_grad:
        return
    leaves = (leaf, *parameters)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True, allow_unused=True)
    total = sum((grad.square().sum() for grad in first if grad is not None and grad.requires_grad), torch.zeros(()))
    if not total.requires_grad:
        return
    try:
        torch.autograd.grad(total, leaves, allow_unused=True)
    except RuntimeError as error:
        sentence = str(error)
        expect(
            "once_differentiable" in sentence or "differentiate twice" in sentence or "second derivative" in sentence,
            f"the second derivative raised {sentence!r}, expected a value or a clear refusal",
        )
        return
    gradgradcheck(lambda x, *_: function(x), leaves, atol=1e-5, rtol=1e-4, fast_mode=True)


def check_reset_parameters(build: Callable[[], nn.Module], fresh: bool, seed: int) -> None:
    """``reset_parameters()`` draws every parameter again, exactly as construction does.

    An instance that cannot be built anew is reset twice from different values under one seed instead.
    """
    with seeded(seed):
        module = build()
    named = dict(module.named_parameters())
    if not named:
        return
    with seeded(seed):
        reference = build()
        if not fresh:
            reference.reset_parameters()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in named.values():
            parameter.fill_(17.0)
    with seeded(seed):
        module.reset_parameters()  # type: ignore[operator]
    for name, expected in reference.named_parameters():
        expect(
            torch.equal(named[name], expected),
            f"the parameter {name} of shape {tuple(expected.shape)} is not the one a fresh module of that seed has",
        )


def check_compiles(
    function: Callable[..., Tensor], calls: Sequence[tuple[Any, ...]], backend: str = "aot_eager"
) -> None:
    """Full-graph capture with dynamic shapes gives the same values on every call."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for arguments in calls:
        expect_close(compiled(*arguments), function(*arguments), "product", "the compiled result")
