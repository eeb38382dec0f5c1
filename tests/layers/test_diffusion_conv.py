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


def test_mixed_heads_have_a_bias_unless_it_is_left_out() -> None:
    diffusivity = SimpleDiffusivity(3)
    assert MultiHeadConv(3, 4, diffusivity, head_channels=5).mix.bias is not None
    bare = MultiHeadConv(3, 4, diffusivity, head_channels=5, bias=False)
    assert bare.mix.bias is None
