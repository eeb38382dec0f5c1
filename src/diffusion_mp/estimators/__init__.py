"""Estimators of scikit-learn (extra `sklearn`), from arrays of features to labels."""

from __future__ import annotations

from typing import Any

from diffusion_mp.checks import needed_by

# scikit-learn is imported on first use, so that the package can be imported without it.
__all__ = ["DiffusionClassifier"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name, "diffusion-mp[sklearn]"):
        from diffusion_mp.estimators import classifier

        return getattr(classifier, name)
