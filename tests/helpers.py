"""What many tests share: random tensors, comparison within tolerances, tables of refusals, a hostile pickle."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.energies import Energy
from diffusion_mp.graph import Graph
from diffusion_mp.testing import tolerance
from diffusion_mp.testing.laws import seeded


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def built(build: Callable[[], Any], seed: int = 0) -> Any:
    """What ``build`` makes from a seed of the global random state."""
    with seeded(seed):
        return build()


def largest_rise(energy: Energy, states: Sequence[Tensor]) -> float:
    """The largest rise between states [N, C], relative to the sizes of the terms, for their sum may be near zero."""
    worst = -math.inf
    graph = energy.graph_of(states[0])
    for before, after in pairwise(z.unsqueeze(1) for z in states):
        size = sum(float(term.value(before, graph).abs()) for term in energy.terms)
        worst = max(worst, float(energy(after) - energy(before)) / max(size, 1e-300))
    return worst


def block_runs(model: Any, **inputs: Any) -> list[tuple[Energy, list[Tensor]]]:
    """The energy of every block of a certified model, and its states before the first step and after every step."""
    edge_attr = inputs.pop("edge_attr", None)
    graph = Graph.coerce(**inputs)
    found = []

    def visit(block: Any, source: Tensor, graph: Graph, **others: Any) -> Tensor:
        states = [*block.states(source, graph, **others)]
        found.append((block.energy(source, graph, **others), states))
        return states[-1]

    model.run(inputs["x"], graph, edge_attr, visit)
    return found


def close(got: Any, expected: Any, operation: str = "product") -> None:
    """Both, tensors or tuples of them, are equal up to the tolerance of the operation in their dtype."""
    dtype = (got if isinstance(got, Tensor) else got[0]).dtype
    assert_close(got, expected, **tolerance(operation, dtype)._asdict())


def agree(
    got: Tensor,
    expected: Tensor,
    leaves: Iterable[Tensor],
    values: tuple[float, float],
    slopes: tuple[float, float] | None = None,
    *,
    unused: bool = False,
) -> None:
    """Both are equal up to (rtol, atol), and so are the gradients of a weighted sum, up to ``slopes``."""
    rtol, atol = values
    assert_close(got, expected, rtol=rtol, atol=atol)
    losses = [
        (out * randn(*out.shape, seed=9).to(out)).sum() for out in (got, expected)
    ]
    leaves = list(leaves)
    grads = [
        torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=unused)
        for loss in losses
    ]
    rtol, atol = slopes or values
    assert_close(*grads, rtol=rtol, atol=atol)


def refuses(
    *cases: tuple[Any, ...], error: Any = (TypeError, ValueError)
) -> Callable[..., None]:
    """Make a test of calls, the error that each raises (``error`` where it does not say), and its words."""

    # The package's own sentences, not those of the shape checks.
    @pytest.mark.usefixtures("no_typecheck")
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [(c[0], c[1] if c[2:] else error, c[-1]) for c in cases],
    )
    def refused(call: Callable[[], object], error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    return refused


class Payload:
    """Where it is unpickled by anything that obeys, `marker` is there afterwards."""

    def __init__(self, marker: Path, way: str = "system") -> None:
        self.marker = marker
        self.way = way

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.way == "system":
            return os.system, (f"touch '{self.marker}'",)
        if self.way == "open":
            return open, (str(self.marker), "w")
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)
