"""`diffusion-mp reproduce` on the digits: every run once, the same however it is stopped, settings by validation."""

import contextlib
import io
import json
import math
import os
import re
import time
from dataclasses import replace
from itertools import count, islice, product
from pathlib import Path
from signal import SIGINT, SIGKILL

import pytest
import torch
from filelock import FileLock

from diffusion_mp import load
from diffusion_mp_experiments.reproduce import harness
from diffusion_mp_experiments.reproduce.figures import draw_curves
from diffusion_mp_experiments.reproduce.harness import (
    Harness,
    key,
    reproduce,
    searches,
)
from diffusion_mp_experiments.reproduce.report import lines, section
from diffusion_mp_experiments.reproduce.table import Records, load_table, parsed
from diffusion_mp_experiments.train import DigitsDataModule
from diffusion_mp_experiments.train.cli import main
from diffusion_mp_experiments.train.many_runs import each
from own_process import started
from reproduce_tables import write_table

# The checker of shapes draws from Python's random state, and is not in the processes that are killed.
pytestmark = pytest.mark.usefixtures("no_typecheck")
# Trials on one tuning split, and two splits; a constant has nothing to search.
RUNS = {"constant": 2, "labels": 3 + 2, "gcn": 3 + 2, "difformer": 3 + 2}


def outcome(path):
    """All lines of a file without times and memory."""
    lines = [
        {**line, "seconds": 0, "memory": 0, "epoch_seconds": 0}
        for line in parsed(path.read_text(), path)
    ]
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of configurations, the table, and the folder where it was made in one go."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    table = load_table(write_table(folder / "configs"))
    reproduce(table, folder / "out" / "digits")
    return folder / "configs", table, folder / "out" / "digits"


def test_a_search_that_ends_early_leaves_time_for_the_test_scores(
    uninterrupted, tmp_path
):
    _, table, _ = uninterrupted

    def first_two(work, runs):
        return islice(each(work, runs, 1), 2)

    made = Harness(table, tmp_path, search_each=first_two)
    made.make(table.rows)
    for row in table.rows:
        reported = [r for r in made.results(row, partly=True) if r["kind"] == "run"]
        # Of DIFFormer-s no setting was tried.
        assert len(reported) == (0 if row.name == "difformer" else table.splits)


def test_every_run_is_there_once_and_says_what_it_was(uninterrupted):
    _, _, out = uninterrupted
    runs = parsed((out / "runs.jsonl").read_text(), out)
    assert len({key(run) for run in runs}) == len(runs) == sum(RUNS.values())
    assert {name: sum(run["row"] == name for run in runs) for name in RUNS} == RUNS
    for run in runs:
        assert run["seconds"] > 0
        assert run["memory"] > 10
        assert {"torch", "diffusion-mp"} <= set(run["versions"])
        assert re.fullmatch("[0-9a-f]{12}", run["config"])
        assert 0 < run["validation"] <= 1
        assert ("test" in run) == (not run["tuning"])
        assert ("epoch" in run) == (run["row"] in ("gcn", "difformer"))
    # One hash of the data for every split, whichever the row.
    assert (
        len({run["data"] for run in runs})
        == len({(run["data"], run["split"], run["tuning"]) for run in runs})
        == 3
    )
    (ablated,) = {
        tuple(run["ablated"])
        for run in runs
        if run["row"] == "difformer" and not run["tuning"]
    }
    assert ablated == ("identity", "uniform")
    # Validation on tuning splits decides.
    results = parsed((out / "results.jsonl").read_text(), out)
    for row in ("labels", "gcn", "difformer"):
        (search,) = [
            line for line in results if line["kind"] == "search" and line["row"] == row
        ]
        best = max(search["trials"], key=lambda trial: trial["value"])
        reported = [
            line for line in results if line["kind"] == "run" and line["row"] == row
        ]
        assert [run["settings"] for run in reported] == [best["settings"]] * 2
        assert not any(run["tuning"] for run in reported)


def test_rows_one_by_one_make_the_same_table_and_what_is_done_is_not_repeated(
    uninterrupted, tmp_path, monkeypatch
):
    _, table, out = uninterrupted
    first = reproduce(table, tmp_path, only=["constant", "labels"])
    assert {line["row"] for line in first} == {"constant", "labels"}
    reproduce(table, tmp_path, only=["gcn", "difformer"])
    assert outcome(tmp_path / "results.jsonl") == outcome(out / "results.jsonl")
    before = outcome(out / "runs.jsonl")
    assert outcome(tmp_path / "runs.jsonl") == before
    with (
        FileLock(out / "lock"),
        pytest.raises(ValueError, match="Another process is at work"),
    ):
        reproduce(table, out)
    monkeypatch.setattr(harness, "train", None)
    reproduce(table, out)
    reproduce(table, out, only=["gcn"])
    assert outcome(out / "runs.jsonl") == before
    with pytest.raises(TypeError):  # one split more is one run more
        reproduce(replace(table, splits=3), out, only=["gcn"])


@pytest.mark.parametrize(
    ("number", "jobs"),
    [(SIGKILL, 1), (SIGINT, 1), pytest.param(SIGINT, 2, marks=pytest.mark.slow)],
)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    number, jobs, uninterrupted, tmp_path, monkeypatch
):
    configs, table, out = uninterrupted
    runs = tmp_path / "digits" / "runs.jsonl"
    said = tmp_path / "said.txt"
    deadline = time.monotonic() + 200
    line = f"reproduce digits --configs {configs} --out {tmp_path} --jobs {jobs}"
    append = Records.append

    def slow(self, record):
        append(self, record)
        time.sleep(
            0.5
        )  # without it, the runs that are left may end before the signal arrives

    with monkeypatch.context() as patched:
        patched.setattr(Records, "append", slow)  # in the forked process
        process = started(main, line.split(), tmp_path)
    while not (runs.is_file() and runs.read_text().count("\n") > 5):
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    if number == SIGINT:
        assert process.exitcode == 130
        assert "Stopped by SIGINT.\nNothing is lost" in said.read_text()
        assert "Traceback" not in said.read_text()
    done = Records(runs).lines  # complete lines, whatever the moment was
    assert 5 < len(done) < sum(RUNS.values())
    reproduce(table, runs.parent)
    assert Records(runs).lines[: len(done)] == done
    assert outcome(runs) == outcome(out / "runs.jsonl")
    assert outcome(runs.parent / "results.jsonl") == outcome(out / "results.jsonl")


class Full(io.FileIO):
    def write(self, line):
        return super().write(line[:-1])


def test_half_a_line_is_cut_off_and_a_broken_one_is_named(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    Records(path).append({"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    records = Records(path)
    records.append({"a": 3})
    assert [line["a"] for line in Records(path).lines] == [1, 3]
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.append({"a": math.nan})
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode, buffering: Full(path, mode))
        with pytest.raises(OSError, match="its disk is full"):
            records.append({"a": 4})
    assert [line["a"] for line in Records(path).lines] == [1, 3]
    assert [line["a"] for line in records.lines] == [1, 3]
    broken = {
        '{"a": 1}\nnothing\n': r"runs\.jsonl, line 2 is no JSON",
        "[1]\n": "line 1 holds no result",
    }
    broken |= {
        b"\xff\n": "line 1 is no JSON",
        b"[" * 10**5 + b"\n": "line 1 is no JSON",
    }
    for text, message in broken.items():
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=message):
            Records(path)


@pytest.fixture
def training(monkeypatch):
    """Replaces training: ``training(f)`` lets ``f(lr, split, tuning)`` be the validation, and the rate the test."""

    def use(validation):
        def trained(config, metric, split, seed, tuning, save, device):
            lr = config["module"].get("lr")
            value = validation(lr, split, tuning)
            return {
                "validation": value,
                "seconds": 1.5,
                "ablated": {},
                "test": None if tuning else lr,
            }

        monkeypatch.setattr(harness, "train", trained)

    return use


def test_nested_tuning_chooses_for_every_split(tmp_path, training):
    """Split k is tuned on its own nodes: with the setting that does best there, never seeing a test node."""
    asked = []

    def validation(lr, split, tuning):
        asked.append((split, tuning))
        # a higher rate validates better on split 0, a lower one on split 1
        if split == 0:
            return lr
        return -lr

    training(validation)
    write_table(tmp_path, tuning="nested", seeds=2)
    results = reproduce(load_table(tmp_path / "digits"), tmp_path / "out", only=["gcn"])
    lrs = {
        trial["settings"]["lr"]
        for line in results
        if line["kind"] == "search"
        for trial in line["trials"]
    }
    chosen = {(run["split"], run["test"]) for run in results if run["kind"] == "run"}
    assert chosen == {(0, max(lrs)), (1, min(lrs))}
    assert asked.count((0, True)) == asked.count((1, True)) == 3
    assert asked.count((0, False)) == asked.count((1, False)) == 2


def test_a_row_is_a_result_once_all_of_its_runs_are_done(tmp_path, training):
    """Stopped in its search, among its reported runs or in a further trial, it is left out of the results."""
    left = 0
    calls = count()

    def validation(*_):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return -next(calls)  # the first trial is the best

    training(validation)
    table = load_table(write_table(tmp_path, tuning=2, trials=2))
    complete = []
    # Four runs of the search and two that are reported, and two of one trial more.
    for trials in [2] * 6 + [3] * 2:
        more = replace(table, trials=trials)
        left = 1
        with contextlib.suppress(KeyboardInterrupt):
            reproduce(more, tmp_path / "out", only=["gcn"])
        left = 2
        complete.append(
            {
                line["row"]
                for line in reproduce(more, tmp_path / "out", only=["constant"])
            }
        )
    assert ["gcn" in rows for rows in complete] == 5 * [False] + [True, False, True]


def test_trials_come_one_after_the_other_and_one_that_diverged_anywhere_is_out(
    tmp_path, training
):
    """Less is better here, and the best trial of all diverges on the second of two tuning splits."""
    metric = {"name": "mse", "mode": "min", "title": "MSE", "scale": 1.0}
    table = load_table(write_table(tmp_path, tuning=2, metric=metric))
    (search,) = searches(table, table.row("gcn"))
    lrs = [settings["lr"] for settings in search.settings]
    asked = []

    def validation(lr, split, tuning):
        asked.append(lr)
        return None if tuning and split == 1 and lr == min(lrs) else lr

    training(validation)
    results = reproduce(table, tmp_path / "out", only=["gcn", "difformer"])
    # Two rows on two splits, whose rates are the same.
    assert asked[:12] == [lr for lr in lrs for _ in range(4)]
    assert set(asked[12:]) == {sorted(lrs)[1]}
    assert [line["seconds"] for line in results if line["kind"] == "search"] == [
        9.0,
        9.0,
    ]
    (trials,) = (
        line["trials"]
        for line in results
        if line["kind"] == "search" and line["row"] == "gcn"
    )
    assert [trial["value"] for trial in trials] == [
        None if lr == min(lrs) else -lr for lr in lrs
    ]


def test_quick_from_the_command_line_and_what_it_refuses(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    write_table(Path("configs"))
    calls = Path("out/digits-quick")
    saved = Path("zoo/gcn.safetensors")
    line = "reproduce digits --configs configs --out out --quick --jobs=1"
    assert "| labels |" in typed(f"{line} --only constant labels")
    report = (calls / "report.md").read_text()
    assert report.startswith("# Digits\n")
    assert "| labels |" in report
    typed(f"{line} --only gcn labels --save zoo")
    assert {*Path("zoo").iterdir()} == {Path("zoo/gcn.md"), saved}
    assert type(load(saved)).__name__ == "DiffusionGNN"
    card = Path("zoo/gcn.md").read_text()
    assert re.search(r"\| accuracy in %, test \| \d\d\.\d \|", card)
    assert "reproduce digits --only gcn --save zoo --quick`" in card
    records = (calls / "runs.jsonl").read_bytes()
    saved.unlink()
    typed(f"{line} --only gcn --save zoo")
    # Made again, and its run is not recorded again.
    once = saved.read_bytes()
    assert (calls / "runs.jsonl").read_bytes() == records
    typed(f"{line} --only gcn --epochs=1 --save zoo")
    # The card beside it is of another run.
    assert saved.read_bytes() != once
    typed(f"{line} --only labels --epochs=1 --save other")
    assert not list(Path("other").iterdir())  # nor a card without its model
    said = typed(f"{line} --only gat", code=2)
    assert "digits has no row gat; it has constant, labels, gcn, difformer." in said
    for device in ("gpu", "meta"):
        said = typed(f"{line} --device {device}", code=2)
        assert f"torch cannot use '{device}'" in said


def test_a_module_moves_all_of_its_graphs():
    """To another device, where a graph of several parts stays one graph."""
    data = DigitsDataModule()
    data.to("meta")
    for loader in (
        data.train_dataloader(),
        data.val_dataloader(),
        data.test_dataloader(),
    ):
        actual = [
            value.device.type
            for graph in loader
            for _, value in graph
            if isinstance(value, torch.Tensor)
        ]
        assert set(actual) == {"meta"}
    assert data.part(0)[0] is data.part(2)[0]
    assert DigitsDataModule().data.x.is_cpu


def test_a_sweep_trains_every_row_at_every_value(tmp_path):
    sweep = {"path": "model.tau", "values": [0.25, 1.0], "title": "τ"}
    table = load_table(write_table(tmp_path, sweep=sweep, trials=1, baselines=[]))
    taus = [
        table.config(row, {})["module"]["model"]["init_args"]["tau"]
        for row in table.named(["difformer"])
    ]
    assert taus == [0.25, 1.0]
    results = reproduce(table, tmp_path / "out", only=["difformer"])
    runs = [line for line in results if line["kind"] == "run"]
    assert [(run["row"], run["split"]) for run in runs] == [
        *product(("difformer@0.25", "difformer@1.0"), (0, 1))
    ]
    # Before any layer, and after each.
    assert [len(run["states"]["rank"]) for run in runs] == [3] * 4
    text = section(table, lines(table, results))
    assert "| τ | 0.25 | 1.0 |" in text
    # The score, and how far apart and in how many directions nodes lie.
    assert text.count("| DIFFormer-s |") == 3
    draw_curves(tmp_path / "curves.png", table, lines(table, results))
    assert (tmp_path / "curves.png").stat().st_size > 10_000
