"""Inference on a whole graph by blocks: the numbers of one forward pass, and the model untouched."""

import copy

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import diffusion_mp as dm
import model_cases
from diffusion_mp.couplings.base import PROMISES
from diffusion_mp.inference import Blocks
from diffusion_mp.testing import tolerance
from helpers import built

NODES = 57
FEATURES = 8

MODELS = {
    name: case.build
    for name, case in model_cases.MODELS.items()
    if {"x", "edge_index"}
    <= set(case.names)
    <= {"x", "edge_index", "edge_weight", "batch"}
    and case.per_node
    and name != "certified-transformer-identity"
} | {
    "DIFFormer-s, Frobenius": lambda: dm.DIFFormer(
        FEATURES, 8, 3, normalize="frobenius"
    ),
    "certified, projections, inputs": lambda: dm.CertifiedDIFFormer(
        FEATURES,
        8,
        3,
        2,
        projection="tied",
        centre=True,
        inputs=dm.SimpleDiffusivity(row_stochastic=False),
    ),
    "certified, at rest": lambda: dm.CertifiedDIFFormer(FEATURES, 8, 3, None, mu=1.0),
    "NodeFormer": lambda: dm.NodeFormer(
        FEATURES, 8, 3, heads=2, num_features=6, hops=2
    ),
}


def data(
    generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    edge_index = torch.randint(NODES - 2, (2, 240), generator=generator)
    weight = torch.rand(240, generator=generator, dtype=dtype)
    return (
        torch.randn(NODES, FEATURES, generator=generator, dtype=dtype),
        edge_index,
        weight,
    )


@pytest.mark.parametrize("block_size", [10, NODES, 1000])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_blocks_give_the_numbers_of_one_forward_pass(
    make, block_size, generator
) -> None:
    x, edge_index, weight = data(generator)
    model = built(make).double()
    before = copy.deepcopy(model.state_dict())
    got = dm.full_graph_inference(
        model, x, edge_index, weight, block_size=block_size, progress=False
    )
    assert model.training
    with torch.no_grad():
        expected = model.eval()(x, edge_index, weight)
    assert torch.allclose(got, expected, *tolerance("rearranged", torch.float64))
    assert not got.requires_grad
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_no_coupling_pools_more_rows_than_a_block(generator, monkeypatch) -> None:
    x, edge_index, weight = data(generator)
    sizes = []
    pool = dm.couplings.PooledCoupling.pool
    monkeypatch.setattr(
        dm.couplings.PooledCoupling,
        "pool",
        lambda self, v: sizes.append(len(v)) or pool(self, v),
    )
    model = dm.DIFFormer(FEATURES, 8, 3).double()
    dm.full_graph_inference(model, x, edge_index, weight, block_size=10)
    assert sizes == 2 * [10, 10, 10, 10, 10, 7]


def test_a_graph_keeps_what_was_derived_from_it(generator) -> None:
    x, edge_index, weight = data(generator)
    model = dm.DIFFormer(FEATURES, 8, 3).double()
    graph = dm.Graph(NODES, edge_index, weight)
    dm.full_graph_inference(model, x, graph, progress=False)
    looped = graph.with_self_loops("remaining")
    assert looped.csr.is_sorted  # the sparse product has compressed it
    dm.full_graph_inference(model, x, graph, progress=False)
    assert graph.with_self_loops("remaining") is looped


@pytest.mark.parametrize("row_stochastic", [True, False])
def test_a_coupling_by_blocks_knows_what_the_whole_one_knows(
    row_stochastic: bool, generator
) -> None:
    x = torch.randn(NODES, FEATURES, generator=generator)
    holder = nn.Sequential(dm.SimpleDiffusivity(row_stochastic=row_stochastic))
    whole = holder[0].couple(x, dm.Graph(NODES))
    Blocks(10, x.device).take_over(holder)
    blocks = holder[0].couple(x, dm.Graph(NODES))
    assert [getattr(blocks, name) for name in PROMISES] == [
        getattr(whole, name) for name in PROMISES
    ]


def test_without_edges_without_nodes_and_of_a_batch(generator) -> None:
    model = dm.DIFFormer(FEATURES, 8, 3).double()
    x = data(generator)[0]
    got = dm.full_graph_inference(model, x, block_size=10, progress=False)
    assert torch.allclose(got, model.eval()(x), *tolerance("rearranged", torch.float64))
    assert dm.full_graph_inference(model, x[:0], progress=False).shape == (0, 3)
    with pytest.raises(ValueError, match="takes one large graph; got a batch of 2"):
        dm.full_graph_inference(model, x[:4], dm.Graph(4, ptr=torch.tensor([0, 2, 4])))
    for steps in (
        dm.CertifiedTransformer(FEATURES, 8, 3),
        dm.layers.CertifiedBlock(FEATURES, [dm.layers.TiedMLP(FEATURES, 8)]),
    ):
        with pytest.raises(
            NotImplementedError,
            match="the steps of a CertifiedBlock are not computed by blocks",
        ):
            dm.full_graph_inference(steps.double(), x, block_size=10, progress=False)


def test_the_bar_counts_blocks(generator, capsys, monkeypatch) -> None:
    x, edge_index, weight = data(generator)
    done = []
    update = tqdm.update
    monkeypatch.setattr(
        tqdm, "update", lambda bar, n=1: done.append(n) or update(bar, n)
    )
    monkeypatch.setattr(dm.runtime.progress, "AFTER", 0)
    dm.full_graph_inference(
        dm.DIFFormer(FEATURES, 8, 3).double(),
        x,
        edge_index,
        weight,
        block_size=10,
        progress=True,
    )
    bar = capsys.readouterr().err
    assert "block" in bar
    assert "/36 " in bar  # 6 blocks: encoder, decoder, twice for each of 2 couplings
    assert sum(done) == 36


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_on_a_gpu_and_states_on_the_cpu(generator) -> None:
    x, edge_index, weight = data(generator)
    model = dm.SGFormer(FEATURES, 8, 3).double()
    got = dm.full_graph_inference(
        model, x, edge_index, weight, block_size=10, device="cuda", progress=False
    )
    assert got.device == x.device
    assert torch.allclose(
        got,
        model.eval()(x, edge_index, weight),
        *tolerance("rearranged", torch.float64),
    )


def test_channels_of_loaded_weights(generator) -> None:
    x, edge_index, weight = data(generator, torch.float32)
    trained, loaded = (
        dm.DiffusionGNN(channels, 8, 3).eval() for channels in (FEATURES, -1)
    )
    loaded.load_state_dict(trained.state_dict())
    got = dm.full_graph_inference(loaded, x, edge_index, weight, block_size=10)
    assert torch.allclose(
        got, trained(x, edge_index, weight), *tolerance("rearranged", torch.float32)
    )
