"""One table of everything that computes, and the states it computes on: what precision and fuzz tests go through.

The constructors are those of the conformance tests; what is called in another way than these call it is added here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cases import DIFFUSIVITIES, LAYERS
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.layers import LaplacianEncoder
from diffusion_mp.models import LabelPropagation, PDETransformer
from diffusion_mp.models.pde_transformer import SITES
from diffusion_mp.testing.laws import expect, expect_close
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
)
from helpers import built

#: What is special about a state or its edges.
CORNERS = ("plain", "zero rows", "zeros", "equal rows", "isolated", "no edges")


@dataclass(frozen=True)
class State:
    """Node features [N, C], the edges among them, and values [N, 1, 2] to be propagated."""

    x: Tensor
    edge_index: Tensor
    values: Tensor

    def to(self, dtype: torch.dtype) -> State:
        return replace(self, x=self.x.to(dtype), values=self.values.to(dtype))


def draw(
    nodes: int, channels: int, corner: str, scale: float = 1.0, seed: int = 0
) -> State:
    """A state in double precision; "isolated" leaves two nodes in three without edges."""
    generator = torch.Generator().manual_seed(1000 * seed + 31 * nodes + channels)
    x = torch.randn(nodes, channels, generator=generator, dtype=torch.float64)
    if corner == "zero rows":
        x[::3] = 0
    elif corner == "zeros":
        x.zero_()
    elif corner == "equal rows":
        x = x[:1].repeat(nodes, 1)
    touched = max(1, nodes // 3) if corner == "isolated" else nodes
    edges = 0 if corner == "no edges" or not nodes else 3 * touched
    edge_index = torch.randint(max(1, touched), (2, edges), generator=generator)
    values = torch.randn(nodes, 1, 2, generator=generator, dtype=torch.float64)
    return State(scale * x, edge_index, values)


@dataclass(frozen=True)
class Case:
    """How to build something, and how to compute with it: (module, state) → results by their row of the tolerances."""

    build: Callable[[], nn.Module]
    compute: Callable[[Any, State], dict[str, Tensor]]
    channels: int = 4

    def module(self, dtype: torch.dtype) -> nn.Module:
        """The same parameters whatever the type, but for their rounding."""
        return built(self.build).to(dtype).eval()


def diffusivity(module: Any, state: State) -> dict[str, Tensor]:
    """Of the coupling that it makes a product, the row sums and the entries at the edges."""
    coupling = module(state.x, Graph(len(state.x), state.edge_index))
    return {
        "product": coupling @ state.values,
        "degree": coupling.degree(),
        "entries": coupling.at(state.edge_index),
    }


def layer(options: dict[str, Any], module: Any, state: State) -> dict[str, Tensor]:
    edge_index = state.edge_index if options.get("edges", True) else None
    return {
        "layer": module(
            state.x, edge_index, **options.get("extra", lambda x: {})(state.x)
        )
    }


def update(kind: str, module: Any, state: State) -> dict[str, Tensor]:
    graph = Graph(len(state.x), state.edge_index)
    coupling = AdjacencyDiffusivity(
        "sym", direction="undirected", self_loops="remaining"
    )(state.x, graph)
    return {kind: module(state.x, coupling)}


def sequence(module: Any, state: State) -> dict[str, Tensor]:
    mask = torch.ones(2, len(state.x), dtype=torch.bool)
    mask[1, -1:] = False
    return {"layer": module(torch.stack([state.x, 2 * state.x]), mask)}


def channels_of(build: Callable[[], nn.Module]) -> int:
    """Channels that a layer or model takes, or any number where the first call decides."""
    channels = getattr(build(), "in_channels", 4)
    return channels if channels > 0 else 4


UPDATES = {
    "explicit": (lambda: ExplicitEuler(0.5), "layer"),
    "explicit-residual": (lambda: ExplicitEuler(0.5, "residual", leak=0.1), "layer"),
    "implicit": (lambda: ImplicitEuler(2.0), "solve"),
    "implicit-long": (lambda: ImplicitEuler(1e6), "solve"),
    "implicit-residual": (lambda: ImplicitEuler(5.0, "residual"), "solve"),
    "trapezoidal": (lambda: CrankNicolson(2.0), "solve"),
    "trapezoidal-long": (lambda: CrankNicolson(1e6), "solve"),
    "equilibrium": (lambda: Equilibrium("residual", beta=0.1, leak=0.1), "solve"),
    "equilibrium-small-leak": (lambda: Equilibrium(beta=1e-6, leak=1e-6), "solve"),
    "heat": (lambda: HeatKernel(3.0), "solve"),
}

CASES = {
    **{
        name: Case(build, diffusivity, getattr(build(), "channels", 0) or 6)
        for name, build in DIFFUSIVITIES.items()
    },
    **{
        f"layer-{name}": Case(build, partial(layer, options), channels_of(build))
        for name, (build, options) in LAYERS.items()
    },
    **{
        f"update-{name}": Case(build, partial(update, kind))
        for name, (build, kind) in UPDATES.items()
    },
    "label-propagation": Case(
        LabelPropagation, lambda m, s: {"layer": m(s.x.sigmoid(), s.edge_index)}
    ),
    "laplacian-encoder": Case(
        lambda: LaplacianEncoder(5), lambda m, s: {"layer": m(s.x, s.x.abs(), s.x > -1)}
    ),
    **{
        f"transformer-{placement}-{pooling}": Case(
            partial(
                PDETransformer,
                4,
                8,
                3,
                1,
                2,
                max_length=20,
                placement=placement,
                pooling=pooling,
            ),
            sequence,
        )
        for placement, pooling in zip(
            (None, *SITES), 2 * ("first", "mean", "last", "mean"), strict=True
        )
    },
}


#: What divides every query and key, or all of them, by a norm, and so gives the same for a state of any scale.
SCALE_FREE = [
    name
    for name in DIFFUSIVITIES
    if name.startswith(
        ("simple", "sigmoid", "softmax", "gaussian", "sgformer", "kernelized-tied")
    )
    and getattr(DIFFUSIVITIES[name](), "normalize", None) is not None
]


def results(
    case: Case, module: nn.Module, state: State, autocast: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a case computes, and the gradients of the state, the values and all parameters of a weighted sum of it."""
    leaves = {
        "x": state.x.clone().requires_grad_(),
        "values": state.values.clone().requires_grad_(),
    }
    leaves |= dict(module.named_parameters())
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = case.compute(
            module, replace(state, x=leaves["x"], values=leaves["values"])
        )
    loss = torch.zeros((), dtype=torch.float64)
    for part in out.values():
        loss = (
            loss
            + (
                part.double()
                * torch.arange(part.numel()).cos().double().view(part.shape)
            ).sum()
        )
    grads = {}
    if loss.requires_grad:
        slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        grads = {
            name: grad
            for name, grad in zip(leaves, slopes, strict=True)
            if grad is not None
        }
    return {name: part.detach() for name, part in out.items()}, grads


def check_precision(
    name: str,
    state: State,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    *,
    values: bool = True,
) -> None:
    """Raise `LawBroken` unless a case computes in ``dtype`` what it computes in double, from inputs that were rounded.

    All results and gradients are finite. With ``values`` results agree within the table of tolerances, and gradients
    too where they are float32, in units of the largest entry where that is more than one.
    """
    case = CASES[name]
    module = case.module(dtype)
    rounded = state.to(dtype)
    got, grads = results(case, module, rounded, autocast)
    expected, true_grads = results(case, module.double(), rounded.to(torch.float64))
    for operation, truth in expected.items():
        expect(
            bool(got[operation].isfinite().all()), f"{operation} holds NaN or infinity"
        )
        if values:
            compare(
                got[operation].to(dtype),
                truth,
                "autocast" if autocast else operation,
                operation,
            )
    for parameter, truth in true_grads.items():
        expect(
            bool(grads[parameter].isfinite().all()),
            f"the gradient of {parameter} holds NaN or infinity",
        )
        if values and dtype == torch.float32 and autocast is None:
            # The derivative along a vector of norm s grows like 1/s, and so does its rounding.
            if parameter == "x" and state.x.any():
                unit = min(1.0, float(state.x.abs().max()))
            else:
                unit = 1.0
            # A gradient whose terms cancel is rounded as the results are that it is made of.
            results_size = max(map(largest, expected.values()))
            compare(
                unit * grads[parameter],
                unit * truth,
                "gradient",
                f"the gradient of {parameter}",
                results_size,
            )


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def compare(
    got: Tensor, expected: Tensor, operation: str, what: str, size: float = 1.0
) -> None:
    """Raise `LawBroken` unless they agree; an absolute tolerance is one of numbers of order one, or of ``size``."""
    size = max(1.0, size, largest(expected))
    expect_close((got.double() / size).to(got.dtype), expected / size, operation, what)
