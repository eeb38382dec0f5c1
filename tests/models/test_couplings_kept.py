"""A model keeps the coupling of a layer, and so the state it was made of, only for those who ask for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_mp import DIFFormer, DiffusionGNN, NodeFormer, SFiFormer, SGFormer

X, EDGES = torch.randn(6, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
MODELS: dict[str, Callable[[], nn.Module]] = {
    "DIFFormer": lambda: DIFFormer(4, 6, 3, 3),
    "NodeFormer": lambda: NodeFormer(4, 6, 3, 3),
    "SGFormer": lambda: SGFormer(4, 6, 3, gnn="gcn", num_gnn_layers=3),
    "DiffusionGNN": lambda: DiffusionGNN(4, 6, 3, 3),
    "SFiFormer": lambda: SFiFormer(4, 8, 3, 3),
}


@pytest.fixture
def _only_what_the_test_makes() -> Iterator[None]:
    """What the other tests have made is left out of collections, which take half a second each otherwise."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_what_the_test_makes")
@pytest.mark.parametrize("name", MODELS)
def test_a_coupling_is_kept_only_for_those_who_ask(name: str) -> None:
    model: Any = MODELS[name]()
    made: list[Any] = []
    alive: list[int] = []

    def watch(module: nn.Module, args: Any, out: Any) -> None:
        gc.collect()
        alive.append(sum(coupling() is not None for coupling in made))
        made.append(weakref.ref(out[-1]))

    within = model.gnn if name == "SGFormer" else model
    for layer in within.blocks if name == "SFiFormer" else within.convs:
        layer.register_forward_hook(watch)
    with torch.no_grad():
        model(X, EDGES)
        assert alive == [0, 0, 0]
        gc.collect()
        assert all(coupling() is None for coupling in made)
        made.clear()
        alive.clear()
        _, couplings = model(X, EDGES, return_coupling=True)
    assert name == "SGFormer" or (len(couplings) == 3 and alive == [0, 1, 2])
