"""What the generic layer lets its diffusivity read."""

from diffusion_mp import MultiHeadConv, SimpleDiffusivity
from helpers import close, randn


def test_one_head_of_values_goes_through_every_head_of_the_diffusivity() -> None:
    x = randn(7, 3)
    diffusivity = SimpleDiffusivity(3, heads=2, projection="tied")
    conv = MultiHeadConv(3, 4, diffusivity, head_channels=5).double()
    out, coupling = conv(x, return_coupling=True)
    heard = coupling.to_dense() @ conv.value(x)
    close(out, conv.mix(heard.transpose(0, 1).flatten(1)))
