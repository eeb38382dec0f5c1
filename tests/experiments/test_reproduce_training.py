"""One run: the best epoch's weights, what diverges, predictors that see no other label, networks without attention."""

import time
from itertools import product
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch_geometric.data import Data
from torchmetrics import MeanMetric

from diffusion_mp import APPNPConv, Graph, HeatKernel, IdentityDiffusivity, UniformDiffusivity
from diffusion_mp.diffusivities import GaussianDiffusivity, SymmetricDiffusivity
from diffusion_mp.diffusivities.all_pair import QueryKeyDiffusivity
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.models import CertifiedDIFFormer, DIFFormer, DiffusionGNN, NodeFormer, SGFormer
from diffusion_mp_experiments.reproduce import training
from diffusion_mp_experiments.reproduce.networks import HeatNetwork, Readout, without_attention
from diffusion_mp_experiments.reproduce.predictors import Constant, Diffusion, Labels, LogisticRegression, Predictor
from diffusion_mp_experiments.reproduce.training import Scores, data_hash, made, train
from diffusion_mp_experiments.train.classifiers import NodeClassifier
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule, KNNDataModule
from diffusion_mp_experiments.train.many_runs import quiet_lightning

DIGITS = {
    "class_path": "diffusion_mp_experiments.train.datamodules.KNNDataModule",
    "init_args": {"name": "digits", "k": 5, "per_class": 5, "num_val": 100},
}
GNN = {"class_path": "diffusion_mp.models.DiffusionGNN", "init_args": {"hidden_channels": 16, "dropout": 0.5}}


def config(epochs=8, patience=8, lr=0.05, **more):
    return {"data": DIGITS, "module": {"model": GNN, "lr": lr}, "epochs": epochs, "patience": patience, **more}


def test_a_run_depends_on_its_split_and_seed_and_nothing_else():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (train(config(), "acc", 1, seed, tuning=False) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for result in (first, again, other):
        del result["seconds"], result["memory"]
    assert first == again
    assert first["test"] != other["test"]
    assert (first["epochs"], first["ended"]) == (8, "epochs")


class Said(nn.Module):
    """Says the right classes in its third epoch of training, or in those that are told, and wrong ones otherwise."""

    def __init__(self, y, *right):
        super().__init__()
        self.weight, self.y, self.right = nn.Parameter(torch.zeros(())), y, right or (3,)
        self.register_buffer("epoch", torch.zeros(()))

    def forward(self, x, edge_index, edge_weight):
        if self.training:
            self.epoch += 1
        said = self.y if self.epoch in self.right else (self.y + 1) % 10
        return nn.functional.one_hot(said, 10) + 0 * self.weight


def fitted(model, data, epochs, patience, lr=0.1):
    module = NodeClassifier(model, lr=lr)
    scores = Scores(module)
    with quiet_lightning():
        return module, training._fit(module, data, scores, epochs, patience)


@pytest.fixture(scope="module")
def digits():
    return KNNDataModule("digits", k=5, per_class=5, num_val=100)


def test_the_weights_are_those_of_the_best_epoch_and_patience_ends(digits):
    module, result = fitted(Said(digits.data.y), digits, 30, 4)
    assert result == {"epoch": 3, "epochs": 7, "ended": "patience"}
    assert module.model.epoch == 3


def test_of_epochs_that_are_equally_good_the_first_is_the_best(digits):
    assert fitted(Said(digits.data.y, 2, 5), digits, 30, 4)[1] == {"epoch": 2, "epochs": 6, "ended": "patience"}


class Diverging(Said):
    def forward(self, x, edge_index, edge_weight):
        return super().forward(x, edge_index, edge_weight) * (float("nan") if self.epoch > 4 else 1)


def test_what_diverges_keeps_its_best_epoch(digits):
    assert fitted(Diverging(digits.data.y), digits, 30, 30)[1] == {"epoch": 3, "epochs": 5, "ended": "diverged"}


class Nothing(Said):
    def forward(self, x, edge_index, edge_weight):
        return x[:, :10] * self.weight * float("nan")


def test_nothing_finite_is_no_number(monkeypatch):
    monkeypatch.setattr(training, "made_module", lambda config, data: NodeClassifier(Nothing(data.data.y)))
    result = train(config(), "acc", 0, 0, tuning=True)
    assert (result["epoch"], result["ended"], result["validation"]) == (0, "diverged", None)


def test_every_split_and_seed_draws_weights_of_its_own(monkeypatch):
    drawn = []

    def module(config, data):
        drawn.append(float(torch.rand(())))
        return NodeClassifier(Nothing(data.data.y))

    monkeypatch.setattr(training, "made_module", module)
    for split, seed in product(range(2), repeat=2):
        train(config(), "acc", split, seed, tuning=True)
    assert len(set(drawn)) == 4


class Restless(Said):
    def forward(self, x, edge_index, edge_weight):
        raise ConvergenceError("the state did not come to rest")


def test_a_model_that_does_not_come_to_rest_has_diverged(monkeypatch):
    monkeypatch.setattr(training, "made_module", lambda config, data: NodeClassifier(Restless(data.data.y)))
    result = train(config(), "acc", 0, 0, tuning=False)
    assert result["ended"] == "diverged: the state did not come to rest"
    assert result["validation"] is result["test"] is None


def test_attention_is_replaced_where_there_is_one():
    for make in (DIFFormer, SGFormer, NodeFormer):
        for name, kind in (("identity", IdentityDiffusivity), ("uniform", UniformDiffusivity)):
            model = make(5, 8, 3, heads=2, dropout=0.0).eval()
            x, ring = torch.randn(9, 5), torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
            before = model(x, ring)
            assert without_attention(model, name)
            assert not any(isinstance(module, QueryKeyDiffusivity) for module in model.modules())
            assert any(isinstance(module, kind) for module in model.modules())
            assert (model(x, ring) - before).abs().max() > 1e-4
    assert not without_attention(DiffusionGNN(5, 8, 3), "identity")
    torch.manual_seed(0)
    certified, rest = (CertifiedDIFFormer(5, 8, 3, 4, penalty=penalty).eval() for penalty in ("simple", None))
    rest.load_state_dict(certified.state_dict(), strict=False)
    assert not without_attention(certified, "uniform")
    assert (certified(x, ring) - rest(x, ring)).abs().max() > 1e-5
    assert without_attention(certified, "identity")
    torch.testing.assert_close(certified(x, ring), rest(x, ring))
    with pytest.raises(ValueError, match="has no attention over pairs"):
        train(config(attention="identity"), "acc", 0, 0, tuning=True)


def test_a_difformer_without_attention_and_graph_is_blind_to_other_nodes():
    model = DIFFormer(5, 8, 3, graph=None).eval()
    x = torch.randn(9, 5)
    without_attention(model, "identity")
    torch.testing.assert_close(model(x)[:3], model(x[:3]))


class Few(FullGraphDataModule):
    """Twelve nodes in a ring, three classes, the first of each known."""

    def __init__(self, others=0):
        super().__init__()
        self.others = others

    def load(self):
        y = torch.arange(12) // 4
        known = torch.arange(12) % 4 == 0
        y = torch.where(known, y, (y + self.others) % 3)
        ring = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
        x = nn.functional.one_hot(torch.arange(12) // 4, 5).float()
        masks = {"train_mask": known, "val_mask": ~known, "test_mask": ~known}
        return Data(x=x, y=y, edge_index=torch.cat([ring, ring.flip(0)], 1), **masks)


@pytest.mark.parametrize(
    "make",
    [
        Constant,
        LogisticRegression,
        Labels,
        lambda: Labels(None, 0.9),
        lambda: Labels(None, 0.9, SymmetricDiffusivity(GaussianDiffusivity(row_stochastic=False), diagonal=False)),
        lambda: Diffusion(n_neighbors=2),
    ],
)
def test_predictors_see_training_labels_only(make):
    said = []
    for others in (0, 1):
        torch.manual_seed(0)
        predictor: Predictor = make()
        predictor.fit(Few(others))
        said.append(predictor())
        assert predictor().shape == (12, 3)
    assert torch.equal(*said)


def test_what_predictors_say():
    def of(predictor):
        predictor.fit(Few())
        return predictor()

    torch.testing.assert_close(of(Constant()), torch.full((12, 3), 1 / 3))
    assert (of(LogisticRegression(C=100.0)).argmax(1) == torch.arange(12) // 4).all()
    assert (of(Labels(None, 0.9)).argmax(1)[[1, 5, 9]] == torch.arange(3)).all()
    assert (of(Diffusion(n_neighbors=2)).argmax(1) == torch.arange(12) // 4).all()


def test_logistic_regression_reads_sparse_features_and_leaves_out_absent_classes():
    few = Few()
    few.data.x, dense = few.data.x.to_sparse_csr(), few.data.x
    few.data.train_mask = few.data.train_mask & (few.data.y < 2)
    predictor = LogisticRegression(C=10.0)
    predictor.fit(few)
    assert (predictor().argmax(1) < 2).all()
    labels = few.data.y.where(few.data.train_mask, -1)
    torch.testing.assert_close(predictor(), predictor.scores(dense, Graph.from_data(few.data), labels, 3))


def test_networks_of_the_tables_against_their_formulas():
    graph = Few().data
    x, edges = graph.x.double(), graph.edge_index
    adjacency = torch.eye(12, dtype=torch.float64)
    adjacency[edges[1], edges[0]] = 1
    normalised = adjacency / 3  # every node of a ring has three neighbours, itself one of them
    heat = HeatNetwork(5, 4, 3, t=2.5).double().eval()
    state = torch.relu(heat.encoder(x))
    spread = torch.linalg.matrix_exp(-2.5 * (torch.eye(12) - normalised)) @ state
    torch.testing.assert_close(heat(x, edges), heat.decoder(spread))
    assert isinstance(heat.heat.update, HeatKernel)
    network = Readout(5, 4, 3, alpha=0.2, conv="mlp").double().eval()
    inverse = torch.linalg.inv(torch.eye(12) - 0.8 * normalised)
    torch.testing.assert_close(network(x, edges), 0.2 * inverse @ network.body(x, edges))
    assert isinstance(network.readout, APPNPConv)


def test_the_hash_sees_masks_features_and_layout():
    known = data_hash(Few())
    assert known == data_hash(Few())
    assert data_hash(Few(1)) != known
    masked, sparse, typed = Few(), Few(), Few()
    masked.data.val_mask = masked.data.val_mask.roll(1)
    sparse.data.x = sparse.data.x.to_sparse_csr()
    typed.data.x = typed.data.x.view(torch.int32)  # the same bytes
    assert len({known, data_hash(masked), data_hash(sparse), data_hash(typed)}) == 4
    batches = [torch.zeros(3)], [torch.ones(3)]
    first, second = (SimpleNamespace(val_dataloader=list, test_dataloader=lambda b=b: b) for b in batches)
    assert data_hash(first) != data_hash(second)


def test_what_is_taken_begins_anew():
    scores, metric = Scores(NodeClassifier(nn.Linear(1, 1))), MeanMetric()
    for value in (1.0, 3.0):
        metric.update(value)
        scores.log("val_loss", metric)
        assert scores.take("val_loss") == value


def test_only_what_was_asked_for_is_made():
    with pytest.raises(Exception, match="LightningDataModule"):
        made(pl.LightningDataModule, {"class_path": "diffusion_mp.models.DIFFormer", "init_args": {}})


@pytest.mark.slow
def test_lightning_costs_little_beside_a_bare_loop(digits):
    """CPU time of epochs, the least of several turns each."""

    def model():
        torch.manual_seed(0)
        return DiffusionGNN(64, 64, 10)

    def bare(epochs=60):
        network, data = model(), digits.data
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        start = time.process_time()
        for _ in range(epochs):
            optimizer.zero_grad()
            logits = network.train()(data.x, data.edge_index)
            nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
            with torch.no_grad():
                logits = network.eval()(data.x, data.edge_index)
                float((logits.argmax(1) == data.y)[data.val_mask].float().mean())
                float(nn.functional.cross_entropy(logits[data.val_mask], data.y[data.val_mask]))
        return time.process_time() - start

    def light(epochs=60):
        start = time.process_time()
        fitted(model(), digits, epochs, epochs, lr=0.01)
        return time.process_time() - start

    turns = [(bare(), light()) for _ in range(5)]
    ours, least = min(turn[1] for turn in turns), min(turn[0] for turn in turns)
    assert ours < 2.5 * least, (ours, least)
