"""APPNP without end: a readout that spreads what any model says, and the model is trained through it."""

import torch

from diffusion_mp import APPNPConv, CouplingMismatchError, GaussianDiffusivity
from diffusion_mp.diffusivities import SymmetricDiffusivity
from helpers import close, refuses

EDGES = torch.tensor([[0, 1], [1, 2]])


def test_it_is_where_the_steps_end_and_differentiates_like_the_inverse(
    generator: torch.Generator,
) -> None:
    one_way = torch.randint(30, (2, 60), generator=generator)
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    x, weight = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    limit = APPNPConv(4, K=None, alpha=0.05)
    out, coupling = limit(x, edge_index, return_coupling=True)
    close(out, APPNPConv(4, K=800, alpha=0.05)(x, edge_index), "layer")
    inverse = torch.linalg.inv(
        torch.eye(30, dtype=x.dtype) - 0.95 * coupling.to_dense()[0]
    )
    close(out, 0.05 * inverse @ x, "layer")
    (grad,) = torch.autograd.grad((weight * out).sum(), x)
    close(grad, 0.05 * inverse.mT @ weight, "layer")


def test_over_all_pairs_of_the_inputs(generator: torch.Generator) -> None:
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    kernel = GaussianDiffusivity(
        bandwidth=0.7, normalize=None, measure="distance", row_stochastic=False
    )
    attention = SymmetricDiffusivity(kernel, diagonal=False)
    readout = APPNPConv(3, K=None, alpha=0.1, diffusivity=attention)
    weights = torch.exp(-torch.cdist(x, x).square() / (2 * 0.7**2)).fill_diagonal_(0)
    root = weights.sum(1).rsqrt()
    dense = root[:, None] * weights * root[None, :]
    expected = 0.1 * torch.linalg.solve(torch.eye(12, dtype=x.dtype) - 0.9 * dense, x)
    close(readout(x), expected, "layer")


test_what_has_no_limit_is_refused_with_the_way_out = refuses(
    (lambda: APPNPConv(3, K=None, alpha=0.0), ValueError, "alpha"),
    (lambda: APPNPConv(3, K=None, alpha=1.0), ValueError, "alpha"),
    (
        lambda: APPNPConv(3, K=None)(torch.rand(3, 3), EDGES),
        CouplingMismatchError,
        "undirected",
    ),
)
