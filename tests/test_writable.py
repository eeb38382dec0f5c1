"""What the library returns can be written to: no entry shares memory with another, or with what it was computed from.

The laws of `diffusion_mp.testing` check this of couplings, diffusivities, updates and layers; here is the rest.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import diffusion_mp as dm
from diffusion_mp.couplings import (
    Coupling,
    DenseCoupling,
    IdentityCoupling,
    LinearAttentionCoupling,
    SparseCoupling,
    SparseFlowCoupling,
    UniformCoupling,
    distance_features,
    merged,
    with_constant,
)
from diffusion_mp.data import (
    AddLaplacianPE,
    KNNGraph,
    RandomPartitionLoader,
    label_mask,
    pad,
    random_split,
    random_split_per_class,
)
from diffusion_mp.diagnostics import posterior_variance
from diffusion_mp.diffusivities import edge_loss
from diffusion_mp.layers import LaplacianEncoder
from diffusion_mp.testing.laws import expect_writable

NODES = 6
DOUBLE = torch.float64
EDGES = torch.tensor([[0, 1, 1, 2, 4, 3], [1, 0, 2, 1, 3, 4]])


def state() -> Tensor:
    return torch.rand(
        NODES, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)
    )


def zero() -> Coupling:
    """The coupling of a graph without edges."""
    graph = dm.Graph(NODES, torch.zeros(2, 0, dtype=torch.long))
    return SparseCoupling(
        graph, torch.zeros(0, 1, dtype=DOUBLE), symmetric=True, nonnegative=True
    )


# Couplings that leave the state as it is, or give all rows one value: where a step may return what it received.
TRIVIAL: dict[str, Callable[[], Coupling]] = {
    "identity": lambda: IdentityCoupling(NODES, dtype=DOUBLE),
    "identity-times-zero": lambda: 0.0 * IdentityCoupling(NODES, dtype=DOUBLE),
    "identity-dense": lambda: DenseCoupling(torch.eye(NODES, dtype=DOUBLE)),
    "uniform": lambda: UniformCoupling(NODES, dtype=DOUBLE),
    "no-edge": zero,
}
UPDATES: dict[str, dm.StateUpdate] = {
    "explicit": dm.ExplicitEuler(1.0),
    "explicit-residual": dm.ExplicitEuler(1.0, "residual"),
    "implicit": dm.ImplicitEuler(1.0),
    "implicit-residual": dm.ImplicitEuler(1.0, "residual"),
    "trapezoidal": dm.CrankNicolson(1.0),
    "heat": dm.HeatKernel(1.0),
    "heat-residual": dm.HeatKernel(1.0, "residual"),
    "equilibrium": dm.Equilibrium(leak=0.5),
    "momentum": dm.MomentumStep(0.3, 0.5, 2),
    "certified": dm.CertifiedStep(0.0, constraint=None),
    "certified-nonnegative": dm.CertifiedStep(0.0, constraint="nonnegative"),
    "certified-ball": dm.CertifiedStep(0.0, constraint="ball", radius=100.0),
}


@pytest.mark.parametrize("name", TRIVIAL)
@pytest.mark.parametrize("update", UPDATES)
def test_the_next_state_can_be_written_to(update, name):
    step = UPDATES[update]
    coupling = TRIVIAL[name]()
    source = state() if step.beta else None
    flat = state()
    expect_writable(
        lambda: step(flat, coupling, source=source),
        "the next state [N, C]",
        flat,
        source,
    )
    by_head = state().unsqueeze(1)
    lifted = None if source is None else source.unsqueeze(1)
    expect_writable(
        lambda: step(by_head, coupling, source=lifted),
        "the next state [N, H, D]",
        by_head,
        lifted,
    )


def flow() -> SparseFlowCoupling:
    x = state().unsqueeze(1)
    return SparseFlowCoupling(x, x, x, x, lam=0.5, alpha=0.1)


def test_what_a_sparse_flow_says_of_itself():
    coupling = flow()
    expect_writable(lambda: coupling.potentials, "potentials")
    expect_writable(coupling.energy, "energy()")
    expect_writable(coupling.density, "density()")


def test_sums_and_features():
    x = state().unsqueeze(1)
    sums = LinearAttentionCoupling(x, x, mutual=True).pool(x)
    expect_writable(lambda: merged([sums]).totals, "merged([sums]).totals", sums.totals)
    expect_writable(lambda: distance_features(x)[0], "queries", x)
    expect_writable(lambda: distance_features(x)[1], "keys", x)
    expect_writable(lambda: with_constant(x, 1.0), "with_constant", x)


def data() -> Data:
    y = torch.tensor([0, 1, 0, 1, 0, -1])
    return Data(
        x=state(), edge_index=EDGES.clone(), edge_weight=torch.ones(EDGES.size(1)), y=y
    )


# What a transform adds; PyG passes it a shallow copy of the data, whose other attributes are shared on purpose.
ADDED = {
    "knn": (KNNGraph(2, weighted=True), ("edge_index", "edge_weight")),
    "laplacian": (
        AddLaplacianPE(2),
        ("laplacian_eigenvectors", "laplacian_eigenvalues", "laplacian_mask"),
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_a_transform_adds(name):
    transform, attributes = ADDED[name]
    given = data()
    for attribute in attributes:
        expect_writable(
            lambda attribute=attribute: transform(given)[attribute],
            attribute,
            *given.to_dict().values(),
        )


def test_batches_of_a_loader():
    given = data()
    loader = RandomPartitionLoader(given, num_parts=2, halo=True)
    for name in ("x", "y", "edge_index", "edge_weight", "n_id", "e_id"):

        def batch(name: str = name) -> Tensor:
            loader.set_epoch(0)
            return next(iter(loader))[name]

        expect_writable(batch, name, *given.to_dict().values())


def test_splits_and_sequences():
    y = data().y
    assert isinstance(y, Tensor)
    items = [(torch.tensor([5, 6, 7]), 0)]

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    for number in range(3):
        expect_writable(lambda n=number: pad(items)[n], "pad", items[0][0])
        expect_writable(
            lambda n=number: random_split(y, 0.5, 0.2, seeded())[n], "a mask", y
        )
        expect_writable(
            lambda n=number: random_split_per_class(y, 1, 1, None, seeded())[n],
            "a mask",
            y,
        )
    expect_writable(lambda: label_mask(y), "label_mask", y)
    expect_writable(lambda: dm.knn_graph(state(), 2), "knn_graph")


def test_models_with_calls_of_their_own():
    x = state().float()
    labels = torch.rand(NODES, 3)
    propagation = dm.LabelPropagation()
    expect_writable(lambda: propagation(labels, EDGES), "propagated labels", labels)
    one_label = torch.tensor([0, 1, -1, -1, 0, 1])
    expect_writable(
        lambda: propagation(one_label, EDGES), "propagated labels", one_label
    )
    sequences = torch.rand(2, 6, 4)
    transformer = dm.PDETransformer(4, 8, 3, num_layers=1, max_length=8).eval()
    expect_writable(
        lambda: transformer(sequences), "logits", sequences, *transformer.parameters()
    )
    encoder = LaplacianEncoder(4, 3).eval()
    mask = torch.ones(NODES, 4, dtype=torch.bool)
    expect_writable(
        lambda: encoder(x, x.abs(), mask), "codes", x, *encoder.parameters()
    )
    network = dm.DiffusionGNN(4, 8, 3, conv="mlp").eval()
    expect_writable(
        lambda: dm.full_graph_inference(network, x, EDGES),
        "logits",
        x,
        EDGES,
        *network.parameters(),
    )


def test_losses_and_diagnostics():
    x = state().float()
    layer = dm.NodeFormerConv(4, 3, edge_regularization=0.5)
    layer(x, EDGES)
    expect_writable(lambda: dm.auxiliary_loss(layer), "auxiliary_loss")
    coupling = UniformCoupling(NODES, dtype=DOUBLE)
    expect_writable(lambda: edge_loss(coupling, dm.Graph(NODES, EDGES)), "edge_loss")
    expect_writable(lambda: posterior_variance(coupling, 0.1), "posterior_variance")
