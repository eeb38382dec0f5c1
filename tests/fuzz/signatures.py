"""Arguments of a public name by its signature: annotations say what they are, names which values are right."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

import torch
from torch import nn

import diffusion_mp as mp
from diffusion_mp import (
    couplings,
    data,
    diagnostics,
    diffusivities,
    distributed,
    energies,
    layers,
)

from diffusion_mp import models, testing, updates  # isort: skip
from diffusion_mp.checks import (
    Count,
    CountOrZero,
    FiniteNumber,
    NonnegativeNumber,
    PositiveNumber,
    Probability,
    Seed,
    Share,
)
from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import EnergyTerm, Penalty
from diffusion_mp.graph import Graph
from diffusion_mp.updates import StateUpdate
from diffusion_mp_experiments import graphs, sequences, train

from .arguments import *
from .program import Draw, Strategy

PACKAGES = {
    package.__name__.rpartition(".")[2]: package
    for package in (data, diagnostics, distributed, testing, graphs, sequences, train)
}
#: Where names without a package are looked up, in this order.
LIBRARY = (mp, couplings, diagnostics, diffusivities, energies, layers, models, updates)


def home(name: str) -> ModuleType:
    """The package that a program takes a public name from."""
    package, _, attribute = name.rpartition(".")
    if package:
        return PACKAGES[package]
    return next(module for module in LIBRARY if attribute in module.__all__)


def address(name: str) -> str:
    """What a program writes for a public name."""
    if "." in name:
        return name
    return f"{home(name).__name__.replace('diffusion_mp', 'mp')}.{name}"


def counts(*right: int, **allowed: Any) -> Make:
    return lambda d: count(d, *right, **allowed)


def numbers(*right: float | str, **allowed: Any) -> Make:
    return lambda d: number(d, *right, **allowed)


def texts(*right: str | None) -> Make:
    return lambda d: choice(d, *right)


MODELS = ["nn.Linear(2, 2)", "mp.GCNConv(4, 2)", "mp.NodeFormer(4, 4, 2)"]
#: What is right by the annotation of a parameter. Makers of numbers take the right ones.
CHECKED: dict[Any, Callable[..., Arg]] = {
    Count: count,
    CountOrZero: partial(count, zero=True),
    FiniteNumber: partial(number, negative=True),
    NonnegativeNumber: partial(number, zero=True),
    PositiveNumber: number,
    Share: partial(number, zero=True, below="1.5"),
}
PLAIN: dict[Any, Callable[..., Arg]] = {int: count, float: number}
OBJECTS: dict[Any, Make] = {
    bool: lambda d: flag(d, optional=False),
    Coupling: any_coupling,
    Diffusivity: diffusivity,
    EnergyTerm: any_term,
    Graph: just_graph,
    Path: absent,
    Penalty: any_penalty,
    Probability: probability,
    Seed: seed,
    StateUpdate: update,
    nn.Module: lambda d: options(d, *MODELS, wrong=NOT_A_MODULE),
    torch.Generator: generator,
    torch.device: device,
    torch.dtype: dtype,
}
#: Right numbers for parameters of a name, where the default takes long or there is none.
RIGHT: dict[str, Sequence[float]] = {
    "dashes": (4, 6),
    "hidden_channels": (4, 6),
    "num": (2, 3),
    "num_layers": (1, 2),
    "num_nodes": (5, 8),
    "out_channels": (3, 1, 4),
    "size": (32, 24),
    "tol": (1e-2, 1e-3),
}
#: Parameters that have to fit the program.
SIZES: dict[str, Make] = {
    "channels": channels,
    "dim": channels,
    "heads": lambda d: count(d, d.heads),
    # -1 may be found out at the first call.
    "in_channels": lambda d: channels(d).unsure("negative"),
}
#: What a parameter of this name is where its annotation does not say enough; a table may say otherwise.
PARAMETERS: dict[str, Make] = {
    "act": texts("relu", "elu", "gelu"),
    "activation": texts("relu", "tanh", "sigmoid"),
    "batch": batch,
    "beta": numbers(0.0, 0.5, negative=True),
    "distractors": counts(1, 0, zero=True),
    "dropout": probability,
    "graph_weight": numbers(0.3, 0.0, 1.0, zero=True, below="1.5"),
    "lam": numbers(1.0, 0.0, 0.1, zero=True),
    "lr": numbers(0.01, zero=True),
    "memory": counts(10, 0, zero=True),
    "negative_slope": numbers(0.2, 0.0, negative=True),
    "num_val": counts(500, 10, zero=True),
    "ptr": ptr,
    "root": absent,
    "seed": seed,
    "strides": strides,
    "train": numbers(0.5, 0.25, below="1.5"),
    "val": numbers(0.1, 0.0, zero=True, below="1.5"),
    "weight_decay": numbers(5e-4, 0.0, zero=True),
    "x": free,
}

#: What is never passed: it would download, print, or write where nobody looks.
LEFT_OUT = {"download", "progress", "cache", "groups", "log"}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return _signature(getattr(home(name), name.rpartition(".")[2]))


@cache
def _signature(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # Of a class with an inherited constructor, Python 3.11.2 gives the signature of a base's `__new__`.
    module = isinstance(target, type) and issubclass(target, nn.Module)
    called = target.__init__ if module else target
    parameters = inspect.signature(called, eval_str=True).parameters
    listed = {
        name: p
        for name, p in parameters.items()
        if name != "self"
        # Not for users, who are told so by the underscore.
        and not name.startswith("_")
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    for parameter in parameters.values():
        # Typed options are parameters too, all of which may be left out.
        if get_origin(parameter.annotation) is Unpack:
            (options,) = get_args(parameter.annotation)
            for name, hint in get_type_hints(options, include_extras=True).items():
                listed[name] = inspect.Parameter(
                    name, parameter.KEYWORD_ONLY, default=None, annotation=hint
                )
    return listed


def arguments(
    d: Draw,
    /,
    leave: str = "",
    more: str = "",
    of: Any = None,
    always: str = "",
    **special: Make | Arg,
) -> dict[str, Arg]:
    """The arguments of the name of this program: ``own`` ones, and every other but for those to ``leave``.

    ``more`` are parameters of another callable ``of``, to which ``**options`` are passed on. What a function makes may
    be left out where the signature has a default, but for what is to be passed ``always``.
    """
    listed = parameters(d.name) | {key: _signature(of)[key] for key in more.split()}
    kept = {
        key: parameter
        for key, parameter in listed.items()
        if key in special or key not in LEFT_OUT | {*leave.split()}
    }
    passed = {
        key: _fitting(d, p, special.get(key), key in always.split())
        for key, p in kept.items()
    }
    return passed | {
        key: arg if isinstance(arg, Arg) else passed.get(key) or arg(d)
        for key, arg in special.items()
    }


def construct(
    d: Draw, result: str, after: str = "", /, **options: Any
) -> dict[str, Arg]:
    """Call the name of this program with `arguments`, which are returned; ``after`` follows the call."""
    passed = arguments(d, **options)
    d.call(result, f"{address(d.name)}({{args}}){after}", **passed)
    return passed


def _fitting(
    d: Draw,
    parameter: inspect.Parameter,
    special: Make | Arg | None,
    always: bool,
) -> Arg:
    """The argument that a table has, or else by annotation or by name."""
    if isinstance(special, Arg):
        return special
    kinds = list(_members(parameter.annotation))
    words = [word for word in kinds if isinstance(word, str)]
    if special is not None:
        arg = special(d)
    elif words:
        arg = choice(d, *words, *([None] if type(None) in kinds else []))
    else:
        arg = _by_annotation_or_name(d, parameter, kinds)
    if type(None) in kinds:
        arg = arg.without("None")
    required = parameter.default is inspect.Parameter.empty
    if always or arg.optional or arg.right is None or required:
        return arg
    return replace(arg, optional=True, right=arg.right if d.maybe(0.5) else None)


def _by_annotation_or_name(
    d: Draw, parameter: inspect.Parameter, kinds: list[Any]
) -> Arg:
    if parameter.name in SIZES:
        return SIZES[parameter.name](d)
    right = _right_numbers(parameter)
    for kind in kinds:
        if kind in CHECKED:
            return CHECKED[kind](d, *right)
    if parameter.name in PARAMETERS:
        return PARAMETERS[parameter.name](d)
    for kind in kinds:
        if kind in OBJECTS:
            return OBJECTS[kind](d)
        if kind in PLAIN:
            # A default is right.
            return PLAIN[kind](d, *right, zero=parameter.default == 0)
    raise KeyError(
        f"{d.name}: what is right for {parameter.name}? Say so in PARAMETERS or in the table"
    )


def _right_numbers(parameter: inspect.Parameter) -> Sequence[float]:
    """Those of the name, or the default and another; none where both are missing."""
    default = parameter.default
    if parameter.name in RIGHT:
        return RIGHT[parameter.name]
    if isinstance(default, int):
        return default, default + 1
    if isinstance(default, float):
        return default, default / 2 or 0.5
    return ()


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union and the words of its literals."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif type(annotation).__name__ in ("UnionType", "_UnionGenericAlias"):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def calls(*uses: str, finite: bool = True, **options: Any) -> Strategy:
    """A call with arguments as of `arguments`, and uses of what it ``made``, which take the options that they name."""
    of_uses = {
        key: make
        for key, make in options.items()
        if any(f"{{{key}}}" in use for use in uses)
    }
    special = {key: make for key, make in options.items() if key not in of_uses}

    def strategy(d: Draw) -> None:
        d.call(
            "made" if uses else "out",
            f"{address(d.name)}({{args}})",
            finite=finite,
            **arguments(d, **special),
        )
        for use in uses:
            passed = {key: make for key, make in of_uses.items() if f"{{{key}}}" in use}
            d.call(
                "out",
                use,
                **{
                    key: make if isinstance(make, Arg) else make(d)
                    for key, make in passed.items()
                },
            )

    return strategy
