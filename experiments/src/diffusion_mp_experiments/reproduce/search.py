"""The random search of one row: its trials are Optuna's, on the disk, and the same whenever they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from diffusion_mp_experiments.reproduce.records import complete_lines
from diffusion_mp_experiments.reproduce.table import Row, Table, digest


def open_storage(path: Path) -> BaseStorage:
    """Optuna's journal in one file, for whoever is alone in its folder; a line that a kill cut short is dropped."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    complete_lines(path)
    return JournalStorage(JournalFileBackend(str(path), _NoLock()))  # type: ignore[arg-type]


class _NoLock:
    """A process that is killed would leave Optuna's own lock behind; that of the folder ends with the process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Search:
    """As many trials as the table says, each tried on all tuning splits; where there is one, there is nothing to try.

    The settings of trial k are drawn with the seed k, whoever asks: so a search that was stopped goes on as it would
    have, and rows draw the same values of the axes that they have in common.

    Args:
        table, row: what is searched.
        storage: where trials are kept.
        split: with nested tuning the reported split whose validation nodes decide.
    """

    def __init__(self, table: Table, row: Row, storage: BaseStorage, split: int | None = None) -> None:
        self.row, self.split = row, split
        splits = [split] if split is not None else list(range(int(table.tuning)))
        space = table.space(row)
        told = [digest(table.config(row, {})), space.declared, splits, table.metric.name]
        name = f"{row.name} {digest({'told': told})}"
        self.study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        count = table.trials if space.axes else 1
        for number in range(len(self.study.get_trials(deepcopy=False)), count):
            # Drawn apart and added as a whole: a kill leaves no trial with half of its settings.
            drawn = optuna.create_study(sampler=RandomSampler(seed=number)).ask(space.axes).params
            self.study.add_trial(create_trial(state=TrialState.RUNNING, params=drawn, distributions=space.axes))
        self.settings: list[dict[str, Any]] = [trial.params for trial in self.study.get_trials(deepcopy=False)[:count]]
        #: On which the settings are tried.
        self.splits = splits if count > 1 else []

    def tell(self, values: Mapping[int, float | None]) -> None:
        """What trials came to, more being better; ``None``: it diverged. What was told before stays."""
        trials = self.study.get_trials(deepcopy=False)
        for number, value in values.items():
            if trials[number].state == TrialState.RUNNING:
                state = TrialState.FAIL if value is None else TrialState.COMPLETE
                self.study.tell(number, value, state=state)

    def best(self, values: Mapping[int, float | None]) -> dict[str, Any]:
        """The settings of the first trial with the highest value.

        Raises:
            ValueError: all of them diverged.
        """
        if not self.splits:
            return self.settings[0]
        known = {number: value for number, value in values.items() if value is not None}
        if not known:
            raise ValueError(f"All trials of row {self.row.name!r} diverged; lower its learning rates.")
        return self.settings[max(known, key=lambda number: (known[number], -number))]
