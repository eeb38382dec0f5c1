"""Arguments of a public name by its signature: annotations say what they are, names which values are right."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import diffusion_mp as mp
from diffusion_mp import (
    couplings,
    data,
    diagnostics,
    diffusivities,
    distributed,
    energies,
    layers,
    models,
    testing,
    updates,
)  # fmt: skip
from diffusion_mp_experiments import graphs, sequences, train

from .arguments import *
from .program import Draw, Strategy

PACKAGES = {"mp": mp, "data": data, "diagnostics": diagnostics, "distributed": distributed, "testing": testing}
PACKAGES |= {"graphs": graphs, "sequences": sequences, "train": train}
#: Where names without a package are looked up, in this order.
LIBRARY = (mp, couplings, diagnostics, diffusivities, energies, layers, models, updates)


def home(name: str) -> ModuleType:
    """The package that a program takes a public name from."""
    package, _, attribute = name.rpartition(".")
    return PACKAGES[package] if package else next(module for module in LIBRARY if attribute in module.__all__)


def address(name: str) -> str:
    """What a program writes for a public name."""
    return name if "." in name else f"{home(name).__name__.replace('diffusion_mp', 'mp')}.{name}"


def _counts(*right: int, zero: bool = False) -> Make:
    return lambda d: count(d, *right, zero=zero)


def _numbers(*right: float | str, **allowed: Any) -> Make:
    return lambda d: number(d, *right, **allowed)


def _texts(*right: str) -> Make:
    return lambda d: choice(d, *right, optional=False)


def strides(d: Draw) -> Arg:
    wrong = bad(
        "empty: () | a zero: (0,) | negative: (-1,) | a fraction: (1.5,) | a string | a number | None",
        "a bool: (True,) | letters: ('a',) | a module",
    )
    return options(d, "(1,)", "(2,)", "[3]", wrong=wrong)


def dtype(d: Draw) -> Arg:
    wrong = bad("a string: 'float32' | integers: torch.int64 | a number | complex: torch.complex64")
    return options(d, f"torch.{d.dtype}", wrong=wrong)


def device(d: Draw) -> Arg:
    wrong = bad("no device: 'nowhere' | a number: 3.5 | a list: ['cpu']")
    return options(d, "'cpu'", "torch.device('cpu')", wrong=wrong)


#: What a parameter of this name is everywhere; a table may say otherwise for one of its names.
PARAMETERS: dict[str, Make] = {
    **dict.fromkeys(("dropout", "attention_dropout", "value_dropout", "gnn_dropout", "trans_dropout"), probability),
    **dict.fromkeys(("num_layers", "encoder_layers", "num_gnn_layers", "trans_num_layers", "hops"), _counts(1, 2)),
    **dict.fromkeys(("gnn_num_layers", "trans_num_heads"), _counts(1, 2)),
    **dict.fromkeys(("channels", "dim"), lambda d: count(d, d.channels)),
    "in_channels": lambda d: count(d, d.channels).unsure("negative"),  # -1 may be found out at the first call
    "hidden_channels": _counts(4, 6), "out_channels": _counts(3, 1, 4), "encoder_channels": _counts(5),
    "head_channels": _counts(3), "mlp_channels": _counts(5), "heads": lambda d: count(d, d.heads), "K": _counts(2, 1),
    "k": _counts(5, 2), "steps": _counts(1, 3), "max_iter": _counts(1000), "max_steps": _counts(30),
    "memory": _counts(10, 0, zero=True), "points": _counts(2, 1), "draws": _counts(1, 2), "num_features": _counts(8, 5),
    "num_samples": _counts(2, 0, zero=True), "per_class": _counts(5, 2), "num_neighbors": _counts(5, 1),
    "num_parts": _counts(1), "num_val": _counts(500, 10, zero=True), "num_test": _counts(5, 10),
    "batch_size": _counts(4), "windows": _counts(4, 3), "lags": _counts(4), "num_images": _counts(9),
    "num_words": _counts(9), "max_length": _counts(9), "num": _counts(2, 3), "size": _counts(32, 24),
    "num_nodes": _counts(4, 7), "rows": _counts(4, 7), "columns": _counts(4, 7), "tau": _numbers(0.5, 0.25),
    "t": _numbers(0.5, 1.0, 0.1), "tol": _numbers(1e-2, 1e-3), "gamma": _numbers(1.0, 0.5), "alpha": _numbers(0.1, 0.2),
    "beta": _numbers(0.0, 0.5, zero=True, negative=True), "leak": _numbers(0.0, 0.2, zero=True),
    "lam": _numbers(1.0, 0.0, 0.1, zero=True), "mu": _numbers(2.0, 20.0), "radius": _numbers(1.0, 0.5),
    "bandwidth": _numbers(0.5, 0.25), "initial": _numbers(1.0, 0.01), "step": _numbers(0.5, 1.0),
    "shrink": _numbers(0.5, below="1.0"), "theta": _numbers(0.5, 0.25), "threshold": _numbers(1e-8),
    "negative_slope": _numbers(0.2, 0.0, negative=True), "edge_regularization": _numbers(0.5, 0.0, zero=True),
    "stabilizer": _numbers(0.0, 1e-6, zero=True),
    "graph_weight": _numbers(0.3, 0.0, 1.0, zero=True, below="1.5"),
    "budget": _numbers(0.5, 0.25, "None", none=True), "sharpness": _numbers(4.0, 0.5), "lr": _numbers(0.01, zero=True),
    "weight_decay": _numbers(5e-4, 0.0, zero=True), "classes": _counts(2, 3), "num_classes": _counts(3, 2),
    "block_size": _counts(3, 65536), "x": free,
    "model": lambda d: options(d, "nn.Linear(2, 2)", "mp.GCNConv(4, 2)", "nn.Identity()", wrong=NOT_A_MODULE),
    "act": _texts("relu", "elu", "gelu"), "coupling": coupling, "device": device, "diffusivity": diffusivity,
    "dtype": dtype, "generator": generator, "batch": lambda d: edges(d)["batch"], "ptr": ptr, "seed": seed,
    "strides": strides, "update": update,
}  # fmt: skip


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return _signature(getattr(home(name), name.rpartition(".")[2]))


@cache
def _signature(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(target, eval_str=True).parameters
    return {name: p for name, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def arguments(
    d: Draw, name: str, /, *, leave: str = "", more: str = "", of: Callable[..., Any] | None = None, **own: Arg
) -> dict[str, Arg]:
    """The arguments of a public name: those given, and every other of its signature but for those to ``leave``.

    ``more`` are parameters of another callable ``of``, to which ``**options`` are passed on.
    """
    found = dict(parameters(name))
    found |= {key: _signature(of)[key] for key in more.split() if of is not None}
    for key in leave.split():
        found.pop(key)
    return {key: own[key] if key in own else _fitting(d, name, p) for key, p in found.items()} | own


def construct(d: Draw, result: str, name: str, after: str = "", /, **options: Any) -> None:
    """Call a public name with `arguments`; ``after`` follows the call in the program."""
    d.call(result, f"{address(name)}({{args}}){after}", **arguments(d, name, **options))


def _fitting(d: Draw, name: str, parameter: inspect.Parameter) -> Arg:
    """The argument by annotation, or else by name; it may be left out where it has a default."""
    kinds = list(_members(parameter.annotation))
    words = [word for word in kinds if isinstance(word, str)]
    if words:
        arg = choice(d, *words, *([None] if type(None) in kinds else []), optional=False)
    elif bool in kinds:
        arg = flag(d, optional=False)
    elif parameter.name in PARAMETERS:
        arg = PARAMETERS[parameter.name](d)
    else:
        raise KeyError(f"{name}: what is right for {parameter.name}? Say so in PARAMETERS or in the table")
    if type(None) in kinds:
        arg = arg.without("None")
    if parameter.default is inspect.Parameter.empty or arg.right is None:
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


def made(d: Draw, make: dict[str, Make | Arg]) -> dict[str, Arg]:
    """Arguments that a table describes, some of them always alike."""
    return {name: arg if isinstance(arg, Arg) else arg(d) for name, arg in make.items()}


def calls(
    name: str,
    use: str = "",
    /,
    *,
    finite: bool = True,
    leave: str = "",
    more: str = "",
    of: Callable[..., Any] | None = None,
    **make: Make | Arg,
) -> Strategy:
    """A call with arguments as of `arguments`, and a ``use`` of what it ``made``."""

    def strategy(d: Draw) -> None:
        given = arguments(d, name, leave=leave, more=more, of=of, **made(d, make))
        d.call("made" if use else "out", f"{address(name)}({{args}})", finite=finite, **given)
        if use:
            d.call("out", use)

    return strategy
