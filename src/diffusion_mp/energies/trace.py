"""``EnergyTrace``: the energy of every diffusion layer of a running model, through forward hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diffusion_mp.energies.energy import Energy
from diffusion_mp.errors import check_function, check_kind
from diffusion_mp.extras import needed_by


@dataclass(frozen=True)
class LayerEnergy:
    """One call of one layer: its name in the model, E(x_in) of the state that came and E(x_out, x_in) after it."""

    layer: str
    before: float
    after: float


class EnergyTrace:
    """Record E(x_out, x_in) of every diffusion layer, in the order of the calls, while the ``with`` block runs.

    >>> with EnergyTrace(model) as trace:
    ...     model(x, edge_index)
    >>> trace.energies  # one number per layer and call

    Layers are recognised by ``is_diffusion_layer = True``, which `DiffusionConv` sets; a user's own module may too.
    Nothing is kept but the numbers, and the model's outputs and gradients are untouched.

    Args:
        model: any module that contains diffusion layers.
        energy: an `Energy` or any function to a scalar, called as ``energy(x_out, x_in)``, and as
            ``energy(x_in, None)`` for the value before. Default: Σ_ij‖x_i − x_j‖² of the state alone, in O(N C).

    Where a layer changes the shape of the state (more channels) there is no distance to x_in; None takes its place.

    Raises:
        ValueError: the model has no diffusion layer.
    """

    def __init__(self, model: nn.Module, energy: Callable[[Tensor, Tensor | None], Tensor] | None = None) -> None:
        check_kind(model, "model", nn.Module, "a torch.nn.Module")
        if energy is not None:
            check_function(energy, "energy", "called as energy(x_out, x_in)")
        self.layers = {
            name or type(module).__name__: module
            for name, module in model.named_modules()
            if getattr(module, "is_diffusion_layer", False)
        }
        if not self.layers:
            raise ValueError(
                f"model must contain a diffusion layer, a module with is_diffusion_layer = True; "
                f"{type(model).__name__} has none among its {sum(1 for _ in model.modules())} modules."
            )
        self.energy = energy if energy is not None else _spread
        self.records: list[LayerEnergy] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> EnergyTrace:
        for name, module in self.layers.items():
            self._handles.append(module.register_forward_hook(self._recorder(name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    @property
    def energies(self) -> list[float]:
        """E(x_out, x_in) of every call, in order."""
        return [record.after for record in self.records]

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns ``layer``, ``before``, ``after``, for a data frame or a JSON file."""
        rows = [asdict(record) for record in self.records]
        return {column: [row[column] for row in rows] for column in ("layer", "before", "after")}

    def plot(self, ax: Any = None) -> Any:
        """Energy against layer, the incoming state first, on a matplotlib ``ax`` (a new one by default); returns it."""
        if ax is None:
            with needed_by("A plot", "diffusion-mp[plot]"):
                import matplotlib.pyplot as plt

            ax = plt.figure().add_subplot()
        start = [self.records[0].before] if self.records else []
        ax.plot(range(len(start) + len(self.energies)), start + self.energies, marker="o")
        ax.set_xlabel("layer")
        ax.set_ylabel("energy")
        return ax

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x_in = args[0] if args else kwargs["x"]
            x_out = output[0] if isinstance(output, tuple) else output
            with torch.no_grad():
                before = float(self.energy(x_in, None))
                after = float(self.energy(x_out, x_in if x_in.shape == x_out.shape else None))
            self.records.append(LayerEnergy(name, before, after))

        return record


def _spread(x: Tensor, x_prev: Tensor | None) -> Tensor:
    """Σ_ij‖x_i − x_j‖²: how far the state has spread, whatever the layer."""
    return Energy("quadratic")(x)
