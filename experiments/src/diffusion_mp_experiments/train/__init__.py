"""Training: losses, Lightning modules, data, checkpoints, the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from diffusion_mp_experiments.train.checkpoints import check_writable, load_checkpoint, replace_file, save_checkpoint
from diffusion_mp_experiments.train.cli import exit_code
from diffusion_mp_experiments.train.losses import mean_squared_error, multi_label_loss, node_cross_entropy

# Lightning takes seconds to import; it is loaded with the first of these.
_LAZY = {
    "CheckpointFiles": "resume",
    "DigitsDataModule": "datamodules",
    "FacebookDataModule": "datamodules",
    "FiniteLoss": "resume",
    "Forecaster": "classifiers",
    "GraphClassifier": "classifiers",
    "HeterophilousDataModule": "datamodules",
    "KNNDataModule": "datamodules",
    "NodeClassifier": "classifiers",
    "OgbDataModule": "datamodules",
    "PlanetoidDataModule": "datamodules",
    "Resumable": "resume",
    "Score": "metrics",
    "SequenceClassifier": "classifiers",
    "SnapshotDataModule": "batch_modules",
    "SynMolDataModule": "batch_modules",
    "TUDataModule": "batch_modules",
    "weighted_accuracy": "metrics",
}

__all__ = [
    "check_writable",
    "exit_code",
    "load_checkpoint",
    "mean_squared_error",
    "multi_label_loss",
    "node_cross_entropy",
    "replace_file",
    "save_checkpoint",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
