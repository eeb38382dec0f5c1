"""What the generic layer lets its diffusivity read."""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion_mp import (
    DiffusionConv,
    ExplicitEuler,
    GaussianDiffusivity,
    Graph,
    MultiHeadConv,
    SimpleDiffusivity,
)
from helpers import refuses


def test_with_features_the_coupling_is_that_of_the_features_at_every_step(
    generator: torch.Generator,
) -> None:
    x, features = (
        torch.randn(7, c, generator=generator, dtype=torch.float64) for c in (3, 5)
    )
    graph = Graph(7, batch=torch.tensor([0, 0, 0, 0, 2, 2, 2]))
    diffusivity = GaussianDiffusivity(bandwidth=0.8)
    conv = DiffusionConv(
        3,
        3,
        diffusivity,
        ExplicitEuler(0.5),
        transform=False,
        bias=False,
        reads="features",
        steps=2,
    )
    out, coupling = conv(x, graph, features=features, return_coupling=True)
    dense = diffusivity(features, graph).to_dense()
    assert torch.equal(coupling.to_dense(), dense)
    step = 0.5 * torch.eye(7, dtype=x.dtype) + 0.5 * dense[0]
    torch.testing.assert_close(out, step @ step @ x)


def test_layers_built_on_it_take_features_and_pass_gradients_to_them(
    generator: torch.Generator,
) -> None:
    x, features = (torch.randn(7, c, generator=generator) for c in (3, 5))
    conv = MultiHeadConv(
        3,
        4,
        SimpleDiffusivity(5, heads=2, projection="tied"),
        2,
        head_channels=2,
        reads="features",
    )
    features.requires_grad_()
    conv(x, features=features).square().sum().backward()
    assert features.grad.abs().sum() > 0


def test_one_head_of_values_goes_through_every_head_of_the_diffusivity(
    generator: torch.Generator,
) -> None:
    x = torch.randn(7, 3, generator=generator)
    conv = MultiHeadConv(
        3, 4, SimpleDiffusivity(3, heads=2, projection="tied"), head_channels=5
    )
    out, coupling = conv(x, return_coupling=True)
    heard = coupling.to_dense() @ conv.value(x)
    torch.testing.assert_close(out, conv.mix(heard.transpose(0, 1).flatten(1)))


def of(features: object = None, reads: str = "features") -> Callable[[], Tensor]:
    return lambda: DiffusionConv(3, 2, SimpleDiffusivity(), reads=reads)(
        torch.rand(4, 3), features=features
    )


def bare(reads: str) -> DiffusionConv:
    symmetric = GaussianDiffusivity(row_stochastic=False)
    return DiffusionConv(
        3, 3, symmetric, ExplicitEuler(0.1), transform=False, bias=False, reads=reads
    )


ONES = torch.ones(4, 3)
test_features_come_if_and_only_if_they_are_read_and_fit = refuses(
    (of(), ValueError, "features.* must come .*got None"),
    (
        of(ONES, "values"),
        ValueError,
        "features.* must come .*reads='values'",
    ),
    (of(torch.rand(5, 3)), ValueError, "features must have 4 rows"),
    (of(ONES.long()), TypeError, "features"),
    (of(ONES.double()), TypeError, "features must be float32"),
    (of(ONES.to("meta")), ValueError, "features must be on the device of"),
    (lambda: bare("features").certificate(ONES), ValueError, "features.* must come"),
    (
        lambda: bare("state").certificate(ONES, features=ONES),
        ValueError,
        "features.* must come",
    ),
)
