"""LaplacianEncoder against its equation; blind to padding, not to anything else."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from diffusion_mp.layers import LaplacianEncoder
from helpers import built, close, randn, refuses


@pytest.fixture
def encoder() -> LaplacianEncoder:
    return built(lambda: LaplacianEncoder(6)).double()


def inputs(num_nodes: int = 7, count: int = 4) -> tuple[Tensor, Tensor]:
    values = randn(count, seed=2).abs().sort().values
    return randn(num_nodes, count, seed=1), values.expand(num_nodes, count)


def test_padding_does_not_enter(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    mask = (torch.arange(6) < 4).expand(7, 6)
    for filler in (0.0, 3.0, float("nan")):
        padded = [pad(each, (0, 2), value=filler) for each in (vectors, values)]
        close(encoder(*padded, mask), encoder(vectors, values))


def test_the_equation(encoder: LaplacianEncoder) -> None:
    """With a ReLU in place of the SiLU, φ(v) + φ(−v) would be flat around v = 0."""
    vectors, values = inputs(3, 2)
    total = torch.zeros(3, 12, dtype=torch.float64)
    for sign in (1, -1):
        pairs = torch.stack([sign * vectors, values], 2)
        total = total + encoder.phi[2](silu(encoder.phi[0](pairs))).sum(1)
    expected = encoder.rho[2](silu(encoder.rho[0](total)))
    close(encoder(vectors, values), expected)
    assert torch.equal(encoder(vectors), encoder(vectors, torch.zeros_like(values)))


@pytest.mark.usefixtures("no_typecheck")
def test_it_compiles(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    mask = values > values[0, 0]
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    close(compiled(vectors, values, mask), encoder(vectors, values, mask))


V = torch.ones(7, 4)
test_refusals = refuses(
    (lambda: LaplacianEncoder(6)(V, V[:, 1:]), ValueError, "eigenvalues"),
    (lambda: LaplacianEncoder(6)(V, V, torch.ones(4).bool()), ValueError, "mask"),
)
