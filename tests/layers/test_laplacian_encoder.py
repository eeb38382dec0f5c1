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
    values = torch.rand(count, generator=generator, dtype=torch.float64).sort().values.expand(num_nodes, count)
    return vectors, values


def test_one_entry_and_the_eigenvalues_do_matter(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    one = vectors.clone()
    one[2, 1] *= -1.5
    changed = (encoder(one, values) - encoder(vectors, values)).abs().amax(dim=1) > 1e-6
    assert changed.tolist() == [i == 2 for i in range(7)]
    assert not torch.allclose(encoder(vectors, values), encoder(vectors, values.flip(1)))
    assert not torch.allclose(encoder(vectors, values), encoder(vectors))


def test_padding_does_not_enter(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    for filler in (0.0, 3.0, float("nan")):
        padded = [torch.cat([t, torch.full((7, 2), filler, dtype=t.dtype)], dim=1) for t in (vectors, values)]
        mask = (torch.arange(6) < 4).expand(7, 6)
        torch.testing.assert_close(encoder(*padded, mask), encoder(vectors, values), rtol=RTOL, atol=ATOL)


def test_the_equation(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs(3, 2)
    (a, b), (c, d) = ((net[0], net[2]) for net in (encoder.phi, encoder.rho))
    for i in range(3):
        total = torch.zeros(12, dtype=torch.float64)
        for r in range(2):
            for sign in (1, -1):
                total = total + b(silu(a(torch.stack([sign * vectors[i, r], values[i, r]]))))
        torch.testing.assert_close(encoder(vectors, values)[i], d(silu(c(total))), rtol=RTOL, atol=ATOL)


def test_small_entries_are_seen(encoder: LaplacianEncoder) -> None:
    """φ(v) + φ(−v) is even, so its slope at 0 is 0; it must not be flat around it as with a ReLU."""
    vectors, values = inputs(1)
    curvature = encoder(vectors * 1e-2, values) - encoder(vectors * 0, values)
    assert (curvature.abs() > 1e-10).all()


@pytest.mark.parametrize(("nodes", "count"), [(0, 4), (1, 4), (3, 0)])
def test_no_node_and_no_eigenvector(encoder: LaplacianEncoder, nodes: int, count: int) -> None:
    out = encoder(*inputs(nodes, count))
    assert out.shape == (nodes, 6)
    assert torch.isfinite(out).all()


@pytest.mark.usefixtures("no_typecheck")
def test_it_compiles_and_has_a_repr(encoder: LaplacianEncoder) -> None:
    vectors, values = inputs()
    mask = values > values[0, 0]
    assert repr(LaplacianEncoder(4, 5)) == "LaplacianEncoder(4, hidden_channels=5)"
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(vectors, values, mask), encoder(vectors, values, mask), rtol=RTOL, atol=ATOL)


V, MASK = torch.ones(7, 4), torch.ones(4, dtype=torch.bool)
SHAPE = r"eigenvalues must have the shape \[7, 4\] of eigenvectors; got \[7, 3\]"
test_refusals = refuses(
    (lambda: LaplacianEncoder(6)(V, V[:, 1:]), ValueError, SHAPE),
    (lambda: LaplacianEncoder(6)(V, V, MASK), ValueError, r"mask must have the shape \[7, 4\]"),
)
