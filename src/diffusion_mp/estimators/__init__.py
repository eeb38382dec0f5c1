"""Estimators of scikit-learn (extra `sklearn`), from arrays of features to labels and numbers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from diffusion_mp.checks import needed_by

# scikit-learn is imported on first use, so that the package can be imported without it.
_PLACES = {
    "DiffusionClassifier": "classifier",
    "DiffusionRegressor": "regressor",
    "LabelledKFold": "model_selection",
    "labelled_scorer": "model_selection",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name, "diffusion-mp[sklearn]"):
        module = import_module(f"{__name__}.{_PLACES[name]}")
        return getattr(module, name)
