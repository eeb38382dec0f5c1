"""A cached, diagonalised coupling of the features, and its state at rest against a dense solve."""

import pytest
import torch

from diffusion_mp.diffusivities import AdjacencyDiffusivity, GaussianDiffusivity, SymmetricDiffusivity
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp_experiments.reproduce.networks import Diagonalized, without_attention

GAUSSIAN = {"normalize": None, "measure": "distance", "row_stochastic": False}


def pixels() -> SymmetricDiffusivity:
    return SymmetricDiffusivity(GaussianDiffusivity(bandwidth=0.8, **GAUSSIAN), diagonal=False)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_products_rows_and_functions_are_those_of_the_coupling():
    x, v = drawn(13, 3), drawn(13, 1, 4, seed=1)
    kept, plain = Diagonalized(pixels())(x), pixels()(x)
    torch.testing.assert_close(kept @ v, plain @ v)
    torch.testing.assert_close(kept.degree(), plain.degree())
    laplacian = torch.diag(plain.degree()[:, 0]) - plain.to_dense()[0]
    expected = torch.linalg.matrix_exp(-0.7 * laplacian) @ v[:, 0]
    result = kept.laplacian_function(lambda rate: torch.exp(-0.7 * rate), v)
    torch.testing.assert_close(result[:, 0], expected)
    x, edges = drawn(9, 2), torch.tensor([[0, 1, 3, 4], [1, 0, 4, 3]])
    both = Diagonalized(pixels() + AdjacencyDiffusivity("sym", direction="undirected"))
    first = both(x, Graph.coerce(x, edges))
    assert both(x.clone(), Graph.coerce(x, edges.clone())) is first
    assert both(x, Graph.coerce(x, edges[:, :2])) is not first
    again = both(x, Graph.coerce(x, edges))
    x[0] += 1.0  # in place: the tensor is the same one, what it holds is not
    assert both(x, Graph.coerce(x, edges)) is not again


def test_one_matrix_is_diagonalised_once_and_what_has_no_real_spectrum_is_refused(monkeypatch):
    counted = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (counted.append(1), eigh(matrix))[1])
    first, again, other = (Diagonalized(pixels())(drawn(12, 3, seed=seed)) for seed in (5, 5, 6))
    assert len(counted) == 2
    assert torch.equal(first.modes, again.modes)
    assert not torch.equal(first.modes, other.modes)
    model = CertifiedDIFFormer(3, 16, 2, num_layers=None, penalty=None, graph=False, inputs=Diagonalized(pixels()))
    assert not without_attention(model, "identity")
    with pytest.raises(CouplingMismatchError, match="Diagonalized needs a symmetric coupling of one head"):
        Diagonalized(GaussianDiffusivity())(drawn(5, 2))


@pytest.mark.parametrize("centre", [False, True])
def test_the_state_at_rest_is_the_dense_solve_and_where_the_steps_lead(centre):
    torch.manual_seed(0)
    options = {"num_layers": None, "penalty": None, "constraint": None, "graph": False, "mu": 7.0, "centre": centre}
    x = drawn(13, 3)
    model = CertifiedDIFFormer(3, 16, 2, inputs=Diagonalized(pixels()), **options).double()
    source = model.encoder(x)
    source = source - source.mean(0) if centre else source
    coupling = pixels()(x)
    laplacian = torch.diag(coupling.degree()[:, 0]) - coupling.to_dense()[0]
    system = model.conv.update.beta() * torch.eye(13, dtype=x.dtype) + model.conv.mu() * laplacian
    expected = model.decoder(torch.linalg.solve(system, model.conv.update.beta() * source))
    weight = drawn(13, 2, seed=2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    result = model(x)
    torch.testing.assert_close(result, expected)
    found, wanted = (torch.autograd.grad((weight * logits).sum(), parameters) for logits in (result, expected))
    torch.testing.assert_close(found, wanted)
    iterated = CertifiedDIFFormer(3, 16, 2, inputs=pixels(), **options).double()  # no eigenvectors: step after step
    iterated.load_state_dict(model.state_dict())
    torch.testing.assert_close(iterated(x), result, rtol=1e-8, atol=1e-9)
    start, rest = model.energies(x)
    assert rest < start


def test_a_centred_source_has_no_mean_in_any_graph_and_does_not_see_other_graphs():
    torch.manual_seed(0)
    model = CertifiedDIFFormer(3, 16, 2, num_layers=5, penalty=None, constraint=None, mu=50.0, centre=True).double()
    x, batch = drawn(11, 3), torch.tensor([0] * 4 + [1] * 7)
    edges = torch.tensor([[0, 1, 4, 5, 6, 9], [1, 0, 5, 4, 9, 6]])
    source = model.energy(x, edges, batch=batch).source[:, 0]
    for graph in (source[:4], source[4:]):
        torch.testing.assert_close(graph.mean(0), torch.zeros(16, dtype=torch.float64), rtol=0, atol=1e-14)
    together = model(x, edges, batch=batch)
    alone = model(x[:4], edges[:, :2])
    torch.testing.assert_close(together[:4], alone)
