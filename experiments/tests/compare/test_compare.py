"""Comparisons from data to predictions."""

import csv
import json
import math
import shutil
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import stochastic_blockmodel_graph

from diffusion_mp.models import DiffusionGNN
from diffusion_mp_experiments.compare import Comparison, compare, comparison
from diffusion_mp_experiments.compare.comparison import (
    kept_module,
    table_folder,
    table_of,
)
from diffusion_mp_experiments.compare.data import with_labels_in_split
from diffusion_mp_experiments.compare.plan import Plan
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.compare.report import hurried
from diffusion_mp_experiments.reproduce.harness import searches
from diffusion_mp_experiments.reproduce.table import load_table
from diffusion_mp_experiments.reproduce.training import train
from diffusion_mp_experiments.train import LinkPredictor
from diffusion_mp_experiments.train.cli import main
from diffusion_mp_experiments.train.many_runs import Workers

ROWS = ["constant", "linear", "gcn"]


def blocks(nodes: int = 60) -> Data:
    """Return a graph of two blocks, whose features say little."""
    torch.manual_seed(0)
    edge_index = stochastic_blockmodel_graph(
        [nodes // 2, nodes // 2], [[0.3, 0.02], [0.02, 0.3]]
    )
    y = torch.arange(nodes) // (nodes // 2)
    return Data(x=torch.randn(nodes, 4) + 0.5 * y[:, None], edge_index=edge_index, y=y)


def problems() -> dict[str, Problem]:
    data = blocks()
    names = tuple(map(str, range(60)))
    graphs = []
    for seed in range(30):
        torch.manual_seed(seed)
        edge_index = torch.randint(6, (2, 14))
        edge_attr = torch.randn(14, 2)
        x = torch.randn(6, 3)
        y = torch.tensor([seed % 2])
        graphs.append(Data(x=x + y, edge_index=edge_index, edge_attr=edge_attr, y=y))
    numbers = data.x.sum(1) + data.y
    of_graphs = [Data(**{**graph, "y": graph.x.mean().view(1)}) for graph in graphs]
    few = tuple(map(str, range(30)))
    plain = [
        Data(x=graph.x, edge_index=graph.edge_index, y=graph.y) for graph in graphs
    ]
    with_features = Data(**{**data}, edge_attr=torch.randn(data.num_edges, 2))
    return {
        "nodes": Problem("node", ("a", "b"), [data], names),
        "edge features": Problem("node", ("a", "b"), [with_features], names),
        "graphs without edge features": Problem("graph", ("a", "b"), plain, few),
        "rows": Problem("node", ("a", "b"), [Data(x=data.x, y=data.y)], names),
        "numbers": Problem(
            "node", (), [Data(x=data.x, y=numbers, edge_index=data.edge_index)], names
        ),
        "graphs": Problem("graph", ("a", "b"), graphs, few),
        "numbers of graphs": Problem("graph", (), of_graphs, few),
        "links": Problem(
            "link", (), [Data(x=data.x, edge_index=data.edge_index)], names
        ),
    }


CASES = [
    (name, row.name)
    for name, problem in problems().items()
    for row in load_table(table_folder(problem)).rows
]


@pytest.mark.parametrize(("name", "row"), CASES)
def test_every_row_trains_on_every_kind_of_data(
    name: str, row: str, tmp_path: Path
) -> None:
    problem = problems()[name]
    problem.save(tmp_path / "problem.npz")
    table = replace(table_of(problem, tmp_path, None, 0, [row]), epochs=2, trials=1)
    settings = searches(table, table.rows[0])[0].settings[0]
    config = table.config(table.rows[0], settings)
    path = None if table.rows[0].model is None else tmp_path / "kept.safetensors"
    for tuning in (True, False):
        record = train(config, table.metric.name, 0, 0, tuning, save=path)
        score = record["validation"] if tuning else record["test"]
        assert score is not None
        assert np.isfinite(score)
    # The kept model is read by another process than the one that has trained it.
    assert not kept_module(config, tmp_path / "kept.safetensors").training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison of nodes.csv and edges.csv, made by the command."""
    source = tmp_path_factory.mktemp("mine")
    out = tmp_path_factory.mktemp("out")
    data = blocks()
    with (source / "nodes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "u", "v", "w", "z", "label"])
        for i, row in enumerate(data.x.tolist()):
            label = "" if i % 6 == 0 else ["left", "right"][int(data.y[i])]
            writer.writerow([f"node {i}", *row, label])
    with (source / "edges.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "target"])
        for a, b in data.edge_index.t().tolist():
            if a < b:
                writer.writerow([f"node {a}", f"node {b}"])
    command = ["compare", str(source), "--out", str(out), "--minutes", "1"]
    assert main([*command, "--jobs", "1", "--only", *ROWS]) == 0
    return out


def test_the_report_names_a_winner_and_how_it_was_found(folder: Path) -> None:
    text = (folder / "report.md").read_text("utf-8")
    comparison = Comparison.load(folder)
    assert comparison.report() == text
    assert comparison.lines[0].title in text
    assert "best validation score" in text
    assert "constant" in text
    # Ten nodes have no label, and the report says so.
    assert "unknown for 10 of 60" in text
    for picture in ("scores.png", "learning.png"):
        assert (folder / "images" / picture).stat().st_size > 1000
        assert f"images/{picture}" in text


def test_what_has_no_label_is_predicted(folder: Path) -> None:
    with (folder / "predictions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["id", "prediction"]
    assert [row[0] for row in rows] == [f"node {i}" for i in range(0, 60, 6)]
    truth = ["left"] * 5 + ["right"] * 5
    right = sum(row[1] == label for row, label in zip(rows, truth, strict=True))
    assert right >= 8


def test_a_loaded_comparison_is_the_same(folder: Path) -> None:
    comparison = Comparison.load(folder)
    assert set(comparison.frame.index) == set(ROWS)
    assert comparison.best in ROWS
    assert comparison.best in comparison.same
    assert comparison.predict().shape == (60,)
    new = blocks(80)
    assert set(comparison.predict(new)) <= {"left", "right"}
    assert len(comparison.predict(new)) == 80


def test_a_comparison_goes_on_with_its_plan(folder: Path) -> None:
    before = (folder / "runs.jsonl").read_text().splitlines()
    report = (folder / "report.md").read_text("utf-8")
    # As after a kill: the last runs are missing, and one line is not complete.
    kept = "\n".join(before[:-3]) + "\n" + before[-3][:40]
    (folder / "runs.jsonl").write_text(kept)
    # A report of what there is needs neither the last runs nor all settings.
    trials = [line for line in before if '"tuning": true' in line]
    (folder / "runs.jsonl").write_text(
        "\n".join(line for line in before if line != trials[-1])
    )
    shorter = Comparison.load(folder)
    assert shorter.hurried_searches
    assert "before all settings were tried" in hurried(shorter)
    (folder / "runs.jsonl").write_text(kept)
    problem = Problem.load(folder / "problem.npz")
    compare(problem, 1, out=folder, jobs=1, only=ROWS)
    after = [
        json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()
    ]
    assert len(after) == len(before)
    first = [json.loads(line) for line in before]
    scores = {
        (r["row"], r["split"], r["tuning"], r["config"]): r["validation"] for r in first
    }
    for record in after:
        place = (record["row"], record["split"], record["tuning"], record["config"])
        assert record["validation"] == scores[place]
    without_seconds = [
        line.rpartition("| ")[0].rpartition("|")[0]
        for line in report.splitlines()
        if line.startswith("|")
    ]
    again = (folder / "report.md").read_text("utf-8")
    for line in without_seconds:
        assert line in again


def planned(data: Problem | Path, out: Path, only: list[str]) -> Comparison:
    """Compare rows with a plan that no clock has made."""
    out.mkdir(exist_ok=True)
    Plan(1, 2, 10, {}, minutes=2.0).save(out / "plan.json")
    return compare(data, 2, out=out, jobs=1, only=only)


def test_new_rows_of_a_table_are_predicted(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    size = generator.normal(size=90)
    tone = np.array(["low", "high"])[(size > 0).astype(int)]
    frame = pd.DataFrame({"size": size, "tone": tone, "target": 3 * size + 1})
    frame[:60].to_csv(tmp_path / "rows.csv", index=False)
    new = frame[60:].drop(columns="target")
    new.to_csv(tmp_path / "new.csv", index=False)
    only = ["linear", "mlp", "constant"]
    out = tmp_path / "out"
    result = planned(tmp_path / "rows.csv", out, only)
    assert result.best == "linear"
    assert "rows of a table" in result.report()
    assert "fitted on all labels" in result.report()
    for data in (tmp_path / "new.csv", str(tmp_path / "new.csv"), new):
        found = result.predict(data)
        assert found.shape == (30,)
        assert np.corrcoef(found, frame["target"][60:])[0, 1] > 0.95
    # A single row has neighbours among the compared ones.
    assert result.predict(new[:1]).shape == (1,)
    named = {"out": out, "jobs": 1, "only": only, "predict": tmp_path / "new.csv"}
    compare(tmp_path / "rows.csv", 2, **named)
    written = pd.read_csv(out / "new_predictions.csv")
    assert written["id"].tolist() == list(range(30))
    np.testing.assert_allclose(written["prediction"], found, rtol=1e-6)
    with pytest.raises(ValueError, match="x of data must have the 3 features"):
        result.predict(Data(x=torch.rand(3, 2)))


def test_labels_are_spread_to_new_rows_and_not_to_a_new_graph(tmp_path: Path) -> None:
    only = ["label_equilibrium", "constant"]
    rows = problems()["rows"]
    result = planned(rows, tmp_path / "rows", only)
    assert result.best == "label_equilibrium"
    # The new rows repeat the compared ones.
    found = result.predict(Data(x=rows.graphs[0].x[:50]))
    assert (found == result.predict()[:50]).mean() > 0.9
    numbers = replace(
        problems()["numbers"], graphs=[copy(problems()["numbers"].graphs[0])]
    )
    del numbers.graphs[0].edge_index
    result = planned(numbers, tmp_path / "numbers", only)
    found = result.predict(Data(x=rows.graphs[0].x[:50]))
    assert np.corrcoef(found, result.predict()[:50])[0, 1] > 0.9
    result = planned(problems()["nodes"], tmp_path / "nodes", only)
    with pytest.raises(ValueError, match="predicts the compared nodes only; add the"):
        result.predict(problems()["nodes"].graphs[0])


def test_new_graphs_are_read_as_the_compared_ones(tmp_path: Path) -> None:
    problem = problems()["nodes"]
    (graph,) = problem.graphs
    result = planned(problem, tmp_path, ["gcn", "constant"])
    expected = result.predict(graph)
    half = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    # In one direction, and twice: the compared graph has both, once.
    halved = Data(x=graph.x.double(), edge_index=torch.cat([half, half], 1))
    assert (result.predict(halved) == expected).all()
    wrong = {
        "must be one graph where nodes are predicted": [graph, graph],
        "one at least otherwise; got 0": [],
        "edge_index of data must be given": Data(x=graph.x),
        "data.x must be finite": Data(
            x=graph.x * math.nan, edge_index=graph.edge_index
        ),
    }
    for message, data in wrong.items():
        with pytest.raises(ValueError, match=message):
            result.predict(data)
    with pytest.raises(TypeError, match="data must be a table"):
        result.predict(5)


def test_a_column_that_was_constant_may_have_another_value(tmp_path: Path) -> None:
    x = torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    frame = pd.DataFrame({"x": x[:, 0], "year": 2023, "y": x[:, 0] > 0})
    result = planned(frame_file(frame, tmp_path), tmp_path / "out", ["mlp", "constant"])
    assert result.best == "mlp"
    later = result.predict(frame.assign(year=2024))
    assert (later == result.predict(frame)).mean() > 0.9


def frame_file(frame: pd.DataFrame, folder: Path) -> Path:
    frame.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def test_a_comparison_may_be_moved(tmp_path: Path) -> None:
    result = planned(problems()["nodes"], tmp_path / "here", ["linear", "constant"])
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = Comparison.load(tmp_path / "there")
    assert moved.best == result.best
    assert (moved.predict() == result.predict()).all()


def test_a_class_of_a_single_training_row(tmp_path: Path) -> None:
    """The training part of a search may have one class."""
    frame = pd.DataFrame({"a": range(40), "y": ["a"] * 38 + ["b"] * 2})
    result = planned(
        frame_file(frame, tmp_path), tmp_path / "out", ["linear", "boosting"]
    )
    assert {line.row for line in result.lines} == {"linear", "boosting"}


def test_too_few_labels_and_parts_without_labels(tmp_path: Path) -> None:
    y = torch.arange(60) % 2
    for labels, least in ((y, 10), (y + 0.5, 20)):
        few = labels.clone()
        few[least - 1 :] = -1 if least == 10 else math.nan
        data = Data(x=torch.randn(60, 2), y=few)
        classes = ("a", "b") if least == 10 else ()
        problem = Problem("node", classes, [data], tuple(map(str, range(60))))
        with pytest.raises(ValueError, match=f"must have {least} labels at least"):
            compare(problem, 1, out=tmp_path)
    half = torch.arange(60) < 30
    data = Data(x=torch.randn(60, 2), y=torch.where(half, y, -1))
    problem = replace(problem, classes=("a", "b"), graphs=[data])
    contest = with_labels_in_split(replace(problem, split=(half, half, ~half)))
    assert contest.split is None
    assert "no labels in its validation or test rows" in contest.notes[-1]
    with pytest.raises(ValueError, match="the training rows of every split must have"):
        compare(replace(problem, split=(~half, half, half)), 1, out=tmp_path)


def test_arguments_that_are_wrong_begin_no_comparison(tmp_path: Path) -> None:
    problem = problems()["nodes"]
    with pytest.raises(ValueError, match="metric must be"):
        compare(problem, 1, out=tmp_path, metric="r2")
    assert not (tmp_path / "problem.npz").exists()


def test_time_that_is_left_is_used_and_more_minutes_go_on(tmp_path: Path) -> None:
    problem = problems()["nodes"]
    options = {"out": tmp_path, "jobs": 1, "only": ROWS}
    # A plan that has left a row out which takes no longer than the others. It may grow for 20 seconds, and there is a
    # minute, since a machine may be busy.
    first = Plan(3, 2, 10, {"gcn": "too slow"}, {"gcn": 0.1}, minutes=1.0, seconds=20.0)
    first.save(tmp_path / "plan.json")
    result = compare(problem, 1, **options)
    planned = result.planned
    assert not planned.left_out
    assert planned.splits * planned.trials > 6
    assert {line.splits for line in result.lines} == {planned.splits}
    # As many minutes change nothing, and more go on, whatever time the trainings have taken.
    again = compare(problem, 1, **options).planned
    assert again == replace(planned, seconds=again.seconds)
    runs = tmp_path / "runs.jsonl"
    plain = runs.read_text().splitlines()
    assert again.seconds == pytest.approx(
        sum(json.loads(line)["seconds"] for line in plain)
    )
    replace(again, splits=3, trials=2).save(tmp_path / "plan.json")
    larger = compare(problem, 1.3, **options).planned
    assert larger.splits * larger.trials > 6
    assert runs.read_text().splitlines()[: len(plain)] == plain


def test_a_large_graph_trains_in_parts_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_PART", 20)
    plans = []
    monkeypatch.setattr(
        Workers, "restart", lambda self, *shape, **named: plans.append((shape, named))
    )
    number = torch.arange(60)
    masks = (number % 3 == 0, number % 3 == 1, number % 3 == 2)
    problem = replace(problems()["nodes"], split=masks)
    result = compare(problem, 1, out=tmp_path, jobs=1, only=["constant", "gcn"])
    assert plans[0] == ((1,), {"threads": 1})
    assert result.table.data["init_args"]["num_parts"] == 3
    assert not result.planned.left_out
    assert "one split that came with the data" in result.report()
    other = next(line for line in result.lines if line.row != result.best)
    difference, error = result.behind(other) or (0.0, 0.0)
    assert difference < -2 * error < 0
    assert result.same == [result.best]


def test_a_mistake_in_the_new_rows_is_found_first(tmp_path: Path) -> None:
    pd.DataFrame({"a": range(40), "y": [0, 1] * 20}).to_csv(tmp_path / "rows.csv")
    pd.DataFrame({"b": range(3)}).to_csv(tmp_path / "new.csv")
    options = {"target": "y", "out": tmp_path / "out", "predict": tmp_path / "new.csv"}
    with pytest.raises(ValueError, match="has no column 'a'"):
        compare(tmp_path / "rows.csv", 10, **options)
    with pytest.raises(ValueError, match="predict is for nodes and graphs"):
        compare(problems()["links"], 10, out=tmp_path / "links", predict="new.csv")


REFUSED = [
    ({"minutes": 0}, "minutes must be"),
    ({"minutes": -1.0}, "minutes must be"),
    ({"metric": "r2"}, "metric must be .*acc"),
    ({"metric": "f1"}, "metric must be .*acc"),
    ({"only": ["gnn"]}, "has no row gnn"),
    ({"jobs": 0}, "jobs must be"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        compare(problems()["nodes"], out=tmp_path, **options)


def test_another_comparison_is_not_mixed_with_this_one(folder: Path) -> None:
    with pytest.raises(ValueError, match="holds the comparison of other data"):
        compare(problems()["rows"], out=folder)
    problem = Problem.load(folder / "problem.npz")
    with pytest.raises(ValueError, match="metric, seed and only must be as"):
        compare(problem, out=folder, seed=1, only=ROWS)


def test_there_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Give the out of compare"):
        Comparison.load(tmp_path)


def test_a_link_predictor_learns_and_draws_new_pairs_in_every_step() -> None:
    data = blocks()
    edges = data.edge_index
    batch = Data(
        x=data.x,
        edge_index=edges,
        edge_label_index=edges,
        edge_label=torch.ones(edges.size(1)),
    )
    module = LinkPredictor(DiffusionGNN(4, 16, 8, task="link"), lr=0.01)
    scores, labels = module.compared(batch, "train")
    assert scores.shape == labels.shape == (2 * edges.size(1), 1)
    assert labels.mean() == 0.5
    # The second half is drawn, and an evaluation takes the pairs as they are.
    again, _ = module.eval().compared(batch, "train")
    once, _ = module.compared(batch, "train")
    assert not torch.equal(again, once)
    assert len(module.compared(batch, "val")[0]) == edges.size(1)
    optimizer = module.configure_optimizers()
    module.train()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = module.loss(*module.compared(batch, "train"))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
