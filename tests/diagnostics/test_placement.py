"""`commutator` against commutators of matrices; `diagnose`: its rows, and a model that it does not change."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics import commutator, diagnose, perturbation_bound, roughness
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
    matrix = torch.diag(torch.ones(length - 1), 1) + torch.diag(
        torch.ones(length - 1), -1
    )
    return (matrix - torch.diag(matrix.sum(1))).double()


class Routing(nn.Module):
    """An attention whose weights do not depend on the state: 𝒜(X) = A X."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.einsum("ij,bjc->bic", self.matrix, x)


def test_on_matrices(generator):
    """‖α(ΔA − AΔ)X‖, without a method `frozen` and so without a linearised form; zero for functions of Δ itself."""
    matrix = draw(generator, 6, 6).softmax(1)
    x = draw(generator, 2, 6, 3)
    delta = laplacian(6)
    expected = 0.2 * float(
        torch.einsum("ij,bjc->bic", delta @ matrix - matrix @ delta, x).norm()
    )
    exact, linearized = commutator(diffusion(3), Routing(matrix), x)
    assert exact == pytest.approx(expected / float((matrix @ x).norm()), rel=1e-12)
    assert linearized is None
    for other in (
        torch.eye(6).double(),
        torch.full((6, 6), 1 / 6).double(),
        torch.linalg.matrix_exp(delta),
    ):
        assert commutator(diffusion(3), Routing(other), x)[0] < 1e-14
    assert commutator(diffusion(3), Routing(0 * delta), x)[0] == 0


def test_equation_13(generator):
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
    expected = (
        0.2 * ((delta @ weights - weights @ delta) @ x).norm() / (weights @ x).norm()
    )
    assert commutator(diffusion(4), module, x)[1] == pytest.approx(
        expected.item(), rel=1e-10
    )


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_both_formulas(generator, mask):
    module = attention(6, 3)
    layer = diffusion(6, strides=(1, 2))
    x = draw(generator, 2, 6, 6)
    rows = torch.ones(2, 6).bool() if mask is None else mask
    routed = module(x, mask)
    frozen = module.frozen(x, mask)
    exact = layer(routed, mask) - module(layer(x, mask), mask)
    linear = layer(frozen(x), mask) - frozen(layer(x, mask))
    expected = [
        float(part[rows].norm() / routed[rows].norm()) for part in (exact, linear)
    ]
    assert commutator(layer, module, x, mask) == pytest.approx(expected, rel=1e-10)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3), (
        "the routing itself changes"
    )


def test_neither_padding_nor_a_norm_behind_the_step_matters(
    generator,
):
    module = attention(6, 3)
    layer = diffusion(6)
    x = draw(generator, 1, 6, 6)
    mask = MASK[1:]
    masked = commutator(layer, module, x.masked_fill(~mask.unsqueeze(2), 7.0), mask)
    assert masked == pytest.approx(
        commutator(layer, module, x[mask].unsqueeze(0)), rel=1e-12
    )
    # The LayerNorm of Eq. 16 is not part of S, and the caller's layer keeps it.
    with_norm = diffusion(6, norm=True)
    assert commutator(with_norm, module, x) == commutator(layer, module, x)
    assert with_norm.norm is not None


LENGTHS = torch.arange(8) < torch.tensor([[8], [5]])


def transformer(placement: str | None, **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(
            2, 6, 3, 2, 3, max_length=8, placement=placement, **options
        ).double()  # type: ignore


def test_every_row_is_what_its_function_gives(generator):
    model = transformer("P7").eval()
    x = draw(generator, 2, 8, 2)
    report = diagnose(model, x, mask=LENGTHS)
    state = model.embed(x, LENGTHS)
    for row, block in enumerate(model.blocks):
        read = block.attention_norm(state)
        exact, linearized = commutator(
            block.after_attention, block.attention, read, LENGTHS
        )
        rough = roughness(read, LENGTHS).sum().item()
        assert taken(report.attention, row) == {
            "layer": f"blocks.{row}.attention",
            "commutator": pytest.approx(exact, rel=1e-10),
            "linearized": pytest.approx(linearized, rel=1e-10),
            "roughness": pytest.approx(rough, rel=1e-10),
            "relative_roughness": pytest.approx(
                rough / float(read[LENGTHS].square().sum())
            ),
        }
        bound = perturbation_bound(model, block.after_attention, x, mask=LENGTHS)
        insertion = taken(report.insertion, row)
        assert insertion.pop("layer") == f"blocks.{row}.after_attention"
        for name, number in insertion.items():
            expected = getattr(bound, name)
            assert number == pytest.approx(expected, rel=1e-10), name
        state = block(state, LENGTHS)
    assert json.loads(json.dumps(asdict(report))) == asdict(report)


def taken(table: dict[str, list[Any]], row: int) -> dict[str, Any]:
    return {name: column[row] for name, column in table.items()}


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("P1", ["after_embedding", "after_embedding"]),
        ("P4", ["blocks.0.before_attention_norm", "blocks.1.before_attention_norm"]),
        ("P5", ["blocks.0.attention.on_values", "blocks.1.attention.on_values"]),
    ],
)
def test_s_is_the_model_s_own(generator, placement, names):
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
        exact, _ = commutator(model.get_submodule(names[row]), block.attention, read)
        assert report.attention["commutator"][row] == pytest.approx(exact, rel=1e-10)
        state = block(state)


def test_a_given_s_for_a_baseline_and_for_heads(generator):
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
    expected = perturbation_bound(
        model, model.blocks[1].after_attention, x, diffusion=layer
    )
    assert report.insertion["truth"][1] == pytest.approx(expected.truth, rel=1e-10)


SITES = ["after_embedding", "blocks.1.after_attention"]
X = torch.ones(2, 8, 2, dtype=torch.float64)
LAYER = PDEDiffusion1d(6).double()

test_refusals = refuses(
    (
        lambda: diagnose(transformer(None), X / 0, diffusion=LAYER),
        "inputs .* must be finite",
    ),
    (
        lambda: diagnose(transformer(None), X),
        r"diffusion .* Pass diffusion=PDEDiffusion1d\(6\)",
    ),
    (
        lambda: diagnose(transformer(None), X, diffusion=LAYER, tol=0.0),
        "tol must be finite and > 0",
    ),
    (lambda: diagnose(transformer("P1"), X, sites=SITES), "sites needs diffusion"),
    (
        lambda: diagnose(transformer(None), X, sites=["embedding"], diffusion=LAYER),
        "sites must",
    ),
)


def test_rows_of_sequences_of_length_zero_and_of_two_towers(
    generator,
):
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
    assert (
        report.attention["layer"]
        == ["blocks.0.attention"] * 2 + ["blocks.1.attention"] * 2
    )
    assert report.insertion["layer"] == ["after_embedding"]


def test_the_model_does_not_notice(generator):
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


def test_plot(generator):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report = diagnose(
        transformer("P2", diffusion={"norm": True}), draw(generator, 2, 8, 2)
    )
    for quantity, table in (
        ("commutator", report.attention),
        ("lipschitz", report.insertion),
    ):
        (line,) = report.plot(figure.add_subplot(), quantity).lines
        assert list(line.get_ydata()) == table[quantity]
    both = report.plot(report.plot(figure.add_subplot(), label="P2"), label="P7")
    assert [text.get_text() for text in both.get_legend().get_texts()] == ["P2", "P7"]
    ax = report.plot(figure.add_subplot(), "estimate")
    assert ax.get_yscale() == "log"
    truth, estimate, by_roughness = (list(line.get_ydata()) for line in ax.lines)
    assert truth == report.insertion["truth"]
    assert estimate == report.insertion["estimate"]
    assert all(map(math.isnan, by_roughness)), (
        "no theorem covers a LayerNorm behind the step"
    )
    assert [text.get_text() for text in ax.get_xticklabels()] == report.insertion[
        "layer"
    ]
    with pytest.raises(ValueError, match="quantity must be one of"):
        report.plot(figure.add_subplot(), "accuracy")
