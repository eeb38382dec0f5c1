"""Training: losses, Lightning modules, data, checkpoints, the command line."""

from importlib import import_module
from typing import Any

from diffusion_mp_experiments.train.checkpoints import (
    check_writable,
    load_checkpoint,
    replace_file,
    save_checkpoint,
)
from diffusion_mp_experiments.train.cli import exit_code
from diffusion_mp_experiments.train.losses import (
    mean_squared_error,
    multi_label_loss,
    node_cross_entropy,
)

# Lightning takes seconds to import; it is loaded with the first of these.
_LAZY = {
    name: module
    for module, names in {
        "batch_modules": "SnapshotDataModule SynMolDataModule TUDataModule",
        "classifiers": "Forecaster GraphClassifier LinkPredictor NodeClassifier SequenceClassifier",
        "datamodules": "DigitsDataModule FacebookDataModule HeterophilousDataModule KNNDataModule OgbDataModule "
        "PlanetoidDataModule RowsDataModule",
        "metrics": "TaskMetric weighted_accuracy",
        "resume": "CheckpointFiles FiniteLoss Resumable",
    }.items()
    for name in names.split()
}

__all__ = [
    "check_writable",
    "exit_code",
    "load_checkpoint",
    "mean_squared_error",
    "multi_label_loss",
]
__all__ += ["node_cross_entropy", "replace_file", "save_checkpoint", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
