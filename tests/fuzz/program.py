"""Programs as text: calls whose arguments are Python expressions, each known to be right, wrong, or either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
        line = self.target
        named = []
        for name, arg in self.args.items():
            position = f"{{{name}}}"
            if arg.right is None:
                continue
            if position in line:
                # It may stand beside an operator.
                line = line.replace(position, f"({arg.right})")
            else:
                named.append(f"{name}={arg.right}")
        return f"{self.result} = {line.replace('{args}', ', '.join(named))}"


@dataclass(frozen=True)
class Program:
    name: str
    calls: tuple[Call, ...]
    # Which arguments were replaced, as (call, argument).
    wrong: tuple[tuple[int, str], ...] = ()

    def with_arg(self, position: tuple[int, str], arg: Arg) -> Program:
        number, name = position
        calls = [*self.calls]
        calls[number] = replace(calls[number], args=calls[number].args | {name: arg})
        return replace(self, calls=tuple(calls))

    def lines(self) -> list[str]:
        return [call.line() for call in self.calls]

    def as_request(self) -> dict[str, Any]:
        """What a worker is told: the lines, what is to be expected of each, and the words a refusal may use.

        Where something of a line is wrong on purpose, these are the names of what is wrong.
        """
        steps = []
        for call in self.calls:
            valid = [arg.valid for arg in call.args.values()]
            step = {
                "line": call.line(),
                # One that may be wrong may also make another right: row boundaries beyond N fit more rows.
                "valid": None if None in valid else False not in valid,
                "finite": call.finite,
                "names": list(call.args),
                "wrong": [
                    name for name, arg in call.args.items() if arg.valid is not True
                ],
            }
            steps.append(step)
        return {"steps": steps}


class Draw:
    """Choices for one program, which calls a public name, from a seeded generator.

    Without a generator it is always the first option: the plainest program.

    Sizes, dtype and edges are drawn once, so that the arguments of a program fit together.
    """

    def __init__(self, name: str, rng: Random | None) -> None:
        self.name = name
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
        if self.rng is None:
            return [(0, 1), (1, 2), (2, 3)]
        graphs = [range(*bounds) for bounds in pairwise(self.ptr)]
        graphs = [nodes for nodes in graphs if nodes]
        edges = []
        for _ in range(self.pick([3, 6, 12, 1, 0]) if graphs else 0):
            nodes = self.pick(graphs)
            edges.append((self.pick(nodes), self.pick(nodes)))
        return edges

    @property
    def batch(self) -> list[int]:
        sizes = self.sizes or [self.nodes]
        return [graph for graph, size in enumerate(sizes) for _ in range(size)]

    @property
    def ptr(self) -> list[int]:
        return [*accumulate(self.sizes or [self.nodes], initial=0)]


Strategy = Callable[[Draw], None]


def draw_program(name: str, strategy: Strategy, seed: int, index: int) -> Program:
    """The program number ``index`` of a seed: the same whenever and wherever it is drawn."""
    rng = Random(f"{seed}/{index}/{name}")
    program = plain_program(name, strategy, rng)
    places = wrong_places(program)
    count = rng.choice([0, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    for position in rng.sample([*places], min(len(places), count)):
        program = put_wrong(program, position, rng.choice(places[position]))
    return program


def plain_program(name: str, strategy: Strategy, rng: Random | None = None) -> Program:
    """A program with nothing wrong; without ``rng`` the plainest one."""
    draw = Draw(name, rng)
    strategy(draw)
    return Program(name, tuple(draw.calls))


def wrong_places(program: Program) -> dict[tuple[int, str], Sequence[Wrong]]:
    """What is wrong, by (call, argument), where something may be."""
    return {
        (number, name): arg.wrong
        for number, call in enumerate(program.calls)
        for name, arg in call.args.items()
        if arg.wrong
    }


def put_wrong(program: Program, position: tuple[int, str], wrong: Wrong) -> Program:
    arg = Arg(wrong.source, valid=wrong.valid, what=wrong.what)
    optional = program.calls[position[0]].args[position[1]].optional
    program = program.with_arg(position, replace(arg, optional=optional))
    return replace(program, wrong=(*program.wrong, position))
