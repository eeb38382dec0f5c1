"""``roughness``: Eq. 6, and the corrected inequality ‖ΔZ‖ ≤ √(8𝓔(Z)) that the bounds stand on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_mp.diagnostics import roughness
from diffusion_mp.layers import PDEDiffusion1d


def states(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_it_is_equation_6(generator: torch.Generator) -> None:
    x = states(generator, 3, 9, 2)
    expected = [sum(0.5 * (row[i + 1] - row[i]).square().sum() for i in range(8)) for row in x]
    torch.testing.assert_close(roughness(x), torch.stack(expected), rtol=1e-12, atol=0)
    assert roughness(x + 3).allclose(roughness(x)), "constants are smooth"
    assert roughness(x[:, :1]).tolist() == [0, 0, 0]


def test_only_tokens_are_neighbours(generator: torch.Generator) -> None:
    x, mask = states(generator, 3, 6, 2), torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0] * 6]).bool()
    expected = torch.cat([roughness(row[tokens].unsqueeze(0)) for row, tokens in zip(x, mask, strict=True)])
    poisoned = x.masked_fill(~mask.unsqueeze(2), torch.nan).requires_grad_()
    torch.testing.assert_close(roughness(poisoned, mask), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(roughness(poisoned, mask).sum(), poisoned)
    assert gradient.isfinite().all()
    assert roughness(x, torch.ones(3, 6).bool()).equal(roughness(x))


def test_half_precision_is_summed_in_single() -> None:
    x = torch.tensor([0.0, 1.0]).repeat(3000).view(1, -1, 1)
    assert roughness(x.half()).item() == 5999 / 2
    assert roughness(x.half()).dtype == torch.float32


@pytest.mark.parametrize("length", [2, 3, 16, 257])
def test_the_corrected_inequality_is_tight_on_the_alternating_sequence(length: int) -> None:
    """‖ΔZ‖ ≤ √(8𝓔(Z)), nearly equal; the printed √(2𝓔(Z)) of Eqs. 10 and 37 is exceeded (P3 in docs/errata.md)."""
    x = (-1.0) ** torch.arange(length, dtype=torch.float64).view(1, -1, 1)
    layer = PDEDiffusion1d(1, alpha=0.25).double()
    moved = ((layer(x) - x).norm() / layer.alpha.sum()).item()
    energy = float(roughness(x).sum())
    assert moved <= (8 * energy) ** 0.5 * (1 + 1e-12)
    if length > 2:
        assert moved > (2 * energy) ** 0.5 * 1.2
    if length > 200:
        assert moved > 0.99 * (8 * energy) ** 0.5


@pytest.mark.usefixtures("no_typecheck")
def test_it_says_what_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"x must be \[batch, length, channels\]; got a float32 tensor of shape \[3, 2\]"
    ):
        roughness(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"mask must be \[1, 3\]"):
        roughness(torch.zeros(1, 3, 2), torch.ones(3).bool())
