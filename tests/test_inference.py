"""Inference on a whole graph by blocks: the numbers of one forward pass, and the model untouched."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import diffusion_mp as dm
import model_cases
from diffusion_mp.couplings import Sums
from diffusion_mp.couplings.base import PROMISES
from diffusion_mp.energies import EnergyTerm
from diffusion_mp.inference import Blocks
from helpers import built, close, randn, refuses

NODES = 57
FEATURES = 8

MODELS = {
    name: case.build
    for name, case in model_cases.MODELS.items()
    if {"x", "edge_index"}
    <= set(case.names)
    <= {"x", "edge_index", "edge_weight", "batch"}
    and case.per_node
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


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges that leave two nodes out, and weights."""
    edge_index = torch.randint(
        NODES - 2, (2, 240), generator=torch.Generator().manual_seed(0)
    )
    x = randn(NODES, FEATURES).to(dtype)
    return x, edge_index, randn(240, seed=1).abs().to(dtype)


infer = partial(dm.full_graph_inference, progress=False)


def difformer() -> nn.Module:
    return built(lambda: dm.DIFFormer(FEATURES, 8, 3)).double()


@pytest.mark.parametrize("block_size", [10, NODES, 1000])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_blocks_give_the_numbers_of_one_forward_pass(make, block_size) -> None:
    inputs = data()
    model = built(make).double()
    before = copy.deepcopy(model.state_dict())
    got = infer(model, *inputs, block_size=block_size)
    assert model.training
    close(got, model.eval()(*inputs).detach(), "rearranged")
    assert not got.requires_grad
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_no_coupling_pools_more_rows_than_a_block(monkeypatch) -> None:
    sizes = []
    pool = dm.couplings.PooledCoupling.pool

    def counted(self: dm.couplings.PooledCoupling, v: Tensor) -> Sums:
        sizes.append(len(v))
        return pool(self, v)

    monkeypatch.setattr(dm.couplings.PooledCoupling, "pool", counted)
    infer(difformer(), *data(), block_size=10)
    assert sizes == 2 * [10, 10, 10, 10, 10, 7]


def test_a_graph_keeps_what_was_derived_from_it() -> None:
    x, edge_index, weight = data()
    model = difformer()
    graph = dm.Graph(NODES, edge_index, weight)
    infer(model, x, graph)
    looped = graph.with_self_loops("remaining")
    assert looped.csr.is_sorted  # the sparse product has compressed it
    infer(model, x, graph)
    assert graph.with_self_loops("remaining") is looped


@pytest.mark.parametrize("row_stochastic", [True, False])
def test_a_coupling_by_blocks_has_the_promises_of_one_of_all_rows(
    row_stochastic: bool,
) -> None:
    x, _, _ = data()
    holder = nn.Sequential(dm.SimpleDiffusivity(row_stochastic=row_stochastic))
    expected = holder[0].couple(x, dm.Graph(NODES))
    Blocks(10, x.device).take_over(holder)
    got = holder[0].couple(x, dm.Graph(NODES))
    for name in PROMISES:
        assert getattr(got, name) == getattr(expected, name), name


def test_without_edges_and_without_nodes() -> None:
    model = difformer()
    x, _, _ = data()
    got = infer(model, x, block_size=10)
    close(got, model.eval()(x).detach(), "rearranged")
    assert infer(model, x[:0]).shape == (0, 3)


BATCHED = dm.Graph(4, ptr=torch.tensor([0, 2, 4]))
test_what_has_no_blocks = refuses(
    (
        lambda: infer(difformer(), randn(4, FEATURES), BATCHED),
        ValueError,
        "takes one large graph; got a batch of 2",
    ),
    (
        lambda: infer(difformer(), randn(4, FEATURES), method="energies"),
        ValueError,
        "method must be 'forward' for a model that is not certified; got 'energies'",
    ),
)


CERTIFIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated and directed": {"gate": True, "symmetric": False},
    "relations": {"edge_dim": 3, "gate": True, "hops": 2, "matrix": "diagonal"},
    "all pairs": {"attention": "all", "heads": 2, "mlp_channels": 0},
    "neighbours": {"attention": "neighbours", "heads": 2, "constraint": "ball"},
    "at rest": {"num_layers": None, "mlp_channels": 0, "constraint": None},
}


@pytest.mark.parametrize("options", CERTIFIED.values(), ids=CERTIFIED)
def test_steps_of_certified_blocks(options, monkeypatch) -> None:
    x, edge_index, weight = data()
    # As in a graph with many edges, functions of edges are computed chunk by chunk.
    monkeypatch.setattr(dm.graph.ops, "CHUNK_EDGES", 50)
    features = {}
    if "edge_dim" in options:
        features["edge_attr"] = randn(240, 3, seed=2).softmax(1)
    options = {"num_blocks": 2, "num_layers": 2, "mlp_channels": 16} | options
    model = built(lambda: dm.CertifiedTransformer(FEATURES, 8, 3, **options)).double()
    expected = model.eval()(x, edge_index, weight, **features)
    for block_size in (10, 1000):
        got = infer(model, x, edge_index, weight, block_size=block_size, **features)
        close(got, expected.detach(), "rearranged")
    arguments = (x, edge_index, weight)
    by_blocks = partial(infer, model, *arguments, block_size=10, **features)
    energies = by_blocks(method="energies")
    close(energies, model.energies(*arguments, **features), "rearranged")
    certificate = by_blocks(method="certificate")
    assert str(certificate) == str(model.certificate(*arguments, **features))


class Pull(EnergyTerm):
    """Half the squared distance from a target of every row."""

    depends_on = "rows"

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.seen: list[int] = []

    def value(self, z, graph):
        return (z.double() - self.target).square().sum() / 2

    def half_gradient(self, z, graph):
        self.seen.append(len(z))
        return (z - self.target) / 2

    def bound(self, z, graph):
        return torch.full_like(z[:, :, :1], 0.25)

    def block(self, rows):
        part = Pull(self.target[rows])
        part.seen = self.seen
        return part


class Pulling(dm.layers.TermModule):
    """Makes the term of its own channels."""

    def forward(self, source, graph):
        self.term = Pull(source.unsqueeze(1).flip(0))
        return 2.0 * self.term


def test_a_term_of_single_rows_is_computed_by_blocks() -> None:
    x, edge_index, _ = data()
    made: list[Pull] = []

    class Kept(Pulling):
        def forward(self, source, graph):
            term = super().forward(source, graph)
            made.append(self.term)
            return term

    terms = [Kept(FEATURES, 1.0), dm.layers.TiedMLP(FEATURES, 16)]
    block = dm.layers.CertifiedBlock(FEATURES, terms, 3).double()
    expected = block(x, edge_index).detach()
    made.clear()
    close(infer(block, x, edge_index, block_size=10), expected, "rearranged")
    assert max(made[0].seen) == 10
    assert sum(made[0].seen) == 3 * NODES


def test_the_bar_counts_blocks(capsys, monkeypatch) -> None:
    done = []
    update = tqdm.update

    def counted(bar: tqdm, n: int = 1) -> None:
        done.append(n)
        update(bar, n)

    monkeypatch.setattr(tqdm, "update", counted)
    monkeypatch.setattr(dm.runtime.progress, "AFTER", 0)
    infer(difformer(), *data(), block_size=10, progress=True)
    bar = capsys.readouterr().err
    assert "block" in bar
    assert "/36 " in bar  # 6 blocks: encoder, decoder, twice for each of 2 couplings
    assert sum(done) == 36


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_on_a_gpu_and_states_on_the_cpu() -> None:
    model = dm.SGFormer(FEATURES, 8, 3).double()
    got = infer(model, *data(), block_size=10, device="cuda")
    assert got.device.type == "cpu"
    close(got, model.eval()(*data()).detach(), "rearranged")


def test_channels_of_loaded_weights() -> None:
    inputs = data(torch.float32)
    trained, loaded = (
        dm.DiffusionGNN(channels, 8, 3).eval() for channels in (FEATURES, -1)
    )
    loaded.load_state_dict(trained.state_dict())
    got = infer(loaded, *inputs, block_size=10)
    close(got, trained(*inputs).detach(), "rearranged")
