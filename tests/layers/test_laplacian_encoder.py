"""LaplacianEncoder against its equation; blind to padding, not to anything else."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from diffusion_mp.layers import LaplacianEncoder
from diffusion_mp.testing import tolerance
from helpers import built, refuses

RTOL, ATOL = tolerance("parity", torch.float64)


@pytest.fixture
def encoder() -> LaplacianEncoder:
    return built(lambda: LaplacianEncoder(6)).double()


def inputs(num_nodes: int = 7, count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(num_nodes, count, generator=generator, dtype=torch.float64)
    values = (
        torch.rand(count, generator=generator, dtype=torch.float64)
        .sort()
        .values.expand(num_nodes, count)
    )
    return vectors, values


def test_padding_does_not_enter(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    for filler in (0.0, 3.0, float("nan")):
        padded = [
            torch.cat([t, torch.full((7, 2), filler, dtype=t.dtype)], dim=1)
            for t in (vectors, values)
        ]
        mask = (torch.arange(6) < 4).expand(7, 6)
        torch.testing.assert_close(
            encoder(*padded, mask), encoder(vectors, values), rtol=RTOL, atol=ATOL
        )


def test_the_equation(encoder: LaplacianEncoder) -> None:
    """With a ReLU in place of the SiLU, φ(v) + φ(−v) would be flat around v = 0."""
    vectors, values = inputs(3, 2)
    (a, b), (c, d) = ((net[0], net[2]) for net in (encoder.phi, encoder.rho))
    for i in range(3):
        total = torch.zeros(12, dtype=torch.float64)
        for r in range(2):
            for sign in (1, -1):
                total = total + b(
                    silu(a(torch.stack([sign * vectors[i, r], values[i, r]])))
                )
        torch.testing.assert_close(
            encoder(vectors, values)[i], d(silu(c(total))), rtol=RTOL, atol=ATOL
        )
    assert torch.equal(encoder(vectors), encoder(vectors, torch.zeros_like(values)))


@pytest.mark.usefixtures("no_typecheck")
def test_it_compiles(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    mask = values > values[0, 0]
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(vectors, values, mask),
        encoder(vectors, values, mask),
        rtol=RTOL,
        atol=ATOL,
    )


V = torch.ones(7, 4)
test_refusals = refuses(
    (lambda: LaplacianEncoder(6)(V, V[:, 1:]), ValueError, "eigenvalues"),
    (lambda: LaplacianEncoder(6)(V, V, torch.ones(4).bool()), ValueError, "mask"),
)
