"""CertifiedDIFFormer: its energy falls at every layer, in training and after, whatever its parameters have become."""

from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import diffusion_mp as dm
from diffusion_mp import GaussianDiffusivity, Graph, certify
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.layers import CertifiedBlock, CertifiedConv
from diffusion_mp.models import CertifiedDIFFormer
from helpers import agree, built, close, randn, refuses

NODES = 18
BATCH = torch.arange(3).repeat_interleave(torch.tensor([7, 1, 10]))
PENALTIES = (None, "simple", "gaussian", "sigmoid", "softmax", "quadratic")
FITTING = [
    (p, c)
    for p, c in product(PENALTIES, CONSTRAINTS)
    if p != "simple" or c not in (None, "nonnegative")
]
QUICK = {(None, "nonnegative"), ("simple", "sphere"), ("gaussian", "ball")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive)
    for case in FITTING
]
TIED = pytest.param(
    {"heads": 2, "projection": "tied"}, id="projections", marks=pytest.mark.exhaustive
)


def build(*, dtype: torch.dtype = torch.float64, **options) -> CertifiedDIFFormer:
    options = {"num_layers": 4} | options
    return built(lambda: CertifiedDIFFormer(5, 8, 3, **options)).to(dtype)


def nodes(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges within the graphs of BATCH (directed, with loops and repeats), classes."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 120), generator=generator)
    edges = edges[:, BATCH[edges[0]] == BATCH[edges[1]]]
    return randn(NODES, 5).to(dtype), edges, torch.arange(NODES) % 3


def largest_rise(model: CertifiedDIFFormer, *inputs) -> float:
    energies = model.energies(*inputs)
    # An energy may be zero.
    return float((energies.diff() / energies[:-1].abs().clamp(min=1e-300)).max())


def train(model: nn.Module, steps: int):
    """Adam, with edges, without, with a batch of graphs and with a batch of mere nodes in turn; yields the inputs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    x, edges, y = nodes(next(model.parameters()).dtype)
    calls = [(x, edges), (x,), (x, edges, None, BATCH), (x, None, None, BATCH)]
    for inputs in islice(cycle(calls), steps):
        optimizer.zero_grad()
        cross_entropy(model.train()(*inputs), y).backward()
        optimizer.step()
        yield inputs


@pytest.mark.parametrize(("penalty", "constraint"), CASES)
@pytest.mark.parametrize("options", [pytest.param({"heads": 2}, id="heads"), TIED])
def test_the_energy_never_rises_while_training(
    penalty: str | None, constraint: str | None, options
):
    options = options | {"penalty": penalty, "constraint": constraint, "dropout": 0.3}
    for dtype, limit, steps in (
        (torch.float64, 1e-13, 30),
        (torch.float32, 1e-5, 10),
    ):
        model = build(lam=0.3, dtype=dtype, **options)
        before = model.conv.mu.raw.clone()
        for step, inputs in enumerate(train(model, steps)):
            assert largest_rise(model.train(step % 3 == 0), *inputs) <= limit
        assert not torch.equal(before, model.conv.mu.raw)


def test_a_shorter_denominator_makes_it_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with a quarter of p a step goes too far."""
    whole = Coupling.majorant

    def quartered(self: Coupling, convex: bool, degree: Tensor | None = None) -> Tensor:
        return whole(self, convex, degree) / 4

    monkeypatch.setattr(Coupling, "majorant", quartered)
    assert (
        largest_rise(build(penalty="gaussian", constraint="ball"), *nodes()[:2]) > 0.01
    )


def dense_states(
    model: CertifiedDIFFormer, x: Tensor, edges: Tensor | None
) -> list[Tensor]:
    """Z⁰ … Z^K by the formula of the theorem, with N × N matrices, for states of one head within a ball."""
    conv = model.conv
    h = model.encoder(x)
    same = (BATCH.unsqueeze(1) == BATCH).to(x)
    # λ is divided by the number of nodes of a graph.
    same = same / same.sum(1, keepdim=True)
    graph = torch.zeros_like(same)
    if edges is not None:
        both = torch.cat([edges, edges.flip(0)], 1)
        half = torch.tensor(0.5, dtype=x.dtype)
        graph = graph.index_put(tuple(both), half, accumulate=True)
        degree = graph.sum(1)
        root = torch.where(degree > 0, degree, 1.0).rsqrt()
        graph = root.unsqueeze(1) * graph * root

    def clipped(z: Tensor) -> Tensor:
        return z / z.norm(dim=1, keepdim=True).clamp(min=1)

    states = [clipped(h)]
    for _ in range(conv.num_layers):
        z = states[-1]
        square = (z.unsqueeze(1) - z).square().sum(2)
        w = conv.lam() * same * (-square / 2).exp() + conv.mu() * graph
        p = w.sum(1, keepdim=True)
        states.append(clipped((conv.beta() * h + w @ z) / (conv.beta() + p)))
    return states


@pytest.mark.parametrize("with_graph", [False, True])
def test_values_and_gradients_are_those_of_the_formula(with_graph: bool) -> None:
    model = build(penalty="gaussian", lam=0.2, mu=3.0)
    x, edges, _ = nodes()
    inputs = x, edges if with_graph else None, None, BATCH
    states = dense_states(model, *inputs[:2])
    agree(
        model(*inputs),
        model.decoder(states[-1]),
        model.parameters(),
        (1e-10, 1e-12),
        (1e-9, 1e-12),
        unused=True,
    )
    energy = model.energy(*inputs)
    expected = torch.stack([energy(state) for state in states])
    close(model.energies(*inputs), expected, "energy")


def test_projections_have_norm_one_at_most_and_see_the_whole_state() -> None:
    model = build(penalty="gaussian", heads=2, projection="tied", lam=0.5)
    x, edges, y = nodes()
    pairs = model.conv.terms[1]
    with torch.no_grad():
        pairs.projection.mul_(torch.tensor([5.0, 0.2]).view(2, 1, 1))
        short = torch.linalg.matrix_norm(pairs.projection[1], 2)
        norms = torch.linalg.matrix_norm(pairs.projections(), 2)
    assert short < 1
    close(norms, torch.stack([torch.ones_like(short), short]))
    state = randn(NODES, 1, 8).sigmoid() / 8
    projected = torch.einsum("hdc,nc->nhd", pairs.projections(), state.squeeze(1))
    square = (projected.unsqueeze(1) - projected).square().sum(3)
    total = 2 * (1 - (-square / 2).exp()).sum()  # δ of the Gaussian penalty
    alone = build(penalty=None, heads=2, projection="tied")
    alone.load_state_dict(model.state_dict(), strict=False)
    expected = alone.energy(x, edges)(state) + model.conv.lam() / (2 * NODES) * total
    close(model.energy(x, edges)(state), expected, "energy")
    cross_entropy(model(x, edges), y).backward()
    assert pairs.projection.grad.abs().max() > 0


@pytest.mark.parametrize("penalty", ["gaussian", None])
def test_without_num_layers_it_is_where_many_layers_end(penalty: str | None) -> None:
    """Gradients and other constraints: tests/saved/test_certified_conv.py."""
    x, edges, _ = nodes()
    rest, long = (
        build(num_layers=number, penalty=penalty, lam=0.2, mu=1.0)
        for number in (None, 150)
    )
    assert rest.state_dict().keys() == long.state_dict().keys()
    close(rest(x, edges, None, BATCH), long(x, edges, None, BATCH), "solve")
    before, after = rest.energies(x, edges, None, BATCH)
    assert after <= before
    close(after, long.energies(x, edges, None, BATCH)[-1])


def test_inputs_stand_beside_the_graph() -> None:
    """What reads the features is a fixed term: with the graph as a diffusivity of its own it is the graph again."""
    x, edges, _ = nodes()
    edge_diffusivity = dm.AdjacencyDiffusivity("sym", direction="undirected")
    once = build(mu=6.0)
    twice = build(mu=3.0, inputs=edge_diffusivity)
    alone = build(mu=6.0, inputs=edge_diffusivity, graph=False)
    torch.testing.assert_close(twice(x, edges), once(x, edges))
    torch.testing.assert_close(alone(x, edges), once(x, edges))
    near = build(
        inputs=GaussianDiffusivity(
            row_stochastic=False, normalize=None, measure="distance"
        )
    )
    assert largest_rise(near, x, edges, None, BATCH) <= 0
    assert not torch.allclose(near(x, edges), build()(x, edges))


def test_a_graph_term_of_all_pairs_needs_no_edges() -> None:
    conv = CertifiedConv(4, graph=GaussianDiffusivity(row_stochastic=False)).double()
    x = randn(6, 4)
    close(conv(x), conv(x, torch.zeros(2, 0, dtype=torch.int64)))


READERS = {
    "sigmoid": lambda: dm.SigmoidDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    ),
    "simple": lambda: dm.SimpleDiffusivity(row_stochastic=False),
    "edges": lambda: dm.EdgeDiffusivity("gaussian", row_stochastic=False),
    "symmetric": lambda: dm.SymmetricDiffusivity(READERS["sigmoid"]()),
    "sum": lambda: (
        dm.AdjacencyDiffusivity("sym", direction="undirected") + READERS["sigmoid"]()
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("constraint", [None, "ball"])
def test_a_graph_term_that_reads_a_state_reads_the_source(
    name: str, constraint: str | None
) -> None:
    """W would follow the states otherwise, and F would rise. A layer by itself has its state as source."""
    x, edges, _ = nodes()
    x = 3 * x
    edges = torch.cat([edges, edges.flip(0)], 1)
    model = build(
        penalty=None, constraint=constraint, num_layers=8, graph=READERS[name]()
    )
    certificate = certify(model, Data(x=x, edge_index=edges, batch=BATCH))
    assert certificate, str(certificate)
    assert largest_rise(model, x, edges, None, BATCH) <= 1e-13
    conv = model.conv
    graph = Graph(NODES, edges)
    state = conv.update.constraint.project(x.repeat(1, 2)[:, :8])
    moved, (coupling, *_) = conv(state, graph, return_coupling=True)
    close(
        coupling.to_dense(),
        (conv.mu() * conv.terms[0].diffusivity(state, graph)).to_dense(),
    )
    energy = conv.energy(state, graph)
    assert energy(moved) <= energy(state)
    assert certify(conv, Data(x=state, edge_index=edges))
    if constraint is None:
        before, after = build(
            penalty=None, constraint=None, num_layers=None, graph=READERS[name]()
        ).energies(x, edges)
        assert after <= before


def test_a_centred_source_has_mean_zero_in_every_graph() -> None:
    model = build(centre=True, lam=1.0)
    x, edges, _ = nodes()
    source = model.energy(x, edges, None, BATCH).terms[-1].term.source
    assert all(part.mean(0).abs().max() < 1e-15 for part in source.split([7, 1, 10]))
    assert largest_rise(model, x, edges, None, BATCH) <= 0


def test_dropout_acts_in_the_encoder_only() -> None:
    model = build(dropout=0.5).train()
    x, edges, _ = nodes()
    source = model.encoder(x)
    assert torch.equal(
        model.conv(source, edges, source=source),
        model.conv(source, edges, source=source),
    )
    assert not torch.equal(model(x, edges), model(x, edges))


def test_a_certificate_is_of_the_model_in_evaluation_mode() -> None:
    """It depends on no draw of dropout, and leaves the mode and the statistics of a batch as they are."""
    model = CertifiedDIFFormer(5, 8, 3, dropout=0.5).train()
    model.encoder.append(nn.BatchNorm1d(8))
    x = randn(9, 5).float()
    seen = []
    handle = model.encoder.register_forward_hook(lambda *call: seen.append(call[-1]))
    assert model.certificate(x)
    handle.remove()
    assert all(torch.equal(each, seen[0]) for each in seen)
    assert model.training
    assert int(model.encoder[-1].num_batches_tracked) == 0


@pytest.mark.parametrize("options", [{"heads": 5}, {"constraint": "sphere"}])
def test_steps_of_a_layer_are_single_steps_one_after_the_other(
    options: dict[str, Any],
) -> None:
    x, edges, _ = nodes()
    several, one = (
        built(lambda n=number: CertifiedConv(5, num_layers=n, **options)).double()
        for number in (4, 1)
    )
    out, couplings = several(x, edges, None, BATCH, return_coupling=True)
    state = x
    for coupling in couplings:
        state, single = one(state, edges, None, BATCH, source=x, return_coupling=True)
        close(coupling.to_dense(), single.to_dense())
    close(out, state)


@pytest.mark.parametrize(
    "options",
    [
        {"centre": False},
        {"constraint": "sphere", "heads": 2},
        {"constraint": None, "projection": "tied", "heads": 2},
        {"penalty": None, "num_layers": None, "centre": True},
    ],
)
def test_it_is_certified_with_the_coefficients_of_its_energy(
    options, no_typecheck: None
) -> None:
    x, edges, _ = nodes()
    data = Data(x=x, edge_index=edges)
    model = build(mu=5.0, **{"penalty": "gaussian"} | options)
    # At a random input without data.
    for certificate in (certify(model, data), certify(model, x), certify(model)):
        assert certificate, str(certificate)
    assert "5 * CouplingTerm" in certify(model, data).energy


def test_a_directed_graph_is_not_certified(no_typecheck: None) -> None:
    x, edges, _ = nodes()
    directed = dm.AdjacencyDiffusivity("row")
    refused = certify(build(graph=False, inputs=directed), Data(x=x, edge_index=edges))
    assert not refused
    assert "not promised to be symmetric" in refused.reason
    assert not certify(build(graph=directed))


def test_couplings_are_those_of_the_steps() -> None:
    x, edges, _ = nodes()
    _, couplings = build(heads=2)(x, edges, return_coupling=True)
    assert [(c.heads, c.symmetric, c.nonnegative) for c in couplings] == [
        (2, True, True)
    ] * 4
    _, (last,) = build(num_layers=None)(x, edges, return_coupling=True)
    assert last.num_nodes == NODES
    _, (nothing, *_) = build(penalty=None)(x, return_coupling=True)
    assert nothing.to_dense().abs().max() == 0


def test_autocast_keeps_the_energy_falling() -> None:
    x, edges, _ = nodes(torch.float32)
    for num_layers in (4, None):
        model = build(
            dtype=torch.float32,
            num_layers=num_layers,
            penalty="gaussian",
            heads=2,
            projection="tied",
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert largest_rise(model, x, edges) <= 1e-5
            logits = model(x, edges)
            logits.float().square().sum().backward()
        torch.testing.assert_close(logits.float(), model(x, edges), rtol=0.1, atol=0.05)


NEAR = r"squared distances up to 4.*Pass constraint='ball' or 'sphere' with radius"
test_an_option_or_input_that_does_not_fit_is_refused = refuses(
    (lambda: CertifiedConv(8, constraint=None), NEAR),
    (lambda: CertifiedConv(8, constraint="nonnegative"), NEAR),
    (
        lambda: CertifiedConv(8, constraint="ball", radius=2.0),
        "lets states be 16 apart",
    ),
    (lambda: build(heads=3), "heads must divide channels; got 3 heads, 8 channels"),
    (lambda: build(graph="sym"), "graph must be a Diffusivity, True or False"),
    (lambda: build(inputs="gaussian"), "inputs must be a Diffusivity"),
    (
        lambda: setattr(build().conv, "num_layers", 0),
        "num_layers must be at least 1; got 0",
    ),
    (
        lambda: CertifiedConv(5).energy(*nodes(torch.float32)[:2]),
        r"graph must be a Graph\(num_nodes, edge_index\)",
    ),
    (
        lambda: CertifiedBlock(5, []).energy(*nodes(torch.float32)[:2]),
        r"graph must be a Graph\(num_nodes, edge_index\)",
    ),
    (
        lambda: build(graph=dm.AdjacencyDiffusivity("row"))(*nodes()[:2]),
        "does not promise to be symmetric",
    ),
    (
        lambda: build().conv(
            torch.zeros(NODES, 8, dtype=torch.float64), source=nodes()[0]
        ),
        "source must have 8",
    ),
)
