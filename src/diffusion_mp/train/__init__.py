"""What the scripts share: losses, the LightningModule, the DataModules, the command line (extra `train`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diffusion_mp.extras import needed_by

from .losses import mean_squared_error, node_cross_entropy

if TYPE_CHECKING:
    from .datamodules import DigitsDataModule, PlanetoidDataModule
    from .metrics import weighted_accuracy
    from .module import NodeClassifier
    from .sequences import SequenceClassifier

__all__ = [
    "DigitsDataModule",
    "NodeClassifier",
    "PlanetoidDataModule",
    "SequenceClassifier",
    "mean_squared_error",
    "node_cross_entropy",
    "weighted_accuracy",
]

# Lightning is loaded with the first of these, so that the losses work and the command line can complain without it.
_LAZY = {
    "NodeClassifier": "module",
    "SequenceClassifier": "sequences",
    "DigitsDataModule": "datamodules",
    "PlanetoidDataModule": "datamodules",
    "weighted_accuracy": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name, "diffusion-mp[train]"):
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
