"""``diagnose``: a row for every attention and every diffusion layer, and a model that did not notice."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics import commutator, diagnose, perturbation_bound, roughness
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.models import PDETransformer
from diffusion_mp.testing.laws import seeded

MASK = torch.arange(8) < torch.tensor([[8], [5]])


def transformer(placement: str | None, **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(2, 6, 3, 2, 3, max_length=8, placement=placement, **options).double()  # type: ignore


def sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 8, 2, generator=generator, dtype=torch.float64)


def test_every_row_is_what_its_function_gives(generator: torch.Generator) -> None:
    model, x = transformer("P7").eval(), sequences(generator)
    report = diagnose(model, x, mask=MASK)
    assert report.attention["layer"] == ["blocks.0.attention", "blocks.1.attention"]
    assert report.insertion["layer"] == ["blocks.0.after_attention", "blocks.1.after_attention"]
    state = model.embed(x, MASK)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(state)
        found = commutator(block.after_attention, block.attention, read, MASK)
        rough = roughness(read, MASK).sum().item()
        assert report.attention["commutator"][row] == pytest.approx(found.relative, rel=1e-10)
        assert report.attention["linearized"][row] == pytest.approx(found.relative_linearized, rel=1e-10)
        assert report.attention["roughness"][row] == pytest.approx(rough, rel=1e-10)
        assert report.attention["relative_roughness"][row] == pytest.approx(rough / float(read[MASK].square().sum()))
        bound = perturbation_bound(model, block.after_attention, x, mask=MASK)
        for name in ("roughness", "step", "lipschitz", "truth", "estimate", "roughness_estimate"):
            assert report.insertion[name][row] == pytest.approx(getattr(bound, name), rel=1e-10), name
        assert report.insertion["relative_roughness"][row] == pytest.approx(bound.roughness / bound.size**2)
        state = block(state, MASK)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("P1", ["after_embedding", "after_embedding"]),
        ("P4", ["blocks.0.before_attention_norm", "blocks.1.before_attention_norm"]),
        ("P5", ["blocks.0.attention.on_values", "blocks.1.attention.on_values"]),
    ],
)
def test_s_is_the_model_s_own(generator: torch.Generator, placement: str, names: list[str]) -> None:
    """The diffusion layer of the same block, or the one behind the embedding; each has an α of its own."""
    model, x = transformer(placement).eval(), sequences(generator)
    for step, layer in enumerate(module for module in model.modules() if isinstance(module, PDEDiffusion1d)):
        nn.init.constant_(layer.diffusivity.eta, -2.0 + step)
    report, state = diagnose(model, x, points=1), model.embed(x)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(block.before_attention_norm(state))
        found = commutator(model.get_submodule(names[row]), block.attention, read)
        assert report.attention["commutator"][row] == pytest.approx(found.relative, rel=1e-10)
        state = block(state)


def test_a_given_s_for_a_baseline_and_for_heads(generator: torch.Generator) -> None:
    x, layer = sequences(generator), PDEDiffusion1d(6).double()
    for placement in (None, "P6"):
        model = transformer(placement)
        with pytest.raises(ValueError, match=r"diffusion must be given: .* Pass diffusion=PDEDiffusion1d\(6\)"):
            diagnose(model, x)
        report = diagnose(model, x, diffusion=layer)
        assert len(report.attention["commutator"]) == 2
        assert report.insertion["layer"] == (
            [] if placement is None else [f"blocks.{k}.attention.on_heads" for k in (0, 1)]
        )
    sites = ["after_embedding", "blocks.1.after_attention"]
    report = diagnose(transformer(None), x, diffusion=layer, sites=sites)
    assert report.insertion["layer"] == sites
    expected = perturbation_bound(model := transformer(None), model.blocks[1].after_attention, x, diffusion=layer)
    assert report.insertion["truth"][1] == pytest.approx(expected.truth, rel=1e-10)
    with pytest.raises(ValueError, match="sites needs diffusion"):
        diagnose(transformer("P1"), x, sites=sites)
    with pytest.raises(ValueError, match="sites must be one of"):
        diagnose(transformer(None), x, diffusion=layer, sites=["embedding"])


@pytest.mark.usefixtures("no_typecheck")
def test_it_says_what_it_needs(generator: torch.Generator) -> None:
    x = sequences(generator)
    for points in ("a", None):
        with pytest.raises(TypeError, match="points must be an integer"):
            diagnose(nn.Linear(2, 2).double(), x, points=points)  # which has no layer to measure anything at
    with pytest.raises(ValueError, match="tol must be finite and > 0"):
        diagnose(nn.Linear(2, 2).double(), x, tol=-1.0)
    with pytest.raises(ValueError, match=r"the state that inputs give at blocks\.0\.attention must be finite"):
        diagnose(transformer(None), x / 0, diffusion=PDEDiffusion1d(6).double())
    with pytest.raises(ValueError, match="the state that inputs give at site must be finite"):
        diagnose(transformer("P1"), x / 0)


def test_sequences_of_length_zero_have_rows_of_zeros() -> None:
    report = diagnose(transformer("P1"), torch.zeros(2, 0, 2, dtype=torch.float64))
    assert report.attention["commutator"] == [0.0, 0.0]
    assert report.insertion["estimate"] == [0.0]


def test_two_towers_have_two_rows(generator: torch.Generator) -> None:
    model, x = transformer("P1", task="retrieve"), sequences(generator)
    report = diagnose(model, x, None, x.flip(1))
    assert report.attention["layer"] == ["blocks.0.attention"] * 2 + ["blocks.1.attention"] * 2
    assert report.insertion["layer"] == ["after_embedding"]


def test_the_model_does_not_notice(generator: torch.Generator) -> None:
    model, x = transformer("P2", dropout=0.3), sequences(generator)
    model.blocks[0].eval()

    def step() -> list[Tensor]:
        with seeded(1):
            out = model(x, MASK)
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    before, modes = step(), [module.training for module in model.modules()]
    diagnose(model, x, MASK)
    with pytest.raises(ValueError, match="x must be"):
        diagnose(model, x[0], MASK)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    for got, expected in zip(step(), before, strict=True):
        assert torch.equal(got, expected)


def test_plot(generator: torch.Generator) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report = diagnose(transformer("P2", diffusion={"norm": True}), sequences(generator))
    (line,) = report.plot(figure.add_subplot(131)).lines
    assert list(line.get_ydata()) == report.attention["commutator"]
    both = report.plot(report.plot(figure.add_subplot(144), label="P2"), label="P7")
    assert [text.get_text() for text in both.get_legend().get_texts()] == ["P2", "P7"]
    (line,) = report.plot(figure.add_subplot(132), "lipschitz").lines
    assert list(line.get_ydata()) == report.insertion["lipschitz"]
    ax = report.plot(figure.add_subplot(133), "estimate")
    truth, estimate, by_roughness = ax.lines
    assert list(truth.get_ydata()) == report.insertion["truth"]
    assert list(estimate.get_ydata()) == report.insertion["estimate"]
    assert all(math.isnan(value) for value in by_roughness.get_ydata()), "LayerNorm behind the step: no theorem"
    assert [text.get_text() for text in ax.get_xticklabels()] == report.insertion["layer"]
    with pytest.raises(ValueError, match="quantity must be one of 'roughness'"):
        report.plot(figure.add_subplot(), "accuracy")
