"""APPNP without end: a readout that spreads what any model says, and the model is trained through it."""

import torch

from diffusion_mp import APPNPConv, CouplingMismatchError, GaussianDiffusivity
from diffusion_mp.diffusivities import SymmetricDiffusivity
from helpers import agree, close, randn, refuses

EDGES = torch.tensor([[0, 1], [1, 2]])


def test_it_is_where_the_steps_end_and_differentiates_like_the_inverse() -> None:
    one_way = torch.randint(30, (2, 60), generator=torch.Generator().manual_seed(0))
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    x = randn(30, 4).requires_grad_()
    limit = APPNPConv(4, K=None, alpha=0.05)
    out, coupling = limit(x, edge_index, return_coupling=True)
    close(out, APPNPConv(4, K=800, alpha=0.05)(x, edge_index), "layer")
    system = torch.eye(30, dtype=x.dtype) - 0.95 * coupling.to_dense()[0]
    agree(out, 0.05 * torch.linalg.solve(system, x), [x], (1e-9, 1e-10))


def test_over_all_pairs_of_the_inputs() -> None:
    x = randn(12, 3)
    kernel = GaussianDiffusivity(
        bandwidth=0.7, normalize=None, measure="distance", row_stochastic=False
    )
    attention = SymmetricDiffusivity(kernel, diagonal=False)
    readout = APPNPConv(3, K=None, alpha=0.1, diffusivity=attention)
    weights = torch.exp(-torch.cdist(x, x).square() / (2 * 0.7**2)).fill_diagonal_(0)
    degree = weights.sum(1)
    system = torch.eye(12, dtype=x.dtype) - 0.9 * weights / degree.outer(degree).sqrt()
    close(readout(x), 0.1 * torch.linalg.solve(system, x), "layer")


test_what_has_no_limit_is_refused_with_the_way_out = refuses(
    (lambda: APPNPConv(3, K=None, alpha=0.0), ValueError, "alpha"),
    (lambda: APPNPConv(3, K=None, alpha=1.0), ValueError, "alpha"),
    (
        lambda: APPNPConv(3, K=None)(torch.rand(3, 3), EDGES),
        CouplingMismatchError,
        "undirected",
    ),
)
