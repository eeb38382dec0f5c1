"""How much of everything a comparison takes, so that it ends in time."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from diffusion_mp_experiments.reproduce.table import Row, Table
from diffusion_mp_experiments.train.checkpoints import replace_file

#: What a plan chooses from, so that times of nearly the same length lead to the same plan.
SPLITS = (1, 3, 5, 10)
TRIALS = (2, 4, 8, 16, 32)
EPOCHS = (10, 25, 50, 100, 200, 300)
#: Epochs below which no row may take most of the time from the others.
ENOUGH = 100
#: Further choices where an epoch has many steps, and what is enough there.
FEW_EPOCHS = (2, 5)
FEW_ENOUGH = 10
#: What a finished plan grows by, in smaller steps, since the time was measured by then.
MORE_SPLITS = tuple(range(1, 11))
MORE_TRIALS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Epochs of the first training of every row, which is only timed.
TIMED = 3
# Training ends early where validation does not improve any more, though not before the patience is over; this share of
# the epochs is typical.
_TYPICAL = 0.7
# Times the part of the time that a row would have if all had the same, beyond which it is left out where the others
# would have fewer epochs than enough.
_GREEDY = 4
# What is planned; the rest is for drawing pictures, and for settings that take longer than the timed one.
_USED = 0.85


@dataclass(frozen=True)
class Cost:
    """Seconds of a training: before the first epoch, and of every epoch."""

    fixed: float
    epoch: float = 0.0

    def of(self, epochs: int) -> float:
        expected = max(_TYPICAL * epochs, min(epochs, patience(epochs)))
        return self.fixed + self.epoch * expected


def patience(epochs: int) -> int:
    """Return after how many epochs without a better validation score a training ends."""
    return max(10, epochs // 4)


@dataclass(frozen=True)
class Plan:
    """The budget of a comparison, and the rows that do not fit into it with the reasons.

    Attributes:
        splits: number of splits.
        trials: number of settings that every row chooses from.
        epochs: most epochs of a training.
        left_out: the rows that are not compared, with the reasons.
        waiting: seconds of a training of those that only the time leaves out.
        minutes: minutes of the comparison.
        seconds: seconds of all processes together, from which the plan may still grow.
    """

    splits: int
    trials: int
    epochs: int
    left_out: dict[str, str]
    waiting: dict[str, float] = field(default_factory=dict)
    minutes: float = 0.0
    seconds: float = 0.0

    def applied(self, table: Table) -> Table:
        """Return the table with this budget and without the rows that are left out."""
        return replace(
            table,
            rows=[row for row in table.rows if row.name not in self.left_out],
            splits=self.splits,
            trials=self.trials,
            epochs=self.epochs,
            patience=patience(self.epochs),
        )

    def save(self, path: Path) -> None:
        replace_file(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> "Plan":
        try:
            return cls(**json.loads(path.read_bytes()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no plan of a comparison: {error}. Delete the folder, or give another --out."
            ) from error


def plan(
    table: Table,
    costs: Mapping[str, Cost],
    seconds: float,
    most_splits: int,
    choices: Sequence[int] = EPOCHS,
    enough: int = ENOUGH,
) -> Plan:
    """Return the largest budget that fits into `seconds` of computing time.

    Rows that are too slow even for the least budget are left out, the slowest first. So is a row that takes several
    times its part of the time while no model would train for enough epochs.

    Args:
        table: the rows, and whether they are tuned on every split.
        costs: what a training of each row takes.
        seconds: seconds of all processes together.
        most_splits: number of splits that there are.
        choices: numbers of epochs to choose from.
        enough: epochs from which on no row is too slow for the others.
    """
    rows = [row for row in table.rows if row.name in costs]
    left_out: dict[str, str] = {}
    waiting: dict[str, float] = {}
    numbers = {min(n, most_splits) for n in SPLITS}
    budgets = list(itertools.product(numbers, TRIALS, choices))

    def needed(row: Row, splits: int, trials: int, epochs: int) -> float:
        return _runs(table, row, splits, trials) * costs[row.name].of(epochs)

    while rows:
        fitting = [
            budget
            for budget in budgets
            if sum(needed(row, *budget) for row in rows) <= _USED * seconds
        ]
        # The least budget where none fits.
        chosen = max(fitting, key=_worth) if fitting else min(budgets)
        least = {row.name: needed(row, *chosen) for row in rows}
        slowest = max(rows, key=lambda row: least[row.name])
        total = sum(least.values())
        greedy = len(rows) * least[slowest.name] > _GREEDY * total
        splits, trials, epochs = chosen
        if fitting and (epochs >= enough or not greedy):
            for name in left_out:
                waiting[name] = costs[name].of(epochs)
            return Plan(splits, trials, epochs, left_out, waiting, seconds=seconds)
        why = "do not fit beside the others"
        if fitting:
            share = least[slowest.name] / total
            why = f"are {share:.0%} of all, and leave too little for the others"
        left_out[slowest.name] = (
            f"it takes about {least[slowest.name]:.0f} seconds of computing time for {trials} settings and {epochs} "
            f"epochs, which {why}; give more minutes"
        )
        rows.remove(slowest)
    raise ValueError(
        "minutes must be enough for a row at least; none fits. Give more minutes."
    )


def grown(
    planned: Plan,
    table: Table,
    costs: Mapping[str, float],
    seconds: float,
    most_splits: int,
) -> Plan:
    """Return the largest budget of as many epochs that fits into the seconds that a finished plan has left.

    Trainings often end before the epoch that a plan expects. Rows that only the time has left out come back first, the
    fastest before the others; then splits and settings become more. Whatever was trained stays.

    Args:
        planned: the finished plan.
        table: all rows.
        costs: seconds of a training of each compared row, as measured.
        seconds: seconds of all processes together.
        most_splits: number of splits that there are.
    """
    costs = {**planned.waiting, **costs}
    left = _USED * seconds
    left_out = dict(planned.left_out)
    waiting = dict(planned.waiting)
    for name in sorted(waiting, key=lambda each: waiting[each]):
        runs = _runs(table, table.row(name), planned.splits, planned.trials)
        if runs * costs[name] > left:
            break
        left -= runs * costs[name]
        del left_out[name], waiting[name]
    rows = [row for row in table.rows if row.name not in left_out]

    def added(splits: int, trials: int) -> float:
        total = 0.0
        for row in rows:
            runs = _runs(table, row, splits, trials)
            runs -= _runs(table, row, planned.splits, planned.trials)
            if trials > planned.trials:
                # Other settings may turn out best, and are then trained again.
                runs += planned.splits
            total += runs * costs[row.name]
        return total

    fitting = [
        (splits, trials, planned.epochs)
        for splits in {planned.splits, *(min(n, most_splits) for n in MORE_SPLITS)}
        for trials in {planned.trials, *MORE_TRIALS}
        if splits >= planned.splits and trials >= planned.trials
        if added(splits, trials) <= left
    ]
    splits, trials, _ = max(fitting, key=_worth)
    return replace(
        planned, splits=splits, trials=trials, left_out=left_out, waiting=waiting
    )


def _worth(budget: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
    splits, trials, epochs = map(math.log, budget)
    # A model that is not trained to its end says less than one whose settings are not the best.
    return splits + trials + 3 * epochs, budget


def _runs(table: Table, row: Row, splits: int, trials: int) -> int:
    """Return the number of trainings of a row."""
    tuned = trials if table.axes(row) else 0
    return tuned * (splits if table.nested else int(table.tuning)) + splits
