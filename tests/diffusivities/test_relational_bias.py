"""The relational bias and the polynomials it is made of: the slides' sum, walks, and how many products they cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from diffusion_mp import Graph, ImplicitEuler, PolynomialCoupling, RelationalBias, SparseCoupling
from diffusion_mp.testing import tolerance

DOUBLE = torch.float64


def star(leaves: int) -> Tensor:
    """Every leaf 1 … n sends to node 0."""
    return torch.stack([torch.arange(1, leaves + 1), torch.zeros(leaves, dtype=torch.long)])


def biased(bias: Tensor, **options) -> RelationalBias:
    module = RelationalBias(bias.size(1), hops=bias.size(0), **options).to(bias.dtype)
    with torch.no_grad():
        module.bias.copy_(bias)
    return module


def close(got: Tensor, expected: Tensor) -> None:
    rtol, atol = tolerance("product", got.dtype)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def test_on_a_star_it_is_the_slides_sum(generator):
    """z_u += Σ_{v: a_uv = 1} σ(b) v_v, a sum and no mean (slides, "Input Graphs as Relational Bias"; ERRATA N7)."""
    bias = torch.tensor([[-1.5, 0.3]], dtype=DOUBLE)
    v = torch.randn(8, 2, 3, generator=generator, dtype=DOUBLE)
    out = biased(bias)(v.flatten(1), Graph(8, star(7))) @ v
    for head in range(2):
        expected = sum(torch.sigmoid(bias[0, head]) * v[leaf, head] for leaf in range(1, 8))
        close(out[0, head], expected)
    assert torch.equal(out[1:], torch.zeros(7, 2, 3, dtype=DOUBLE))


@pytest.mark.parametrize("normalization", ["row", "sym"])
def test_the_normalised_forms_divide_by_degrees(normalization, generator):
    """A leaf sends once; the hub receives seven times."""
    v = torch.randn(8, 1, 3, generator=generator, dtype=DOUBLE)
    out = biased(torch.zeros(1, 1, dtype=DOUBLE), normalization=normalization)(v.flatten(1), Graph(8, star(7))) @ v
    close(out[0, 0], 0.5 * v[1:, 0].sum(0) / {"row": 7, "sym": 7**0.5}[normalization])


def test_hops_count_walks_with_their_weights():
    """Two ways lead from 0 over 1 or 2 to 3: an entry of 2 · 3 + 5 · 7, where reachability would have a 1."""
    edges, weight = torch.tensor([[0, 1, 0, 2], [1, 3, 2, 3]]), torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=DOUBLE)
    bias = torch.tensor([[0.4], [-0.7]], dtype=DOUBLE)
    coupling = biased(bias)(torch.zeros(4, 1, dtype=DOUBLE), Graph(4, edges, weight))
    two_hops = coupling.at(torch.tensor([[0], [3]]))
    close(two_hops, torch.sigmoid(bias[1:]) * (2 * 3 + 5 * 7))
    close(coupling.at(edges), torch.sigmoid(bias[:1]) * weight.unsqueeze(1))


def test_it_is_the_polynomial_of_the_dense_adjacency(generator):
    edges = torch.randint(9, (2, 30), generator=generator)
    weight = torch.rand(30, generator=generator, dtype=DOUBLE)
    bias = torch.randn(4, 3, generator=generator, dtype=DOUBLE)
    coupling = biased(bias)(torch.zeros(9, 1, dtype=DOUBLE), Graph(9, edges, weight))
    adjacency = torch.zeros(9, 9, dtype=DOUBLE).index_put((edges[1], edges[0]), weight, accumulate=True)
    powers = torch.stack([torch.linalg.matrix_power(adjacency, p) for p in range(1, 5)])
    expected = torch.einsum("ph,pij->hij", bias.sigmoid(), powers)
    v = torch.randn(9, 3, 2, generator=generator, dtype=DOUBLE)
    close(coupling @ v, torch.einsum("hij,jhd->ihd", expected, v))
    close(coupling.T @ v, torch.einsum("hji,jhd->ihd", expected, v))
    close(coupling.degree(), expected.sum(2).t())
    close(coupling.to_dense(), expected)


def test_it_is_differentiable_in_bias_values_and_weights(generator):
    module = RelationalBias(2, hops=3).double()
    v = torch.randn(6, 2, 3, generator=generator, dtype=DOUBLE, requires_grad=True)
    weight = (torch.rand(9, generator=generator, dtype=DOUBLE) + 0.5).requires_grad_()
    edges = torch.randint(6, (2, 9), generator=generator)

    def product(v, weight, _):
        return module(v.flatten(1), Graph(6, edges, weight)) @ v

    assert gradcheck(product, (v, weight, module.bias))


def test_it_starts_at_one_half():
    coupling = RelationalBias(3, hops=2)(torch.zeros(3, 1), Graph(3, torch.tensor([[0], [1]])))
    assert coupling.at(torch.tensor([[0], [1]])).tolist() == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_a_polynomial_of_degree_p_takes_p_products(degree, monkeypatch):
    base = SparseCoupling(Graph(8, star(7)))
    products = []
    product = SparseCoupling._product
    monkeypatch.setattr(SparseCoupling, "_product", lambda self, v: products.append(v) or product(self, v))
    PolynomialCoupling(base, torch.ones(degree)) @ torch.ones(8, 1, 2)
    assert len(products) == degree


@pytest.mark.parametrize("degree", [1, 3])
def test_a_polynomial_of_a_symmetric_coupling_is_its_own_transpose(degree):
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    promised = PolynomialCoupling(SparseCoupling(Graph(3, path), symmetric=True), torch.ones(degree))
    assert promised.T is promised
    looked_at = PolynomialCoupling(SparseCoupling(Graph(3, path)), torch.ones(degree))
    assert looked_at.symmetric
    assert not PolynomialCoupling(SparseCoupling(Graph(8, star(7))), torch.ones(degree)).symmetric


def test_an_implicit_step_takes_an_undirected_bias(generator):
    """What an update asks of a coupling (symmetry, products), a polynomial answers."""
    x = torch.randn(8, 1, 3, generator=generator, dtype=DOUBLE)
    module = RelationalBias(hops=2, direction="undirected").double()
    coupling = module(x.flatten(1), Graph(8, star(7)))
    dense = coupling.to_dense()[0]
    laplacian = dense.sum(1).diag() - dense
    expected = torch.linalg.solve(torch.eye(8, dtype=DOUBLE) + 0.3 * laplacian, x[:, 0])
    got = ImplicitEuler(0.3)(x, coupling)
    rtol, atol = tolerance("solve", DOUBLE)
    torch.testing.assert_close(got[:, 0], expected, rtol=rtol, atol=atol)
