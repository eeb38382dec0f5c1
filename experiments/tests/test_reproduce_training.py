"""One run: best weights, divergence, states, predictors that see no other label, the networks of tables."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected
from torchmetrics import MeanMetric

from diffusion_mp import (
    Graph,
    IdentityDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    GaussianDiffusivity,
    SymmetricDiffusivity,
)
from diffusion_mp.diffusivities.all_pair import QueryKeyDiffusivity
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError
from diffusion_mp.models import (
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionGNN,
    NodeFormer,
    SGFormer,
)
from diffusion_mp.testing import check_coupling
from diffusion_mp_experiments.reproduce import training
from diffusion_mp_experiments.reproduce.networks import (
    Diagonalized,
    DropoutSeenDIFFormer,
    HeatNetwork,
    Readout,
    without_attention,
)
from diffusion_mp_experiments.reproduce.predictors import (
    Constant,
    Diffusion,
    Labels,
    LogisticRegression,
)
from diffusion_mp_experiments.reproduce.training import (
    LastLogged,
    build,
    data_hash,
    measured,
    state_measures,
    train,
)
from diffusion_mp_experiments.train.classifiers import NodeClassifier
from diffusion_mp_experiments.train.datamodules import (
    FullGraphDataModule,
    KNNDataModule,
)
from helpers import randn

DIGITS = {
    "class_path": "diffusion_mp_experiments.train.datamodules.KNNDataModule",
    "init_args": {"name": "digits", "k": 5, "per_class": 5, "num_val": 100},
}
GNN = {
    "class_path": "diffusion_mp.models.DiffusionGNN",
    "init_args": {"hidden_channels": 16, "dropout": 0.5},
}
PREDICTORS = [
    Constant,
    lambda: LogisticRegression(C=100.0),
    Labels,
    lambda: Labels(None, 0.9),
    lambda: Labels(
        None,
        0.9,
        SymmetricDiffusivity(GaussianDiffusivity(row_stochastic=False), diagonal=False),
    ),
    lambda: Diffusion(n_neighbors=2),
]


def test_numbers_are_spread_as_shares_of_the_least_and_the_largest():
    """The limit in closed form, on a path of five nodes; the sixth has no neighbours, and the mean."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    y = torch.tensor([2.0, math.nan, math.nan, math.nan, 6.0, math.nan])
    data = Data(torch.ones(6, 1), torch.cat([edges, edges.flip(0)], 1), y=y)
    found = Labels(None, 0.9).scores(data, 0)
    adjacency = torch.zeros(5, 5)
    adjacency[data.edge_index[0], data.edge_index[1]] = 1
    root = adjacency.sum(1).rsqrt()
    limit = torch.linalg.inv(torch.eye(5) - 0.9 * root[:, None] * adjacency * root)
    share = limit[:, 4] / (limit[:, 0] + limit[:, 4])
    expected = torch.cat([2 + 4 * share, torch.tensor([4.0])])
    torch.testing.assert_close(found, expected.unsqueeze(1))


def config(epochs=8, patience=8, lr=0.05, **more):
    return {
        "data": DIGITS,
        "module": {"model": GNN, "lr": lr},
        "epochs": epochs,
        "patience": patience,
        **more,
    }


def test_a_run_depends_on_its_split_and_seed_and_nothing_else(monkeypatch):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (
        train(config(), "acc", 1, seed, tuning=False) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for result in (first, again, other):
        for name in ("seconds", "memory", "epoch_seconds"):
            del result[name]
    assert first == again
    assert first["test"] != other["test"]
    assert (first["epochs"], first["ended"]) == (8, "epochs")
    drawn = []

    def module(config, data):
        drawn.append(float(torch.rand(())))
        return NodeClassifier(Nothing(data.data.y))

    monkeypatch.setattr(training, "build_module", module)
    for split, seed in product(range(2), repeat=2):
        train(config(), "acc", split, seed, tuning=True)
    assert len(set(drawn)) == 4


class Scripted(nn.Module):
    """Predicts the right classes in its third epoch of training, or in the given ones, and wrong ones otherwise."""

    def __init__(self, y, *right):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.y = y
        self.right = right or (3,)
        self.register_buffer("epoch", torch.zeros(()))

    def forward(self, x, edge_index, edge_weight):
        if self.training:
            self.epoch += 1
        predicted = self.y if self.epoch in self.right else (self.y + 1) % 10
        return nn.functional.one_hot(predicted, 10) + 0 * self.weight


class Diverging(Scripted):
    def forward(self, x, edge_index, edge_weight):
        return super().forward(x, edge_index, edge_weight) * (
            float("nan") if self.epoch > 4 else 1
        )


class Nothing(Scripted):
    def forward(self, x, edge_index, edge_weight):
        return x[:, :10] * self.weight * float("nan")


class Restless(Scripted):
    def forward(self, x, edge_index, edge_weight):
        raise ConvergenceError("the state did not come to rest")


@pytest.mark.parametrize(
    ("model", "right", "patience", "best", "epochs", "ended"),
    [
        (Scripted, (), 4, 3, 7, "patience"),
        (Scripted, (2, 5), 4, 2, 6, "patience"),  # the first of equals
        (Diverging, (), 30, 3, 5, "diverged"),
    ],
)
def test_the_weights_are_those_of_the_best_epoch(
    model, right, patience, best, epochs, ended
):
    data = KNNDataModule(**DIGITS["init_args"])
    module = NodeClassifier(model(data.data.y, *right))
    result = training._fit(module, data, LastLogged(module), 30, patience)
    curve = result.pop("curve")
    assert result.pop("epoch_seconds") > 0
    assert result == {"epoch": best, "epochs": epochs, "ended": ended}
    # Where a score is not finite there is no point.
    assert len(curve) <= epochs
    assert curve[best - 1] == max(curve)
    assert module.model.epoch == best


def test_the_time_ends_a_training_after_an_epoch():
    data = KNNDataModule(**DIGITS["init_args"])
    module = NodeClassifier(Scripted(data.data.y))
    result = training._fit(module, data, LastLogged(module), 30, 4, end=0.0)
    assert (result["epochs"], result["ended"]) == (1, "time")


@pytest.mark.parametrize(
    ("model", "tuning", "ended"),
    [
        (Nothing, True, "diverged"),
        (Restless, False, "diverged: the state did not come to rest"),
    ],
)
def test_without_a_finite_score_there_is_no_number(monkeypatch, model, tuning, ended):
    monkeypatch.setattr(
        training,
        "build_module",
        lambda config, data: NodeClassifier(model(data.data.y)),
    )
    result = train(config(), "acc", 0, 0, tuning=tuning)
    assert (result["epoch"], result["ended"]) == (0, ended)
    assert result["validation"] is result["test"] is None


def test_attention_is_replaced_where_there_is_one():
    for make in (DIFFormer, SGFormer, NodeFormer):
        for name, kind in (
            ("identity", IdentityDiffusivity),
            ("uniform", UniformDiffusivity),
        ):
            model = make(5, 8, 3, heads=2, dropout=0.0).eval()
            x = torch.randn(9, 5)
            ring = torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
            before = model(x, ring)
            assert without_attention(model, name)
            assert not any(
                isinstance(module, QueryKeyDiffusivity) for module in model.modules()
            )
            assert any(isinstance(module, kind) for module in model.modules())
            assert (model(x, ring) - before).abs().max() > 1e-4
    assert not without_attention(DiffusionGNN(5, 8, 3), "identity")
    torch.manual_seed(0)
    certified, rest = (
        CertifiedDIFFormer(5, 8, 3, 4, penalty=penalty).eval()
        for penalty in ("simple", None)
    )
    rest.load_state_dict(certified.state_dict(), strict=False)
    assert not without_attention(certified, "uniform")
    assert (certified(x, ring) - rest(x, ring)).abs().max() > 1e-5
    assert without_attention(certified, "identity")
    torch.testing.assert_close(certified(x, ring), rest(x, ring))
    with pytest.raises(ValueError, match="has no attention over pairs"):
        train(config(attention="identity"), "acc", 0, 0, tuning=True)
    blind = DIFFormer(5, 8, 3, graph=None).eval()
    without_attention(blind, "identity")
    torch.testing.assert_close(blind(x)[:3], blind(x[:3]))


class Few(FullGraphDataModule):
    """Twelve nodes in a ring, three classes, the first node of each labelled; `others` shifts the other labels."""

    def __init__(self, others=0):
        super().__init__()
        self.others = others

    def load(self):
        y = torch.arange(12) // 4
        labelled = torch.arange(12) % 4 == 0
        y = torch.where(labelled, y, (y + self.others) % 3)
        ring = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
        x = nn.functional.one_hot(torch.arange(12) // 4, 5).float()
        masks = {"train_mask": labelled, "val_mask": ~labelled, "test_mask": ~labelled}
        return Data(x=x, y=y, edge_index=torch.cat([ring, ring.flip(0)], 1), **masks)


@pytest.mark.parametrize("make", PREDICTORS)
def test_predictors_see_training_labels_only(make):
    found = []
    for others in (0, 1):
        torch.manual_seed(0)
        predictor = make()
        few = Few(others)
        predictor.fit(few)
        found.append(predictor(few.data.x, few.data.edge_index))
        assert found[-1].shape == (12, 3)
    assert torch.equal(*found)
    scores = found[0]
    if isinstance(predictor, Constant):
        torch.testing.assert_close(scores, torch.full((12, 3), 1 / 3))
    elif isinstance(predictor, Labels):  # the neighbours of the labelled nodes
        assert (scores.argmax(1)[[1, 5, 9]] == torch.arange(3)).all()
    else:
        assert (scores.argmax(1) == torch.arange(12) // 4).all()


def test_networks_against_their_formulas_and_logistic_regression_with_absent_classes():
    graph = Few().data
    x = graph.x.double()
    edges = graph.edge_index
    adjacency = torch.eye(12, dtype=torch.float64)
    adjacency[edges[1], edges[0]] = 1
    # Every node of a ring has three neighbours, itself one of them.
    normalised = adjacency / 3
    heat = HeatNetwork(5, 4, 3, t=2.5).double().eval()
    state = torch.relu(heat.encoder(x))
    spread = torch.linalg.matrix_exp(-2.5 * (torch.eye(12) - normalised)) @ state
    torch.testing.assert_close(heat(x, edges), heat.decoder(spread))
    network = Readout(5, 4, 3, alpha=0.2, conv="mlp").double().eval()
    inverse = torch.linalg.inv(torch.eye(12) - 0.8 * normalised)
    torch.testing.assert_close(
        network(x, edges), 0.2 * inverse @ network.body(x, edges)
    )
    nodes_of_ring = Few()
    nodes_of_ring.data.x, dense = (
        nodes_of_ring.data.x.to_sparse_csr(),
        nodes_of_ring.data.x,
    )
    nodes_of_ring.data.train_mask = nodes_of_ring.data.train_mask & (
        nodes_of_ring.data.y < 2
    )
    predictor = LogisticRegression(C=10.0)
    predictor.fit(nodes_of_ring)
    assert (predictor().argmax(1) < 2).all()
    labels = nodes_of_ring.data.y.where(nodes_of_ring.data.train_mask, -1)
    scores = predictor.scores(Data(x=dense, y=labels), 3)
    torch.testing.assert_close(predictor(), scores)


def test_the_hash_sees_masks_features_and_layout():
    labelled = data_hash(Few())
    assert labelled == data_hash(Few())
    assert data_hash(Few(1)) != labelled
    masked = Few()
    sparse = Few()
    typed = Few()
    masked.data.val_mask = masked.data.val_mask.roll(1)
    sparse.data.x = sparse.data.x.to_sparse_csr()
    typed.data.x = typed.data.x.view(torch.int32)  # the same bytes
    assert len({labelled, data_hash(masked), data_hash(sparse), data_hash(typed)}) == 4
    tested = [SimpleNamespace(val_dataloader=list) for _ in range(2)]
    for number, module in enumerate(tested):
        module.test_dataloader = partial(list, [torch.tensor(number)])
    assert len(set(map(data_hash, tested))) == 2
    with pytest.raises(Exception, match="LightningDataModule"):
        build(
            pl.LightningDataModule,
            {"class_path": "diffusion_mp.models.DIFFormer", "init_args": {}},
        )
    logged = LastLogged(NodeClassifier(nn.Linear(1, 1)))
    metric = MeanMetric()
    for value in (1.0, 3.0):
        metric.update(value)
        logged.log("val_loss", metric)
        assert logged.take("val_loss") == value


@pytest.fixture
def graph():
    return Graph(
        7, to_undirected(torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 3]]))
    )


def test_measures_are_their_formulas(graph):
    z = torch.randn(7, 3, dtype=torch.double)
    dense = torch.eye(7, dtype=torch.double)
    dense[graph.edge_index[0], graph.edge_index[1]] = 1
    root = dense.sum(1).rsqrt().diag()
    energy = float(torch.trace(z.T @ (torch.eye(7) - root @ dense @ root) @ z))
    square = float(z.square().sum())
    share = torch.linalg.svdvals(z).square() / square
    actual = state_measures(z, graph)
    spread = float((z - z.mean(0)).square().sum()) / square
    rank = math.exp(-float((share * share.log()).sum()))
    assert list(actual.values()) == pytest.approx(
        [energy, energy / square, spread, rank]
    )
    alike = state_measures(torch.ones(7, 3), graph)
    assert (alike["spread"], alike["rank"]) == pytest.approx((0, 1), abs=1e-12)
    assert state_measures(torch.zeros(7, 3), graph)["spread"] == 0
    model = DIFFormer(5, 4, 3, num_layers=3).eval()
    x = torch.randn(7, 5)
    with measured(model) as states:
        model(x, graph)
        model(x, graph)
    assert {len(values) for values in states.values()} == {4}
    first = torch.relu(model.norms[0](model.encoder(x)))
    assert states["spread"][0] == pytest.approx(state_measures(first, graph)["spread"])
    with measured(model) as states:
        model(x, batch=torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert not states["rank"]  # two graphs have no spread in common


def test_dropout_that_the_attention_sees_is_none_in_evaluation(graph):
    torch.manual_seed(0)
    plain = DIFFormer(5, 4, 3, num_layers=2)
    torch.manual_seed(0)
    with_dropout = DropoutSeenDIFFormer(5, 4, 3, num_layers=2, dropout=0.5)
    x = torch.randn(7, 5)
    read = []
    assert torch.equal(with_dropout.eval()(x, graph), plain.eval()(x, graph))
    with_dropout.train().convs[0].diffusivity.register_forward_hook(
        lambda module, args, out: read.append(args[0])
    )
    with_dropout(x, graph)
    assert (read[0] == 0).float().mean() > 0.2


def pixels() -> SymmetricDiffusivity:
    kernel = GaussianDiffusivity(
        bandwidth=0.8, normalize=None, measure="distance", row_stochastic=False
    )
    return SymmetricDiffusivity(kernel, diagonal=False)


def test_it_is_the_coupling_by_the_laws_and_made_anew_where_its_inputs_change():
    x = randn(13, 3)
    kept = Diagonalized(pixels())(x)
    check_coupling(kept)
    torch.testing.assert_close(kept.to_dense(), pixels()(x).to_dense())
    x = randn(9, 2)
    edges = torch.tensor([[0, 1, 3, 4], [1, 0, 4, 3]])
    both = Diagonalized(pixels() + AdjacencyDiffusivity("sym", direction="undirected"))
    first = both(x, Graph.coerce(x, edges))
    assert both(x.clone(), Graph.coerce(x, edges.clone())) is first
    assert both(x, Graph.coerce(x, edges[:, :2])) is not first
    again = both(x, Graph.coerce(x, edges))
    x[0] += 1.0  # in place: the tensor is the same one, what it holds is not
    assert both(x, Graph.coerce(x, edges)) is not again


def test_one_matrix_is_diagonalised_once_and_what_has_no_real_spectrum_is_refused():
    first, again = (Diagonalized(pixels())(randn(12, 3, seed=5)) for _ in range(2))
    assert torch.equal(first.modes, again.modes)
    assert first.rates is again.rates
    model = CertifiedDIFFormer(
        3,
        16,
        2,
        num_layers=None,
        penalty=None,
        graph=False,
        inputs=Diagonalized(pixels()),
    )
    assert not without_attention(model, "identity")
    with pytest.raises(
        CouplingMismatchError,
        match="Diagonalized needs a symmetric coupling of one head",
    ):
        Diagonalized(GaussianDiffusivity())(randn(5, 2))


@pytest.mark.parametrize("centre", [False, True])
def test_the_state_at_rest_is_the_dense_solve_and_where_the_steps_lead(centre):
    torch.manual_seed(0)
    options = {
        "num_layers": None,
        "penalty": None,
        "constraint": None,
        "graph": False,
        "mu": 7.0,
        "centre": centre,
    }
    x = randn(13, 3)
    model = CertifiedDIFFormer(
        3, 16, 2, inputs=Diagonalized(pixels()), **options
    ).double()
    source = model.encoder(x)
    source = source - source.mean(0) if centre else source
    coupling = pixels()(x)
    laplacian = torch.diag(coupling.degree()[:, 0]) - coupling.to_dense()[0]
    system = (
        model.conv.update.beta() * torch.eye(13, dtype=x.dtype)
        + model.conv.mu() * laplacian
    )
    expected = model.decoder(
        torch.linalg.solve(system, model.conv.update.beta() * source)
    )
    weight = randn(13, 2, seed=2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    result = model(x)
    torch.testing.assert_close(result, expected)
    actual, exact = (
        torch.autograd.grad((weight * logits).sum(), parameters)
        for logits in (result, expected)
    )
    torch.testing.assert_close(actual, exact)
    # No eigenvectors: step after step.
    iterated = CertifiedDIFFormer(3, 16, 2, inputs=pixels(), **options).double()
    iterated.load_state_dict(model.state_dict())
    torch.testing.assert_close(iterated(x), result, rtol=1e-8, atol=1e-9)
    start, rest = model.energies(x)
    assert rest < start
