"""All formats of the hostile-files test by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from hostile import Format

FORMATS: dict[str, Format] = {
    format.name: format
    for module in ("hostile_binary", "hostile_text")
    if find_spec(module) is not None
    for format in import_module(module).FORMATS
}
