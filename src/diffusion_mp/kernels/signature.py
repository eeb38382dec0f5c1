"""``Signature``: arguments as a function is annotated, and flat, as torch's schemas know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, get_args, get_type_hints

import torch
from torch import Tensor

Wide = Annotated[Tensor, "wide"]
"""An argument that is brought to one dtype with all other ``Wide`` and ``Narrow`` ones, at least float32."""

Narrow = Annotated[Tensor, "narrow"]
"""An argument that kernels may get in half precision, since they accumulate in float32: one dtype for all of these."""

#: How annotations read in a schema.
SCHEMA = {
    Tensor: "Tensor",
    Wide: "Tensor",
    Narrow: "Tensor",
    Tensor | None: "Tensor?",
    Wide | None: "Tensor?",
    Sequence[int]: "SymInt[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
}


class Signature:
    """What a function takes and returns; named tuples are taken apart into ``tuple.field``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        self.arguments = list(hints)
        tuples = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
        self.tuples: dict[str, Callable[..., Any]] = tuples
        self._nested = bool(tuples)
        self.flat: dict[str, Any] = {}
        self.parts: dict[str, list[str]] = {}
        for name, hint in hints.items():
            fields = get_type_hints(hint, include_extras=True) if name in self.tuples else {}
            parts = {f"{name}.{field}": kind for field, kind in fields.items()} or {name: hint}
            self.parts[name], self.flat = list(parts), self.flat | parts
        unknown = {name: kind for name, kind in self.flat.items() if kind not in SCHEMA}
        if unknown:
            raise TypeError(f"an operation takes {', '.join(SCHEMA.values())} and tuples of these; got {unknown}.")
        self.several = returned is not Tensor
        # Results have the names of their fields; "out" is the only one, or all of them.
        self.results = ["out"]
        if self.several:
            self.results = [*getattr(returned, "_fields", [f"out_{place}" for place in range(len(get_args(returned)))])]
        self.returned: Callable[..., Any] = returned if hasattr(returned, "_fields") else _plain_tuple
        shared = set(self.flat) & set(self.results)
        if shared:
            raise TypeError(f"arguments and results of an operation have names of their own; got {shared} twice.")
        self.parts |= {name: [name] for name in self.results if name not in self.parts}
        if "out" not in self.parts:
            self.parts["out"], self.tuples["out"] = self.results, self.returned
        self._wide = [place for place, kind in enumerate(self.flat.values()) if kind in (Wide, Wide | None)]
        self._narrow = [place for place, kind in enumerate(self.flat.values()) if kind == Narrow]

    def schema(self, *more: str) -> str:
        """That of the flat operation, with ``more`` arguments at the end."""
        arguments = [f"{SCHEMA[kind]} {name.replace('.', '_')}" for name, kind in self.flat.items()]
        results = f"({', '.join('Tensor' for _ in self.results)})" if self.several else "Tensor"
        return f"({', '.join([*arguments, *more])}) -> {results}"

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """The parts of arguments."""
        if not self._nested:
            return list(args)
        flat: list[Any] = []
        for name, arg in zip(self.arguments, args, strict=True):
            if name in self.tuples:
                flat.extend(arg)
            else:
                flat.append(arg)
        return flat

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Arguments from their parts; what comes after them is left out."""
        if not self._nested:
            return list(flat[: len(self.arguments)])
        values, args = iter(flat), []
        for name in self.arguments:
            kind = self.tuples.get(name)
            args.append(kind(*islice(values, len(self.parts[name]))) if kind else next(values))
        return args

    def to_one_dtype(self, flat: list[Any], *, narrow: bool) -> None:
        """In place; with ``narrow`` what kernels take in half precision stays in it."""
        if not (self._wide or self._narrow):
            return
        short = flat[self._narrow[0]].dtype if self._narrow else torch.float32
        for place in self._narrow:
            short = torch.promote_types(short, flat[place].dtype)
        wide = torch.promote_types(short, torch.float32)
        for place in self._wide:
            wide = wide if flat[place] is None else torch.promote_types(wide, flat[place].dtype)
        for place in self._wide:
            flat[place] = None if flat[place] is None else flat[place].to(wide)
        for place in self._narrow:
            flat[place] = flat[place].to(short if narrow else wide)


def _plain_tuple(*results: Tensor) -> tuple[Tensor, ...]:
    return results
