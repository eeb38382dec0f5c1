"""``commutator``: on matrices it is the commutator of matrices; elsewhere what its two formulas say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics import commutator
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import SelfAttention
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
