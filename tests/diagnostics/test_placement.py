"""`commutator` against commutators of matrices; `diagnose`: its rows, and a model that it does not change."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics import Commutator, commutator, diagnose, perturbation_bound, roughness
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import SelfAttention
from diffusion_mp.models import PDETransformer
from diffusion_mp.testing.laws import seeded
from helpers import built, draw, refuses

MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()


def diffusion(channels: int, **options: object) -> PDEDiffusion1d:
    layer = PDEDiffusion1d(channels, **{"alpha": 0.2, **options}).double()  # type: ignore[arg-type]
    layer.diffusivity.reset_parameters()  # α in double precision
    return layer


def attention(channels: int, heads: int) -> SelfAttention:
    return built(lambda: SelfAttention(channels, heads)).double().eval()


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
    """‖α(ΔA − AΔ)X‖, without a method `frozen` and so without a linearised form; zero for functions of Δ itself."""
    matrix = draw(generator, 6, 6).softmax(1)
    x = draw(generator, 2, 6, 3)
    delta = laplacian(6)
    found = commutator(diffusion(3), Routing(matrix), x)
    expected = 0.2 * float(torch.einsum("ij,bjc->bic", delta @ matrix - matrix @ delta, x).norm())
    assert found.exact == pytest.approx(expected, rel=1e-12)
    assert found.routed == pytest.approx(float((matrix @ x).norm()), rel=1e-12)
    assert found.relative == found.exact / found.routed
    assert found.linearized is found.relative_linearized is None
    for other in (
        torch.eye(6).double(),
        torch.full((6, 6), 1 / 6).double(),
        torch.linalg.matrix_exp(delta),
    ):
        assert commutator(diffusion(3), Routing(other), x).relative < 1e-14
    assert commutator(diffusion(3), Routing(0 * delta), x).relative == 0
    assert Commutator(exact=1.0, linearized=3.0, routed=0.0).relative_linearized == 0


def test_equation_13(generator: torch.Generator) -> None:
    """One head whose projections are the identity: α‖(ΔA(X) − A(X)Δ)X‖, sequence by sequence."""
    module = attention(4, 1)
    x = draw(generator, 2, 6, 4)
    with torch.no_grad():
        module.project.weight[8:].copy_(torch.eye(4))
        module.project.bias[8:].zero_()
        module.mix.weight.copy_(torch.eye(4))
        module.mix.bias.zero_()
    weights = module.weights(x)[:, 0]
    delta = laplacian(6)
    expected = 0.2 * ((delta @ weights - weights @ delta) @ x).norm().item()
    assert commutator(diffusion(4), module, x).linearized == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_both_formulas(generator: torch.Generator, mask: Tensor | None) -> None:
    module = attention(6, 3)
    layer = diffusion(6, strides=(1, 2))
    x = draw(generator, 2, 6, 6)
    rows = torch.ones(2, 6).bool() if mask is None else mask
    found = commutator(layer, module, x, mask)
    exact = layer(module(x, mask), mask) - module(layer(x, mask), mask)
    frozen = module.frozen(x, mask)
    linear = layer(frozen(x), mask) - frozen(layer(x, mask))
    assert found.exact == pytest.approx(exact[rows].norm().item(), rel=1e-10)
    assert found.linearized == pytest.approx(linear[rows].norm().item(), rel=1e-10)
    assert found.exact != pytest.approx(found.linearized, rel=1e-3), "the routing itself changes"


def test_neither_padding_nor_a_norm_behind_the_step_matters(generator: torch.Generator) -> None:
    module = attention(6, 3)
    layer = diffusion(6)
    x = draw(generator, 2, 6, 6)
    found = commutator(layer, module, x, MASK)
    again = commutator(layer, module, x.masked_fill(~MASK.unsqueeze(2), 7.0), MASK)
    alone = [
        commutator(layer, module, row[tokens].unsqueeze(0))
        for row, tokens in zip(x, MASK, strict=True)
    ]
    assert again.exact == pytest.approx(found.exact, rel=1e-12)
    assert found.exact == pytest.approx(sum(one.exact**2 for one in alone) ** 0.5, rel=1e-12)
    assert found.routed == pytest.approx(sum(one.routed**2 for one in alone) ** 0.5, rel=1e-12)
    # A LayerNorm behind the step (Eq. 16) is not part of S, and stays where it is.
    module = attention(6, 3)
    x = draw(generator, 2, 6, 6)
    with_norm = diffusion(6, norm=True)
    assert commutator(with_norm, module, x) == commutator(diffusion(6), module, x)
    assert with_norm.norm is not None


LENGTHS = torch.arange(8) < torch.tensor([[8], [5]])


def transformer(placement: str | None, **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(2, 6, 3, 2, 3, max_length=8, placement=placement, **options).double()  # type: ignore


def test_every_row_is_what_its_function_gives(generator: torch.Generator) -> None:
    model = transformer("P7").eval()
    x = draw(generator, 2, 8, 2)
    report = diagnose(model, x, mask=LENGTHS)
    assert report.attention["layer"] == ["blocks.0.attention", "blocks.1.attention"]
    assert report.insertion["layer"] == ["blocks.0.after_attention", "blocks.1.after_attention"]
    state = model.embed(x, LENGTHS)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(state)
        found = commutator(block.after_attention, block.attention, read, LENGTHS)
        rough = roughness(read, LENGTHS).sum().item()
        assert report.attention["commutator"][row] == pytest.approx(found.relative, rel=1e-10)
        assert report.attention["linearized"][row] == pytest.approx(
            found.relative_linearized, rel=1e-10
        )
        assert report.attention["roughness"][row] == pytest.approx(rough, rel=1e-10)
        assert report.attention["relative_roughness"][row] == pytest.approx(
            rough / float(read[LENGTHS].square().sum())
        )
        bound = perturbation_bound(model, block.after_attention, x, mask=LENGTHS)
        for name in ("roughness", "step", "lipschitz", "truth", "estimate", "roughness_estimate"):
            assert report.insertion[name][row] == pytest.approx(getattr(bound, name), rel=1e-10), (
                name
            )
        assert report.insertion["relative_roughness"][row] == pytest.approx(
            bound.roughness / bound.size**2
        )
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
    model = transformer(placement).eval()
    x = draw(generator, 2, 8, 2)
    for step, layer in enumerate(
        module for module in model.modules() if isinstance(module, PDEDiffusion1d)
    ):
        nn.init.constant_(layer.diffusivity.eta, -2.0 + step)
    report = diagnose(model, x, points=1)
    state = model.embed(x)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(block.before_attention_norm(state))
        found = commutator(model.get_submodule(names[row]), block.attention, read)
        assert report.attention["commutator"][row] == pytest.approx(found.relative, rel=1e-10)
        state = block(state)


def test_a_given_s_for_a_baseline_and_for_heads(generator: torch.Generator) -> None:
    x = draw(generator, 2, 8, 2)
    layer = PDEDiffusion1d(6).double()
    for placement, names in (
        (None, []),
        ("P6", [f"blocks.{k}.attention.on_heads" for k in (0, 1)]),
    ):
        report = diagnose(transformer(placement), x, diffusion=layer)
        assert len(report.attention["commutator"]) == 2
        assert report.insertion["layer"] == names
    model = transformer(None)
    report = diagnose(model, x, diffusion=layer, sites=SITES)
    assert report.insertion["layer"] == SITES
    expected = perturbation_bound(model, model.blocks[1].after_attention, x, diffusion=layer)
    assert report.insertion["truth"][1] == pytest.approx(expected.truth, rel=1e-10)


SITES = ["after_embedding", "blocks.1.after_attention"]
X = torch.ones(2, 8, 2, dtype=torch.float64)
LAYER = PDEDiffusion1d(6).double()

test_it_says_what_it_needs = refuses(
    (
        lambda: diagnose(transformer(None), X / 0, diffusion=LAYER),
        r"give at blocks\.0\.attention must be finite",
    ),
    (
        lambda: diagnose(transformer("P1"), X / 0),
        "the state that inputs give at site must be finite",
    ),
    (
        lambda: diagnose(transformer(None), X),
        r"diffusion must be given: .* Pass diffusion=PDEDiffusion1d\(6\)",
    ),
    (
        lambda: diagnose(transformer("P6"), X),
        r"diffusion must be given: .* Pass diffusion=PDEDiffusion1d\(6\)",
    ),
    (lambda: diagnose(transformer("P1"), X, sites=SITES), "sites needs diffusion"),
    (
        lambda: diagnose(transformer(None), X, sites=["embedding"], diffusion=LAYER),
        "sites must be one of",
    ),
    (
        lambda: commutator(diffusion(6), attention(6, 3), X.repeat(1, 1, 3) / 0),
        "x must be finite; 96 of its 96",
    ),
)


def test_rows_of_sequences_of_length_zero_and_of_two_towers(generator: torch.Generator) -> None:
    report = diagnose(transformer("P1"), X[:, :0])
    assert report.attention["commutator"] == [0.0, 0.0]
    assert (
        report.insertion["estimate"]
        == report.insertion["lipschitz"]
        == report.insertion["truth"]
        == [0.0]
    )
    x = draw(generator, 2, 8, 2)
    report = diagnose(transformer("P1", task="retrieve"), x, None, x.flip(1))
    assert report.attention["layer"] == ["blocks.0.attention"] * 2 + ["blocks.1.attention"] * 2
    assert report.insertion["layer"] == ["after_embedding"]


def test_the_model_does_not_notice(generator: torch.Generator) -> None:
    model = transformer("P2", dropout=0.3)
    x = draw(generator, 2, 8, 2)
    model.blocks[0].eval()

    def step() -> list[Tensor]:
        out = built(lambda: model(x, LENGTHS), 1)
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    before = step()
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    diagnose(model, x, LENGTHS)
    with pytest.raises(ValueError, match="x must be"):
        diagnose(model, x[0], LENGTHS)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    for got, expected in zip(step(), before, strict=True):
        assert torch.equal(got, expected)


def test_plot(generator: torch.Generator) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report = diagnose(transformer("P2", diffusion={"norm": True}), draw(generator, 2, 8, 2))
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
    assert all(math.isnan(value) for value in by_roughness.get_ydata()), (
        "LayerNorm behind the step: no theorem"
    )
    assert [text.get_text() for text in ax.get_xticklabels()] == report.insertion["layer"]
    with pytest.raises(ValueError, match="quantity must be one of 'roughness'"):
        report.plot(figure.add_subplot(), "accuracy")
