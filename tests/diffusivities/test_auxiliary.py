"""The edge loss against the slides' double sum, and auxiliary losses from a module to the training step."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from diffusion_mp import Graph, NodeFormerConv
from diffusion_mp.couplings import (
    LinearAttentionCoupling,
    LogLowRankCoupling,
    PairwiseCoupling,
    SparseCoupling,
    UniformCoupling,
)
from diffusion_mp.diffusivities import (
    AuxiliaryLoss,
    SoftmaxDiffusivity,
    auxiliary_loss,
    edge_loss,
)
from helpers import agree

DOUBLE = torch.float64
N = 11
H = 2
E = 24
PTR = torch.tensor([0, 4, 4, 5, N])

ATTENTION = {
    "softmax": PairwiseCoupling,
    "log-low-rank": lambda query, key, ptr: LogLowRankCoupling(
        query, key, ptr, key[:, :, :2]
    ),
    "low-rank": lambda query, key, ptr: LinearAttentionCoupling(
        query.abs(), key.abs(), ptr, nonnegative=True
    ),
}


def draw(generator, ptr):
    """Queries, keys, edges within graphs (self-loops and repeated ones among them) and weights, some of them zero."""
    query, key = (
        torch.randn(N, H, 3, generator=generator, dtype=DOUBLE, requires_grad=True)
        for _ in range(2)
    )
    edges = torch.randint(N, (2, E), generator=generator)
    if ptr is not None:
        member = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff())
        edges = edges[:, member[edges[0]] == member[edges[1]]]
    edges = torch.cat([edges, edges[:, :3]], dim=1)
    weight = torch.rand(edges.size(1), generator=generator, dtype=DOUBLE) + 0.2
    weight[3] = 0
    return query, key, edges, weight


def double_sum(pi, adjacency, edges):
    """−(1/N) Σ_u Σ_v (a_uv / d_u) log π_uv of dense π [H, N, N], head by head, term by term; then the mean of heads."""
    pairs = set(zip(*edges.flip(0).tolist(), strict=True))
    return (
        -sum(
            adjacency[u, v] / adjacency[u].sum() * pi[:, u, v].log().mean()
            for u, v in pairs
        )
        / N
    )


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unit"])
@pytest.mark.parametrize("ptr", [None, PTR], ids=["single", "batch"])
def test_the_edge_loss_is_the_slides_double_sum(kind, weighted, ptr, generator):
    query, key, edges, weight = draw(generator, ptr)
    weight = (weight if weighted else torch.ones_like(weight)).requires_grad_()
    graph = Graph(N, edges, weight if weighted else None, ptr=ptr)
    adjacency = torch.zeros(N, N, dtype=DOUBLE).index_put(
        (edges[1], edges[0]), weight, accumulate=True
    )
    coupling = ATTENTION[kind](query, key, ptr)
    got = edge_loss(coupling, graph)
    expected = double_sum(coupling.to_dense(), adjacency, edges)
    assert got.dim() == 0
    agree(
        got,
        expected,
        (query, key, weight) if weighted else (query, key),
        (1e-12, 1e-12),
        (1e-9, 1e-10),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_too_small_for_a_float_still_have_a_logarithm(dtype):
    query = torch.ones(2, 1, 1, dtype=dtype, requires_grad=True)
    key = torch.tensor([0.0, 256.0], dtype=dtype).view(2, 1, 1)
    edge = torch.tensor([[0], [1]])
    for coupling, pair in (
        (LogLowRankCoupling(0 * query, -key), edge.flip(0)),
        (PairwiseCoupling(query, key), edge),
    ):
        assert coupling.at(pair).item() == 0
        loss = edge_loss(coupling, Graph(2, pair))
        assert loss.dtype == torch.float32
        assert loss.item() == 128
    assert torch.autograd.grad(loss, query)[0].isfinite().all()


def test_half_precision_entries_are_summed_in_float32():
    """Four thousand equal terms: bfloat16 would stop counting at 256."""
    nodes = torch.arange(4000)
    graph = Graph(4000, torch.stack([nodes, nodes.roll(1)]))
    attention = SparseCoupling(
        graph, torch.full((4000,), 0.25, dtype=torch.bfloat16), nonnegative=True
    )
    loss = edge_loss(attention, graph)
    assert loss.dtype == torch.float32
    assert_close(loss, torch.tensor(4.0).log(), rtol=4e-3, atol=0)


def test_no_edge_or_one_of_weight_zero_is_no_loss():
    none = torch.zeros(2, 0, dtype=torch.long)
    query = torch.rand(4, 1, 2, requires_grad=True)
    loss = edge_loss(PairwiseCoupling(query, query, mutual=True), Graph(4, none))
    assert loss.item() == 0
    assert torch.equal(torch.autograd.grad(loss, query)[0], torch.zeros_like(query))
    assert (
        edge_loss(
            PairwiseCoupling(query[:0], query[:0], mutual=True), Graph(0, none)
        ).item()
        == 0
    )
    graph = Graph(3, torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 0.0]))
    attention = SparseCoupling(
        Graph(3, torch.tensor([[0], [1]])), torch.tensor([0.5]), nonnegative=True
    )
    assert_close(edge_loss(attention, graph), torch.tensor(2.0).log() / 3)
    # Each divided by its own log n.
    two = Graph(5, torch.tensor([[0, 2], [1, 3]]), ptr=torch.tensor([0, 2, 5]))
    assert_close(
        edge_loss(UniformCoupling(5, two.ptr), two, relative=True), torch.tensor(2 / 5)
    )


class Recorder(nn.Module):
    """Attention whose edges are regularised in training."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.attention = SoftmaxDiffusivity(4, projection="separate")
        self.weight = weight
        self.auxiliary = AuxiliaryLoss()

    def forward(self, x, edge_index=None):
        coupling = self.attention(x)
        self.auxiliary.value = None
        if self.training and edge_index is not None:
            self.auxiliary.value = self.weight * edge_loss(
                coupling, Graph.coerce(x, edge_index)
            )
        return (coupling @ x.unsqueeze(1)).squeeze(1)


EDGES = torch.tensor(
    [
        [0, 1, 2, 3],
        [1, 2, 0, 4],
    ]
)


@pytest.fixture
def x(generator):
    return torch.randn(5, 4, generator=generator)


def test_losses_are_summed_and_zero_where_nothing_was_recorded(x):
    first = Recorder()
    second = Recorder(0.25)
    model = nn.ModuleDict(
        {
            "first": first,
            "deep": nn.ModuleList([nn.Sequential(second)]),
            "mute": nn.Linear(4, 4),
        }
    )
    first(x, EDGES)
    second(x, EDGES)
    expected = edge_loss(first.attention(x), Graph(5, EDGES)) + 0.25 * edge_loss(
        second.attention(x), Graph(5, EDGES)
    )
    total = auxiliary_loss(model)
    assert_close(total, expected)
    total.backward()
    assert all(
        recorder.attention.query.weight.grad.abs().sum() > 0
        for recorder in (first, second)
    )
    for model in (Recorder(), Recorder().double(), nn.Linear(4, 4), nn.ReLU()):
        total = auxiliary_loss(model)
        assert total.dim() == total.item() == 0
        assert not total.requires_grad
    assert auxiliary_loss(Recorder().double()).dtype == DOUBLE


@pytest.mark.parametrize(
    "make", [Recorder, lambda: NodeFormerConv(4, 3, edge_regularization=0.5)]
)
def test_a_reentrant_checkpoint_is_refused_and_the_other_kind_has_the_gradient(make, x):
    """The first pass of a reentrant checkpoint has no gradient, so the loss would be a constant without a word."""
    model = make()
    state = x.clone().requires_grad_()
    checkpoint(model, state, EDGES, use_reentrant=True)
    with pytest.raises(
        RuntimeError,
        match=r"no gradient: \w+ ran without gradients.*use_reentrant=False",
    ):
        auxiliary_loss(model)
    with torch.no_grad():
        value = auxiliary_loss(model)
    gradients = []
    for run in (model, partial(checkpoint, model, use_reentrant=False)):
        run(state, EDGES)
        loss = auxiliary_loss(model)
        assert_close(loss.detach(), value)
        slopes = torch.autograd.grad(
            loss, list(model.parameters()), materialize_grads=True
        )
        gradients.append(slopes)
    assert_close(*gradients)


def test_a_value_that_needs_no_gradient_is_not_refused(x):
    """In evaluation, under no_grad, and for frozen parameters."""
    model = Recorder()
    with torch.no_grad():
        model(x, EDGES)
        assert auxiliary_loss(model) > 0
    with torch.inference_mode():
        model(x, EDGES)
    with pytest.raises(RuntimeError, match="no gradient"):
        auxiliary_loss(model)
    frozen = Recorder().requires_grad_(False)
    with torch.no_grad():
        frozen(x, EDGES)
    assert auxiliary_loss(frozen) > 0
    assert auxiliary_loss(model.eval()) > 0


def test_copies_pickles_and_state_dicts_start_empty(x):
    model = Recorder()
    buffer = io.BytesIO()
    model(x, EDGES)
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for holder in [
        copy.copy(model.auxiliary),
        *(copied.auxiliary for copied in copies),
    ]:
        assert isinstance(holder, AuxiliaryLoss)
        assert holder.value is None
    assert model.auxiliary.value is not None
    assert set(model.state_dict()) == {"attention.query.weight", "attention.key.weight"}


def test_each_thread_collects_what_its_own_forward_passes_left(x):
    """All threads have run the shared module before any of them collects."""
    model = Recorder()
    states = [x + k * x.cos() for k in range(4)]
    ready = Barrier(4)

    def collected(state):
        model(state, EDGES)
        ready.wait(timeout=60)
        loss = auxiliary_loss(model)
        loss.backward()
        return loss.detach()

    expected = torch.stack(
        [
            edge_loss(model.attention(state), Graph(5, EDGES)).detach()
            for state in states
        ]
    )
    with ThreadPoolExecutor(4) as pool:
        assert_close(torch.stack(list(pool.map(collected, states))), expected)
    assert len(expected.unique()) == 4


def test_a_loss_that_only_other_threads_have_is_not_taken_for_zero(x):
    """As under DataParallel, whose replicas share the holder and run in threads of their own."""
    model = Recorder()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, x, EDGES).result()
        with pytest.raises(
            RuntimeError, match="belongs to the thread whose forward pass recorded it"
        ):
            auxiliary_loss(model)
        assert pool.submit(auxiliary_loss, model).result() > 0
    assert auxiliary_loss(copy.deepcopy(model)) == 0
    model.eval()(x, EDGES)
    assert auxiliary_loss(model) == 0
