"""Copies of couplings in which every tensor is another: of another dtype, on another device, or without gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.graph import Graph

C = TypeVar("C", bound=Coupling)


@dataclass
class Change:
    """What happens to the tensors of a coupling, of its parts and of the questions that wait in them.

    Attributes:
        dtype, device: what they are brought to; ``None`` leaves them as they are. Row boundaries stay on the CPU.
        detach: cut them off from what they were made of.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    detach: bool = False
    #: What was changed already, beside the original, so that its id stays taken: what stands twice stays one object.
    _seen: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def coupling(self, coupling: C) -> C:
        """A copy of a coupling, which answers the same."""
        changed = self._keep(coupling, copy.copy(coupling))
        if coupling.ptr is not None:
            self._keep(coupling.ptr, coupling.ptr)
        for name, value in vars(coupling).items():
            # A metric is in double, whatever the coupling is in.
            setattr(changed, name, self._placed(value) if name == "_metric" else self.of(value))
        changed.dtype = self.dtype or coupling.dtype
        changed.device = self.device or coupling.device
        return changed

    def of(self, value: Any) -> Any:
        """The same for anything that a coupling holds; what holds no tensors is given back as it is."""
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if isinstance(value, Tensor):
            return self._keep(value, self._tensor(value))
        if isinstance(value, Coupling):
            return self.coupling(value)
        if isinstance(value, Graph):
            return self._keep(value, self._graph(value))
        if isinstance(value, nn.Module):
            return self._keep(value, self._module(value))
        if isinstance(value, tuple):
            parts = [self.of(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return [self.of(part) for part in value]
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, FunctionType) and value.__closure__:
            return self._keep(value, self._function(value))
        return value

    def _keep(self, value: Any, changed: Any) -> Any:
        self._seen[id(value)] = value, changed
        return changed

    def _placed(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) and self.device is not None else value

    def _tensor(self, value: Tensor) -> Tensor:
        value = value.detach() if self.detach else value
        return value.to(self.device or value.device, self.dtype if value.is_floating_point() else None)

    def _graph(self, graph: Graph) -> Graph:
        """A graph keeps the dtype of its weights; what is derived of weights without gradient is found anew."""
        graph = graph if self.device is None else graph.to(self.device)
        if not self.detach or graph.edge_weight is None or not graph.edge_weight.requires_grad:
            return graph
        graph = copy.copy(graph)
        graph.edge_weight, graph._derived = self.of(graph.edge_weight), {}
        return graph

    def _module(self, module: nn.Module) -> nn.Module:
        module = copy.deepcopy(module).to(device=self.device, dtype=self.dtype)
        return module.requires_grad_(False) if self.detach else module

    def _function(self, function: FunctionType) -> FunctionType:
        """A function of what it was defined among: questions are such."""
        cells = tuple(CellType(self.of(cell.cell_contents)) for cell in function.__closure__ or ())
        changed = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        changed.__kwdefaults__ = function.__kwdefaults__
        return changed
