"""Random states and symmetric graphs for the energy tests, all in double."""

import pytest
import torch
from energy_cases import from_dense


@pytest.fixture
def ball(generator: torch.Generator):
    """States drawn uniformly from a ball of the given radius, [n, d]."""

    def draw(n, d, radius=1.0):
        x = torch.randn(n, d, generator=generator, dtype=torch.double)
        length = torch.rand(n, 1, generator=generator, dtype=torch.double) ** (1 / d)
        return radius * length * x / x.norm(dim=1, keepdim=True)

    return draw


@pytest.fixture
def symmetric_graph(generator: torch.Generator):
    """A random symmetric non-negative coupling, connected by a cycle unless ``density`` alone shall decide."""

    def draw(n, density=0.3, *, cycle=True):
        dense = torch.rand(n, n, generator=generator, dtype=torch.double)
        dense = dense * (torch.rand(n, n, generator=generator) < density)
        if cycle and n > 1:
            nodes = torch.arange(n)
            dense[nodes, (nodes + 1) % n] += 0.1
        return from_dense(dense + dense.T)

    return draw


@pytest.fixture
def uniform(generator: torch.Generator):
    def draw(low, high):
        return low + (high - low) * float(torch.rand(1, generator=generator))

    return draw


@pytest.fixture
def size(generator: torch.Generator):
    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    return draw
