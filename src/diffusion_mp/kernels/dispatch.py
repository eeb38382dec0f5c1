"""Which implementation of an operation runs: the one that was named, or the first that does not decline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from diffusion_mp.errors import BackendError, check_choice

Backend = Literal["auto", "reference", "cpu", "triton", "flex"]

BACKENDS = ("auto", "reference", "cpu", "triton", "flex")

#: Names a backend for all operations ("reference"), or for some ("linear_attention=triton,pairwise=cpu").
VARIABLE = "DIFFUSION_MP_BACKEND"


class Implementation(NamedTuple):
    """A way to compute an operation."""

    run: Callable[..., Any]
    """The computation, on the arguments of the operation."""
    declines: Callable[..., str | None] | None = None
    """Called with whether it was named, and the arguments: why not on these, as the end of a sentence ("q is on the
    CPU"), or ``None`` if it can. Without such a function it always can."""


def requested(operation: str, backend: str) -> str:
    """The backend that the call or else the environment names for an operation; ``"auto"`` where neither does.

    Raises:
        ValueError: it is none of the backends.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        check_choice(backend, "backend", BACKENDS)
    if backend != "auto":
        return backend
    for part in os.environ.get(VARIABLE, "").split(","):
        target, _, name = part.strip().rpartition("=")
        if name and target in ("", operation):
            check_choice(name, VARIABLE, BACKENDS)
            return name
    return "auto"


def choose(operation: str, backend: str, table: Mapping[str, Implementation], *args: Any) -> Callable[..., Any]:
    """The implementation for these arguments; with ``"auto"`` the first of the table that does not decline.

    Raises:
        BackendError: the named backend declines, or does not have the operation. Nothing else is taken instead.
    """
    named = backend != "auto"
    if named and backend not in table:
        raise BackendError(
            f"backend {backend!r} does not have {operation}; it has {', '.join(map(repr, table))}. "
            f"Take one of these, or 'auto'."
        )
    for name in [backend] if named else table:
        run, declines = table[name]
        reason = None if declines is None else declines(named, *args)
        if reason is None:
            return run
    raise BackendError(f"backend {name!r} declines {operation}: {reason}. Take another, or 'auto'.")
