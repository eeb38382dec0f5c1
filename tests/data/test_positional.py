"""Laplacian encodings: eigenvectors of the Laplacian, PyG's up to sign, padded where there are too few."""

import math

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE
from torch_geometric.utils import to_undirected

from diffusion_mp.data import AddLaplacianPE, transforms


def random_graph(num_nodes, seed=0, weighted=False, p=0.15):
    """Connected, with eigenvalues that differ."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.triu_indices(num_nodes, num_nodes, 1)
    kept = (torch.rand(pairs.size(1), generator=generator) < p) | (pairs[1] == pairs[0] + 1)
    edges = pairs[:, kept]
    if not weighted:
        return Data(edge_index=to_undirected(edges), num_nodes=num_nodes)
    weight = torch.rand(edges.size(1), generator=generator, dtype=torch.float64) + 0.5
    edges, weight = to_undirected(edges, weight)
    return Data(edge_index=edges, edge_weight=weight, num_nodes=num_nodes)


@pytest.fixture
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def laplacian(data):
    """I − D^-½AD^-½, dense."""
    adjacency = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    weight = torch.ones(data.num_edges) if data.edge_weight is None else data.edge_weight
    adjacency[data.edge_index[0], data.edge_index[1]] = weight.double()
    scale = adjacency.sum(dim=1).rsqrt()
    return torch.eye(data.num_nodes, dtype=torch.float64) - scale[:, None] * adjacency * scale


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_they_are_the_lowest_eigenvectors(monkeypatch, dense, weighted):
    if not dense:
        monkeypatch.setattr(transforms, "_DENSE", 0)
    data = random_graph(60, weighted=weighted)
    out = AddLaplacianPE(5)(data)
    vectors, values = out.laplacian_eigenvectors, out.laplacian_eigenvalues[0]
    assert torch.allclose(laplacian(data) @ vectors, vectors * values, rtol=0, atol=1e-10)
    assert torch.allclose(vectors.T @ vectors / 60, torch.eye(5), rtol=0, atol=1e-10)
    assert torch.allclose(values, torch.linalg.eigvalsh(laplacian(data))[1:6], rtol=0, atol=1e-10)
    assert out.laplacian_mask.all()
    assert (out.laplacian_eigenvalues == values).all()


@pytest.mark.parametrize("num_nodes", [30, 130])
def test_pygs_transform_up_to_sign(num_nodes):
    """PyG has a dense and, from 100 nodes on, a sparse solver."""
    data = random_graph(num_nodes)
    ours = AddLaplacianPE(4)(data).laplacian_eigenvectors / math.sqrt(num_nodes)
    with torch.random.fork_rng(devices=[]):
        theirs = AddLaplacianEigenvectorPE(4, is_undirected=True)(data).laplacian_eigenvector_pe
    sign = (ours * theirs).sum(dim=0).sign()
    assert torch.allclose(ours, theirs.to(ours.dtype) * sign, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_it_repeats_and_draws_nothing(monkeypatch, dense):
    if not dense:
        monkeypatch.setattr(transforms, "_DENSE", 0)
    data = random_graph(50)
    before = torch.get_rng_state()
    first, second = (AddLaplacianPE(6)(data).laplacian_eigenvectors for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert "laplacian_eigenvectors" not in data


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 4])
def test_small_graphs_are_padded(num_nodes):
    edges = torch.combinations(torch.arange(num_nodes)).T if num_nodes > 1 else torch.zeros(2, 0, dtype=torch.long)
    out = AddLaplacianPE(5)(Data(edge_index=to_undirected(edges), num_nodes=num_nodes))
    found = max(num_nodes - 1, 0)
    assert out.laplacian_eigenvectors.shape == out.laplacian_eigenvalues.shape == (num_nodes, 5)
    assert (out.laplacian_mask == (torch.arange(5) < found)).all()
    assert (out.laplacian_eigenvectors[:, found:] == 0).all()
    assert (out.laplacian_eigenvalues[:, found:] == 0).all()
    if num_nodes == 4:  # the complete graph: L = (n I − 1 1ᵀ)/(n − 1)
        assert torch.allclose(out.laplacian_eigenvalues[:, :3], torch.tensor(4 / 3))


def test_isolated_nodes_and_no_edges():
    out = AddLaplacianPE(2)(Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=4))
    assert torch.isfinite(out.laplacian_eigenvectors).all()
    assert torch.isfinite(
        AddLaplacianPE(2)(Data(edge_index=torch.zeros(2, 0).long(), num_nodes=3)).laplacian_eigenvectors
    ).all()


def test_the_path_has_cosines():
    """Path of n nodes, L = I − D^-½AD^-½: eigenvalues 1 − cos(πr/(n − 1)), r = 0, 1, …"""
    n = 9
    chain = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    out = AddLaplacianPE(4)(Data(edge_index=to_undirected(chain), num_nodes=n))
    expected = [1 - math.cos(math.pi * r / (n - 1)) for r in range(1, 5)]
    assert out.laplacian_eigenvalues[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_alone_and_batched():
    graphs = [AddLaplacianPE(5)(random_graph(n, seed=n)) for n in (3, 20, 11)]
    batch = Batch.from_data_list(graphs)
    assert torch.equal(batch.laplacian_mask, torch.cat([g.laplacian_mask for g in graphs]))
    assert torch.equal(batch.laplacian_eigenvectors, torch.cat([g.laplacian_eigenvectors for g in graphs]))


def test_large_graphs_take_the_sparse_solver():
    n = transforms._DENSE + 100
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    ladder = torch.cat([ring, torch.tensor([[0], [n // 3]])], dim=1)  # a chord, so that eigenvalues differ
    out = AddLaplacianPE(3)(Data(edge_index=to_undirected(ladder), num_nodes=n))
    values = out.laplacian_eigenvalues[0]
    assert (values > 0).all()
    assert (values.diff() >= 0).all()
    assert (values < 1e-4).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(num_nodes=3), "needs edge_index"),
        (Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), r"undirected graph.*ToUndirected\(\)"),
        (
            Data(edge_index=torch.tensor([[0, 1], [1, 0]]), edge_weight=torch.tensor([1.0, 2.0]), num_nodes=2),
            "with one weight",
        ),
    ],
)
def test_refusals(data, message):
    with pytest.raises(ValueError, match=message):
        AddLaplacianPE(2)(data)


def test_a_count_below_one():
    with pytest.raises(ValueError, match="k must be at least 1"):
        AddLaplacianPE(0)
    assert repr(AddLaplacianPE(7)) == "AddLaplacianPE(k=7)"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_edges_of_fewer_bits(dtype):
    """Source · N + target leaves 16 bits at 182 nodes and 32 at 46 341; the edges are among the last 60 of them."""
    size = 300 if dtype == torch.int16 else 70_000
    last = torch.arange(size - 60, size)
    path = to_undirected(torch.stack([last[:-1], last[1:]]))
    wide, narrow = (Data(edge_index=path.to(dtype), num_nodes=size) for dtype in (torch.long, dtype))
    add = AddLaplacianPE(2)
    assert torch.equal(add(narrow).laplacian_eigenvectors, add(wide).laplacian_eigenvectors)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (Data(edge_index=torch.tensor([[0, 9], [9, 0]]), num_nodes=3), ValueError, r"edge_index must lie in \[0, 2\]"),
        (Data(edge_index=torch.tensor([[0, -1], [-1, 0]]), num_nodes=3), ValueError, "edge_index must lie in"),
        (Data(edge_index=torch.zeros(2, 2), num_nodes=3), TypeError, "edge_index must hold integers"),
        (Data(edge_index=torch.zeros(3, 2).long(), num_nodes=3), ValueError, r"edge_index must be \[2, num_edges\]"),
        (None, TypeError, "data must be a torch_geometric Data"),
    ],
)
def test_edges_that_are_none(data, error, message):
    with pytest.raises(error, match=message):
        AddLaplacianPE(2)(data)
