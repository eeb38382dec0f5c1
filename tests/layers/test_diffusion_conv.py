"""What the generic layer lets its diffusivity read."""

import torch

from diffusion_mp import (
    MultiHeadConv,
    SimpleDiffusivity,
)


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
