"""The runtime checker of the test run: beartype, with an int where a float is annotated, as PEP 484 has it."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its check; one within another is made at every call of that, and a check takes long to make."""
    return function if "<locals>" in function.__qualname__ else check(function)
