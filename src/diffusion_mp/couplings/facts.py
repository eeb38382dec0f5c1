"""What couplings hold: ``Fact``, an attribute that may be computed on access, and ``Change``, which copies it all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from diffusion_mp.graph import Graph

T = TypeVar("T")

Promise = bool | Callable[[], bool]
"""A known property, or a function without arguments that finds it out on first access."""

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")


class Fact(Generic[T]):
    """Attribute that is given at construction, or computed on first access and then kept.

    Python finds a given or kept value in the instance, without ``__get__``. A function in ``coupling._questions``
    computes the others. It must not refer to its own coupling: with such a cycle, only the garbage collector would
    free the tensors of both.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, coupling: Any, kind: type | None = None) -> T:
        answer: T = coupling._questions[self.name]()
        setattr(coupling, self.name, answer)
        return answer


class Change:
    """Copies of couplings in another dtype, on another device, or without gradient.

    An object that is held in several places is copied once, so that the copies share it too. The closures of functions
    that compute facts hold tensors and couplings; they are rebuilt around the copies.

    Args:
        dtype, device: of the copies; ``None`` keeps those of the original.
        detach: detach all tensors from the graph of autograd.
    """

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | None = None, detach: bool = False):
        self.dtype, self.device, self.detach = dtype, device, detach
        # Copies by the id of the original, which is kept as well: otherwise its id could be given to another object.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def keep(self, value: Any, changed: Any) -> Any:
        """Register ``changed`` as the copy of ``value`` and return it."""
        self._copies[id(value)] = value, changed
        return changed

    def of(self, value: Any) -> Any:
        """Return the copy of anything that a coupling may hold; an object without tensors is returned as it is."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, Tensor):
            tensor = value.detach() if self.detach else value
            dtype = self.dtype if value.is_floating_point() else None
            return self.keep(value, tensor.to(self.device or value.device, dtype))
        if hasattr(type(value), "_changed"):  # a coupling, which this module cannot import
            return value._changed(self)
        if isinstance(value, Graph):
            return self.keep(value, self._graph(value))
        if isinstance(value, nn.Module):
            module = copy.deepcopy(value).to(device=self.device, dtype=self.dtype)
            return self.keep(value, module.requires_grad_(False) if self.detach else module)
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
            return self.keep(value, self._function(value))
        return value

    def _graph(self, graph: Graph) -> Graph:
        """Graphs keep the dtype of their weights. Quantities derived from detached weights are computed again."""
        graph = graph if self.device is None else graph.to(self.device)
        if not self.detach or graph.edge_weight is None or not graph.edge_weight.requires_grad:
            return graph
        graph = copy.copy(graph)
        graph.edge_weight, graph._derived = self.of(graph.edge_weight), {}
        return graph

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(CellType(self.of(cell.cell_contents)) for cell in function.__closure__ or ())
        changed = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        changed.__kwdefaults__ = function.__kwdefaults__
        return changed
