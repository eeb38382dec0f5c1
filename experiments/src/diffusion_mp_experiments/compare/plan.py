"""How much of everything a comparison takes, so that it ends in time."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from diffusion_mp_experiments.reproduce.table import Row, Table
from diffusion_mp_experiments.train.checkpoints import replace_file

#: What a plan chooses from, so that times of nearly the same length lead to the same plan.
SPLITS = (3, 5, 10)
TRIALS = (2, 4, 8, 16, 32)
EPOCHS = (10, 25, 50, 100, 200, 300)
#: Further choices where an epoch has many steps.
FEW_EPOCHS = (2, 5)
#: Epochs of the first training of every row, which is only timed.
TIMED = 3
# Training ends early where validation does not improve any more, though not before the patience is over; this share of
# the epochs is typical.
_TYPICAL = 0.7
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
    """The budget of a comparison, and the rows that do not fit into it with the reasons."""

    splits: int
    trials: int
    epochs: int
    left_out: dict[str, str]

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
) -> Plan:
    """Return the largest budget that fits into `seconds` of computing time.

    Rows that are too slow even for the least budget are left out, the slowest first.

    Args:
        table: the rows, and whether they are tuned on every split.
        costs: what a training of each row takes.
        seconds: seconds of all processes together.
        most_splits: number of splits that there are.
        choices: numbers of epochs to choose from.
    """
    rows = [row for row in table.rows if row.name in costs]
    left_out: dict[str, str] = {}
    budgets = list(
        itertools.product({min(n, most_splits) for n in SPLITS}, TRIALS, choices)
    )

    def needed(row: Row, splits: int, trials: int, epochs: int) -> float:
        return _runs(table, row, splits, trials) * costs[row.name].of(epochs)

    def worth(budget: tuple[int, int, int]) -> float:
        splits, trials, epochs = map(math.log, budget)
        # A model that is not trained to its end says less than one whose settings are not the best.
        return splits + trials + 3 * epochs

    while rows:
        fitting = [
            budget
            for budget in budgets
            if sum(needed(row, *budget) for row in rows) <= _USED * seconds
        ]
        if fitting:
            return Plan(*max(fitting, key=lambda each: (worth(each), each)), left_out)
        fewest = min(budgets)
        least = {row.name: needed(row, *fewest) for row in rows}
        slowest = max(rows, key=lambda row: least[row.name])
        left_out[slowest.name] = (
            f"it takes about {least[slowest.name]:.0f} seconds of computing time for two settings and {fewest[2]} "
            f"epochs, which do not fit beside the others; give more minutes"
        )
        rows.remove(slowest)
    raise ValueError(
        "minutes must be enough for a row at least; none fits. Give more minutes."
    )


def _runs(table: Table, row: Row, splits: int, trials: int) -> int:
    """Return the number of trainings of a row."""
    tuned = trials if table.axes(row) else 0
    return tuned * (splits if table.nested else int(table.tuning)) + splits
