"""What the scripts share: losses, modules, data, checkpoints, how a command ends, the command line (extra `train`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diffusion_mp.extras import needed_by

from .files import check_writable, load_checkpoint, replace_file, save_checkpoint
from .losses import mean_squared_error, node_cross_entropy
from .stopping import exit_code

if TYPE_CHECKING:
    from .datamodules import DigitsDataModule, PlanetoidDataModule
    from .guards import FiniteLoss
    from .metrics import weighted_accuracy
    from .module import NodeClassifier
    from .resume import CheckpointFiles, Resumable
    from .sequences import SequenceClassifier

__all__ = [
    "CheckpointFiles",
    "DigitsDataModule",
    "FiniteLoss",
    "NodeClassifier",
    "PlanetoidDataModule",
    "Resumable",
    "SequenceClassifier",
    "check_writable",
    "exit_code",
    "load_checkpoint",
    "mean_squared_error",
    "node_cross_entropy",
    "replace_file",
    "save_checkpoint",
    "weighted_accuracy",
]

# Lightning is loaded with the first of these, so that the rest works, and the command line can complain, without it.
_LAZY = {
    "NodeClassifier": "module",
    "SequenceClassifier": "sequences",
    "DigitsDataModule": "datamodules",
    "PlanetoidDataModule": "datamodules",
    "weighted_accuracy": "metrics",
    "CheckpointFiles": "resume",
    "Resumable": "resume",
    "FiniteLoss": "guards",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name, "diffusion-mp[train]"):
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
