"""SFi-Former and its frame: features, edge features, positions, tasks, and SFi-Former+."""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from diffusion_mp.couplings import PairwiseCoupling, SparseFlowCoupling
from diffusion_mp.data import AddLaplacianPE
from diffusion_mp.diffusivities import FrictionAttention
from diffusion_mp.models import GPS, DFiFormer, GatedGCN, SFiFormer
from diffusion_mp.testing import tolerance
from helpers import built, close, refuses

MODELS = [GatedGCN, GPS, DFiFormer, SFiFormer]
ATOMS = [5, 3]
BONDS = [4]


def build(cls: type, *sizes, **options):
    return built(lambda: cls(*sizes, **options)).double().eval()


def molecule(size: int, generator: torch.Generator) -> Data:
    node = torch.arange(size)
    ring = torch.stack([node, node.roll(-1)])
    bonds = torch.randint(BONDS[0], (size, 1), generator=generator)
    data = Data(
        x=torch.stack(
            [torch.randint(count, (size,), generator=generator) for count in ATOMS], 1
        ),
        edge_index=torch.cat([ring, ring.flip(0)], 1),
        edge_attr=torch.cat([bonds, bonds]),
    )
    data = AddLaplacianPE(4)(data)
    for name in ("laplacian_eigenvectors", "laplacian_eigenvalues"):
        data[name] = data[name].double()
    return data


def call(model, data: Data, **options) -> Tensor:
    pe = (data.laplacian_eigenvectors, data.laplacian_eigenvalues, data.laplacian_mask)
    return model(
        data.x,
        data.edge_index,
        batch=data.batch,
        edge_attr=data.edge_attr,
        pe=pe,
        **options,
    )


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("task", ["node", "graph"])
def test_a_molecule_alone_and_in_a_batch(
    cls: type, task: str, generator: torch.Generator
) -> None:
    parts = [molecule(size, generator) for size in (3, 9, 5)]
    model = build(cls, ATOMS, 12, 2, 2, edge_dim=BONDS, pe_channels=4, task=task)
    batch = Batch.from_data_list(parts)
    call(model.train(), batch)  # running statistics that are not the first ones
    model.eval()
    rtol, atol = tolerance("rearranged", torch.float64)
    alone = torch.cat([call(model, part) for part in parts])
    assert alone.shape == ((3, 2) if task == "graph" else (17, 2))
    torch.testing.assert_close(call(model, batch), alone, rtol=rtol, atol=atol)


def test_the_encodings_of_both_kinds_are_read(generator: torch.Generator) -> None:
    data = molecule(6, generator)
    model = build(GatedGCN, ATOMS, 8, 3, 1, edge_dim=BONDS, pe_channels=4)
    vectors = data.laplacian_eigenvectors
    values = data.laplacian_eigenvalues
    mask = data.laplacian_mask

    def out(model, pe) -> Tensor:
        return model(data.x, data.edge_index, edge_attr=data.edge_attr, pe=pe)

    expected = out(model, (vectors, values, mask))
    close(out(model, (-vectors, values, mask)), expected)
    assert not torch.allclose(out(model, (vectors * 0.5, values, mask)), expected)


@pytest.mark.parametrize("cls", MODELS)
def test_edge_features_matter_and_are_carried(
    cls: type, generator: torch.Generator
) -> None:
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    # a gate alone at its node would always be open.
    edges = torch.tensor([[0, 1, 2, 3, 0, 4], [1, 2, 3, 4, 2, 1]])
    features = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    model = build(cls, 3, 8, 2, 2, edge_dim=2)
    out = model(x, edges, edge_attr=features)
    assert not torch.allclose(out, model(x, edges, edge_attr=2 * features))
    order = torch.tensor([2, 5, 0, 3, 1, 4])
    close(model(x, edges[:, order], edge_attr=features[order]), out)


@pytest.mark.parametrize("edges", [torch.zeros(2, 0).long(), None])
def test_what_attends_in_each(edges: Tensor | None) -> None:
    x = torch.randn(
        5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for cls, kind in (
        (GPS, PairwiseCoupling),
        (DFiFormer, PairwiseCoupling),
        (SFiFormer, SparseFlowCoupling),
    ):
        _, couplings = build(cls, 3, 8, 2, 2)(x, edges, return_coupling=True)
        alone = edges is None or cls is GPS
        assert [type(c if alone else c.attention) for c in couplings] == [kind, kind]
    modules = build(
        SFiFormer, 3, 8, 2, 2, attention={"friction": FrictionAttention(8, 4, 2)}
    ).modules()
    # One for every block.
    assert sum(isinstance(module, FrictionAttention) for module in modules) == 2


@pytest.mark.usefixtures("no_typecheck")
def test_sfi_former_plus_starts_where_dfi_former_ended() -> None:
    dfi = build(DFiFormer, 3, 8, 2, 2, heads=2, attention={"gamma": 0.5})
    x = torch.randn(
        6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    dfi.train()(x, edges)  # running statistics are taken too
    dfi.eval()
    before = {name: value.clone() for name, value in dfi.state_dict().items()}
    close = SFiFormer.from_dfi(dfi, lam=1e-9, attention={"alpha": float("inf")}).eval()
    torch.testing.assert_close(close(x, edges), dfi(x, edges), rtol=1e-6, atol=1e-6)
    model = SFiFormer.from_dfi(dfi, lam=3.0).eval()
    own = {name for name in model.state_dict() if ".friction." in name}
    assert len(own) == 4
    assert set(model.state_dict()) - own == set(before)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(dfi.state_dict()[name], value), name
    assert not torch.allclose(model(x, edges), dfi(x, edges))
    constant = SFiFormer.from_dfi(dfi, attention={"friction": "constant"})
    assert not any(".friction." in name for name in constant.state_dict())
    with pytest.raises(TypeError, match="dfi must be a DFiFormer; got"):
        SFiFormer.from_dfi(build(GPS, 3, 8, 2))
    with pytest.raises(ValueError, match=r"attention .* these differ: \['blocks"):
        SFiFormer.from_dfi(dfi, attention={"projection": "tied"})


X = torch.ones(4, 3)
EDGES = torch.tensor([[0, 1], [1, 2]])
ONE = torch.ones(2, 1)
SPARSE = torch.eye(4).to_sparse_csr()


def sfi(options, **inputs):
    return lambda: SFiFormer(3, 8, 2, 1, **options)(
        **{"x": X, "edge_index": EDGES, **inputs}
    )


test_refusals = refuses(
    (sfi({"pe_channels": 8}), r"pe_channels must lie in 0\.\.7"),
    (sfi({"heads": 3}), "heads must divide out_channels"),
    (
        sfi({"edge_dim": 1}, edge_attr=X[:3, :1]),
        "edge_attr must have one row for each of 2 edges",
    ),
    (
        sfi({"edge_dim": 1}, edge_attr=ONE, edge_index=None),
        "edge_attr needs edge_index",
    ),
    (
        sfi({"edge_dim": 1}, edge_attr=ONE, edge_index=SPARSE),
        "edge_attr goes with edge",
    ),
    (sfi({"edge_dim": [2]}, edge_attr=ONE), "edge_attr must hold categories"),
    (
        sfi({"edge_dim": [2]}, edge_attr=EDGES),
        "edge_attr must be .* one column per table",
    ),
    (sfi({}, pe=torch.ones(4, 2)), "pe must be passed to a model with pe_channels"),
    (sfi({"task": "link"}, edge_label_index=EDGES[0]), "edge_label_index must be"),
)
