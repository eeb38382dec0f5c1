"""Programs as text: calls whose arguments are Python expressions, each known to be right, wrong, or either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

# What every program may use; a reproducer begins with it.
PRELUDE = """\
import math
import numpy as np
import torch
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
import diffusion_mp as mp
from diffusion_mp import data, diagnostics, distributed, testing
from diffusion_mp_experiments import graphs, sequences, train
torch.manual_seed(0)
"""


@dataclass(frozen=True)
class Wrong:
    """An expression that should be refused (``valid=False``), or may be (``None``), and what is wrong with it."""

    source: str
    what: str
    valid: bool | None = False


@dataclass(frozen=True)
class Arg:
    """What may stand in one place of a call.

    ``right`` is the expression drawn for it (``None``: it is left out), ``wrong`` are others that may take its place.
    ``valid`` says of ``right`` whether it must be accepted (``True``) or may be refused as well (``None``).
    """

    right: str | None
    wrong: Sequence[Wrong] = ()
    optional: bool = False
    valid: bool | None = True
    what: str = ""

    def without(self, *which: str) -> Arg:
        """The argument where these, by what they are or by their source, are no mistakes, and are not drawn."""
        return replace(
            self,
            wrong=[
                wrong
                for wrong in self.wrong
                if not {wrong.what, wrong.source} & {*which}
            ],
        )

    def unsure(self, *which: str) -> Arg:
        """The argument where these may be refused or not; every one if none is named."""
        return replace(
            self,
            wrong=[
                replace(w, valid=None) if not which or w.what in which else w
                for w in self.wrong
            ],
        )


@dataclass(frozen=True)
class Call:
    """``result = target``, where ``{args}`` in the target stands for all arguments, ``{name}`` for one of them.

    Unless ``finite`` is false, the result of a call with nothing but right arguments must hold no NaN or infinity.
    """

    result: str
    target: str
    args: dict[str, Arg]
    finite: bool = True

    def line(self) -> str:
        named = {
            name: arg.right for name, arg in self.args.items() if arg.right is not None
        }
        line = self.target
        for name in list(named):
            if f"{{{name}}}" in line:
                line = line.replace(f"{{{name}}}", _bracketed(str(named.pop(name))))
        line = line.replace(
            "{args}", ", ".join(f"{name}={source}" for name, source in named.items())
        )
        return f"{self.result} = {line}"


def _bracketed(source: str) -> str:
    """An expression that stands beside an operator."""
    return f"({source})" if source.startswith("lambda") or " + " in source else source


@dataclass(frozen=True)
class Program:
    name: str
    calls: tuple[Call, ...]
    wrong: tuple[
        tuple[int, str], ...
    ] = ()  # which arguments were replaced, as (call, argument)
    errors: tuple[str, ...] = ()  # what else it may raise, since it says so

    def with_arg(self, place: tuple[int, str], arg: Arg) -> Program:
        call = self.calls[place[0]]
        changed = replace(call, args=call.args | {place[1]: arg})
        return replace(
            self, calls=(*self.calls[: place[0]], changed, *self.calls[place[0] + 1 :])
        )

    def lines(self) -> list[str]:
        return [call.line() for call in self.calls]

    def as_request(self) -> dict[str, Any]:
        """What a worker is told: the lines, what is to be expected of each, and the words a refusal may use.

        Where something of a line is wrong on purpose, these are the names of what is wrong.
        """
        steps = []
        for call in self.calls:
            valid = [arg.valid for arg in call.args.values()]
            # One that may be wrong may also make another right: row boundaries that reach beyond N fit more rows.
            step = {
                "line": call.line(),
                "valid": None if None in valid else False not in valid,
                "finite": call.finite,
            }
            wrong = [name for name, arg in call.args.items() if arg.valid is not True]
            steps.append(step | {"names": list(call.args), "wrong": wrong})
        return {"name": self.name, "steps": steps, "errors": self.errors}


class Draw:
    """Choices for one program, from a seeded generator; without one, always the first option: the plainest program.

    Sizes, dtype and edges are drawn once, so that the arguments of a program fit together.
    """

    def __init__(self, rng: Random | None) -> None:
        self.rng = rng
        self.calls: list[Call] = []
        self.nodes = self.pick([5, 5, 5, 2, 1, 0, 17])
        self.channels = self.pick([4, 4, 6, 1, 12])
        self.heads = self.pick([h for h in (1, 1, 2, 3) if self.channels % h == 0])
        self.dtype = self.pick(
            ["float32"] * 6 + ["float64", "float64", "float16", "bfloat16"]
        )
        self.sizes = self._sizes() if self.pick([False, False, True]) else None
        self.edges = self._edges()

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; the first is the plainest."""
        return options[0] if self.rng is None else self.rng.choice(options)

    def maybe(self, chance: float) -> bool:
        """True with that probability; the plainest is False."""
        return self.rng is not None and self.rng.random() < chance

    def call(
        self, result: str, target: str, /, *, finite: bool = True, **args: Arg
    ) -> None:
        self.calls.append(Call(result, target, args, finite))

    def _sizes(self) -> list[int]:
        """Sizes of the graphs of a batch; some may be empty."""
        sizes = []
        left = self.nodes
        while left > 0 or not sizes:
            size = min(left, self.pick([2, 1, 3, 0, 5]))
            sizes.append(size)
            left -= size
        return sizes

    def _edges(self) -> list[tuple[int, int]]:
        """Directed edges inside the graphs, loops and repeats among them; some nodes may be isolated."""
        starts = []
        first = 0
        for size in self.sizes or [self.nodes]:
            starts += [(first, size)] if size else []
            first += size
        if not starts:
            return []
        edges = []
        for k in range(self.pick([3, 6, 12, 1, 0])):
            start, size = (
                starts[k % len(starts)] if self.rng is None else self.pick(starts)
            )
            source, target = (
                (k, k + 1)
                if self.rng is None
                else (self.rng.randrange(size), self.rng.randrange(size))
            )
            edges.append((start + source % size, start + target % size))
        return edges

    @property
    def batch(self) -> list[int]:
        return [
            graph
            for graph, size in enumerate(self.sizes or [self.nodes])
            for _ in range(size)
        ]

    @property
    def ptr(self) -> list[int]:
        bounds = [0]
        for size in self.sizes or [self.nodes]:
            bounds.append(bounds[-1] + size)
        return bounds


Strategy = Callable[[Draw], None]


def draw_program(name: str, strategy: Strategy, seed: int, index: int) -> Program:
    """The program number ``index`` of a seed: the same whenever and wherever it is drawn."""
    rng = Random(f"{seed}/{index}/{name}")
    program = _built(name, strategy, Draw(rng))
    places = [
        (k, arg)
        for k, call in enumerate(program.calls)
        for arg, a in call.args.items()
        if a.wrong
    ]
    for place in rng.sample(
        places, min(len(places), rng.choice([0, 0, 0, 0, 1, 1, 1, 1, 1, 2]))
    ):
        program = put_wrong(
            program, place, rng.choice(program.calls[place[0]].args[place[1]].wrong)
        )
    return program


def plain_program(name: str, strategy: Strategy) -> Program:
    return _built(name, strategy, Draw(None))


def put_wrong(program: Program, place: tuple[int, str], wrong: Wrong) -> Program:
    arg = program.calls[place[0]].args[place[1]]
    program = program.with_arg(
        place,
        replace(arg, right=wrong.source, valid=wrong.valid, what=wrong.what, wrong=()),
    )
    return replace(program, wrong=tuple(dict.fromkeys([*program.wrong, place])))


def _built(name: str, strategy: Strategy, draw: Draw) -> Program:
    strategy(draw)
    return Program(name, tuple(draw.calls))
