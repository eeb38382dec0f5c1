"""``Resettable``, the base of all modules whose parameters can be drawn again; and models in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from diffusion_mp.saving import Saved


class Resettable(Saved):
    """Base of modules with `reset_parameters`; one with parameters of its own draws them in `_draw`."""

    _initial: Mapping[str, Tensor] = {}

    def reset_parameters(self) -> None:
        """Reset every parameter, in the order of the constructor."""
        for child in self.children():
            reset(child)
        with torch.no_grad():
            for name, value in self._initial.items():
                getattr(self, name).copy_(value)
        self._draw()

    def _draw(self) -> None:
        """Draw the parameters that the module itself holds."""

    def _keep(self, name: str, value: object) -> None:
        """Set an attribute; a parameter is reset to the value it has now, and any other tensor is a buffer."""
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
            return
        if isinstance(value, nn.Parameter):
            self._initial = {**self._initial, name: value.detach().clone()}
        setattr(self, name, value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode and restore the mode of every module, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
