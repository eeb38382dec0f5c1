"""Arguments of a public name by its signature: annotations say what they are, names which values are right."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

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
from diffusion_mp_experiments import graphs, sequences, train

from .arguments import *
from .program import Draw, Strategy

PACKAGES = {
    "mp": mp,
    "data": data,
    "diagnostics": diagnostics,
    "distributed": distributed,
    "testing": testing,
}
PACKAGES |= {"graphs": graphs, "sequences": sequences, "train": train}
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
    return (
        name
        if "." in name
        else f"{home(name).__name__.replace('diffusion_mp', 'mp')}.{name}"
    )


def counts(*right: int, **allowed: Any) -> Make:
    return lambda d: count(d, *right, **allowed)


def numbers(*right: float | str, **allowed: Any) -> Make:
    return lambda d: number(d, *right, **allowed)


def texts(*right: str | None) -> Make:
    return lambda d: choice(d, *right, optional=False)


def strides(d: Draw) -> Arg:
    wrong = bad(
        "empty: () | a zero: (0,) | negative: (-1,) | a fraction: (1.5,) | a string | a number | None",
        "a bool: (True,) | letters: ('a',) | a module",
    )
    return options(d, "(1,)", "(2,)", "[3]", wrong=wrong)


def dtype(d: Draw) -> Arg:
    wrong = bad(
        "a string: 'float32' | integers: torch.int64 | a number | complex: torch.complex64"
    )
    return options(d, f"torch.{d.dtype}", wrong=wrong)


def device(d: Draw) -> Arg:
    wrong = bad("no device: 'nowhere' | a number: 3.5 | a list: ['cpu']")
    return options(d, "'cpu'", "torch.device('cpu')", wrong=wrong)


MODELS = (
    "nn.Linear(2, 2)",
    "mp.GCNConv(4, 2)",
    "mp.NodeFormer(4, 4, 2)",
    "nn.Identity()",
)
#: What a parameter of this name is everywhere; a table may say otherwise for one of its names.
PARAMETERS: dict[str, Make] = {
    **dict.fromkeys(
        ("dropout", "attention_dropout", "value_dropout", "gnn_dropout"),
        probability,
    ),
    **dict.fromkeys(
        ("num_layers", "encoder_layers", "num_gnn_layers", "trans_num_layers", "hops"),
        counts(1, 2),
    ),
    **dict.fromkeys(("channels", "dim"), lambda d: count(d, d.channels)),
    "in_channels": lambda d: count(d, d.channels).unsure(
        "negative"
    ),  # -1 may be found out at the first call
    "hidden_channels": counts(4, 6),
    "out_channels": counts(3, 1, 4),
    "encoder_channels": counts(5),
    "head_channels": counts(3),
    "mlp_channels": counts(5),
    "heads": lambda d: count(d, d.heads),
    "K": counts(2, 1),
    "k": counts(5, 2),
    "steps": counts(1, 3),
    "max_iter": counts(1000),
    "max_steps": counts(30),
    "memory": counts(10, 0, zero=True),
    "points": counts(2, 1),
    "draws": counts(1, 2),
    "num_features": counts(8, 5),
    "num_samples": counts(2, 0, zero=True),
    "per_class": counts(5, 2),
    "num_neighbors": counts(5, 1),
    "num_parts": counts(1),
    "num_val": counts(500, 10, zero=True),
    "num_test": counts(5, 10),
    "batch_size": counts(4),
    "windows": counts(4, 3),
    "lags": counts(4),
    "num_images": counts(9),
    "num_words": counts(9),
    "max_length": counts(9),
    "num": counts(2, 3),
    "size": counts(32, 24),
    "max_depth": counts(5),
    "max_args": counts(5),
    "dashes": counts(4, 6),
    "distractors": counts(1, 0, zero=True),
    "distractor_dashes": counts(2),
    "num_nodes": counts(4, 7),
    "rows": counts(4, 7),
    "columns": counts(4, 7),
    "tau": numbers(0.5, 0.25),
    "t": numbers(0.5, 1.0, 0.1),
    "tol": numbers(1e-2, 1e-3),
    "gamma": numbers(1.0, 0.5),
    "alpha": numbers(0.1, 0.2),
    "beta": numbers(0.0, 0.5, zero=True, negative=True),
    "leak": numbers(0.0, 0.2, zero=True),
    "lam": numbers(1.0, 0.0, 0.1, zero=True),
    "mu": numbers(2.0, 20.0),
    "radius": numbers(1.0, 0.5),
    "bandwidth": numbers(0.5, 0.25),
    "initial": numbers(1.0, 0.01),
    "step": numbers(0.5, 1.0),
    "shrink": numbers(0.5, below="1.0"),
    "theta": numbers(0.5, 0.25),
    "threshold": numbers(1e-8),
    "negative_slope": numbers(0.2, 0.0, negative=True),
    "edge_regularization": numbers(0.5, 0.0, zero=True),
    "stabilizer": numbers(0.0, 1e-6, zero=True),
    "graph_weight": numbers(0.3, 0.0, 1.0, zero=True, below="1.5"),
    "budget": numbers(0.5, 0.25, "None", none=True),
    "sharpness": numbers(4.0, 0.5),
    "lr": numbers(0.01, zero=True),
    "weight_decay": numbers(5e-4, 0.0, zero=True),
    "classes": counts(2, 3),
    "num_classes": counts(3, 2),
    "block_size": counts(3, 65536),
    "x": free,
    "train": numbers(0.5, 0.25, below="1.5"),
    "val": numbers(0.1, 0.0, zero=True, below="1.5"),
    "split": seed,
    "model": lambda d: options(d, *MODELS, wrong=NOT_A_MODULE),
    "act": texts("relu", "elu", "gelu"),
    "activation": texts("relu", "tanh", "sigmoid"),
    "coupling": coupling,
    "device": device,
    "diffusivity": diffusivity,
    "dtype": dtype,
    "generator": lambda d: generator(d, optional=False),
    "root": absent,
    "batch": lambda d: edges(d)["batch"],
    "ptr": ptr,
    "seed": seed,
    "strides": strides,
    "update": update,
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
    found = {
        name: p
        for name, p in parameters.items()
        if name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    for parameter in parameters.values():
        # Typed options are parameters too, all of which may be left out.
        if get_origin(parameter.annotation) is Unpack:
            (options,) = get_args(parameter.annotation)
            for name, hint in get_type_hints(options, include_extras=True).items():
                found[name] = inspect.Parameter(
                    name, parameter.KEYWORD_ONLY, default=None, annotation=hint
                )
    return found


def arguments(
    d: Draw,
    name: str,
    /,
    leave: str = "",
    more: str = "",
    of: Any = None,
    always: str = "",
    **own: Make | Arg,
) -> dict[str, Arg]:
    """The arguments of a public name: its own, as a table has them, and every other but for those to ``leave``.

    ``more`` are parameters of another callable ``of``, to which ``**options`` are passed on. What a function makes may
    be left out where the signature has a default, but for what is to be passed ``always``.
    """
    found = parameters(name) | {key: _signature(of)[key] for key in more.split()}
    kept = {
        key: parameter
        for key, parameter in found.items()
        if key in own or key not in LEFT_OUT | {*leave.split()}
    }
    given = {
        key: _fitting(d, name, p, own.get(key), key in always.split())
        for key, p in kept.items()
    }
    return given | {
        key: arg if isinstance(arg, Arg) else given.get(key) or arg(d)
        for key, arg in own.items()
    }


def construct(
    d: Draw, result: str, name: str, after: str = "", /, **options: Any
) -> dict[str, Arg]:
    """Call a public name with `arguments`, which are returned; ``after`` follows the call in the program."""
    given = arguments(d, name, **options)
    d.call(result, f"{address(name)}({{args}}){after}", **given)
    return given


def _fitting(
    d: Draw,
    name: str,
    parameter: inspect.Parameter,
    own: Make | Arg | None,
    always: bool,
) -> Arg:
    """The argument that a table has, or else by annotation or by name."""
    if isinstance(own, Arg):
        return own
    kinds = list(_members(parameter.annotation))
    words = [word for word in kinds if isinstance(word, str)]
    if own is not None:
        arg = own(d)
    elif words:
        arg = choice(
            d, *words, *([None] if type(None) in kinds else []), optional=False
        )
    elif bool in kinds:
        arg = flag(d, optional=False)
    elif parameter.name in PARAMETERS:
        arg = PARAMETERS[parameter.name](d)
    else:
        raise KeyError(
            f"{name}: what is right for {parameter.name}? Say so in PARAMETERS or in the table"
        )
    if type(None) in kinds:
        arg = arg.without("None")
    if (
        always
        or arg.optional
        or arg.right is None
        or parameter.default is inspect.Parameter.empty
    ):
        return arg
    return replace(arg, optional=True, right=arg.right if d.maybe(0.5) else None)


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union and the words of its literals."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif type(annotation).__name__ in ("UnionType", "_UnionGenericAlias"):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def calls(name: str, /, *uses: str, finite: bool = True, **options: Any) -> Strategy:
    """A call with arguments as of `arguments`, and uses of what it ``made``, which take the options that they name."""
    of_uses = {
        key: make
        for key, make in options.items()
        if any(f"{{{key}}}" in use for use in uses)
    }
    own = {key: make for key, make in options.items() if key not in of_uses}

    def strategy(d: Draw) -> None:
        d.call(
            "made" if uses else "out",
            f"{address(name)}({{args}})",
            finite=finite,
            **arguments(d, name, **own),
        )
        for use in uses:
            given = {key: make for key, make in of_uses.items() if f"{{{key}}}" in use}
            d.call(
                "out",
                use,
                **{
                    key: make if isinstance(make, Arg) else make(d)
                    for key, make in given.items()
                },
            )

    return strategy
