"""Tables as files: what is read, what is refused, and that every row of every table can be built and run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from optuna.storages import InMemoryStorage
from reproduce_tables import ROWS, write_table

from diffusion_mp_experiments.reproduce.search import Search, open_storage
from diffusion_mp_experiments.reproduce.space import Space
from diffusion_mp_experiments.reproduce.table import digest, load_table
from diffusion_mp_experiments.reproduce.training import made_module
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TABLES = sorted(path.parent.name for path in CONFIGS.glob("*/table.yaml"))
# Those that say nothing of rows or axes have nothing more to build.
OWN = [
    name for name in TABLES if {"rows", "search"} & yaml.safe_load((CONFIGS / name / "table.yaml").read_text()).keys()
]


class Ring(FullGraphDataModule):
    num_features, num_classes = 5, 3


def test_tables_were_found():
    assert {"cora", "citeseer"} <= set(TABLES)


@pytest.mark.parametrize("name", OWN)
def test_every_row_is_built_and_runs(name):
    table, ring = load_table(CONFIGS / name), torch.stack([torch.arange(9), (torch.arange(9) + 1) % 9])
    for row in table.rows:
        for settings in Search(replace(table, trials=1, tuning=1), row, InMemoryStorage()).settings:
            module = made_module(table.config(row, settings), Ring())
            if row.model is not None:
                predicted = 1 if settings.get("model.task") == "graph" else 9
                assert module.model(torch.ones(9, 5), torch.cat([ring, ring.flip(0)], 1)).shape == (predicted, 3)


def test_settings_are_put_where_their_paths_say(tmp_path):
    table = load_table(write_table(tmp_path))
    config = table.config(table.row("gcn"), {"lr": 0.25, "model.dropout": 0.125})
    assert config["module"] == {
        "model": {"class_path": ROWS["gcn"]["model"]["class_path"], "init_args": {"conv": "gcn", "dropout": 0.125}},
        "lr": 0.25,
    }
    assert (config["epochs"], config["patience"]) == (6, 4)
    assert table.config(table.row("constant"), {}).keys() == {"data", "module"}  # it has no epochs to depend on
    assert table.config(table.row("difformer"), {})["module"]["weight_decay"] == 0.001
    assert set(table.space(table.row("gcn")).axes) == {
        "lr",
        "model.dropout",
        "model.hidden_channels",
        "model.num_layers",
    }
    assert set(table.space(table.row("labels")).axes) == {"predictor.alpha"}
    assert [table.space(table.row("gcn")).axes[name].log for name in ("lr", "model.dropout")] == [True, False]
    assert not table.space(table.row("constant")).axes


def test_an_axis_that_is_null_is_left_out(tmp_path):
    folder = write_table(tmp_path)
    (folder / "gcn.yaml").write_text(yaml.safe_dump({**ROWS["gcn"], "search": {"model.dropout": None}}))
    assert set(load_table(folder).space(load_table(folder).row("gcn")).axes) == {"lr", "model.hidden_channels"}


def test_the_digest_is_that_of_all_but_the_root(tmp_path):
    write_table(tmp_path)
    here, there = (load_table(tmp_path / "digits", root) for root in ("a", "b"))
    row = here.row("gcn")
    assert here.data["init_args"]["root"] == "a"
    assert digest(here.config(row, {"lr": 0.5})) == digest(there.config(row, {"lr": 0.5}))
    assert digest(here.config(row, {"lr": 0.5})) != digest(here.config(row, {"lr": 0.25}))


def test_a_table_like_another_has_its_rows(tmp_path):
    write_table(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "table.yaml").write_text("like: digits\ntitle: More\nsplits: 7\n")
    table = load_table(tmp_path / "more")
    assert (table.name, table.title, table.splits, table.trials) == ("more", "More", 7, 3)
    assert [row.name for row in table.rows] == list(ROWS)
    assert table.quickly().splits == 1


def test_a_table_like_another_says_which_axes_differ(tmp_path):
    write_table(tmp_path)
    (tmp_path / "more").mkdir()
    told = "search: {data.k: {choice: [3]}, lr: null, model.dropout: {choice: [0.4]}}"
    (tmp_path / "more" / "table.yaml").write_text(f"like: digits\ntitle: More\n{told}\n")
    table = load_table(tmp_path / "more")
    # Its own first: axes are drawn one after the other, so their order is part of what a seed stands for.
    assert list(table.space(table.row("difformer")).declared.items()) == [
        ("data.k", {"choice": [3]}),
        ("model.dropout", {"choice": [0.4]}),
        ("model.hidden_channels", {"choice": [8]}),
    ]


def test_a_row_like_another_says_how_it_differs(tmp_path):
    folder = write_table(tmp_path, rows=[*ROWS, "deep", "deeper"])
    (folder / "deep.yaml").write_text(
        "like: gcn\ntitle: Deep\nmodel: {init_args: {num_layers: 8}}\noptimizer: {lr: 0.5}\n"
        "search: {lr: null, model.num_layers: null, model.alpha: {choice: [0.5]}}\n"
    )
    (folder / "deeper.yaml").write_text(
        "like: deep\ntitle: Deeper\nattention: identity\nmodel: {init_args: {conv: gat}}\n"
    )
    table = load_table(folder)
    deep, deeper = table.row("deep"), table.row("deeper")
    assert deep.model == {**ROWS["gcn"]["model"], "init_args": {"conv": "gcn", "num_layers": 8}}
    assert deeper.model["init_args"] == {"conv": "gat", "num_layers": 8}
    assert (deep.attention, deeper.attention, deeper.title, deeper.optimizer) == (
        None,
        "identity",
        "Deeper",
        {"lr": 0.5},
    )
    assert table.config(deeper, {})["attention"] == "identity"
    assert set(table.space(deeper).axes) == {"model.dropout", "model.hidden_channels", "model.alpha"}
    assert table.row("gcn").model["init_args"] == {"conv": "gcn"}
    (folder / "deeper.yaml").write_text("like: deeper\ntitle: Deeper\n")
    with pytest.raises(ValueError, match="like deeper, which is no other row"):
        load_table(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ["gcn"]}, "must list its rows"),
        ({"epoch": 3}, "says epoch; known are"),
        ({"splits": 0}, "splits must"),
        ({"baselines": ["gat"]}, "gat are not"),
        ({"quick": {"epoch": 3}}, "quick says how much less"),
        ({"metric": {"name": "acc", "kind": 1}}, "says kind"),
    ],
)
def test_what_no_table_says_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_table(write_table(tmp_path, **changes))


def test_rows_that_are_refused(tmp_path):
    folder = write_table(tmp_path)
    table = load_table(folder)
    with pytest.raises(ValueError, match=r"gives model\.conv and searches it"):
        table.config(table.row("gcn"), {"model.conv": "gat"})
    (folder / "gcn.yaml").write_text("title: both\nmodel: {}\npredictor: {}\n")
    with pytest.raises(ValueError, match="either a model or a predictor"):
        load_table(folder)
    (folder / "gcn.yaml").write_text("- a list\n")
    with pytest.raises(ValueError, match="must hold names and values"):
        load_table(folder)
    with pytest.raises(FileNotFoundError, match=r"no table 'none'.*Tables there are digits"):
        load_table(tmp_path / "none")


@pytest.mark.parametrize(
    "axis",
    [
        3,
        {"choice": 3},
        {"normal": [0, 1]},
        {"uniform": [1, 0]},
        {"uniform": [1, 1]},
        {"uniform": [0]},
        {"choice": [[1]]},
        {},
    ],
)
def test_what_is_no_axis_is_refused(axis):
    with pytest.raises(ValueError, match=r"model\.a"):
        Space({"model.a": axis})


def test_trials_are_the_same_whenever_they_are_drawn(tmp_path):
    table = load_table(write_table(tmp_path))
    row, longer = table.row("gcn"), load_table(write_table(tmp_path, trials=5))
    first = Search(table, row, open_storage(tmp_path / "a.log"))
    first.tell({0: 0.5, 1: None})
    first.tell({0: 0.75})  # what was told stays
    with (tmp_path / "a.log").open("a") as file:
        file.write('{"op_code')  # what a kill has left of a line
    again = Search(longer, row, open_storage(tmp_path / "a.log"))
    assert again.settings == Search(longer, row, open_storage(tmp_path / "b.log")).settings
    assert again.settings[:3] == first.settings
    assert len({settings["lr"] for settings in again.settings}) == 5
    assert again.study.best_value == 0.5
    assert again.best({0: 0.5, 1: None, 2: 0.75, 3: 0.75}) == again.settings[2]
    with pytest.raises(ValueError, match="diverged"):
        again.best({0: None})
    assert Search(table, row, open_storage(tmp_path / "a.log")).settings == first.settings
    # Another number of tuning splits and another space are other searches.
    for changed in ({"tuning": 2}, {"search": {**table.search, "lr": {"loguniform": [0.1, 0.2]}}}):
        fresh = Search(replace(table, **changed), row, open_storage(tmp_path / "a.log"))
        assert not any(trial.state.is_finished() for trial in fresh.study.trials)
    # Rows draw the same values of the axes that they share.
    other = Search(table, table.row("difformer"), open_storage(tmp_path / "a.log"))
    assert [settings["lr"] for settings in other.settings] == [settings["lr"] for settings in first.settings]
    assert len(Search(table, table.row("constant"), open_storage(tmp_path / "a.log")).settings) == 1


def test_rows_and_axes_reach_the_data(tmp_path):
    write_table(tmp_path)
    path = tmp_path / "digits"
    content = yaml.safe_load((path / "table.yaml").read_text())
    content["search"]["data.metric"] = {"choice": ["euclidean", "cosine"]}
    (path / "table.yaml").write_text(yaml.safe_dump(content))
    labels = yaml.safe_load((path / "labels.yaml").read_text())
    (path / "labels.yaml").write_text(yaml.safe_dump({**labels, "data": {"per_class": 7}}))
    table = load_table(path)
    assert "data.metric" in table.space(table.row("gcn")).axes
    assert set(table.space(table.row("labels")).axes) == {"predictor.alpha", "data.metric"}
    told = table.config(table.row("labels"), {"data.metric": "cosine"})["data"]["init_args"]
    assert told == {**table.data["init_args"], "per_class": 7, "metric": "cosine"}
    assert table.config(table.row("gcn"), {})["data"] == table.data


def test_a_table_like_one_that_is_like_another(tmp_path):
    write_table(tmp_path)
    for name, like, more in (
        ("second", "digits", "rows: [gcn, own]\nbaselines: [gcn]"),
        ("third", "second", "title: third"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.yaml").write_text(f"like: {like}\n{more}\n")
    (tmp_path / "second" / "own.yaml").write_text("like: gcn\ntitle: own\n")
    first, second, third = (load_table(tmp_path / name) for name in ("digits", "second", "third"))
    assert [row.name for row in third.rows] == ["gcn", "own"]
    assert (third.title, third.data, third.rows) == ("third", first.data, second.rows)
    (tmp_path / "second" / "table.yaml").write_text("like: digits\nrows: [gcn]\n")
    with pytest.raises(ValueError, match="must list its rows: the other files there, own"):
        load_table(tmp_path / "second")
