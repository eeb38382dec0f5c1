"""Resumed runs that equal uninterrupted runs bit for bit, and no checkpoints of NaN."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn

from diffusion_mp_experiments.train.checkpoints import load_checkpoint, save_checkpoint

State = dict[str, Any]


class CheckpointFiles(TorchCheckpointIO):
    """Plugin of `Trainer`: checkpoints are complete or absent, and are read as tensors and plain types only.

    Examples:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(plugins=[CheckpointFiles()], logger=False)
    """

    def save_checkpoint(
        self, checkpoint: State, path: str | Path, storage_options: Any = None
    ) -> None:
        save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> State:
        return load_checkpoint(path, map_location or "cpu")


class Resumable(Callback):
    """Callback that saves in a checkpoint what Lightning leaves out, and restores what a resumed run needs.

    The random states of torch, CUDA, numpy and Python in the first process are saved, so dropout continues. A run that
    early stopping ended stays ended. The settings of the module and the patience of early stopping are the ones given
    now; if one cannot change, ValueError is raised.

    Examples:
        >>> callback, checkpoint = Resumable(), {}  # pl.Trainer(callbacks=[callback]) does the following
        >>> callback.on_save_checkpoint(None, None, checkpoint)
        >>> sorted(checkpoint["random_state"])
        ['cuda', 'numpy', 'python', 'torch']
    """

    _ended = False
    _random_state: State | None = None

    def on_save_checkpoint(
        self,
        trainer: Trainer | None,
        pl_module: LightningModule | None,
        checkpoint: State,
    ) -> None:
        """Add the random states; Lightning calls this after everything else is in the checkpoint."""
        checkpoint["random_state"] = random_state()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Change the checkpoint before callbacks, optimisers and loops are restored and a loader draws numbers."""
        states = checkpoint.get("callbacks", {})
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        # Nothing will be saved, and the best checkpoint stays known.
        if trainer.state.fn != TrainerFn.FITTING:
            for callback in callbacks:
                if isinstance(callback, ModelCheckpoint):
                    states.pop(callback.state_key, None)
            return
        _keep_settings(dict(pl_module.hparams), checkpoint)
        for callback in callbacks:
            state = states.get(callback.state_key)
            if state is not None and isinstance(callback, ModelCheckpoint):
                # Lightning forgets the scores where the same folder is written in another way.
                state["dirpath"] = callback.dirpath
            if state is not None and isinstance(callback, EarlyStopping):
                # Lightning restores the epoch of the stop, and trains on all the same.
                stopped = 0 < state["stopped_epoch"] == checkpoint["epoch"]
                self._ended = self._ended or (
                    stopped and callback.patience <= state["patience"]
                )
                state["patience"] = callback.patience
        if trainer.is_global_zero and "random_state" in checkpoint:
            self._random_state = checkpoint["random_state"]
            set_random_state(self._random_state)
        elif trainer.is_global_zero:
            rank_zero_info(
                "This checkpoint holds no random states: dropout goes on in another way."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at once where early stopping had ended the run."""
        trainer.should_stop = self._ended

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Forget the restored states, which move on with the run from here."""
        self._random_state = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore again if the checkpoint was written after validation: a loader has drawn in vain since."""
        if self._random_state is not None:
            set_random_state(self._random_state)


class FiniteLoss(Callback):
    """Callback that checks the logged losses before early stopping and checkpoints see them.

    A loss that is not a finite number raises FloatingPointError with its name and the epoch.

    Examples:
        >>> import pytorch_lightning as pl
        >>> trainer = pl.Trainer(callbacks=[FiniteLoss()], logger=False)
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        for name, value in trainer.callback_metrics.items():
            if name.endswith("loss") and not math.isfinite(value):
                said = f"{name} is {float(value)} in epoch {trainer.current_epoch}: the training has diverged"
                raise FloatingPointError(f"{said}. Lower the learning rate.")

    on_validation_end = on_train_epoch_end  # checkpoints are written there when validation is rarer than epochs


def random_state() -> State:
    """Return the global random states, as tensors and plain types."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - others draw from it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: State) -> None:
    """Restore what `random_state` returned, except for GPUs that do not exist here."""
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def _keep_settings(state: State, checkpoint: State) -> None:
    """Write settings that differ from the checkpoint's into the state of its optimiser, or refuse them."""
    groups = [
        group
        for optimizer in checkpoint["optimizer_states"]
        for group in optimizer["param_groups"]
    ]
    before = checkpoint.get("hyper_parameters", {})
    for name in sorted(
        name for name in state if name in before and state[name] != before[name]
    ):
        scheduled = name == "lr" and checkpoint["lr_schedulers"]
        if scheduled or not all(name in group for group in groups):
            raise ValueError(
                f"{name} was {before[name]!r} in the run of this checkpoint, and cannot become {state[name]!r} on its "
                "way; leave it as it was, or start a new run."
            )
        rank_zero_info(
            f"From here on {name} is {state[name]!r}; it was {before[name]!r}."
        )
        for group in groups:
            group[name] = state[name]
