"""``Fact``: what a coupling knows of itself, given or found out when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Promise = bool | Callable[[], bool]
"""True, False, or a question: a function without arguments that finds it out."""

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")


class Fact(Generic[T]):
    """An attribute that is given when a coupling is made, or found out when somebody first asks for it, and then kept.

    A given answer is an ordinary attribute of the coupling, which Python finds first. A question, a function without
    arguments, waits in ``coupling._questions``, and only then is ``__get__`` called. A question must not hold its own
    coupling: in such a circle the tensors of both would wait for the garbage collector.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, coupling: Any, kind: type | None = None) -> T:
        answer: T = coupling._questions[self.name]()
        setattr(coupling, self.name, answer)
        return answer
