"""The data modules of tables, and what trains on them: batches of graphs, snapshots, several labels."""

from functools import partial
from itertools import chain

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

from diffusion_mp.graph import Graph
from diffusion_mp.models import CertifiedTransformer, DiffusionGNN, GatedGCN
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments import train
from diffusion_mp_experiments.graphs import (
    SumEdgeFeatures,
    fit_forecast,
    load_heterophilous,
    load_ogb,
    load_snapshots,
)
from diffusion_mp_experiments.graphs.node_sets import visible_labels
from diffusion_mp_experiments.reproduce.networks import ClassicGNN
from diffusion_mp_experiments.reproduce.predictors import Constant, NoCorrection
from diffusion_mp_experiments.train.batch_modules import BatchDataModule
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule
from small_sets import (
    make_chickenpox,
    make_facebook,
    make_heterophilous,
    make_ogb,
    make_series,
    make_synmol,
    make_tu,
)
from training_runs import quiet_trainer


def learned(module, data, epochs):
    with seeded(0):
        trainer = quiet_trainer(max_epochs=epochs)
        trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data, verbose=False)[0]


@pytest.fixture
def chickenpox(tmp_path):
    make_chickenpox(tmp_path, FX=make_series(54))
    return str(tmp_path)


def test_a_published_split_and_its_tuning(tmp_path):
    make_heterophilous(tmp_path)
    masks = load_heterophilous(tmp_path, "small")
    for tuning, tested in ((False, masks.test_mask), (True, masks.val_mask)):
        module = train.HeterophilousDataModule(
            str(tmp_path), "small", split=1, tuning=tuning, normalize_features=True
        )
        assert torch.equal(module.data.train_mask, masks.train_mask[:, 1])
        assert torch.equal(module.data.test_mask, tested[:, 1])
        assert (module.num_features, module.num_classes) == (4, 3)
    with pytest.raises(ValueError, match="column"):
        train.HeterophilousDataModule(str(tmp_path), "small", split=2).load()


def test_few_labels_on_neighbours():
    options = {"name": "digits", "k": 4, "per_class": 3, "num_val": 50}
    results, tuning = (
        train.KNNDataModule(**options, split=2, tuning=tuning).data
        for tuning in (False, True)
    )
    assert results.edge_index is tuning.edge_index  # made once
    for data, side in ((results, False), (tuning, True)):
        assert data.y[data.train_mask].bincount().tolist() == [3] * 10
        assert int(data.val_mask.sum()) == 50
        used = data.train_mask | data.val_mask | data.test_mask
        assert (visible_labels(data.y, side)[used] >= 0).all()
    assert not (results.test_mask & (tuning.val_mask | tuning.test_mask)).any()
    module = train.KNNDataModule(**options, num_parts=5)
    parts = list(module.train_dataloader())
    assert len(parts) == 5
    assert sum(part.num_nodes for part in parts) == module.data.num_nodes
    assert sum(int(part.train_mask.sum()) for part in parts) == 30
    assert next(iter(module.val_dataloader())) is module.data


class Several(FullGraphDataModule):
    """Three tasks; the first is the sign of the first feature."""

    def load(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        mask = torch.arange(40) % 2 == 0
        tasks = [x[:, 0] > 0, x[:, 1] > x[:, 2], torch.zeros(40) > 0]
        return Data(
            x=x,
            edge_index=torch.arange(40).repeat(2, 1),
            y=torch.stack(tasks, 1).float(),
            train_mask=mask,
            val_mask=~mask,
            test_mask=~mask,
        )


def test_several_labels_of_a_node_are_learned():
    data = Several()
    assert data.num_classes == 3
    with seeded(0):
        module = train.NodeClassifier(
            DiffusionGNN(4, 16, 3, conv="mlp", dropout=0.0), metric="roc_auc"
        )
    assert learned(module, data, 60)["test_roc_auc"] > 0.9


def test_proteins_and_papers_in_the_format_of_ogb(tmp_path, generator):
    make_ogb("ogbn-proteins")(tmp_path)
    make_ogb("ogbn-arxiv")(tmp_path)
    module = train.OgbDataModule(str(tmp_path), "ogbn-proteins")
    graph = load_ogb(tmp_path, "ogbn-proteins")
    assert (module.num_features, module.num_classes) == (8, 112)
    assert torch.equal(module.data.x, SumEdgeFeatures()(graph).x)
    logits = torch.randn(4, 112, generator=torch.Generator().manual_seed(0))
    both = (graph.y.min(0).values == 0) & (graph.y.max(0).values == 1)
    assert 0 < int(both.sum()) < 112  # some tasks have one answer only
    assert 0 < float(train.TaskMetric("roc_auc")(logits, graph.y)) < 1
    papers = train.OgbDataModule(str(tmp_path), "ogbn-arxiv", tuning=True)
    assert papers.data.is_undirected()
    assert papers.num_classes == 40
    assert torch.equal(papers.data.test_mask, papers.data.val_mask)
    edges = torch.randint(5, (2, 30), generator=generator)
    attr = torch.randn(30, 3, generator=generator)
    data = SumEdgeFeatures()(Data(edge_index=edges, edge_attr=attr, num_nodes=6))
    expected = torch.zeros(6, 3).index_add(0, edges[1], attr)
    torch.testing.assert_close(data.x, expected)


class Sizes(BatchDataModule):
    """Graphs of two sizes, which is their class."""

    def parts(self):
        ring = {
            n: torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in (3, 5)
        }
        x = {n: torch.full((n, 1), float(n)) for n in ring}
        graphs = [
            Data(x=x[n], edge_index=ring[n], y=torch.tensor([n // 4]))
            for n in (3, 5) * 10
        ]
        return graphs[:10], graphs[10:14], graphs[14:]


def test_batches_of_graphs_are_learned():
    data = Sizes(batch_size=4, split=0, tuning=False)
    assert (data.num_features, data.num_classes) == (1, 2)
    assert [batch.num_graphs for batch in data.train_dataloader()] == [4, 4, 2]
    orders = {
        tuple(torch.cat([batch.y for batch in data.train_dataloader()]).tolist())
        for _ in range(9)
    }
    assert len(orders) > 1
    first, second = (list(data.test_dataloader()) for _ in range(2))
    assert [batch.num_graphs for batch in first] == [4, 2]
    assert first[0].graph is second[0].graph  # what is known of a graph stays known
    with seeded(0):
        module = train.GraphClassifier(
            DiffusionGNN(1, 8, 2, conv="gin", dropout=0.0, task="graph"), lr=0.02
        )
    assert learned(module, data, 30)["test_acc"] == 1
    predictor = Constant()
    predictor.fit(data)
    assert predictor(first[0].x, first[0].graph).tolist() == [[0.5, 0.5]] * 4


class Ends(nn.Module):
    """Reads edges whose features are the numbers of their ends."""

    reads = ("edge_attr",)

    def forward(self, x, edges, edge_weight=None, *, edge_attr):
        edge_index = edges.edge_index if isinstance(edges, Graph) else edges
        assert torch.equal(edge_attr, x[edge_index, 0].T)
        return x


def test_features_of_edges_come_in_the_order_of_edges():
    with seeded(0):
        graphs = []
        for size in (4, 1, 7):
            x = torch.arange(size).float()[:, None] + 10 * size
            edges = torch.randint(size, (2, 3 * size))
            y = torch.tensor([0])
            graphs.append(Data(x, edges, x[edges, 0].T, y))
        module = Sizes(batch_size=None, split=0, tuning=False)
        (batch,) = Sizes.together(Sizes(3, 0, False), graphs)
        certified = CertifiedTransformer(1, 4, 2, edge_dim=2, task="graph")
    assert module.num_edge_features is None
    for classifier in (train.GraphClassifier, train.NodeClassifier):
        assert classifier(Ends())(batch) is batch.x
    alone = [certified(g.x, g.edge_index, edge_attr=g.edge_attr) for g in graphs]
    together = train.GraphClassifier(certified)(batch)
    torch.testing.assert_close(together, torch.cat(alone))
    without_edge_dim = train.GraphClassifier(GatedGCN(1, 4, 2, task="graph"))
    assert without_edge_dim(batch).shape == (3, 2)  # it reads none


@pytest.mark.parametrize(
    ("conv", "edge_dim"),
    [
        *zip(("gcn", "sage", "gine"), [None] * 3, strict=True),
        *zip(("gine", "gat", "gatedgcn"), [3] * 3, strict=True),
    ],
)
def test_a_classic_network_does_not_depend_on_the_order_of_edges(conv, edge_dim):
    with seeded(0):
        x = torch.randn(7, 5)
        edge_index = torch.randint(7, (2, 13))
        edge_attr = torch.randn(13, 3)
        model = ClassicGNN(
            5, 6, 2, 3, conv=conv, edge_dim=edge_dim, heads=2, dropout=0.5
        )
        order = torch.randperm(13)
    edges = {} if edge_dim is None else {"edge_attr": edge_attr}
    logits = model.eval()(x, edge_index, **edges)
    assert logits.shape == (7, 2)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    edges = {name: value[order] for name, value in edges.items()}
    torch.testing.assert_close(model(x, edge_index[:, order], **edges), logits)
    assert ClassicGNN(5, 6, 2, conv=conv, task="graph")(
        x[:1], edge_index[:, :0]
    ).shape == (1, 2)
    with pytest.raises(
        ValueError, match="edge_dim goes with the layers that read edge_attr"
    ):
        ClassicGNN(5, 6, 2, conv="sage", edge_dim=3)


@pytest.mark.parametrize(
    ("conv", "make"), [("gcn", GCNConv), ("sage", partial(SAGEConv, root_weight=False))]
)
def test_classic_layers_are_those_of_pyg(conv, make):
    with seeded(0):
        x = torch.randn(7, 6)
        edge_index = torch.randint(7, (2, 13))
        ours = ClassicGNN(5, 6, 2, conv=conv).convs[0]
        theirs = make(6, 6)
    weight, bias = sorted(theirs.parameters(), key=torch.Tensor.dim, reverse=True)
    ours.load_state_dict({"value.weight": weight, "bias": bias})
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


def test_the_score_counts_graphs_of_all_batches_alike():
    """Of 4 + 2 graphs the first four are wrong: a third is right, not the half of the mean over batches."""

    class Fixed(nn.Module):
        def forward(self, x, graph):
            right = x[graph.ptr[:-1], 0] > 4
            wrong = graph.num_graphs == 4
            return nn.functional.one_hot((right != wrong).long(), 2).float()

    data = Sizes(batch_size=4, split=0, tuning=False)
    data.val_dataloader = data.test_dataloader
    (actual,) = quiet_trainer().validate(
        train.GraphClassifier(Fixed()), datamodule=data, verbose=False
    )
    assert actual["val_acc"] == pytest.approx(1 / 3)
    assert actual["val_loss"] == pytest.approx(2 / 3 + 0.3132617, abs=1e-5)
    assert 1 / 3 - 1 / 12 < actual["val_score"] < 1 / 3


def test_sets_of_graphs_in_parts(tmp_path):
    make_tu(tmp_path)
    module = train.TUDataModule(str(tmp_path), "SMALL", train=0.5, val=0.4)
    with pytest.raises(ValueError, match="nothing to split"):
        train.TUDataModule(str(tmp_path), "SMALL", tuning=True).parts()
    assert sum(len(part) for part in module.parts()) == 3
    make_synmol(tmp_path)
    (first, val, test) = train.SynMolDataModule(str(tmp_path), val=0.5).parts()
    assert (len(first), len(val), len(test)) == (1, 1, 1)
    assert test[0].num_nodes == 3
    make_facebook(tmp_path)
    data = train.FacebookDataModule(str(tmp_path), "small", train=0.5, val=0.25).data
    sides = [visible_labels(data.y, side) >= 0 for side in (False, True)]
    assert torch.equal(data.train_mask | data.val_mask | data.test_mask, sides[0])


def test_the_first_snapshots_train_and_windows_roll_before_the_test(chickenpox):
    snapshots = load_snapshots(chickenpox, "chickenpox")
    parts = train.SnapshotDataModule(chickenpox, base="ridge").parts()
    assert [len(part) for part in parts] == [10, 10, 30]
    in_order = zip(snapshots, chain(*parts), strict=True)
    assert all(torch.equal(a.y, b.y) for a, b in in_order)
    forecast = fit_forecast("ridge", snapshots[:10])
    torch.testing.assert_close(parts[2][3].base, forecast(snapshots[23].x))
    observed = []
    for split in range(4):
        past, val, test = train.SnapshotDataModule(
            chickenpox, split=split, tuning=True
        ).parts()
        assert [len(past), len(val)] == [4 * (split + 1), 4]
        assert torch.equal(past[-1].y, snapshots[len(past) - 1].y)
        assert all(torch.equal(a.y, b.y) for a, b in zip(val, test, strict=True))
        observed += val
    assert torch.equal(
        observed[-1].y, snapshots[19].y
    )  # nothing of the test is looked at
    with pytest.raises(ValueError, match="which leave none to train"):
        train.SnapshotDataModule(chickenpox, windows=30, tuning=True).parts()
    data = train.SnapshotDataModule(chickenpox, base="own")
    predictor = NoCorrection()
    predictor.fit(data)
    (actual,) = quiet_trainer().test(
        train.Forecaster(predictor), datamodule=data, verbose=False
    )
    trained, _, test = data.parts()
    mine = torch.stack([snapshot.y for snapshot in trained]).mean(0)
    errors = torch.stack([snapshot.y for snapshot in test]) - mine
    assert actual["test_mse"] == pytest.approx(float(errors.square().mean()))


def test_a_forecast_begins_at_its_base_and_learns_the_rest(chickenpox):
    data = train.SnapshotDataModule(chickenpox, base="mean")
    for snapshot in (snapshot for number in range(3) for snapshot in data.part(number)):
        snapshot.y = snapshot.base + snapshot.x[:, 0]
    with seeded(0):
        module = train.Forecaster(
            DiffusionGNN(4, 16, 1, conv="mlp", dropout=0.0), lr=0.02
        )
    (batch,) = data.train_dataloader()
    assert torch.equal(module(batch), batch.base)
    actual = learned(module, data, 200)
    (batch,) = data.test_dataloader()
    expected = (module.eval()(batch) - batch.y).square().mean()
    assert actual["test_mse"] == pytest.approx(expected.item())
    assert actual["test_mse"] < 0.1
    (val,) = quiet_trainer().validate(module, datamodule=data, verbose=False)
    assert -val["val_mse"] - 1 / 60 < val["val_score"] < -val["val_mse"]
    (batch,) = train.SnapshotDataModule(chickenpox).train_dataloader()
    with pytest.raises(
        ValueError,
        match=r"The model returned \[30, 2\] for 30 nodes; it must return one number",
    ):
        train.Forecaster(DiffusionGNN(4, 8, 2, conv="mlp")).training_step(batch, 0)


@pytest.mark.parametrize(
    "make", [lambda folder: Several(), lambda folder: train.SnapshotDataModule(folder)]
)
def test_what_was_validated_first_can_be_trained_on(chickenpox, make):
    data = make(chickenpox)
    with torch.inference_mode():
        assert data.num_features == 4
    width, options = (3, {"metric": "ap"}) if isinstance(data, Several) else (1, {})
    with seeded(0):
        module = type(data).trains(DiffusionGNN(4, 8, width, conv="mlp"), **options)
        trainer = quiet_trainer(max_epochs=1)
        trainer.validate(module, datamodule=data, verbose=False)
        trainer.fit(module, datamodule=data)
