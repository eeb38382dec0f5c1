"""The source of `DIFFormer` has weight one, as footnote 4 to Eq. 10 of Wu, Wipf & Yan (2025) has it."""

import torch

from diffusion_mp.models import DIFFormer


def test_the_initial_embedding_is_added_with_weight_one(generator: torch.Generator) -> None:
    tau, leak = 0.5, 0.2
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    model = DIFFormer(4, 6, 3, 3, tau=tau, source=True, leak=leak, layer_norm=False, graph=None).double().eval()
    out, couplings = model(x, return_coupling=True)
    source = state = model.encoder(x).relu()
    for coupling in couplings:
        dense = coupling.to_dense()[0]
        slope = (dense.sum(1, keepdim=True) + leak) * state - dense @ state - source
        state = state - tau * slope
    torch.testing.assert_close(out, model.decoder(state), rtol=1e-10, atol=1e-10)
