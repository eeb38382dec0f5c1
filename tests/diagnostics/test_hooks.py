"""`roughness`: Eq. 6 and ‖ΔZ‖ ≤ √(8𝓔(Z)); `EnergyTrace`, which changes nothing; the picture of a coupling."""

import math
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.testing import assert_close

from diffusion_mp import SparseFlowDiffusivity
from diffusion_mp.couplings import LowRankCoupling
from diffusion_mp.diagnostics import EnergyTrace, plot_attention, roughness
from diffusion_mp.energies import QuadraticPenalty
from energy_forms import Explicit
from helpers import built, draw, randn, refuses

matplotlib.use("Agg")

ONES = torch.ones(3, 1, 2)


def test_it_is_equation_6(generator):
    x = draw(generator, 3, 9, 2)
    expected = [
        sum(0.5 * (row[i + 1] - row[i]).square().sum() for i in range(8)) for row in x
    ]
    assert_close(roughness(x), torch.stack(expected), rtol=1e-12, atol=0)
    assert roughness(x + 3).allclose(roughness(x)), "constants are smooth"
    assert roughness(x[:, :1]).tolist() == [0, 0, 0]
    x = torch.tensor([0.0, 1.0]).repeat(3000).view(1, -1, 1)
    assert roughness(x.half()).item() == 5999 / 2
    assert roughness(x.half()).dtype == torch.float32


def test_only_tokens_are_neighbours(generator):
    x = draw(generator, 3, 6, 2)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0] * 6]).bool()
    expected = torch.cat(
        [
            roughness(row[tokens].unsqueeze(0))
            for row, tokens in zip(x, mask, strict=True)
        ]
    )
    poisoned = x.masked_fill(~mask.unsqueeze(2), torch.nan).requires_grad_()
    assert_close(roughness(poisoned, mask), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(roughness(poisoned, mask).sum(), poisoned)
    assert gradient.isfinite().all()
    assert roughness(x, torch.ones(3, 6).bool()).equal(roughness(x))


COUPLING = LowRankCoupling(ONES, ONES)
test_refusals = refuses(
    (
        lambda: EnergyTrace(Smooth()).plot("axis"),
        TypeError,
        "ax must be a matplotlib axis",
    ),
    (lambda: traced(lambda x, previous: x), TypeError, "energy must give a scalar"),
    (lambda: EnergyTrace([3]), TypeError, "every one of model must be a torch.nn"),
    (lambda: plot_attention(COUPLING, threshold=1.0), ValueError, "threshold must lie"),
)


def traced(energy: Callable[[Tensor, Tensor | None], Tensor]) -> None:
    layer = Smooth()
    with EnergyTrace(layer, energy):
        layer(randn(8, 3))


class Smooth(nn.Module):
    """A stand-in for a diffusion layer: half the state, half its mean."""

    is_diffusion_layer = True

    def forward(self, x: Tensor, pair: bool = False) -> Tensor | tuple[Tensor, str]:
        out = (x + x.mean(0)) / 2
        return (out, "coupling") if pair else out


class Widen(Smooth):
    def forward(self, x: Tensor, pair: bool = False) -> Tensor:
        return torch.cat([x, x], 1)


def test_default_energy_of_every_layer_and_its_plot():
    x = randn(8, 3)
    model = nn.Sequential(Smooth(), nn.Identity(), Smooth())
    with EnergyTrace(model) as trace:
        model(x)
    spread = float(QuadraticPenalty().total(x))
    assert trace.energies == pytest.approx([spread / 4, spread / 16])
    assert [record.before for record in trace.records] == pytest.approx(
        [spread, spread / 4]
    )
    assert [record.layer for record in trace.records] == ["0", "2"]
    (line,) = trace.plot(Figure().add_subplot()).lines
    assert list(line.get_ydata()) == [trace.records[0].before, *trace.energies]


@pytest.mark.filterwarnings("ignore:.*leaves the domain")
def test_given_energy_sees_both_states():
    x = randn(8, 3)
    layer = Smooth()
    energy = Explicit("simple", 0.1)
    with EnergyTrace(layer, energy) as trace:
        out = layer(x=x)
    assert trace.energies == [float(energy(out, x))]
    assert trace.records[0].before == float(energy(x))
    assert trace.records[0].layer == "Smooth"


def test_outputs_with_a_coupling_and_changing_widths():
    x = randn(8, 3)
    energy = Explicit("quadratic")
    layer = Smooth()
    widen = Widen()
    with EnergyTrace(nn.ModuleList([layer, widen]), energy) as trace:
        layer(x, pair=True)
        widen(x)
    assert len(trace.records) == 2
    assert trace.energies[1] == pytest.approx(2 * float(energy(x))), (
        "no distance between states of different widths"
    )


def test_hooks_are_gone_afterwards_even_after_an_error_and_gradients_are_untouched():
    x = randn(6, 2).requires_grad_()
    layer = Smooth()
    with EnergyTrace(layer) as trace:
        (traced,) = torch.autograd.grad(layer(x).square().sum(), x)
    with pytest.raises(AttributeError), trace:
        layer(x).not_a_method()
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(traced, plain)
    assert len(trace.energies) == 2
    assert not layer._forward_hooks


def test_every_entry_is_a_pixel_and_zeros_are_blank(generator):
    diffusivity = built(
        lambda: SparseFlowDiffusivity(4, heads=2, lam=20.0, alpha=math.inf)
    )
    coupling = diffusivity(torch.randn(9, 4, generator=generator))
    dense = coupling.to_dense()[1].detach().numpy()
    assert 0 < (dense == 0).mean() < 1
    ax = plot_attention(coupling, head=1)
    picture = np.ma.filled(ax.images[-1].get_array(), np.nan)
    assert np.array_equal(np.isnan(picture), dense <= 1e-8)
    np.testing.assert_allclose(picture[dense > 1e-8], dense[dense > 1e-8], rtol=1e-6)
    assert ax.images[-1].norm.vmin == 1e-8
    ax.figure.canvas.draw()
