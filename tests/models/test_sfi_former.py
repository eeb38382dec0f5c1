"""SFi-Former and its frame: features, edge features, positions, tasks, and SFi-Former+."""

import copy
import math
import re

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from diffusion_mp.couplings import PairwiseCoupling, SparseFlowCoupling
from diffusion_mp.data import AddLaplacianPE
from diffusion_mp.diffusivities import FrictionAttention
from diffusion_mp.models import GPS, DFiFormer, GatedGCN, SFiFormer
from helpers import built, close, randn, refuses

MODELS = [GatedGCN, GPS, DFiFormer, SFiFormer]
ATOMS = [5, 3]
BONDS = [4]
RING = randn(6, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])
FRICTION = re.compile(r"\.friction\.")


def build(cls: type, *sizes, **options):
    return built(lambda: cls(*sizes, **options)).double().eval()


def molecule(size: int, generator: torch.Generator) -> Data:
    """A ring, with categories of atoms and bonds."""
    node = torch.arange(size)
    ring = torch.stack([node, node.roll(-1)])
    bonds = torch.randint(BONDS[0], (size, 1), generator=generator)
    atoms = [torch.randint(count, (size,), generator=generator) for count in ATOMS]
    data = Data(
        x=torch.stack(atoms, 1),
        edge_index=torch.cat([ring, ring.flip(0)], 1),
        edge_attr=torch.cat([bonds, bonds]),
    )
    return AddLaplacianPE(4)(data)


def call(model, data: Data, sign: float = 1.0) -> Tensor:
    vectors = sign * data.laplacian_eigenvectors.double()
    values = data.laplacian_eigenvalues.double()
    return model(
        data.x,
        data.edge_index,
        batch=data.batch,
        edge_attr=data.edge_attr,
        pe=(vectors, values, data.laplacian_mask),
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
    alone = torch.cat([call(model, part) for part in parts])
    assert alone.shape == ((3, 2) if task == "graph" else (17, 2))
    close(call(model, batch), alone, "rearranged")


def test_encodings_are_read_whatever_their_sign(generator: torch.Generator) -> None:
    data = molecule(6, generator)
    model = build(GatedGCN, ATOMS, 8, 3, 1, edge_dim=BONDS, pe_channels=4)
    close(call(model, data, sign=-1), call(model, data))
    assert not torch.allclose(call(model, data, sign=0.5), call(model, data))


@pytest.mark.parametrize("cls", MODELS)
def test_edge_features_matter_and_are_carried(cls: type) -> None:
    x = randn(5, 3)
    # A gate alone at its node would always be open.
    edges = torch.tensor([[0, 1, 2, 3, 0, 4], [1, 2, 3, 4, 2, 1]])
    features = randn(6, 2, seed=1)
    model = build(cls, 3, 8, 2, 2, edge_dim=2)
    out = model(x, edges, edge_attr=features)
    assert not torch.allclose(out, model(x, edges, edge_attr=2 * features))
    order = torch.tensor([2, 5, 0, 3, 1, 4])
    close(model(x, edges[:, order], edge_attr=features[order]), out)


@pytest.mark.parametrize("edges", [torch.zeros(2, 0).long(), None])
@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (GPS, PairwiseCoupling),
        (DFiFormer, PairwiseCoupling),
        (SFiFormer, SparseFlowCoupling),
    ],
)
def test_what_attends_in_each(cls: type, kind: type, edges: Tensor | None) -> None:
    _, couplings = build(cls, 3, 8, 2, 2)(randn(5, 3), edges, return_coupling=True)
    alone = edges is None or cls is GPS
    assert [type(c if alone else c.attention) for c in couplings] == [kind, kind]


def test_every_block_has_its_own_friction() -> None:
    attention = {"friction": FrictionAttention(8, 4, 2)}
    modules = build(SFiFormer, 3, 8, 2, 2, attention=attention).modules()
    assert sum(isinstance(module, FrictionAttention) for module in modules) == 2


@pytest.fixture
def dfi() -> DFiFormer:
    """After a call in training, for running statistics are taken too."""
    model = build(DFiFormer, 3, 8, 2, 2, heads=2, attention={"gamma": 0.5})
    model.train()(*RING)
    return model.eval()


@pytest.mark.usefixtures("no_typecheck")
def test_sfi_former_plus_starts_where_dfi_former_ended(dfi: DFiFormer) -> None:
    before = copy.deepcopy(dfi.state_dict())
    near = SFiFormer.from_dfi(dfi, lam=1e-9, attention={"alpha": math.inf}).eval()
    torch.testing.assert_close(near(*RING), dfi(*RING), rtol=1e-6, atol=1e-6)
    model = SFiFormer.from_dfi(dfi, lam=3.0).eval()
    assert not torch.allclose(model(*RING), dfi(*RING))
    assert len(FRICTION.findall(" ".join(model.state_dict()))) == 4
    for each in (model, dfi):
        state = each.state_dict()
        state = {name: state[name] for name in state if not FRICTION.search(name)}
        torch.testing.assert_close(state, dict(before), rtol=0, atol=0)
    constant = SFiFormer.from_dfi(dfi, attention={"friction": "constant"})
    assert constant.state_dict().keys() == before.keys()
    same = SFiFormer.from_dfi(dfi, lam=1.0, attention={"friction": "constant"})
    assert torch.equal(constant.eval()(*RING), same.eval()(*RING))


@pytest.mark.usefixtures("no_typecheck")
def test_what_is_no_start_of_sfi_former_plus(dfi: DFiFormer) -> None:
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
