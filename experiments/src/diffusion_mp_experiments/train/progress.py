"""One progress bar over epochs: with the whole graph in one step, a bar per epoch would only flicker."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm


class EpochProgress(ProgressBar):
    """Shows epochs done and the metrics logged with `prog_bar=True`."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = False
        self._bar = tqdm(disable=True)

    def disable(self) -> None:
        """Called by Lightning on all processes but the first."""
        self._hidden = True

    def enable(self) -> None:
        """Show the bar."""
        self._hidden = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the bar at the epoch where a resumed run starts."""
        super().on_train_start(trainer, pl_module)
        total = trainer.max_epochs if trainer.max_epochs != -1 else None
        self._bar = tqdm(desc="epoch", total=total, initial=trainer.current_epoch, disable=self._hidden)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Moves one epoch on."""
        metrics = self.get_metrics(trainer, pl_module)
        self._bar.set_postfix({name: value for name, value in metrics.items() if isinstance(value, float)}, False)
        self._bar.update(trainer.current_epoch + 1 - self._bar.n)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Closes the bar."""
        self._bar.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Closes the bar before the message."""
        self._bar.close()
