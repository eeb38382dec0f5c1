"""The picture of a coupling: every entry is a pixel, zeros are blank."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pytest
import torch

from diffusion_mp import LowRankCoupling, SparseFlowDiffusivity
from diffusion_mp.diagnostics import plot_attention
from diffusion_mp.testing.laws import seeded

matplotlib.use("Agg")


def test_every_entry_is_a_pixel_and_zeros_are_blank(generator):
    with seeded(0):
        diffusivity = SparseFlowDiffusivity(4, heads=2, lam=20.0, alpha=math.inf)
    coupling = diffusivity(torch.randn(9, 4, generator=generator))
    dense = coupling.to_dense()[1].detach().numpy()
    assert 0 < (dense == 0).mean() < 1
    ax = plot_attention(coupling, head=1)
    picture = np.ma.filled(ax.images[-1].get_array(), np.nan)
    assert np.array_equal(np.isnan(picture), dense <= 1e-8)
    np.testing.assert_allclose(picture[dense > 1e-8], dense[dense > 1e-8], rtol=1e-6)
    assert ax.images[-1].norm.vmin == 1e-8
    ax.figure.canvas.draw()


@pytest.mark.usefixtures("no_typecheck")
def test_it_says_what_it_needs(generator):
    x = torch.randn(3, 1, 2, generator=generator)
    with pytest.raises(TypeError, match="coupling must be a Coupling"):
        plot_attention(torch.eye(3))
    with pytest.raises(ValueError, match=r"head must lie in \[0, 0\]; got 1"):
        plot_attention(LowRankCoupling(x, x), head=1)
    with pytest.raises(ValueError, match="must be non-negative"):
        plot_attention(LowRankCoupling(x, -x))
