"""One progress bar over epochs: with the whole graph in one step, a bar per epoch would only flicker."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


def epoch_bar(disable: bool = False) -> Progress:
    """A bar that counts epochs: what runs, how far, how long still, and a free text `note`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=disable,
    )


class EpochProgress(ProgressBar):
    """Shows epochs done and the metrics logged with `prog_bar=True`."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def disable(self) -> None:
        """Called by Lightning on all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the bar at the epoch where a resumed run starts."""
        super().on_train_start(trainer, pl_module)
        total = trainer.max_epochs if trainer.max_epochs != -1 else None
        self._bar = epoch_bar(disable=not self._enabled)
        self._task = self._bar.add_task("epoch", total=total, completed=trainer.current_epoch, note="")
        self._bar.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Moves one epoch on."""
        if self._bar is not None:
            metrics = self.get_metrics(trainer, pl_module)
            note = " ".join(f"{k} {v:.3f}" for k, v in metrics.items() if isinstance(v, float))
            self._bar.update(self._task, completed=trainer.current_epoch + 1, note=note)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Closes the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Closes the bar before the message."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
