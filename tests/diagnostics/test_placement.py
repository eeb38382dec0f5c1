"""`commutator` against commutators of matrices; `diagnose`: its rows, and a model that it does not change."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics import commutator, diagnose, perturbation_bound, roughness
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import SelfAttention
from diffusion_mp.models import PDETransformer
from diffusion_mp.testing.laws import seeded

MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def diffusion(channels: int, **options: object) -> PDEDiffusion1d:
    layer = PDEDiffusion1d(channels, **{"alpha": 0.2, **options}).double()  # type: ignore[arg-type]
    layer.diffusivity.reset_parameters()  # α in double precision
    return layer


def attention(channels: int, heads: int) -> SelfAttention:
    with seeded(0):
        return SelfAttention(channels, heads).double().eval()


def laplacian(length: int) -> Tensor:
    matrix = torch.diag(torch.ones(length - 1), 1) + torch.diag(torch.ones(length - 1), -1)
    return (matrix - torch.diag(matrix.sum(1))).double()


class Routing(nn.Module):
    """An attention whose weights do not depend on the state: 𝒜(X) = A X."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.einsum("ij,bjc->bic", self.matrix, x)


def test_on_matrices(generator: torch.Generator) -> None:
    """‖α(ΔA − AΔ)X‖, without a method `frozen` and so without a linearised form."""
    matrix, x = draw(generator, 6, 6).softmax(1), draw(generator, 2, 6, 3)
    delta = laplacian(6)
    found = commutator(diffusion(3), Routing(matrix), x)
    expected = 0.2 * float(torch.einsum("ij,bjc->bic", delta @ matrix - matrix @ delta, x).norm())
    assert found.exact == pytest.approx(expected, rel=1e-12)
    assert found.routed == pytest.approx(float((matrix @ x).norm()), rel=1e-12)
    assert found.relative == found.exact / found.routed
    assert found.linearized is None
    assert found.relative_linearized is None


def test_what_commutes(generator: torch.Generator) -> None:
    """The identity, the mean, and any function of Δ itself."""
    delta, x = laplacian(6), draw(generator, 2, 6, 3)
    for matrix in (torch.eye(6).double(), torch.full((6, 6), 1 / 6).double(), torch.linalg.matrix_exp(delta)):
        assert commutator(diffusion(3), Routing(matrix), x).relative < 1e-14
    assert commutator(diffusion(3), Routing(0 * delta), x).relative == 0


def test_equation_13(generator: torch.Generator) -> None:
    """One head whose projections are the identity: α‖(ΔA(X) − A(X)Δ)X‖, sequence by sequence."""
    module, x = attention(4, 1), draw(generator, 2, 6, 4)
    with torch.no_grad():
        module.project.weight[8:].copy_(torch.eye(4))
        module.project.bias[8:].zero_()
        module.mix.weight.copy_(torch.eye(4))
        module.mix.bias.zero_()
    weights, delta = module.weights(x)[:, 0], laplacian(6)
    expected = 0.2 * ((delta @ weights - weights @ delta) @ x).norm().item()
    assert commutator(diffusion(4), module, x).linearized == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_both_formulas(generator: torch.Generator, mask: Tensor | None) -> None:
    module, layer, x = attention(6, 3), diffusion(6, strides=(1, 2)), draw(generator, 2, 6, 6)
    rows = torch.ones(2, 6).bool() if mask is None else mask
    found = commutator(layer, module, x, mask)
    exact = layer(module(x, mask), mask) - module(layer(x, mask), mask)
    frozen = module.frozen(x, mask)
    linear = layer(frozen(x), mask) - frozen(layer(x, mask))
    assert found.exact == pytest.approx(exact[rows].norm().item(), rel=1e-10)
    assert found.linearized == pytest.approx(linear[rows].norm().item(), rel=1e-10)
    assert found.exact != pytest.approx(found.linearized, rel=1e-3), "the routing itself changes"


def test_the_linearised_form_is_the_limit_of_slow_diffusion_without_the_change_of_the_routing(
    generator: torch.Generator,
) -> None:
    """Queries and keys scaled to nothing: attention is the mean, and both forms vanish together."""
    module, x = attention(6, 3), draw(generator, 2, 6, 6)
    with torch.no_grad():
        module.project.weight[:12].zero_()
    found = commutator(diffusion(6), module, x)
    assert found.exact < 1e-14
    assert found.linearized is not None
    assert found.linearized < 1e-14


def test_padding_does_not_matter(generator: torch.Generator) -> None:
    module, layer, x = attention(6, 3), diffusion(6), draw(generator, 2, 6, 6)
    found = commutator(layer, module, x, MASK)
    again = commutator(layer, module, x.masked_fill(~MASK.unsqueeze(2), 7.0), MASK)
    alone = [commutator(layer, module, row[tokens].unsqueeze(0)) for row, tokens in zip(x, MASK, strict=True)]
    assert again.exact == pytest.approx(found.exact, rel=1e-12)
    assert found.exact == pytest.approx(sum(one.exact**2 for one in alone) ** 0.5, rel=1e-12)
    assert found.routed == pytest.approx(sum(one.routed**2 for one in alone) ** 0.5, rel=1e-12)


def test_a_state_that_is_not_finite_is_refused(generator: torch.Generator) -> None:
    x = draw(generator, 2, 6, 6)
    with pytest.raises(ValueError, match="x must be finite; 1 of its 72 entries"):
        commutator(diffusion(6), attention(6, 3), x.index_put((torch.tensor(0),) * 3, x.new_tensor(torch.inf)))


def test_s_is_the_bare_step(generator: torch.Generator) -> None:
    """A LayerNorm behind the step (Eq. 16) is not part of S, and stays where it is."""
    module, x = attention(6, 3), draw(generator, 2, 6, 6)
    with_norm = diffusion(6, norm=True)
    assert commutator(with_norm, module, x) == commutator(diffusion(6), module, x)
    assert with_norm.norm is not None


LENGTHS = torch.arange(8) < torch.tensor([[8], [5]])


def transformer(placement: str | None, **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(2, 6, 3, 2, 3, max_length=8, placement=placement, **options).double()  # type: ignore


def sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 8, 2, generator=generator, dtype=torch.float64)


def test_every_row_is_what_its_function_gives(generator: torch.Generator) -> None:
    model, x = transformer("P7").eval(), sequences(generator)
    report = diagnose(model, x, mask=LENGTHS)
    assert report.attention["layer"] == ["blocks.0.attention", "blocks.1.attention"]
    assert report.insertion["layer"] == ["blocks.0.after_attention", "blocks.1.after_attention"]
    state = model.embed(x, LENGTHS)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(state)
        found = commutator(block.after_attention, block.attention, read, LENGTHS)
        rough = roughness(read, LENGTHS).sum().item()
        assert report.attention["commutator"][row] == pytest.approx(found.relative, rel=1e-10)
        assert report.attention["linearized"][row] == pytest.approx(found.relative_linearized, rel=1e-10)
        assert report.attention["roughness"][row] == pytest.approx(rough, rel=1e-10)
        assert report.attention["relative_roughness"][row] == pytest.approx(rough / float(read[LENGTHS].square().sum()))
        bound = perturbation_bound(model, block.after_attention, x, mask=LENGTHS)
        for name in ("roughness", "step", "lipschitz", "truth", "estimate", "roughness_estimate"):
            assert report.insertion[name][row] == pytest.approx(getattr(bound, name), rel=1e-10), name
        assert report.insertion["relative_roughness"][row] == pytest.approx(bound.roughness / bound.size**2)
        state = block(state, LENGTHS)
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
            out = model(x, LENGTHS)
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    before, modes = step(), [module.training for module in model.modules()]
    diagnose(model, x, LENGTHS)
    with pytest.raises(ValueError, match="x must be"):
        diagnose(model, x[0], LENGTHS)
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
