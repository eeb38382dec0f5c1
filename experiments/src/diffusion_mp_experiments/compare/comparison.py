"""Which model is best on data of one's own: all rows with one budget, and what their scores do and do not say."""

import csv
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch_geometric.data import Data

from diffusion_mp import load
from diffusion_mp.checks import (
    check_choice,
    check_counts,
    check_positive,
    check_seed,
)
from diffusion_mp.data import ToDiffusionGraph
from diffusion_mp.models.certified_network import CertifiedNetwork
from diffusion_mp.saving import Saved
from diffusion_mp_experiments.compare import findings
from diffusion_mp_experiments.compare.data import (
    kept_split,
    labels_of,
    prepared,
    scaled_target,
    target_scaling,
    with_labels_in_split,
)
from diffusion_mp_experiments.compare.inputs import new_graphs, read, read_more
from diffusion_mp_experiments.compare.plan import (
    ENOUGH,
    EPOCHS,
    FEW_ENOUGH,
    FEW_EPOCHS,
    TIMED,
    Cost,
    Plan,
    grown,
    plan,
)
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.compare.report import markdown
from diffusion_mp_experiments.files.reading import as_path, check_present
from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.harness import Harness, alone_in, key, searches
from diffusion_mp_experiments.reproduce.predictors import Predictor
from diffusion_mp_experiments.reproduce.report import Line, best_trial, lines
from diffusion_mp_experiments.reproduce.table import (
    Config,
    Metric,
    Record,
    Row,
    Table,
    load_table,
    with_arguments,
)
from diffusion_mp_experiments.reproduce.training import build_module, data_module, train
from diffusion_mp_experiments.train.checkpoints import replace_file
from diffusion_mp_experiments.train.datamodules import has_label
from diffusion_mp_experiments.train.many_runs import Runner, Workers

_CURVES = {
    "roc_auc": Metric("roc_auc", "max", "ROC-AUC in %", 100.0),
    "ap": Metric("ap", "max", "average precision in %", 100.0),
}
#: Metrics by what is predicted; the first is the default.
METRICS = {
    "classes": {
        "acc": Metric("acc", "max", "accuracy in %", 100.0),
        "macro_f1": Metric("macro_f1", "max", "macro F₁ in %", 100.0),
        **_CURVES,
    },
    "numbers": {"r2": Metric("r2", "max", "R² in %", 100.0)},
    "links": _CURVES,
}
_ROWS = {"node": "nodes", "graph": "graphs", "link": "nodes, their edges"}
# Shares of the time after which no further row is timed, the last one is given up, all but the kept model is trained,
# and that model is trained.
_TIMING = 0.3
_TIMED_LAST = 0.4
_TRAINED = 0.9
_KEPT = 0.98
_FOLDERS = {"node": "nodes", "graph": "graphs", "link": "links"}
# Labels from which on some are reserved for the search; with fewer, every split is tuned on its validation rows.
_POOLED = 1000
# Nodes up to which a row that computes all pairs of nodes runs.
_ALL_PAIRS = 12_000
# Features of all rows together from which on a linear model may take as long as all networks.
_MANY_NUMBERS = 100_000_000
# Nodes from which on a graph trains in random parts of about so many nodes.
_PART = 100_000


def compare(
    data: Any,
    minutes: float = 10.0,
    *,
    target: str | None = None,
    task: str | None = None,
    metric: str | None = None,
    out: str | Path = "runs/compare",
    jobs: int | None = None,
    seed: int = 0,
    only: Sequence[str] = (),
    edges: str | Path | None = None,
    identifier: str | None = None,
    directed: bool | None = None,
    predict: str | Path | None = None,
) -> "Comparison":
    """Compare models on data of one's own, all with one budget, and keep the best of them.

    The time is shared: every row gets as many settings and epochs as fit. Settings are chosen on labels that no
    reported score has seen. A comparison that was stopped goes on where it was, if it is called with the same `out`.

    Args:
        data: a graph, a list of graphs, or a file, see `read`.
        minutes: time for everything.
        target: the column of a table that is predicted.
        task: "node", "graph", "link" or "regression". By default what the data say.
        metric: "acc" (the default), "macro_f1", "roc_auc" or "ap" of classes; "r2" of numbers; "roc_auc" (the default)
            or "ap" of links.
        out: folder of the runs, the report and the kept model.
        jobs: number of processes, or of threads where a graph trains in parts, by default the number of cores.
        seed: draws the splits.
        only: names of the rows to compare. By default all.
        edges: file of the edges of a table of nodes, see `read`.
        identifier: column of the ids of nodes, see `read`.
        directed: whether edges have a direction, see `read`.
        predict: a table of new rows with the same columns, or the folder of new nodes.csv and edges.csv. Their
            predictions are written to ``out``, for new.csv to ``new_predictions.csv``.

    Raises:
        ValueError: the data cannot be read, or the time is too short for any row.

    Examples:
        >>> compare("nodes.csv", minutes=0)
        Traceback (most recent call last):
        ValueError: minutes must be finite and > 0; got 0.
    """
    check_positive(minutes, "minutes")
    check_seed(seed)
    start = time.monotonic()
    folder = as_path(out, "out")
    if jobs is None:
        jobs = os.cpu_count() or 1
    check_counts(jobs=jobs)
    if predict is not None:
        predict = as_path(predict, "predict")
    with alone_in(folder), Workers(jobs) as workers:
        problem = _problem(
            data,
            folder,
            target=target,
            task=task,
            edges=edges,
            identifier=identifier,
            directed=directed,
        )
        options: Config = {"metric": metric, "seed": seed, "only": list(only)}
        table = table_of(problem, folder, **options)
        # Once nothing is wrong with the arguments; names and notes may have changed since the last call.
        problem.save(folder / "problem.npz")
        _keep_options(folder / "table.json", options)
        if number_of_parts(problem) > 1:
            # Several trainings of a large graph would need too much memory, and one keeps all cores busy.
            workers.restart(1, threads=jobs)
        if predict is not None:
            # A mistake in the new rows is found before the minutes are spent.
            check_predictable(problem)
            read_more(predict, problem)
        result = _compared(problem, table, folder, workers, start, 60 * minutes)
        if predict is not None:
            result.write_predictions(predictions_path(folder, predict), predict)
        return result


def predictions_path(folder: Path, predict: str | Path) -> Path:
    """Return the file of the predictions of a table, or folder, of new rows."""
    return folder / f"{Path(predict).stem}_predictions.csv"


def check_predictable(problem: Problem) -> None:
    """Raise unless there are rows, nodes or graphs to predict."""
    if problem.task == "link":
        raise ValueError(
            "predict is for nodes and graphs; a model of links scores pairs: comparison.module().model(x, edge_index, "
            "edge_label_index=pairs)."
        )


def _problem(data: Any, folder: Path, **options: Any) -> Problem:
    """Return the problem of the data, which is that of a folder where another comparison was begun."""
    path = folder / "problem.npz"
    problem = data if isinstance(data, Problem) else read(data, **options)
    problem = with_labels_in_split(problem)
    if path.is_file():
        before = findings.digest(Problem.load(path))
        if before != findings.digest(problem):
            raise ValueError(
                f"{folder} holds the comparison of other data. Give another out, or delete that folder."
            )
    return problem


def _keep_options(path: Path, options: Config) -> None:
    """Write the options of a comparison, or refuse others than those with which it was begun."""
    if path.is_file():
        before = json.loads(path.read_text("utf-8"))
        if before != options:
            raise ValueError(
                f"metric, seed and only must be as the comparison of {path.parent} was begun, {before}; got {options}. "
                "Give another out."
            )
    replace_file(path, json.dumps(options).encode())


def table_folder(problem: Problem) -> Path:
    return configs_folder() / "compare" / _FOLDERS[problem.task]


def table_of(
    problem: Problem, folder: Path, metric: str | None, seed: int, only: Sequence[str]
) -> Table:
    """Return the table of a problem: its rows, data and metric; the budget is still open."""
    kind = "numbers"
    if problem.task == "link":
        kind = "links"
    elif problem.classes:
        kind = "classes"
    metrics = METRICS[kind]
    name = metric or next(iter(metrics))
    check_choice(name, "metric", metrics)
    table = load_table(table_folder(problem))
    pooled = False
    if problem.task != "link" and problem.split is None:
        pooled = int(has_label(labels_of(problem)).sum()) >= _POOLED
    arguments = {"problem": str(folder / "problem.npz"), "seed": seed, "pooled": pooled}
    parts = number_of_parts(problem)
    if parts > 1:
        arguments["num_parts"] = parts
    return replace(
        table,
        title=f"{len(problem.names):,} {_rows_of(problem)}",
        data=with_arguments(table.data, **arguments),
        rows=table.named(only),
        baselines=[],
        metric=metrics[name],
        module={"metric": name},
        tuning=1 if pooled else "nested",
        quick={},
    )


def _rows_of(problem: Problem) -> str:
    """Return what the rows of a problem are."""
    if problem.task == "node" and problem.graphs[0].edge_index is None:
        return "rows of a table"
    return _ROWS[problem.task]


def number_of_parts(problem: Problem) -> int:
    """Return in how many parts a graph trains."""
    nodes = problem.graphs[0].num_nodes
    if problem.task != "node" or nodes <= 2 * _PART:
        return 1
    return math.ceil(nodes / _PART)


def enough_epochs(problem: Problem) -> int:
    """Return below how many epochs networks are hardly trained; an epoch in parts has many steps."""
    return ENOUGH if number_of_parts(problem) == 1 else FEW_ENOUGH


def cannot_run(problem: Problem, table: Table) -> dict[str, str]:
    """Return the rows that cannot run on these data, with the reason."""
    reasons = {}
    nodes = max(graph.num_nodes for graph in problem.graphs)
    for row in table.rows:
        if row.name in ("sfi", "transformer_attention") and nodes > _ALL_PAIRS:
            reasons[row.name] = (
                f"it computes all pairs of nodes, which are too many for {nodes:,} nodes"
            )
        if (
            row.name in ("linear", "boosting", "boosting_neighbours", "gat")
            and nodes > 10 * _PART
        ):
            reasons[row.name] = f"it does not train in parts of {nodes:,} nodes"
    return reasons


def _compared(
    problem: Problem,
    table: Table,
    folder: Path,
    workers: Workers,
    start: float,
    seconds: float,
) -> "Comparison":
    """Do what is left of a comparison in its folder."""
    path = folder / "plan.json"
    # The rest is for the model that is kept, and for pictures.
    end = start + _TRAINED * seconds
    minutes = seconds / 60
    if path.is_file():
        planned = Plan.load(path)
        if minutes > planned.minutes:
            more = 60 * (minutes - planned.minutes) * workers.jobs
            planned = replace(planned, minutes=minutes, seconds=planned.seconds + more)
    else:
        timing = workers.until(start + _TIMING * seconds, start + _TIMED_LAST * seconds)
        planned = _plan(problem, table, timing, workers.jobs, end)
        planned = replace(planned, minutes=minutes)
    finished = False
    while not finished:
        planned.save(path)
        harness, beside = _made(planned.applied(table), folder, workers, end)
        left = workers.jobs * (end - time.monotonic())
        larger = _grown(planned, table, harness, beside, left, table_splits(problem))
        finished = larger == planned
        planned = larger
    # As if the trainings had taken all of the time: a later call with as many minutes makes the same table, and what it
    # has more is for what is new.
    spent = sum(record["seconds"] for record in harness.done.values())
    replace(planned, seconds=spent).save(path)
    table = planned.applied(table)
    result = Comparison(problem, table, folder, planned)
    # A moment is left for the pictures.
    result.keep(start + _KEPT * seconds)
    result.report()
    return result


def _plan(
    problem: Problem, table: Table, timing: Runner, jobs: int, end: float
) -> Plan:
    """Time a short training of every row, and plan the others until the time `end`."""
    reasons = cannot_run(problem, table)
    parts = number_of_parts(problem)
    # An epoch in parts has steps enough to be timed.
    epochs = TIMED if parts == 1 else 1
    short = replace(table, epochs=epochs, patience=epochs)
    runs = []
    for row in short.rows:
        if row.name not in reasons:
            settings = searches(short, row)[0].settings[0]
            runs.append((row.name, short.config(row, settings)))
    runs.sort(key=lambda run: _turn(problem, run[1]["module"]))
    costs = {}
    for (name, _), cost in timing(_timed, runs):
        if isinstance(cost, str):
            reasons[name] = cost
        else:
            costs[name] = cost
    late = (
        "the time in which every model is timed ended before it was; give more minutes"
    )
    reasons = {name: late for name, _ in runs if name not in costs} | reasons
    if not costs and late in reasons.values():
        raise ValueError(
            f"minutes must be enough for a row at least; none fits. {reasons}"
        )
    if not costs:
        raise ValueError(f"No row can run on these data: {reasons}.")
    left = end - time.monotonic()
    most = table_splits(problem)
    table = replace(table, rows=[row for row in table.rows if row.name in costs])
    choices = EPOCHS if parts == 1 else (*FEW_EPOCHS, *EPOCHS)
    planned = plan(table, costs, jobs * left, most, choices, enough_epochs(problem))
    return replace(planned, left_out={**reasons, **planned.left_out})


def _made(
    table: Table, folder: Path, workers: Workers, end: float
) -> tuple[Harness, float]:
    """Train what a table lacks until the time `end`.

    Return what was done, and the seconds of a process for a run beside its training, such as those of reading data.
    """
    harness = Harness(table, folder, train_each=workers.until(end))
    before = len(harness.done)
    # However long the search takes, all rows are then trained for their test scores.
    now = time.monotonic()
    searched = now + search_share(harness) * (end - now)
    harness.search_each = workers.until(searched, (searched + end) / 2)
    harness.make(table.rows)
    new = list(harness.done.values())[before:]
    if not new:
        return harness, 0.0
    trained = sum(record["seconds"] for record in new)
    spent = workers.jobs * (time.monotonic() - now)
    return harness, (spent - trained) / len(new)


def search_share(harness: Harness) -> float:
    """Return the share of the trainings that are left which choose settings."""
    table = harness.table
    found = [search for row in table.rows for search in searches(table, row)]
    left = [
        sum(
            key(planned) not in harness.done for _, (planned, _) in harness.trials(each)
        )
        for each in found
    ]
    # A search that goes on may choose other settings than before.
    trained = sum(number > 0 for number in left)
    if not table.nested:
        trained *= table.splits
    return sum(left) / max(sum(left) + trained, 1)


def _grown(
    planned: Plan,
    table: Table,
    harness: Harness,
    beside: float,
    seconds: float,
    most_splits: int,
) -> Plan:
    """Return the plan with the larger budget for which time is left.

    Args:
        planned: a plan that may be finished.
        table: all rows.
        harness: what was trained.
        beside: seconds that a process needs for a run beside its training.
        seconds: seconds of all processes until the end.
        most_splits: number of splits that there are.
    """
    times = defaultdict(list)
    for record in harness.done.values():
        times[record["row"]].append(record["seconds"] + beside)
    left = min(planned.seconds - sum(map(sum, times.values())), seconds)
    # A row that was not trained at all is one that the time has ended.
    if left <= 0 or any(row.name not in times for row in harness.table.rows):
        return planned
    costs = {name: statistics.fmean(each) for name, each in times.items()}
    return grown(planned, table, costs, left, most_splits)


def table_splits(problem: Problem) -> int:
    """Return how many splits there are: those of the data, or as many as are wanted."""
    if problem.split is None:
        return 1000
    mask = problem.split[0]
    return 1 if mask.dim() == 1 else mask.size(1)


def _turn(problem: Problem, module: Config) -> int:
    """Return when a row is timed: what takes little first, and models of scikit-learn that may take long last."""
    if "predictor" not in module:
        return 1
    model = module["predictor"].get("init_args", {}).get("model")
    numbers = sum(graph.x.numel() for graph in problem.graphs)
    slow = model == "boosting" or (model == "linear" and numbers > _MANY_NUMBERS)
    return 2 if slow else 0


def _timed(name: str, config: Config) -> Cost | str:
    """Return what a training of a row takes, or why there is none."""
    try:
        # Later runs find the data read.
        data_module(config)
        record = train(config, config["module"]["metric"], 0, 0, True)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if "predictor" in config["module"]:
        return Cost(record["seconds"])
    epoch = record["epoch_seconds"]
    return Cost(record["seconds"] - record["epochs"] * epoch, epoch)


def kept_module(config: Config, path: Path) -> LightningModule:
    """Return the model of a file in its LightningModule; a predictor, which has no file, is fitted again."""
    data = data_module(config)
    module = build_module(config, data)
    model: Any = module.model
    if "predictor" in config["module"]:
        model.fit(data)
    else:
        # The file may name networks of the tables, which `load` does not know.
        classes = [type(each) for each in model.modules() if isinstance(each, Saved)]
        module.model = load(path, classes=classes)
    return module.eval()


@dataclass
class Comparison:
    """The result of `compare`.

    Attributes:
        problem: the data.
        planned: the budget, and the rows that were left out with the reasons.
        splits: numbers of the splits that nearly all rows were tested on; others were not reached.
        lines: what every row came to, the best validation score first.
        best: name of the row with the best validation score.
        same: names of the rows that are no worse by their test scores, cheapest first; `best` is one of them.

    Examples:
        >>> Comparison.load(folder)
        Traceback (most recent call last):
        FileNotFoundError: The comparison...missing problem.npz, table.json, plan.json. Give the out of compare...
    """

    problem: Problem
    table: Table
    folder: Path
    planned: Plan

    def __post_init__(self) -> None:
        sign = self.table.metric.sign
        self._harness = Harness(self.table, self.folder)
        # What the time has ended is not lost: fewer settings or splits are better than none.
        records = [
            record
            for row in self.table.rows
            for record in self._harness.results(row, partly=True)
        ]
        runs = [record for record in records if record["kind"] == "run"]
        self.splits = findings.common_splits(runs)
        # Scores of other splits would not compare with these.
        self.records = [
            record
            for record in records
            if record["kind"] != "run" or record["split"] in self.splits
        ]
        found = [self._with_search(line) for line in lines(self.table, self.records)]
        self.lines = sorted(found, key=lambda line: -sign * line.validation)
        if not self.lines:
            raise ValueError(
                f"minutes must be enough for a row on all splits; none was done. {self.folder} keeps what was: give "
                "the same out and more minutes."
            )
        # A row that was stopped before its last split is no winner.
        self.lines.sort(key=lambda line: line.splits < len(self.splits))
        best = self.lines[0]
        against = replace(self.table, baselines=[best.row])
        behind = {
            line.row: line.differences.get(best.row)
            for line in lines(against, self.records)
        }
        if len(self.splits) == 1 and self.judged:
            # A single split has no standard error over splits, but a number of test rows.
            tested = self._test_rows()
            for line in self.lines[1:]:
                mean, _ = behind[line.row] or (0.0, 0.0)
                error = findings.accuracy_error(best.score[0], line.score[0], tested)
                behind[line.row] = (mean, error)
        self.best = best.row
        self.same = [line.row for line in findings.equals(best, self.lines, behind)]
        self._behind = behind

    def _with_search(self, line: Line) -> Line:
        """Return a line whose validation score is the one with which its settings were chosen, if there were several.

        It is of rows that did not choose the epoch, as the validation score of the reported runs is.
        """
        found = [
            best_trial(search)["value"]
            for search in self._searches(line.row)
            if search["split"] in {None, *self.splits}
        ]
        known = [value for value in found if value is not None]
        if not known:
            return line
        metric = self.table.metric
        mean = metric.sign * metric.scale * statistics.fmean(known)
        return replace(line, validation=mean)

    def _searches(self, row: str) -> list[Record]:
        """Return the records of the searches of a row."""
        return [
            record
            for record in self.records
            if record["kind"] == "search" and record["row"] == row
        ]

    @classmethod
    def load(cls, folder: str | Path) -> "Comparison":
        """Load the comparison of a folder, the `out` of `compare`.

        Raises:
            FileNotFoundError: there is no comparison in the folder.
        """
        path = as_path(folder, "folder")
        files = [path / name for name in ("problem.npz", "table.json", "plan.json")]
        check_present("The comparison", path, files, "Give the out of compare")
        problem = Problem.load(files[0])
        made = json.loads(files[1].read_text("utf-8"))
        planned = Plan.load(files[2])
        table = planned.applied(table_of(problem, path, **made))
        return cls(problem, table, path, planned)

    @property
    def judged(self) -> bool:
        """Whether differences have standard errors: over several splits, or of accuracies of a single one."""
        return len(self.splits) > 1 or self.table.metric.name == "acc"

    def _test_rows(self) -> int:
        (number,) = self.splits
        split = findings.reported_split(self.problem, self.table, number)
        return int(split.test.sum())

    @property
    def hardly_trained(self) -> bool:
        """Whether the time was too short for enough epochs."""
        trained = any("epoch" in record for record in self.records)
        return trained and self.table.epochs < enough_epochs(self.problem)

    @property
    def improving(self) -> list[str]:
        """Titles of the rows that were still improving when most of their trainings ended with the last epoch."""
        found = []
        for line in self.lines:
            epochs = [
                record["epoch"]
                for record in self.records
                if record["row"] == line.row and "epoch" in record
            ]
            if epochs and statistics.median(epochs) > 0.9 * self.table.epochs:
                found.append(line.title)
        return found

    @property
    def hurried_searches(self) -> list[str]:
        """Titles of the rows whose search was ended by the time."""
        return [
            row.title
            for row in self.table.rows
            if any(
                # Of a single setting no score is needed.
                len(self._harness.values(search)) < len(search.settings) > 1
                for search in searches(self.table, row)
            )
        ]

    @property
    def rows(self) -> list[Row]:
        """All rows, those that were left out too."""
        return load_table(table_folder(self.problem)).named([])

    def behind(self, line: Line) -> tuple[float, float] | None:
        """Return how far a row is ahead of the best on the test rows (below zero: behind), and the standard error."""
        return self._behind.get(line.row)

    def ahead(self, line: Line) -> bool:
        """Return whether a row is ahead of the best on the test rows by more than two standard errors."""
        mean, error = self.behind(line) or (0.0, 0.0)
        return mean > 2 * error > 0

    def curves(self) -> dict[str, list[float]]:
        """Return the validation score by epoch of the first reported run of every row, by its title."""
        found = {}
        for record in self._harness.done.values():
            first = not record["tuning"] and record["split"] == record["seed"] == 0
            if first and record.get("curve"):
                found[self.table.row(record["row"]).title] = record["curve"]
        return found

    @torch.no_grad()
    def energies(self) -> dict[str, list[float]]:
        """Return the energy at every step of each block of the best row, if it is a certified network."""
        model = self.module().model
        if not isinstance(model, CertifiedNetwork):
            return {}
        first = prepared(self.problem.graphs[:1], self.problem)[0]
        features = {"edge_attr": first.edge_attr} if model.reads else {}
        found = model.energies(first.x, first.edge_index, first.edge_weight, **features)
        return {
            f"block {number}": values.tolist()
            for number, values in enumerate(torch.atleast_2d(found), 1)
        }

    @property
    def model_path(self) -> Path:
        return self.folder / f"{self.best}.safetensors"

    @property
    def training_path(self) -> Path:
        return self.folder / f"{self.best}.json"

    @property
    def kept(self) -> Config:
        """The configuration of the kept model: the best settings, and all labels but those that choose its epoch."""
        row = self.table.row(self.best)
        search = self._searches(self.best)[0]
        config = self.table.config(row, best_trial(search)["settings"])
        arguments = {"kept": True, "validated": self.is_network}
        config["data"] = with_arguments(config["data"], **arguments)
        return config

    @property
    def is_network(self) -> bool:
        """Whether the best row trains for epochs, and is not fitted at once."""
        return self.table.row(self.best).model is not None

    def keep(self, end: float = math.inf) -> None:
        """Train the best row on all labels but a validation part, and save it.

        Args:
            end: the time of ``time.monotonic()`` after which no other epoch begins.
        """
        if self.is_network and not self.model_path.is_file():
            metric = self.table.metric.name
            record = train(self.kept, metric, 0, 0, True, save=self.model_path, end=end)
            replace_file(self.training_path, json.dumps(record).encode())

    @property
    def hurried(self) -> bool:
        """Whether the training of the kept model was ended by the time."""
        if not self.training_path.is_file():
            return False
        return bool(json.loads(self.training_path.read_bytes())["ended"] == "time")

    def module(self) -> LightningModule:
        """Return the kept model in its LightningModule; a row that is fitted at once is fitted again."""
        return kept_module(self.kept, self.model_path)

    def predict(
        self, data: Any = None, *, edges: str | Path | None = None
    ) -> np.ndarray:
        """Return a class, or a number, for every row, node or graph.

        New rows of a table without edges find their neighbours among the compared rows, too.

        Args:
            data: new rows in a table with the columns of the compared one, a path or a DataFrame; or a graph, or a list
                of graphs, with the features of the compared data. By default the compared data.
            edges: the table of the edges between new nodes, see `compare`.

        Raises:
            ValueError: the comparison is of links, whose scores are those of ``module().model``; the new rows do not
                have the columns of the compared ones; or the best row knows the compared nodes only.
        """
        _, predicted = self._predicted(data, edges)
        return predicted

    def write_predictions(
        self, path: str | Path, data: Any = None, *, edges: str | Path | None = None
    ) -> None:
        """Write the ids and the predictions of new rows as a table .csv.

        Args:
            path: the file, which is replaced.
            data: the new rows, see `predict`. By default the compared rows without a label, or all of them.
            edges: the table of the edges between new nodes, see `predict`.
        """
        names, predicted = self._predicted(data, edges)
        wanted = torch.ones(len(names), dtype=torch.bool)
        if data is None:
            unlabelled = ~has_label(labels_of(self.problem))
            wanted = unlabelled if unlabelled.any() else wanted
        rows = [(names[i], predicted[i]) for i in wanted.nonzero().flatten().tolist()]
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("id", "prediction"), *rows])

    @torch.no_grad()
    def _predicted(
        self, data: Any, edges: str | Path | None
    ) -> tuple[Sequence[str], np.ndarray]:
        """Return the ids of rows, nodes or graphs, and what `predict` returns for them."""
        problem = self.problem
        check_predictable(problem)
        module = self.module()
        first = 0
        graphs = problem.graphs
        names: Sequence[str] = problem.names
        known = graphs[0]
        rows = known.edge_index is None
        if data is not None:
            if isinstance(module.model, Predictor) and not rows:
                raise ValueError(
                    f"{self.lines[0].title} predicts the compared nodes only; add the new ones to them, without a "
                    f"label, and compare again."
                )
            graphs, names = self._new(data, edges)
            if rows:
                first = len(known.x)
                graphs = [Data(x=torch.cat([known.x, graphs[0].x]))]
        graphs = prepared(graphs, problem)
        batch = ToDiffusionGraph()(graphs) if problem.task == "graph" else graphs[0]
        split = kept_split(problem, self.is_network)
        shift, scale = target_scaling(problem, split)
        if first and isinstance(module.model, Predictor):
            # It knows the rows to which it was fitted, and is fitted to all.
            labels = scaled_target(known.y, shift, scale)
            fill = -1 if problem.classes else math.nan
            unknown = labels.new_full((len(batch.x) - first,), fill)
            batch.y = torch.cat([labels, unknown])
            outputs = module.model.scores(batch, len(problem.classes))[first:]
        else:
            outputs = module(batch)[first:]
        if problem.classes:
            return names, np.array(problem.classes)[outputs.argmax(1).numpy()]
        return names, (outputs.view(-1).double() * scale + shift).numpy()

    def _new(
        self, data: Any, edges: str | Path | None
    ) -> tuple[list[Data], Sequence[str]]:
        """Return the graphs of new data, with the features of the compared ones, and the ids of what is predicted."""
        if isinstance(data, (str, Path)) or hasattr(data, "to_csv"):
            return read_more(data, self.problem, edges)
        graphs = new_graphs(data, self.problem)
        # One graph, where nodes are predicted.
        nodes = self.problem.task == "node"
        number = graphs[0].num_nodes if nodes else len(graphs)
        return graphs, [str(row) for row in range(number)]

    @property
    def frame(self) -> Any:
        """The table as a pandas DataFrame, a row for every model."""
        import pandas as pd  # type: ignore[import-untyped]

        rows = []
        for line in self.lines:
            score, deviation = line.score
            ahead, error = self.behind(line) or (0.0, 0.0)
            rows.append(
                {
                    "model": line.title,
                    self.table.metric.title: score,
                    "±": deviation,
                    "validation": line.validation,
                    "against the winner": ahead,
                    "standard error": error,
                    "seconds": line.seconds,
                }
            )
        return pd.DataFrame(rows, index=[line.row for line in self.lines])

    def report(self) -> str:
        """Return the report as Markdown, and write it as report.md, with its pictures and predictions.csv beside it."""
        text = markdown(self)
        (self.folder / "report.md").write_text(text, "utf-8")
        if self.problem.task != "link":
            self.write_predictions(self.folder / "predictions.csv")
        return text
