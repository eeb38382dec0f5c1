"""Nodes over ranks: loss, logits and all gradients are those of one process."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from diffusion_mp import (
    AdjacencyDiffusivity,
    CertifiedDIFFormer,
    CertifiedStep,
    CouplingMismatchError,
    DIFFormer,
    DiffusionConv,
    DiffusionGNN,
    Graph,
    NodeFormer,
    SGFormer,
    SimpleDiffusivity,
    auxiliary_loss,
)
from diffusion_mp.couplings import ReweightedCoupling, Sums, UniformCoupling
from diffusion_mp.diagnostics import posterior_variance
from diffusion_mp.diffusivities import (
    GaussianDiffusivity,
    KernelizedSoftmaxDiffusivity,
    PenaltyDiffusivity,
    Positive,
    SigmoidDiffusivity,
    SparseFlowDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.distributed import RankLostError, ShardedGraph, node_parallel
from diffusion_mp.distributed.parallel import all_merged, contact
from diffusion_mp.energies import (
    EnergyTerm,
    FunctionPenalty,
    MixturePenalty,
    get_constraint,
)
from diffusion_mp.layers import (
    CertifiedBlock,
    Neighbours,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.models import CertifiedTransformer, GatedGCN
from diffusion_mp.updates import ImplicitEuler

# more nodes than a run of Gumbel noise
NODES = 1500
FEATURES = 6
CLASSES = 3
SIZES = FEATURES, 8, CLASSES

MODELS = {
    "DIFFormer-s": lambda: DIFFormer(
        *SIZES, heads=2, projection="separate", transform=True, tau=0.5, layer_norm=True
    ),
    "DIFFormer-s, Frobenius": lambda: DIFFormer(
        *SIZES, normalize="frobenius", graph="mean"
    ),
    "SGFormer": lambda: SGFormer(*SIZES, num_gnn_layers=2),
    "SGFormer, Frobenius": lambda: SGFormer(
        *SIZES, normalize="frobenius", gnn="gat", num_gnn_layers=2
    ),
    "NodeFormer": lambda: NodeFormer(
        *SIZES, heads=2, num_features=5, num_samples=3, hops=2
    ),
    "DIFFormer-a": lambda: DIFFormer(*SIZES, kernel="sigmoid", heads=2),
    "softmax": lambda: DIFFormer(
        *SIZES, kernel="softmax", projection="separate", transform=True
    ),
    **{
        name: lambda name=name: DiffusionGNN(*SIZES, conv=name, dropout=0.0)
        for name in ("mlp", "gin", "gcnii")
    },
}

CERTIFIED = {
    "heads": 2,
    "constraint": "sphere",
    "centre": True,
    "lam": 1.0,
    "mu": 10.0,
    "encoder_layers": 2,
}
# A certified step needs a symmetric graph: theirs is the graph and its reverse.
ON_BOTH_WAYS = {
    "certified": lambda: CertifiedDIFFormer(
        *SIZES, 3, graph=AdjacencyDiffusivity("sym"), **CERTIFIED
    ),
    "certified, projections": lambda: CertifiedDIFFormer(
        *SIZES, 2, projection="tied", lam=0.01, graph=AdjacencyDiffusivity("sum")
    ),
    "certified, at rest": lambda: CertifiedDIFFormer(
        *SIZES,
        None,
        penalty=None,
        constraint="nonnegative",
        mu=1.0,
        graph=AdjacencyDiffusivity("sym"),
    ),
    "certified, gaussian": lambda: CertifiedDIFFormer(
        *SIZES, 2, penalty="gaussian", lam=0.1, graph=AdjacencyDiffusivity("sym")
    ),
    "certified, mixture": lambda: CertifiedDIFFormer(
        *SIZES,
        2,
        penalty=MixturePenalty([0.5, 2.0]),
        lam=0.1,
        graph=AdjacencyDiffusivity("sym"),
    ),
}
MODELS |= ON_BOTH_WAYS
BLOCKS = {
    "plain": {},
    "gated": {"gate": True, "symmetric": False, "mlp_channels": 5},
    "sym, diagonal": {"graph": "sym", "matrix": "diagonal", "num_layers": 3},
    "neighbours": {"attention": "neighbours", "heads": 2, "constraint": "ball"},
    "all pairs": {"attention": "all", "heads": 2},
    "at rest": {"num_layers": None, "mlp_channels": 0, "constraint": "nonnegative"},
}
MODELS |= {
    f"certified transformer, {name}": lambda options=options: CertifiedTransformer(
        *SIZES, 2, dropout=0.0, **options
    )
    for name, options in BLOCKS.items()
}


def data(dtype):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES - 9, (2, 4 * NODES), generator=generator)
    edge_index[1, :40] = edge_index[0, :40]
    weight = torch.rand(4 * NODES, generator=generator, dtype=torch.float64).to(dtype)
    x = torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(NODES, generator=generator) < 0.2
    mask[-20:] = False
    return (
        x,
        edge_index,
        weight,
        torch.randint(CLASSES, (NODES,), generator=generator),
        mask,
    )


def build(make, dtype, seed=0):
    torch.manual_seed(seed)  # in a process of the test, not of pytest
    return make().to(dtype)


def loss_of(model, logits, y, mask, labels):
    return cross_entropy(
        logits[mask], y[mask], reduction="sum"
    ) / labels + auxiliary_loss(model)


def error(got, expected, complete=None):
    """The norm of the difference, relative to that of the complete tensor where a rank has a part of it."""
    size = (expected if complete is None else complete).detach().norm()
    return float((got.detach() - expected.detach()).norm() / size.clamp(min=1e-300))


def gradients(model, loss):
    """Of all parameters that the loss depends on."""
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(names, grads, strict=True)
    return {name: grad for name, grad in pairs if grad is not None}


def same_as_one_process(dtype, limit, names):
    rank = distributed.get_rank()
    x, edge_index, weight, y, mask = data(dtype)
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1), weight.repeat(2)
    for name in names:
        edges = both if name in ON_BOTH_WAYS else (edge_index, weight)
        graph = ShardedGraph(edges[0], NODES, edges[1])
        rows = graph.rows
        alone = build(MODELS[name], dtype)
        exact = build(MODELS[name], torch.float64)
        # The second changes nothing.
        shared = node_parallel(node_parallel(build(MODELS[name], dtype, seed=rank)))
        assert shared.state_dict().keys() == alone.state_dict().keys()
        for step in range(2):  # the second draws other noise
            where = f"{name}, rank {rank}, step {step}"
            expected = alone(x, Graph(NODES, *edges))
            expected_loss = loss_of(alone, expected, y, mask, mask.sum())
            theirs = gradients(alone, expected_loss)

            logits = shared(x[rows], graph)
            labels = graph.total(mask[rows].sum())
            loss = loss_of(shared, logits, y[rows], mask[rows], labels)
            shared.zero_grad()
            loss.backward()
            ours = {
                key: parameter.grad
                for key, parameter in shared.named_parameters()
                if parameter.grad is not None
            }

            assert error(logits, expected[rows], expected) < limit, where
            assert error(graph.total(loss.detach()), expected_loss) < limit, where
            assert ours.keys() == theirs.keys(), where
            if dtype == torch.float64:
                for parameter, grad in ours.items():
                    assert error(grad, theirs[parameter]) < limit, (where, parameter)
            else:
                # Some gradients (queries, keys, λ, μ) are small differences of large numbers, which rounding moves by
                # more than the limit: ranks must not be farther from double than one process is.
                exact_logits = exact(
                    x.double(), Graph(NODES, edges[0], edges[1].double())
                )
                truth = gradients(
                    exact, loss_of(exact, exact_logits, y, mask, mask.sum())
                )
                # Relative to all gradients: what is left of such a difference has no digits to compare.
                size = torch.cat([grad.flatten() for grad in truth.values()])
                of_ranks, of_one = (
                    max(error(grads[name], truth[name], size) for name in truth)
                    for grads in (ours, theirs)
                )
                assert of_ranks < 3 * of_one, (where, of_ranks, of_one)
            together, apart = (
                torch.cat([grads[name].flatten() for name in theirs])
                for grads in (ours, theirs)
            )
            assert error(together, apart) < limit, where


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32], ids=["double", "single"]
)
def test_ranks_compute_what_one_process_does(ranks, dtype, tmp_path):
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    if dtype == torch.float64:
        names = list(MODELS)
    else:
        names = ["DIFFormer-s", "SGFormer", "NodeFormer", "certified"]
    on_ranks(same_as_one_process, ranks, tmp_path, dtype, limit, names)


def certified(constraint):
    attention = SimpleDiffusivity(
        normalize=None,
        measure="distance",
        row_stochastic=False,
        constraint=get_constraint(constraint),
    )
    terms = Positive(0.01) * attention + Positive(3.0) * AdjacencyDiffusivity("sym")
    step = CertifiedStep(Positive(), constraint=constraint)
    return DiffusionConv(FEATURES, FEATURES, terms, step, transform=False, bias=False)


def certified_as_one_process():
    """Whether the graph is symmetric is found out over the ranks, and semi-definite attention counts once."""
    sums = all_merged(
        Sums(torch.ones(1), torch.tensor([100.0 * distributed.get_rank()])),
        None,
    )
    assert (sums.totals.item(), sums.shift.item()) == (
        1,
        100,
    )  # e^−100 and 1, no overflow
    x, edge_index, weight, *_ = data(torch.float64)
    both = torch.cat([edge_index, edge_index.flip(0)], 1)
    weights = torch.cat([weight, weight])
    graph = ShardedGraph(both, NODES, weights)
    complete = Graph(NODES, both, weights)
    for constraint in ("ball", "sphere"):
        x = get_constraint(constraint).project(x)
        layer = build(
            lambda constraint=constraint: certified(constraint), torch.float64
        )
        out, coupling = layer(
            x[graph.rows], graph, source=x[graph.rows].roll(1, 1), return_coupling=True
        )
        assert coupling.terms[0].positive_semidefinite is (constraint == "sphere")
        expected = layer(x, complete, source=x.roll(1, 1))
        assert error(out, expected[graph.rows], expected) < 1e-12
        results = []
        for loss in (graph.total((out * x[graph.rows]).sum()), (expected * x).sum()):
            results.append(torch.autograd.grad(loss, list(layer.parameters())))
        for ours, theirs in zip(*results, strict=True):
            assert (
                error(graph.total(ours) / distributed.get_world_size(), theirs) < 1e-10
            )
    one_way = ShardedGraph(edge_index, NODES, weight)
    with pytest.raises(CouplingMismatchError, match="does not promise to be symmetric"):
        layer(x[graph.rows], one_way)
    inside = (both < graph.bounds[1]).all(0).nonzero()[-1]
    # One of twelve thousand, known to one rank.
    near = weights.index_add(0, inside, weights[inside], alpha=0.01)
    with pytest.raises(CouplingMismatchError, match="does not promise to be symmetric"):
        layer(x[graph.rows], ShardedGraph(both, NODES, near))
    assert not AdjacencyDiffusivity("sum")(
        x[graph.rows], ShardedGraph(both, NODES, near)
    ).symmetric


def test_a_certified_step_over_ranks(tmp_path):
    on_ranks(certified_as_one_process, 2, tmp_path)


class Towards(EnergyTerm):
    """The squared distance from a number, row by row."""

    depends_on = "rows"

    def __init__(self, number):
        self.number = number

    def value(self, z, graph):
        return (z.double() - self.number).square().sum()

    def half_gradient(self, z, graph):
        return z - self.number

    def bound(self, z, graph):
        return 0.5 * torch.ones_like(z[:, :, :1])


class TowardsMean(Towards):
    depends_on = "graph"


def terms_as_one_process():
    x, edge_index, weight, *_ = data(torch.float64)
    features = torch.rand(edge_index.size(1), 3, dtype=torch.float64)
    features = features.roll(1, 0)
    distributed.broadcast(features, 0)
    relations = WeightedGraph(FEATURES, edge_dim=3, gate=True, symmetric=False)
    block = CertifiedBlock(FEATURES, [relations, TiedMLP(FEATURES, 5), Towards(0.3)], 3)
    block = node_parallel(block.double())
    # All edges are in the first rank, or begin there: the others have no edge, or no halo.
    first = edge_index % (NODES // 4)
    for edges in (edge_index, first, torch.stack([first[0], edge_index[1]])):
        graph = ShardedGraph(edges, NODES, weight)
        here = features[graph.positions]
        assert torch.equal(edges[1, graph.positions] - graph.rows.start, graph.edges[1])
        out = block(x[graph.rows], graph, edge_attr=here)
        expected = block(x, edges, weight, edge_attr=features)
        assert error(out, expected[graph.rows], expected) < 1e-12
        block.zero_grad()
        (out * x[graph.rows]).sum().backward()
        ours = [parameter.grad.clone() for parameter in block.parameters()]
        block.zero_grad()
        # The hooks add up the gradients of all ranks, each of which has all of them here.
        ((expected * x).sum() / distributed.get_world_size()).backward()
        for one, parameter in zip(ours, block.parameters(), strict=True):
            assert error(one, parameter.grad) < 1e-11
    refused = {
        "WeightedGraph": [WeightedGraph(FEATURES, hops=2)],
        "Neighbours": [Neighbours(FEATURES, penalty="sigmoid")],
        "TowardsMean": [TowardsMean(0.3)],
    }
    for name, terms in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name}.* Use one process"):
            CertifiedBlock(FEATURES, terms).double()(x[graph.rows], graph)
    for ask in (block.energies, block.certificate):
        with pytest.raises(NotImplementedError, match="sum over all nodes"):
            ask(x[graph.rows], graph, edge_attr=here)


def test_terms_over_ranks(tmp_path):
    on_ranks(terms_as_one_process, 3, tmp_path)


def attention_on_uneven_parts():
    nodes = NODES + 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, 6, generator=generator, dtype=torch.float64)
    v = torch.rand(nodes, 2, 2, generator=generator, dtype=torch.float64)
    graph = ShardedGraph(None, nodes)
    mixture = MixturePenalty([0.5, 2.0])
    cauchy = FunctionPenalty(lambda z2: 1 / (1 + z2))
    for attention in (
        SigmoidDiffusivity(6, heads=2),
        GaussianDiffusivity(projection=None, heads=2, row_stochastic=False),
        PenaltyDiffusivity(mixture, heads=2),
        PenaltyDiffusivity(mixture, heads=2, row_stochastic=False),
        PenaltyDiffusivity(cauchy, 6, heads=2, projection="separate"),
        PenaltyDiffusivity(cauchy, heads=2, projection=None, row_stochastic=False),
    ):
        attention = attention.double()
        distributed.broadcast(next(iter(attention.parameters()), v).detach(), 0)
        results = []
        for rows, part in ((graph.rows, graph), (slice(None), Graph(nodes))):
            state = x[rows].clone().requires_grad_()
            coupling = attention(state, part)
            values = v[rows].clone().requires_grad_()
            received, returned = coupling.both(values, values)
            assert error(received, coupling @ values) < 1e-12
            assert error(returned, coupling.T @ values) < 1e-12
            loss = (received * values).sum() + returned.square().sum()
            results.append(
                (received, returned, *torch.autograd.grad(loss, [state, values]))
            )
        for ours, theirs in zip(*results, strict=True):
            assert error(ours, theirs[graph.rows], theirs) < 1e-12
    weights = torch.rand(graph.num_nodes, 1, dtype=torch.float64)
    local = UniformCoupling(graph.num_nodes)
    for column in (None, weights):
        # Nothing tells which weights the columns of other ranks have.
        reweighted = ReweightedCoupling(
            local, weights, column, row_stochastic=column is not None
        )
        with pytest.raises(TypeError, match="ReweightedCoupling can not be taken"):
            graph.share(reweighted)


def test_all_pairs_of_parts_of_different_size(tmp_path):
    on_ranks(attention_on_uneven_parts, 3, tmp_path)


def far_rows_on_one_rank():
    """Only the rows of the last rank are so far apart that distances need double precision."""
    x = torch.randn(NODES, 3, generator=torch.Generator().manual_seed(0))
    # Their mean is zero, so that the rows of the first rank stay near the centre.
    far = 1e4 * x[:25]
    x[-100:] = torch.cat([far, far + 0.3, -far, -far - 0.3])
    attention = GaussianDiffusivity(normalize=None, measure="distance", projection=None)
    graph = ShardedGraph(None, NODES)
    coupling = attention(x[graph.rows], graph)
    v = torch.rand(NODES, 1, 2, generator=torch.Generator().manual_seed(1))
    expected = attention(x) @ v
    received = coupling @ v[graph.rows]
    assert received.dtype == v.dtype
    assert error(received, expected[graph.rows], expected) < 1e-6


def test_ranks_agree_on_the_precision_of_distances(tmp_path):
    on_ranks(far_rows_on_one_rank, 2, tmp_path)


def logarithms_of_noisy_attention():
    x, edge_index, *_ = data(torch.float64)
    graph = ShardedGraph(edge_index, NODES)
    results = []
    for rows, part in ((graph.rows, graph), (slice(None), Graph(NODES, edge_index))):
        make = partial(KernelizedSoftmaxDiffusivity, FEATURES, heads=2, num_samples=3)
        attention = build(make, torch.float64)
        state = x[rows].clone().requires_grad_()
        logs = attention(state, part).log_at(part.edge_index)
        results.append((logs, *torch.autograd.grad(logs.square().sum(), state)))
    (logs, grad), (expected, theirs) = results
    assert error(logs, expected[graph.positions], expected) < 1e-12
    assert error(grad, theirs[graph.rows], theirs) < 1e-12


def test_logarithms_of_the_samples_over_ranks(tmp_path):
    on_ranks(logarithms_of_noisy_attention, 2, tmp_path)


def within_a_group():
    group = distributed.new_group([1, 2])
    if distributed.get_rank() == 0:
        return  # the others do not wait for it
    x, edge_index, weight, *_ = data(torch.float64)
    graph = ShardedGraph(edge_index, NODES, weight, group=group)
    alone = build(MODELS["DIFFormer-s"], torch.float64)
    shared = build(
        MODELS["DIFFormer-s"], torch.float64, seed=distributed.get_rank(group)
    )
    expected = alone(x, Graph(NODES, edge_index, weight))
    got = node_parallel(shared, group)(x[graph.rows], graph)
    assert error(got, expected[graph.rows], expected) < 1e-12


def test_a_group_of_some_processes_works_without_the_others(tmp_path):
    on_ranks(within_a_group, 3, tmp_path, seconds=8)


def left_by_one(folder):
    rank = distributed.get_rank()
    ranks = distributed.get_world_size()
    x, edge_index, _, y, mask = data(torch.float32)
    graph = ShardedGraph(edge_index, NODES)
    model = node_parallel(build(MODELS["DIFFormer-s"], torch.float32))
    try:
        for step in range(3):
            if rank == ranks - 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            logits = model(x[graph.rows], graph)
            cross_entropy(
                logits[mask[graph.rows]], y[graph.rows][mask[graph.rows]]
            ).backward()
    except RankLostError as error:
        (folder / f"said by {rank}").write_text(str(error))
        raise


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_dies_ends_the_run_with_a_sentence(ranks, tmp_path):
    run = on_ranks(left_by_one, ranks, tmp_path, tmp_path, seconds=8, join=False)
    for process in run.processes:
        process.join(60)
    *others, killed = (process.exitcode for process in run.processes)
    assert killed == -signal.SIGKILL
    assert all(code == 1 for code in others)
    for rank in range(ranks - 1):
        said = (tmp_path / f"said by {rank}").read_text()
        assert (
            f"rank {rank} of {ranks} got no answer from another one, which has ended or is stuck"
            in said
        )
        assert "start all of them again from the last checkpoint" in said


def stuck(folder):
    if distributed.get_rank() == 1:
        time.sleep(6)
        return
    begun = time.monotonic()
    with pytest.raises(RankLostError, match="rank 0 of 2 got no answer"):
        node_parallel(nn.Linear(2, 2))
    (folder / "waited").write_text(str(time.monotonic() - begun))


def test_a_rank_that_is_stuck_ends_the_run_within_the_timeout(tmp_path):
    on_ranks(stuck, 2, tmp_path, tmp_path, seconds=2)
    assert float((tmp_path / "waited").read_text()) < 5


def test_an_error_that_no_lost_rank_made_keeps_its_own_words():
    with pytest.raises(RuntimeError, match=r"^out of memory$") as caught, contact(None):
        raise RuntimeError("out of memory")
    assert type(caught.value) is RuntimeError


def trained(folder, begun, steps):
    """Steps of NodeFormer with noise and Adam, from the first or from a checkpoint; rank 0 writes one after each."""
    x, edge_index, weight, y, mask = data(torch.float64)
    graph = ShardedGraph(edge_index, NODES, weight)
    model = build(MODELS["NodeFormer"], torch.float64, seed=distributed.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if begun is not None:
        state = torch.load(begun, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    node_parallel(model)
    labels = graph.total(mask[graph.rows].sum())
    for step in steps:
        optimizer.zero_grad()
        loss_of(
            model, model(x[graph.rows], graph), y[graph.rows], mask[graph.rows], labels
        ).backward()
        optimizer.step()
        if distributed.get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                folder / f"{step}.pt",
            )


@pytest.mark.slow
def test_new_processes_go_on_from_what_the_first_rank_saved(tmp_path):
    complete = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    for folder, begun, steps in (
        (complete, None, range(2)),
        (resumed, complete / "0.pt", range(1, 2)),
    ):
        folder.mkdir()
        on_ranks(trained, 2, folder, folder, begun, steps)
    got, expected = (
        torch.load(folder / "1.pt", weights_only=True)["model"]
        for folder in (resumed, complete)
    )
    before = torch.load(complete / "0.pt", weights_only=True)["model"]
    assert got.keys() == expected.keys()
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    for name, value in expected.items():
        assert_close(got[name], value, rtol=1e-12, atol=1e-12)


EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
X = torch.ones(4, 3)


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", f"file://{tmp_path / 'meet'}", world_size=1, rank=0
    )
    yield
    distributed.destroy_process_group()


def learned_function():
    class Slope(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, z2):
            return 1 / (1 + self.scale.to(z2.dtype) * z2)

    return FunctionPenalty(Slope())


def sharded(**options):
    return ShardedGraph(EDGES, 4, **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ShardedGraph(None, 0), "num_nodes must be at least 1"),
        (lambda: ShardedGraph(EDGES + 1, 4), r"edge_index must lie in \[0, 3\]"),
        (
            lambda: SparseFlowDiffusivity(3)(X, sharded()),
            "can not be taken over .*Use such a diffusivity",
        ),
        (
            lambda: PenaltyDiffusivity(learned_function(), projection=None)(
                X, sharded()
            ),
            r"learned parameters can not be .*Freeze them with requires_grad_\(False\)",
        ),
        (
            lambda: AdjacencyDiffusivity(direction="undirected")(X, sharded()),
            "Make the graph undirected .* before it",
        ),
        (lambda: sharded().to_undirected(), "Make the graph undirected .* before it"),
        (lambda: sharded().with_self_loops("add"), "change its edges, before it"),
        (lambda: sharded().is_symmetric, "can not turn edges around"),
        (
            lambda: sharded().total(3),
            r"x must be a tensor, such as mask.sum\(\); got 3",
        ),
        (
            lambda: sharded(group="world"),
            "group must be a process group of torch.distributed or None; got 'world'",
        ),
        (
            lambda: AdjacencyDiffusivity()(X, sharded()).T,
            "transpose of a coupling over several ranks is not",
        ),
        (
            lambda: ImplicitEuler(1.0)(X, AdjacencyDiffusivity()(X, sharded())),
            "all rows",
        ),
        (
            lambda: NodeFormer(3, 4, 2)(X, sharded(), return_coupling=True)[1][0].at(
                EDGES
            ),
            "Export attention in one",
        ),
        (
            lambda: AdjacencyDiffusivity()(X, sharded()).to_dense(),
            "entries of a coupling over several ranks are not",
        ),
        (
            lambda: posterior_variance(UniformDiffusivity()(X, sharded()), 0.5),
            "variance needs .* of all nodes",
        ),
        (
            lambda: ShardedGraph(torch.zeros(2, 3), 4),
            "edge_index must hold integers",
        ),
        (
            lambda: GatedGCN(3, 4, 2)(X, sharded()),
            "can not turn edges around, walk along them",
        ),
    ],
)
@pytest.mark.usefixtures("group", "no_typecheck")
def test_operations_that_a_rank_cannot_do_are_refused(call, sentence):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=sentence):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
@pytest.mark.usefixtures("group")
def test_edges_may_be_unsigned(dtype):
    edge_index = ShardedGraph(EDGES.to(dtype), 4).edge_index
    assert edge_index.dtype == torch.int64
    assert torch.equal(edge_index, EDGES)


@pytest.mark.parametrize("call", [sharded, lambda: node_parallel(nn.Linear(2, 2))])
def test_without_ranks_there_are_no_parts(call):
    with pytest.raises(
        ValueError,
        match=r"there are no ranks yet. Call torch.distributed.init_process_group first",
    ):
        call()
