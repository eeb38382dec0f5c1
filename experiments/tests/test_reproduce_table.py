"""Tables as files: what is read, what is refused, and that every row of every table can be built and run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.harness import drawn, searches
from diffusion_mp_experiments.reproduce.table import (
    as_made,
    digest,
    load_table,
    parsed,
)
from diffusion_mp_experiments.reproduce.training import build, build_module
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule
from reproduce_tables import ROWS, write_table

CONFIGS = configs_folder()
CONTENT = {
    path.parent.name: yaml.safe_load(path.read_text())
    for path in sorted(CONFIGS.glob("*/table.yaml"))
}
# Tables without rows or axes of their own have nothing more to build.
OWN = [name for name, content in CONTENT.items() if {"rows", "search"} & content.keys()]
# The hash of a configuration identifies its runs in results/: it must not change.
MLP = "08558fefbcf1"
COMMON = ["model.dropout", "model.hidden_channels"]
REFUSED_TABLES = [
    ({"rows": ["gcn"]}, "must list its rows"),
    ({"epoch": 3}, "epoch"),
    ({"baselines": ["gat"]}, "gat are not"),
    ({"quick": {"epoch": 3}}, "quick says .*epoch"),
    ({"metric": {"name": "acc", "kind": 1}}, "kind"),
    ({"metric": {"mode": "up"}}, "metric: mode must be one of 'max', 'min'"),
    ({"like": "digits"}, "like digits, which is no other table"),
    ({"like": "x"}, "like x, which is no other table"),
    ("title: [\n", r"gcn\.yaml is no YAML: while parsing"),
    ("title: none\n", "either a model or a predictor"),
    ("- a list\n", "names and values"),
]


class Ring(FullGraphDataModule):
    num_features = 5
    num_classes = 3
    num_edge_features = None


@pytest.mark.parametrize("name", OWN)
def test_every_row_is_built_and_runs(name):
    table = load_table(CONFIGS / name)
    ring = torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
    for row in table.rows:
        (search,) = searches(replace(table, trials=1, tuning=1), row)
        for settings in search.settings:
            module = build_module(table.config(row, settings), Ring())
            if row.model is not None:
                task = settings.get(
                    "model.task", row.model.get("init_args", {}).get("task")
                )
                predicted = 1 if task == "graph" else 9
                assert module.model(
                    torch.ones(9, 5), torch.cat([ring, ring.flip(0)], 1)
                ).shape == (
                    predicted,
                    3,
                )


def test_settings_are_put_where_their_paths_say(tmp_path):
    table = load_table(write_table(tmp_path))
    constant, labels, gcn, difformer = table.rows
    config = table.config(gcn, {"lr": 0.25, "model.dropout": 0.125})
    model = {
        "class_path": ROWS["gcn"]["model"]["class_path"],
        "init_args": {"conv": "gcn", "dropout": 0.125},
    }
    assert config["module"] == {"model": model, "lr": 0.25}
    assert (config["epochs"], config["patience"]) == (6, 4)
    assert table.config(constant, {}).keys() == {
        "data",
        "module",
    }  # it has no epochs to depend on
    assert table.config(difformer, {})["module"]["weight_decay"] == 0.001
    assert [sorted(table.axes(row)) for row in (constant, labels)] == [
        [],
        ["predictor.alpha"],
    ]
    assert sorted(table.axes(gcn)) == ["lr", *COMMON, "model.num_layers"]
    with pytest.raises(ValueError, match=r"gives model\.conv and searches it"):
        table.config(gcn, {"model.conv": "gat"})
    here, there = (load_table(tmp_path / "digits", root) for root in ("a", "b"))
    row = here.row("gcn")
    assert here.data["init_args"]["root"] == "a"
    first = here.config(row, {"lr": 0.5})
    other_root = there.config(row, {"lr": 0.5})
    other_rate = here.config(row, {})
    assert digest(first) == digest(other_root) != digest(other_rate)
    digits = load_table(CONFIGS / "digits")
    assert digest(digits.config(digits.row("mlp"), {})) == MLP


def test_a_table_like_another_has_its_rows_and_says_which_axes_differ(tmp_path):
    write_table(tmp_path)
    search = "search: {data.k: {choice: [3]}, lr: null, model.dropout: {choice: [0.4]}}"
    for name, text in {
        "second": "like: digits\nrows: [gcn, own]\nbaselines: [gcn]\n",
        "third": "like: second\ntitle: third\n",
        "more": f"like: digits\nsplits: 7\n{search}\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.yaml").write_text(text)
    (tmp_path / "second" / "own.yaml").write_text("like: gcn\ntitle: own\n")
    first, second, third, more = (
        load_table(tmp_path / name) for name in ("digits", "second", "third", "more")
    )
    assert (more.name, more.title, more.splits, more.trials) == ("more", "Digits", 7, 3)
    assert [row.name for row in more.rows] == list(ROWS)
    # Its own first: axes are drawn one after the other, so their order is part of what a seed stands for.
    assert list(more.axes(more.row("difformer")).items()) == [
        ("data.k", {"choice": [3]}),
        ("model.dropout", {"choice": [0.4]}),
        ("model.hidden_channels", {"choice": [8]}),
    ]
    assert [row.name for row in third.rows] == ["gcn", "own"]
    assert (third.title, third.data, third.rows) == ("third", first.data, second.rows)
    (tmp_path / "second" / "table.yaml").write_text("like: digits\nrows: [gcn]\n")
    with pytest.raises(
        ValueError, match="must list its rows: the other files there, own"
    ):
        load_table(tmp_path / "second")


def test_a_row_like_another_says_how_it_differs(tmp_path):
    folder = write_table(tmp_path, rows=[*ROWS, "deep", "deeper"])
    (folder / "deep.yaml").write_text(
        "like: gcn\ntitle: Deep\nmodel: {init_args: {num_layers: 8}}\noptimizer: {lr: 0.5}\n"
        "search: {lr: null, model.num_layers: null, model.alpha: {choice: [0.5]}}\n"
    )
    deeper = folder / "deeper.yaml"
    deeper.write_text(
        "like: deep\ntitle: Deeper\nattention: identity\nmodel: {init_args: {conv: gat}}\n"
    )
    table = load_table(folder)
    *_, deep, last = table.rows
    assert deep.model == {
        **ROWS["gcn"]["model"],
        "init_args": {"conv": "gcn", "num_layers": 8},
    }
    assert last.model["init_args"] == {"conv": "gat", "num_layers": 8}
    assert (last.attention, last.title, last.optimizer) == (
        "identity",
        "Deeper",
        {"lr": 0.5},
    )
    assert (deep.attention, table.config(last, {})["attention"]) == (None, "identity")
    assert sorted(table.axes(last)) == ["model.alpha", *COMMON]
    assert table.row("gcn").model["init_args"] == {"conv": "gcn"}
    for name in (
        "deeper",
        "deep",
    ):  # a row like itself, and two that are like each other
        (folder / f"{name}.yaml").write_text("like: deeper\ntitle: Deep\n")
        deeper.write_text(f"like: {name}\ntitle: Deeper\n")
        with pytest.raises(ValueError, match=f"like {name}, which is no other row"):
            load_table(folder)


@pytest.mark.parametrize(("changes", "message"), REFUSED_TABLES)
def test_tables_and_rows_that_are_refused(changes, message, tmp_path):
    folder = write_table(tmp_path, **({} if isinstance(changes, str) else changes))
    if isinstance(changes, str):
        (folder / "gcn.yaml").write_text(changes)
    with pytest.raises(ValueError, match=message):
        load_table(folder)


WRONG_AXES = [3, {}, {"choice": 3}, {"choice": [[1]]}, {"normal": [0, 1]}]
WRONG_AXES += [
    {"choice": []},
    {"loguniform": [0, 1]},
    {"uniform": ["a", 1]},
    {"uniform": 3},
    {"uniform": [0, 1, 2]},
    {"uniform": [1, 0]},
    {"uniform": [1, 1]},
    {"uniform": [0]},
]


@pytest.mark.parametrize("axis", WRONG_AXES)
def test_what_is_no_axis_is_refused(axis):
    with pytest.raises(ValueError, match=r"model\.a"):
        drawn("model.a", axis, np.random.RandomState(0))


RESULTS = sorted((CONFIGS / "../../../../results").resolve().glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_settings_of_published_results_are_drawn_again(path):
    records = parsed(path.read_bytes(), path)
    table = as_made(load_table(CONFIGS / path.stem), records, path)
    again = {
        (row.name, search.split): search.settings
        for row in table.rows
        for search in searches(table, row)
    }
    published = {
        (line["row"], line["split"]): [trial["settings"] for trial in line["trials"]]
        for line in records
        if line["kind"] == "search"
    }
    assert published.items() <= again.items()


def test_trials_are_the_same_whenever_they_are_drawn(tmp_path):
    table = load_table(write_table(tmp_path))
    row = table.row("gcn")
    (first,) = searches(table, row)
    (longer,) = searches(replace(table, trials=5), row)
    assert longer.settings[:3] == first.settings
    assert len({settings["lr"] for settings in longer.settings}) == 5
    assert longer.best({0: 0.5, 1: None, 2: 0.75, 3: 0.75}) == longer.settings[2]
    with pytest.raises(ValueError, match="diverged"):
        longer.best({0: None})
    # Rows draw the same values of the axes that they share.
    (other,) = searches(table, table.row("difformer"))
    assert [settings["lr"] for settings in other.settings] == [
        settings["lr"] for settings in first.settings
    ]


def test_rows_and_axes_reach_the_data(tmp_path):
    search = {"model.dropout": None, "data.metric": {"choice": ["euclidean", "cosine"]}}
    path = write_table(tmp_path, search=search)
    (path / "labels.yaml").write_text(
        yaml.safe_dump({**ROWS["labels"], "data": {"per_class": 7}})
    )
    table = load_table(path)
    gcn = table.row("gcn")
    labels = table.row("labels")
    # An axis that is null is left out.
    assert sorted(table.axes(gcn)) == [
        "data.metric",
        "model.num_layers",
    ]
    assert sorted(table.axes(labels)) == ["data.metric", "predictor.alpha"]
    arguments = table.config(labels, {"data.metric": "cosine"})["data"]["init_args"]
    assert arguments == {**table.data["init_args"], "per_class": 7, "metric": "cosine"}
    assert table.config(gcn, {})["data"] == table.data


def test_a_misspelt_argument_of_a_row_is_named():
    with pytest.raises(
        ValueError,
        match=r"(?s)torch\.nn\.Dropout.*makes no Module.*Option 'q' is not accepted",
    ):
        build(
            torch.nn.Module, {"class_path": "torch.nn.Dropout", "init_args": {"q": 0.5}}
        )
