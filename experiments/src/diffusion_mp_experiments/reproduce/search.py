"""The random search of a row: Optuna's trials, kept on disk, and the same whenever they are drawn."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from diffusion_mp_experiments.reproduce.records import complete_lines
from diffusion_mp_experiments.reproduce.table import Row, Table, digest

_KINDS = ("choice", "uniform", "loguniform")


def open_storage(path: Path) -> BaseStorage:
    """Open Optuna's journal in a file that no other process uses; an unfinished last line is cut off."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    complete_lines(path)
    return JournalStorage(JournalFileBackend(str(path), _NoLock()))  # type: ignore[arg-type]


class _NoLock:
    """A killed process would leave Optuna's own lock behind, unlike that of the folder (`reproduce`)."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def distribution(path: str, axis: Any) -> BaseDistribution:
    """Optuna's distribution for the axis of a path (`model.dropout`).

    An axis is `{"choice": [...]}` of plain values, `{"uniform": [low, high]}` or `{"loguniform": [low, high]}`.
    """
    if not isinstance(axis, dict) or len(axis) != 1 or (kind := next(iter(axis))) not in _KINDS:
        raise ValueError(f"the axis {path} must be one of {', '.join(_KINDS)} with a list; got {axis!r}.")
    values = axis[kind]
    if kind == "choice":
        if not isinstance(values, list) or not all(isinstance(v, bool | int | float | str | None) for v in values):
            raise ValueError(f"the choices of {path} must be a list of numbers, names or null; got {values!r}.")
        return CategoricalDistribution(values)
    numbers = [float(value) for value in values] if isinstance(values, list) else []
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or not numbers[0] < numbers[1]:
        raise ValueError(f"{kind} of {path} must be [low, high]; got {values!r}.")
    low, high = numbers
    return FloatDistribution(low, high, log=kind == "loguniform")


class Search:
    """The trials of a row, each on all tuning splits; a row without axes has one trial and no splits.

    The settings of trial k are drawn with the seed k. So a search that was stopped continues as it would have, and rows
    draw the same values of the axes that they share. With nested tuning `split` is the reported split whose validation
    nodes decide.
    """

    def __init__(self, table: Table, row: Row, storage: BaseStorage, split: int | None = None) -> None:
        self.row, self.split = row, split
        splits = [split] if split is not None else list(range(int(table.tuning)))
        declared = table.axes(row)
        axes = {path: distribution(path, axis) for path, axis in declared.items()}
        name = digest({"search": [digest(table.config(row, {})), declared, splits, table.metric.name]})
        self.study = optuna.create_study(
            storage=storage, study_name=f"{row.name} {name}", direction="maximize", load_if_exists=True
        )
        count = table.trials if axes else 1
        for number in range(len(self.study.get_trials(deepcopy=False)), count):
            # Drawn in another study and added complete: a kill leaves no trial with half of its settings.
            drawn = optuna.create_study(sampler=RandomSampler(seed=number)).ask(axes).params
            self.study.add_trial(create_trial(state=TrialState.RUNNING, params=drawn, distributions=axes))
        self.settings: list[dict[str, Any]] = [trial.params for trial in self.study.get_trials(deepcopy=False)[:count]]
        self.splits = splits if count > 1 else []

    def tell(self, values: Mapping[int, float | None]) -> None:
        """Record the values of trials, of which higher is better; ``None`` if it diverged. Recorded values stay."""
        trials = self.study.get_trials(deepcopy=False)
        for number, value in values.items():
            if trials[number].state == TrialState.RUNNING:
                state = TrialState.FAIL if value is None else TrialState.COMPLETE
                self.study.tell(number, value, state=state)

    def best(self, values: Mapping[int, float | None]) -> dict[str, Any]:
        if not self.splits:
            return self.settings[0]
        known = {number: value for number, value in values.items() if value is not None}
        if not known:
            raise ValueError(f"All trials of row {self.row.name!r} diverged; lower its learning rates.")
        return self.settings[max(known, key=lambda number: (known[number], -number))]
