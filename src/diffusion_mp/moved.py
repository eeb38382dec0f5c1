"""Where public names were in version 0.1, and are found for one more version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

_NOW = {
    "diffusion_mp.data": ("diffusion_mp_experiments.graphs", "diffusion_mp_experiments.sequences"),
    "diffusion_mp.train": ("diffusion_mp_experiments.train",),
}


def names_before(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: a name that has moved is found where it is now, with a DeprecationWarning."""

    def find(name: str) -> Any:
        for place in () if name.startswith("_") else _NOW[package]:
            module = import_module(place)
            if name in module.__all__:
                warnings.warn(
                    f"{package}.{name} has moved: import it from {place}. The old path goes with the next version.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
