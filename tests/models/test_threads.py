"""One model, several threads: every call has the output and the gradients that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp import DIFFormer, DiffusionGNN, PDETransformer, SFiFormer, SGFormer
from diffusion_mp.testing.laws import seeded

MODELS: dict[str, Callable[[], nn.Module]] = {
    "difformer-s": lambda: DIFFormer(8, 6, 3, heads=2, graph="sum"),
    "difformer-a": lambda: DIFFormer(8, 6, 3, kernel="sigmoid"),
    "sgformer": lambda: SGFormer(8, 6, 3),
    "sfi-former": lambda: SFiFormer(8, 8, 3, 2, heads=2),
    "gat": lambda: DiffusionGNN(8, 6, 3, conv="gat", dropout=0.0),
    "pde-transformer": lambda: PDETransformer(8, 8, 3, 2, 2, max_length=16, placement="P1"),
}


@pytest.mark.parametrize("name", MODELS)
def test_threads_do_not_meddle(name):
    generator = torch.Generator().manual_seed(0)
    with seeded(0):
        model = MODELS[name]().train()
    calls: list[tuple[Tensor, ...]] = []
    for size in range(5, 15):
        if name == "pde-transformer":
            calls.append((torch.randn(2, size, 8, generator=generator),))
        else:
            edges = torch.randint(size, (2, 3 * size), generator=generator)
            calls.append((torch.randn(size, 8, generator=generator), edges))

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        out = model(*inputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)]

    alone = [run(inputs) for inputs in calls]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, calls))
    for got, expected in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
