"""``EnergyTrace``: the energy of every diffusion layer of a running model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics.hooks import declared, hooked
from diffusion_mp.diagnostics.plotting import axis
from diffusion_mp.energies import Energy
from diffusion_mp.errors import check_function, check_kind


@dataclass(frozen=True)
class LayerEnergy:
    """One call of one layer: its name in the model, E(x_in) of the state that came and E(x_out, x_in) after it."""

    layer: str
    before: float
    after: float


class EnergyTrace:
    """Record E(x_out, x_in) of every diffusion layer, in the order of the calls, while the ``with`` block runs.

    Layers are recognised by ``is_diffusion_layer = True``, which `DiffusionConv` sets; a user's own module may too.
    Nothing is kept but the numbers, and the model's outputs and gradients are untouched. Where a layer changes the
    shape of the state (more channels) there is no distance to x_in, and ``None`` is passed in its place.

    Args:
        model: any module that contains diffusion layers.
        energy: an `Energy` or any function to a scalar, called as ``energy(x_out, x_in)``, and as
            ``energy(x_in, None)`` for the value before. Default: Σ_ij‖x_i − x_j‖² of the state alone, in O(N C).

    Raises:
        ValueError: the model has no diffusion layer.

    Examples:
        >>> model = DIFFormer(4, 16, 3, num_layers=2)
        >>> with EnergyTrace(model) as trace:
        ...     out = model(x, edge_index)
        >>> len(trace.energies)  # one number per layer and call; print(trace) shows a table
        2
    """

    def __init__(self, model: nn.Module, energy: Callable[[Tensor, Tensor | None], Tensor] | None = None) -> None:
        check_kind(model, "model", nn.Module, "a torch.nn.Module")
        if energy is not None:
            check_function(energy, "energy", "called as energy(x_out, x_in)")
        found = declared(model, "is_diffusion_layer")
        self.layers = {name or type(module).__name__: module for name, module in found.items()}
        if not self.layers:
            raise ValueError(
                f"model must contain a diffusion layer, a module with is_diffusion_layer = True; "
                f"{type(model).__name__} has none among its {sum(1 for _ in model.modules())} modules."
            )
        self.energy = energy if energy is not None else _spread
        self.records: list[LayerEnergy] = []
        self._hooks = ExitStack()

    def __enter__(self) -> EnergyTrace:
        self._hooks.enter_context(hooked(self.layers, self._record))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    @property
    def energies(self) -> list[float]:
        """E(x_out, x_in) of every call, in order."""
        return [record.after for record in self.records]

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns ``layer``, ``before``, ``after``, for a data frame or a JSON file."""
        return {column: [getattr(r, column) for r in self.records] for column in ("layer", "before", "after")}

    def __str__(self) -> str:
        """A table of all calls: layer, energy before, energy after."""
        rows = [("layer", "before", "after")]
        rows += [(record.layer, f"{record.before:.6g}", f"{record.after:.6g}") for record in self.records]
        name, before, after = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{row[0]:<{name}}  {row[1]:>{before}}  {row[2]:>{after}}" for row in rows)

    def plot(self, ax: Any = None) -> Any:
        """Energy against layer, the incoming state first, on a matplotlib ``ax`` (a new one by default); returns it."""
        ax = axis(ax)
        energies = [record.before for record in self.records[:1]] + self.energies
        ax.plot(range(len(energies)), energies, marker="o")
        ax.set_xlabel("layer")
        ax.set_ylabel("energy")
        return ax

    @torch.no_grad()
    def _record(self, layer: str, x: Tensor, mask: object, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out  # beside its coupling, when that was asked for
        before = float(self.energy(x, None))
        after = float(self.energy(out, x if x.shape == out.shape else None))
        self.records.append(LayerEnergy(layer, before, after))


def _spread(x: Tensor, x_prev: Tensor | None) -> Tensor:
    """Σ_ij‖x_i − x_j‖²: how far the state has spread, whatever the layer."""
    return Energy("quadratic")(x)
