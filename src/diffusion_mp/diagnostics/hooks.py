"""Record the calls of modules in a running model: the roughness of states, and the energy after every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diffusion_mp.checks import (
    check_function,
    check_kind,
    check_mask,
    check_tensor,
    describe,
    needed_by,
)
from diffusion_mp.energies import QuadraticPenalty
from diffusion_mp.layers.sequences import tokens_first
from diffusion_mp.runtime.precision import wide_dtype, widened


def axis(ax: Any = None) -> Any:
    """Return the given matplotlib axis, or the axis of a new figure."""
    if ax is not None and not hasattr(ax, "set_xlabel"):
        raise TypeError(f"ax must be a matplotlib axis or None; got {describe(ax)}.")
    # Imported on first use: the library needs no matplotlib, and importing it takes longer than all the rest.
    with needed_by("A plot", "diffusion-mp[plot]"):
        import matplotlib.pyplot as plt

    return plt.figure().add_subplot() if ax is None else ax


def roughness(
    x: Float[Tensor, "B L C"],
    mask: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, " B"]:
    """Return how much neighbouring tokens differ, 𝓔(x) = ½ Σ_i ‖x_{i+1} − x_i‖² (Zhang & Zhou, Eq. 6).

    The sum runs over the tokens of each sequence, in at least float32.

    Args:
        x: the states of B sequences of length L.
        mask: true at tokens, false at padding. The neighbour of a token is the next token, whatever padding lies
            between. By default every entry is a token.

    Shapes:
        x: [B, L, C].
        mask: [B, L] of bool.
        output: [B].

    Examples:
        >>> roughness(torch.rand(3, 10, 4)).shape  # of three sequences
        torch.Size([3])
    """
    check_tensor(x, "x", "[batch, length, channels]")
    if x.dim() != 3:
        raise ValueError(
            f"x must be [batch, length, channels]; got {describe(x)}. For one sequence: x.unsqueeze(0)."
        )
    check_mask(mask, x)
    x = widened(x)
    if mask is None:
        return x.diff(dim=1).square().sum((1, 2)) / 2
    # The neighbour of a token is the next token, whatever padding lies between; padding may hold NaN, which a product
    # with zero would keep.
    order, _ = tokens_first(mask)
    ordered = x.flatten(0, 1)[order].view_as(x)
    tokens = mask.flatten()[order].view_as(mask)
    steps = ordered.diff(dim=1).masked_fill(~tokens[:, 1:, None], 0)
    return steps.square().sum((1, 2)) / 2


@dataclass(frozen=True)
class Call:
    """One call of a module, ``out = module(x, mask)``."""

    x: Tensor
    mask: Tensor | None
    out: Tensor

    def roughness(self) -> float:
        return float(roughness(self.x, self.mask).sum())

    def square(self) -> float:
        return float(tokens(self.x, self.mask).square().sum())

    def moved(self) -> Tensor:
        """Return out − x at the tokens, [N, C]."""
        return tokens(self.out, self.mask) - tokens(self.x, self.mask)


def declared(model: nn.Module, mark: str) -> dict[str, nn.Module]:
    """Return the modules of a model, by name, whose attribute ``mark`` is true."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, mark, False)
    }


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module],
    hook: Callable[[str, Any, Any, Any], Tensor | None],
) -> Iterator[None]:
    """Call ``hook(name, x, mask, output)`` after every ``module(x, mask)``; a tensor it returns replaces the output."""

    def after(
        name: str,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        output: Any,
    ) -> Tensor | None:
        # A hook gets arguments as they were passed, by position or by name.
        x = args[0] if args else kwargs.get("x")
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        return hook(name, x, mask, output)

    # All hooks go when the body ends, also by an error.
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(
                partial(after, name), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of every module on sequences, while the body runs."""
    calls: dict[str, list[Call]] = {name: [] for name in modules}

    def record(name: str, x: Any, mask: Any, out: Any) -> None:
        tensors = isinstance(x, Tensor) and isinstance(out, Tensor)
        if not tensors or not isinstance(mask, Tensor | None):
            raise TypeError(
                f"a module to be diagnosed must be called as module(x, mask) and give a tensor; "
                f"{type(modules[name]).__name__} got {describe(x)} and {describe(mask)} and gave {describe(out)}."
            )
        # Detached, or the records would keep the autograd graphs of all calls.
        calls[name].append(Call(x.detach(), mask, out.detach()))

    with hooked(modules, record):
        yield calls


def tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the tokens of x [B, L, C] as [N, C], in at least float32."""
    # Squares of half-precision states would overflow at 256.
    rows = x.flatten(0, 1) if mask is None else x[mask]
    return rows.to(wide_dtype(x.dtype))


def _layers(model: Any) -> dict[str, nn.Module]:
    """Return the modules to record by name: the diffusion layers of a model, or those that are listed."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        layers = declared(model, "is_diffusion_layer")
    else:
        kinds = (Sequence, Mapping, nn.ModuleList)
        check_kind(model, "model", kinds, "a torch.nn.Module, or a list of modules")
        if isinstance(model, Mapping):
            layers = dict(model)
        else:
            layers = {
                f"{type(each).__name__} {k}": each for k, each in enumerate(model)
            }
        for each in layers.values():
            check_kind(each, "every one of model", nn.Module, "a torch.nn.Module")
    if not layers:
        raise ValueError(
            f"model must contain a diffusion layer (is_diffusion_layer=True), or be a list of the modules to record; "
            f"got {describe(model)}."
        )
    # The model itself has an empty name.
    return {name or type(each).__name__: each for name, each in layers.items()}


@dataclass(frozen=True)
class LayerEnergy:
    """The energies around one call of a layer: E(x_in) before it, and E(x_out, x_in) after it."""

    layer: str
    before: float
    after: float


class EnergyTrace:
    """Record the energy E(x_out, x_in) after every call of a diffusion layer, within a ``with`` block.

    Args:
        model: a module that contains modules with ``is_diffusion_layer = True``, such as `DiffusionConv`; or the
            modules to record, of any kind, as a list or by name.
        energy: an `Energy`, or another function to a scalar. It is called as ``energy(x_in, None)`` before a layer and
            ``energy(x_out, x_in)`` after it, with ``None`` for x_in where the shape of the state changes. By default
            Σ_ij ‖x_i − x_j‖², which needs no parameters and measures how far apart the nodes are.

    Raises:
        ValueError: the model contains no diffusion layer.

    Examples:
        >>> model = DIFFormer(4, 16, 3, num_layers=2)
        >>> with EnergyTrace(model) as trace:
        ...     out = model(x, edge_index)
        >>> len(trace.energies)  # one number per call
        2
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        energy: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        layers = _layers(model)
        if energy is None:
            energy = lambda x, _: QuadraticPenalty().total(x)  # noqa: E731
        check_function(energy, "energy", "called as energy(x_out, x_in)")
        self.energy = energy
        self.layers = layers
        self.records: list[LayerEnergy] = []
        self._hooks = ExitStack()

    def __enter__(self) -> EnergyTrace:
        self._hooks.enter_context(hooked(self.layers, self._record))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    @property
    def energies(self) -> list[float]:
        """E(x_out, x_in) after every call, in the order of the calls."""
        return [record.after for record in self.records]

    def plot(self, ax: Any = None) -> Any:
        """Plot the energy before the first layer and after each layer, and return the matplotlib axis.

        Args:
            ax: the axis to draw on. By default a new figure is made.
        """
        ax = axis(ax)
        energies = [record.before for record in self.records[:1]] + self.energies
        ax.plot(range(len(energies)), energies, marker="o")
        ax.set(xlabel="layer", ylabel="energy")
        return ax

    @torch.no_grad()
    def _record(self, layer: str, x: Tensor, mask: object, out: Any) -> None:
        # Under no_grad: an energy is a measurement, and must not keep the autograd graph of a training step alive.
        # With return_coupling=True a layer returns its coupling too.
        if isinstance(out, tuple):
            out = out[0]
        before = self.energy(x, None)
        # A layer that changes the width leads to another space, where there is no distance from x.
        after = self.energy(out, x if x.shape == out.shape else None)
        for value in (before, after):
            is_number = isinstance(value, int | float | Tensor)
            if not is_number or torch.as_tensor(value).numel() != 1:
                raise TypeError(
                    f"energy must give a scalar; got {describe(value)} at the layer {layer}."
                )
        self.records.append(LayerEnergy(layer, float(before), float(after)))
