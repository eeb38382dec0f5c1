"""What our modules bring to every Trainer: a run can be resumed, and stops before a checkpoint of NaN is written."""

from __future__ import annotations

import math

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn

from .resume import Resumable


class FiniteLoss(Callback):
    """Looks at the logged losses before early stopping and checkpoints see them.

    Errors: FloatingPointError that names the loss and the epoch.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning calls callbacks that monitor something, and checkpoints, after this."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        for name, value in trainer.callback_metrics.items():
            if name.endswith("loss") and not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {float(value)} in epoch {trainer.current_epoch}: the training has diverged. Lower the "
                    "learning rate."
                )

    on_validation_end = on_train_epoch_end  # where validation is rarer than epochs, checkpoints are written there


def guards(module: pl.LightningModule) -> list[Callback]:
    """For `LightningModule.configure_callbacks`, which is called again in every stage: those that are not there yet."""
    present = {type(callback) for callback in module.trainer.callbacks}  # type: ignore[attr-defined]
    return [kind() for kind in (Resumable, FiniteLoss) if kind not in present]
