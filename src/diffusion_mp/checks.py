"""Checks of arguments (``check_…`` raises, ``as_…`` converts or raises); their messages are sentences for users."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from inspect import Parameter, signature
from operator import index
from shlex import quote
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data, HeteroData

from diffusion_mp.runtime.torch_private import dispatch_mode_active

# torch computes next to nothing in these (no comparison, no index), so they are
# converted before anything is asked of them.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *UNSIGNED)


class _Brief(reprlib.Repr):
    """Short representations of containers, with dtypes and shapes in place of tensors and arrays."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, (Tensor, np.ndarray, nn.Module)):
            return describe(x)
        return super().repr1(x, level)


_brief = _Brief()


def _with_article(kind: object) -> str:
    """Return the name of a dtype or of a class after "a" or "an"."""
    name = getattr(kind, "__name__", str(kind)).removeprefix("torch.")
    return f"an {name}" if name.startswith(("int", "A", "E", "I")) else f"a {name}"


def describe(value: object) -> str:
    """Return dtype and shape of a tensor, or the shortened value and the type of any other object."""
    if isinstance(value, Tensor):
        text = _with_article(value.dtype)
        if value.layout != torch.strided:
            text += f" {str(value.layout).removeprefix('torch.')}"
        text += f" tensor of shape {list(value.shape)}"
        if value.is_meta:
            text += " on the meta device"
        return text
    # The whole tree of a module, or the numbers of an array, would bury the sentence.
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__})"
    if isinstance(value, np.ndarray):
        return f"{_with_article(value.dtype)} array of shape {list(value.shape)}"
    shown = _brief.repr(value).replace("\n", " ")
    return f"{shown} ({type(value).__name__})"


def check_choice(value: object, name: str, choices: Iterable[Any]) -> None:
    """Raise unless ``value`` is one of the choices."""
    options = list(choices)
    # An array of NumPy would answer ``in`` with an array, and an object of the user
    # with what it likes.
    if not (value is None or isinstance(value, str)) or value not in options:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, options))}; got {describe(value)}."
        )


def check_positive(value: float, name: str, *, allow_zero: bool = False) -> None:
    """Raise unless ``value`` is a finite number above zero (or, with ``allow_zero``, at least zero)."""

    def fits(number: float) -> bool:
        # While torch compiles, a number may be a symbol, which is finite and has no
        # `math.isfinite`.
        finite = torch.compiler.is_compiling() or math.isfinite(number)
        return finite and (number >= 0 if allow_zero else number > 0)

    check_number(value, name, fits, f"be finite and {'>= 0' if allow_zero else '> 0'}")


def check_number(
    value: float,
    name: str,
    fits: Callable[[float], bool] = math.isfinite,
    condition: str = "be a finite number",
) -> None:
    """Raise unless ``value`` is a number for which ``fits`` is true; ``condition`` says so in words."""
    # True is an int for Python; as a step size or a rate it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {describe(value)}.")
    if not fits(value):
        raise ValueError(f"{name} must {condition}; got {value}.")


def found_later(channels: object) -> bool:
    """Return whether the number of channels is -1, to be read from the first call."""
    return type(channels) is int and channels == -1


def check_integer(value: int, name: str, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is an integer of at least ``low``, and at most ``high`` if that is given."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer; got {describe(value)}. Pass int({name})."
        )
    if high is not None and not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}]; got {value}.")
    if value < low:
        raise ValueError(f"{name} must be at least {low}; got {value}.")


def check_counts(least: int = 1, /, **counts: int) -> None:
    """Raise unless every named value, such as heads, channels or layers, is an integer of at least ``least``."""
    for name, value in counts.items():
        if name == "in_channels" and found_later(value) and least > -1:
            raise ValueError(
                f"in_channels must be at least {least}; got -1. Only what begins with one linear map finds it out at "
                f"the first call (GCNConv, DIFFormer, …)."
            )
        check_integer(value, name, least)


def check_seed(seed: int, name: str = "seed") -> None:
    """Raise unless ``seed`` is an integer that a buffer of int64 holds."""
    # A buffer would cut off larger seeds without a word.
    check_integer(seed, name, -(1 << 63), (1 << 63) - 1)


def check_index(value: int, name: str, size: int) -> None:
    """Raise unless ``value`` is an integer in 0 … ``size`` − 1."""
    check_integer(value, name, 0, size - 1)


def as_whole(value: object, name: str, way_out: str = "") -> int:
    """Return a whole number as an int, also a number of NumPy or PyTorch; raise TypeError, ending in ``way_out``."""
    # `operator.index` takes what Python takes as a position in a list, and no float,
    # not even 3.0.
    with suppress(TypeError):
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    raise TypeError(
        f"{name} must be a whole number; got {describe(value)}. {way_out}".rstrip()
    )


def python_number(value: object) -> Any:
    """Return a NumPy number, a scalar or an array without dimensions, as a Python number; return all else unchanged."""
    # Python does not take NumPy's float32 for a float, and a saved model could not write it as
    # JSON.
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        return value.item()
    return value


def check_flags(**flags: bool) -> None:
    """Raise unless every named value is True or False, since Python converts any object to a bool."""
    for name, value in flags.items():
        check_kind(value, name, bool, "True or False")


def check_generator(generator: object) -> None:
    """Raise unless ``generator`` is a ``torch.Generator`` or None."""
    check_kind(
        generator,
        "generator",
        (torch.Generator, NoneType),
        "a torch.Generator, such as torch.Generator().manual_seed(0), or None",
    )


def check_function(value: object, name: str, what: str) -> None:
    """Raise unless ``value`` can be called; ``what`` describes its arguments."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, {what}; got {describe(value)}.")


def check_kind(
    value: object, name: str, kind: type | tuple[Any, ...], what: str
) -> None:
    """Raise ``TypeError`` unless ``value`` is of ``kind``, described by ``what``."""
    if not isinstance(value, kind):
        raise wrong_kind(value, name, what)


# Errors are returned where every call of a layer asks: a call of a check would cost as much as the question.
def wrong_kind(value: object, name: str, what: str) -> TypeError:
    """Return the error of a value that is not ``what``."""
    way_out = _way_to_tensor(value, name)
    return TypeError(f"{name} must be {what}; got {describe(value)}.{way_out}")


def _way_to_tensor(value: object, name: str) -> str:
    """Return how to convert an argument, such as ``x`` or ``edge_index``, that is not a tensor."""
    if isinstance(value, HeteroData):
        return " Number all nodes in one run, data = data.to_homogeneous(), and pass data.x and data.edge_index."
    if isinstance(value, Data) and name in ("x", "edge_index"):
        return (
            f" {name} is the tensor data.{name}, as in model(data.x, data.edge_index)."
        )
    if isinstance(value, (list, tuple, np.ndarray)):
        return f" Convert it with torch.as_tensor({name})."
    return ""


def check_probability(value: float, name: str) -> None:
    """Raise unless ``value`` lies in [0, 1)."""
    check_number(value, name, lambda p: 0.0 <= p < 1.0, "be a probability in [0, 1)")


def check_share(value: float, name: str) -> None:
    """Raise unless ``value`` lies in [0, 1], the weight w of one thing when another has 1 − w."""
    check_number(value, name, lambda w: 0.0 <= w <= 1.0, "lie in [0, 1]")


Check = Callable[[Any, str], None]
Function = TypeVar("Function", bound=Callable[..., Any])


def _at_least(least: int) -> Check:
    return lambda value, name: check_counts(least, **{name: value})


def _check_channels(value: int, name: str) -> None:
    if not found_later(value):
        check_counts(**{name: value})


#: What an argument may be, as annotations say it and `checked` makes sure of it. -1
#: channels are the channels of the first call.
Count = Annotated[int, _at_least(1)]
CountOrZero = Annotated[int, _at_least(0)]
Channels = Annotated[int, _check_channels]
FiniteNumber = Annotated[float, check_number]
PositiveNumber = Annotated[float, check_positive]
NonnegativeNumber = Annotated[float, partial(check_positive, allow_zero=True)]
Probability = Annotated[float, check_probability]
Seed = Annotated[int, check_seed]
Share = Annotated[float, check_share]


def checked(function: Function) -> Function:
    """Return a function that first checks its arguments, as far as its annotations say what they may be.

    An annotation is checked if it is one of the types above, ``bool``, a ``Literal``, or a class of modules or of this
    library, each possibly ``None``. All constructors of modules are decorated like this (`Saved`).
    """
    # Without ``*args``, whose values are no single argument.
    names = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]

    @cache
    def checks() -> dict[str, Check]:
        # Not before the first call, since an annotation may name a class that its module defines later.
        hints = get_type_hints(function, include_extras=True)
        # ``**options: Unpack[…]`` is annotated option by option.
        for hint in tuple(hints.values()):
            if get_origin(hint) is Unpack:
                (options,) = get_args(hint)
                hints |= get_type_hints(options, include_extras=True)
        of_all = {name: _check_of(hint) for name, hint in hints.items()}
        return {name: check for name, check in of_all.items() if check is not None}

    @wraps(function)
    def checking(*args: Any, **options: Any) -> Any:
        # More arguments than parameters are for the function to refuse.
        by_name = dict(zip(names, args, strict=False)) | options
        for name, check in checks().items():
            if name in by_name:
                check(by_name[name], name)
        return function(*args, **options)

    return cast("Function", checking)


def _check_of(hint: Any) -> Check | None:
    """Return the check that an annotation stands for, if any."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = NoneType in parts
    required = [part for part in parts if part is not NoneType]
    if all(get_origin(part) is Literal for part in required):
        choices = [choice for part in required for choice in get_args(part)]
        choices += [None] * optional
        return partial(check_choice, choices=choices)
    if len(required) > 1:
        return None
    (part,) = required
    kind = get_origin(part) or part
    check: Check | None = None
    if kind is Annotated:
        check = part.__metadata__[0]
    elif kind is bool:
        check = partial(check_kind, kind=bool, what="True or False")
    elif isinstance(kind, type) and (
        issubclass(kind, (nn.Module, dict, torch.Generator))
        or kind.__module__.startswith("diffusion_mp.")
    ):
        what = _with_article(kind) + " or None" * optional
        check = partial(check_kind, kind=kind, what=what)
    if check is None or not optional:
        return check
    required_check = check

    def check_optional(value: Any, name: str) -> None:
        if value is not None:
            required_check(value, name)

    return check_optional


def check_tensor(
    value: Any,
    name: str,
    shape: str,
    device: torch.device | None = None,
    other: str = "",
) -> None:
    """Raise unless ``value`` is a dense floating-point tensor (of a ``shape``) on ``device``, where ``other`` is."""
    if not isinstance(value, Tensor):
        raise wrong_kind(value, name, f"a tensor {shape}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor {shape}; got {describe(value)}. Use {name}.to_dense()."
        )
    if not value.is_floating_point():
        raise TypeError(
            f"{name} must be floating point; got {describe(value)}. Convert it with {name}.float()."
        )
    if device is not None:
        check_device(value, name, device, other)


def check_has_values(value: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a tensor on the meta device."""
    if value.is_meta:
        raise ValueError(
            f"{name} must have values; got {describe(value)}, where there are none."
        )


def floating(
    shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    """Return ones of a floating dtype on a device, after checks of dtype and device."""
    check_kind(dtype, "dtype", (torch.dtype, NoneType), "a floating torch.dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating torch.dtype; got {dtype}.")
    return torch.ones(
        shape, dtype=dtype, device=None if device is None else as_device(device)
    )


def as_device(device: object, origin: torch.device | None = None) -> torch.device:
    """Return a device from its name; raise for other objects, and where values would leave the meta device."""
    try:
        target = torch.device(device)  # type: ignore[call-overload]
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"device must be a torch.device or the name of one; got {describe(device)}."
        ) from error
    if origin is not None and origin.type == "meta" and target.type != "meta":
        raise ValueError(
            f"device must be meta, since there are no values to move from it; got {target}."
        )
    return target


def check_device(value: Tensor, name: str, device: torch.device, other: str) -> None:
    """Raise unless ``value`` is on ``device``, the device of ``other``."""
    if value.device != device:
        raise wrong_device(value, name, device, other)


def wrong_device(
    value: Tensor, name: str, device: torch.device, other: str
) -> ValueError:
    """Return the error of a tensor that is not on ``device``, the device of ``other``."""
    return ValueError(
        f"{name} must be on the device of {other}, {device}; it is on {value.device}. Move one of them with "
        f".to(device)."
    )


def check_place(
    x: Tensor, module: nn.Module | None, name: str = "x", *, dtype: bool = False
) -> None:
    """Raise unless ``x`` has the device and, with ``dtype`` but not under autocast, the dtype of the parameters."""
    if torch.compiler.is_compiling():
        return
    # The first parameter with dimensions, since scalars go with any dtype.
    # (``parameters()`` takes ten times as long.)
    modules = [module]
    while modules:
        part = modules.pop()
        if part is None:
            continue
        for parameter in part._parameters.values():
            # A lazy parameter takes the dtype of what comes first.
            if parameter is None or is_lazy(parameter) or not parameter.dim():
                continue
            kind = type(module).__name__
            if x.device != parameter.device:
                others = f"the parameters of {kind}"
                raise wrong_device(x, name, parameter.device, others)
            # Integers have no rounding to agree on, and under autocast torch converts
            # both.
            if (
                not dtype
                or x.dtype == parameter.dtype
                or not parameter.is_floating_point()
                or torch.is_autocast_enabled(x.device.type)
            ):
                return
            raise TypeError(
                f"{name} must be {str(parameter.dtype).removeprefix('torch.')}, as the parameters of {kind} are; got "
                f"{describe(x)}. Convert it with {name}.to({parameter.dtype}), or the module with .to({x.dtype})."
            )
        modules += [*part._modules.values()][::-1]


def check_state(
    x: Tensor,
    name: str = "x",
    channels: int | None = None,
    *,
    module: nn.Module | None = None,
) -> None:
    """Raise unless ``x`` is a floating-point state [N, C] with the given C, and dtype and device of ``module``."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
        # PyG's pair of states.
        raise TypeError(
            f"{name} must be a tensor [num_nodes, channels]; got {describe(x)}. A coupling here is between nodes of "
            f"one kind. Number the senders first and the receivers after them, {name} = torch.cat([{name}_src, "
            f"{name}_dst]) and edge_index[1] + len({name}_src), and take the last rows of the result; GINConv, and "
            f"GATConv with self_loops='keep', take the pair as it is."
        )
    if isinstance(x, dict):
        raise TypeError(
            f"{name} must be a tensor [num_nodes, channels]; got {describe(x)}. Pass data.to_homogeneous(), which "
            f"numbers all nodes in one run."
        )
    # Dimensions before the dtype: what has others is most often a batch of another library, whose way out is longer.
    if isinstance(x, Tensor) and x.dim() != 2:
        raise ValueError(
            f"{name} must have two dimensions [num_nodes, channels]; got {describe(x)}. Flatten a padded batch to its "
            f"real rows and pass `batch`."
        )
    if isinstance(x, Tensor) and x.dtype in INTEGERS:
        raise TypeError(
            f"{name} must be floating point; got {describe(x)}. Convert it with {name}.float(). If these are "
            f"categories, CertifiedTransformer and GPS take in_channels=[number of categories of every column], and "
            f"other models one_hot({name}, number).float()."
        )
    check_tensor(x, name, "[num_nodes, channels]")
    if channels is not None and x.size(1) != channels:
        raise ValueError(
            f"{name} must have {channels} channels as the layer was built for; got {describe(x)}."
        )
    if module is not None:
        check_place(x, module, name, dtype=True)


def check_rows(value: Tensor, name: str, x: Tensor) -> None:
    """Raise unless ``value`` is a floating-point [N, F] with the rows and the device of ``x``."""
    check_state(value, name)
    if value.size(0) != x.size(0):
        raise ValueError(
            f"{name} must have {x.size(0)} rows, one per node, as the state has; got {describe(value)}."
        )
    check_device(value, name, x.device, "the state")


def index_vector(value: object, name: str, length: str) -> Tensor:
    """Return indices [length] as int64, from a tensor of any integer type, a list or an array."""
    # int64 always: torch takes an index of uint8 for a mask.
    indices = as_tensor(value, name, f"a tensor {length} of integers")
    if indices.dtype not in INTEGERS:
        raise TypeError(
            f"{name} must hold integers; got {describe(indices)}. Convert it with {name}.long()."
        )
    if indices.dim() != 1 or indices.layout != torch.strided:
        raise ValueError(
            f"{name} must be one-dimensional, {length}; got {describe(indices)}."
        )
    check_has_values(indices, name)
    return indices.long()


def label_vector(y: object) -> Tensor:
    """Return class numbers [N] as int64, also from a column [N, 1], as in OGB's node sets."""
    labels = as_tensor(y, "y", "a tensor [num_nodes] of integers")
    return index_vector(_column_as_vector(labels), "y", "[num_nodes]")


def _column_as_vector(values: Tensor) -> Tensor:
    is_column = (
        values.dim() == 2 and values.size(1) == 1 and values.layout == torch.strided
    )
    return values.squeeze(1) if is_column else values


def as_node_mask(
    mask: object, name: str, num_nodes: int, device: torch.device
) -> Tensor:
    """Return a bool mask [N], from a mask [N] or [N, 1], or from the indices of the nodes, as PyG takes them."""
    what = f"a bool tensor [{num_nodes}], as y has rows, or the indices of nodes"
    nodes = _column_as_vector(as_tensor(mask, name, what))
    if not isinstance(plain(mask), Tensor):
        nodes = nodes.to(device)
    check_has_values(nodes, name)
    check_device(nodes, name, device, "y")
    # Bytes may be a mask of an old data set or indices, so they are neither.
    if nodes.dtype == torch.uint8:
        raise TypeError(
            f"{name} must be {what}; got {describe(nodes)}. A mask is {name}.bool(), and indices are {name}.long()."
        )
    if nodes.dtype == torch.bool:
        if nodes.shape != (num_nodes,) or nodes.layout != torch.strided:
            raise ValueError(
                f"{name} must be {what}; got {describe(nodes)}. Of several splits take one column."
            )
        return nodes
    nodes = index_vector(nodes, name, "[number of nodes]")
    check_range(nodes, name, num_nodes)
    chosen = torch.zeros(num_nodes, dtype=torch.bool, device=device)
    chosen[nodes] = True
    # Zeros and ones, a mask in integers, name two nodes again and again.
    if int(chosen.sum()) < len(nodes):
        raise ValueError(
            f"{name} must name every node once, as indices; some are there again. If it is a mask of zeros and ones, "
            f"pass {name}.bool()."
        )
    return chosen


def check_pairs(
    pairs: object,
    name: str,
    num_nodes: int,
    device: torch.device,
    shape: str = "[2, num_pairs] of int64",
) -> Tensor:
    """Return pairs of nodes [2, E], senders first, on ``device`` as int64, from a tensor there, a list or an array."""
    listed = as_tensor(pairs, name, f"a tensor {shape}")
    # A list has no device, and goes where it is needed; a tensor elsewhere is a mistake
    # of the caller.
    if not isinstance(plain(pairs), Tensor):
        listed = listed.to(device)
    check_integer_pairs(listed, name, shape)
    check_device(listed, name, device, "the coupling")
    if values_to_check():
        check_range(listed, name, num_nodes)
    return listed.long()


def check_integer_pairs(
    pairs: Tensor, name: str, shape: str = "[2, num_edges]"
) -> None:
    """Raise unless ``pairs`` is an integer tensor [2, E]."""
    if pairs.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor [2, E]; got {describe(pairs)}.")
    if pairs.dim() != 2 or pairs.size(0) != 2:
        raise ValueError(
            f"{name} must be {shape}; got {describe(pairs)}. If it is transposed, pass {name}.t()."
        )
    if pairs.dtype not in INTEGERS:
        raise TypeError(
            f"{name} must hold integers; got {describe(pairs)}. Convert it with {name}.long()."
        )


def torchscript_error() -> RuntimeError:
    """Return the error of ``torch.jit.trace``, which would fix what values decide, such as a solver's iterations."""
    return RuntimeError(
        "torch.jit.trace fixes the sizes, and the number of iterations of every solver, that it sees once; use "
        "torch.export.export(model, (x, edge_index)) instead, which refuses what it cannot export."
    )


def values_to_check() -> bool:
    """Return whether tensors have values, which they lack while torch compiles or records."""
    # Inside transforms of torch.func they have, so checks run there.
    return not torch.compiler.is_compiling() and not dispatch_mode_active()


def check_range(pairs: Tensor, name: str, size: int, what: str = "nodes") -> None:
    """Raise unless every index lies in 0 … ``size`` − 1."""
    if not pairs.numel():
        return
    check_has_values(pairs, name)
    numbers = pairs.long() if pairs.dtype in UNSIGNED else pairs
    # `tolist` in a transform of torch.func looks for memory that a wrapped tensor has
    # not, with PyTorch 2.6.
    low, high = (int(end) for end in numbers.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} must lie in [0, {size - 1}] for {size} {what}; it reaches from {low} to {high}."
        )


def plain(value: object) -> object:
    """Return PyG's ``EdgeIndex`` and ``Index`` and our ``PartEdgeIndex`` as plain tensors; other objects unchanged."""
    if isinstance(value, Tensor) and hasattr(type(value), "as_tensor"):
        return value.as_tensor()  # type: ignore[attr-defined]
    return value


def as_tensor(value: object, name: str, what: str) -> Tensor:
    """Return a plain tensor from PyG's subclasses, a list, a tuple or an array."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        # torch would make an empty list a tensor of floats, which cannot be an edge_index.
        if not len(value):
            return torch.empty(0, dtype=torch.long)
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be {what}; got {describe(value)}, of which torch makes no tensor: {error}"
            ) from error
    raise TypeError(f"{name} must be {what}; got {describe(value)}.")


def check_sequences(
    x: Tensor, mask: Tensor | None, channels: int, module: nn.Module | None
) -> None:
    """Raise unless ``x`` is a state [B, L, C] that fits ``module``, and ``mask`` is [B, L] of bool, or None."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise torchscript_error()
    check_tensor(x, "x", f"[batch, length, {channels}]")
    if x.dim() != 3 or x.size(2) != channels:
        raise ValueError(f"x must be [batch, length, {channels}]; got {describe(x)}.")
    check_place(x, module, dtype=True)
    check_mask(mask, x)


def check_mask(mask: Tensor | None, x: Tensor, name: str = "mask") -> None:
    """Raise unless ``mask`` is None or bool [B, L], true at the tokens of ``x`` [B, L, …]."""
    if mask is None:
        return
    what = "a bool tensor, true where there is a token"
    check_kind(mask, name, Tensor, what)
    # Only bool: numbers may mean tokens or padding, and are added to scores by other
    # libraries.
    if mask.dtype != torch.bool or mask.layout != torch.strided:
        raise TypeError(f"{name} must be {what}; got {describe(mask)}.")
    check_has_values(mask, name)
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} must be {list(x.shape[:2])}, one entry per position of x; got {describe(mask)}."
        )
    check_device(mask, name, x.device, "x")


def check_edge_rows(
    edge_attr: Tensor,
    num_edges: int,
    name: str = "edge_attr",
    *,
    channels: int | None = None,
    module: nn.Module | None = None,
) -> None:
    """Raise unless ``edge_attr`` has a row for every edge, and fits ``module`` with that many channels."""
    check_kind(
        edge_attr, name, Tensor, "a tensor [num_edges, channels], one row per edge"
    )
    # Shape before type: an index of the type of every edge is the usual mistake, and has a way out of its own.
    if not edge_attr.dim() or edge_attr.size(0) != num_edges:
        raise ValueError(
            f"{name} must have one row for each of {num_edges} edges; got {describe(edge_attr)}."
        )
    if channels is None:
        return
    if edge_attr.dim() != 2 or edge_attr.size(1) != channels:
        raise ValueError(
            f"{name} must have {channels} channels, [num_edges, {channels}]; got {describe(edge_attr)}. Types of "
            f"edges become one_hot(types, {channels}).float()."
        )
    if not edge_attr.is_floating_point() or edge_attr.layout != torch.strided:
        raise TypeError(
            f"{name} must be dense and floating point; got {describe(edge_attr)}. Types of edges become "
            f"one_hot(types, {channels}).float(), measured numbers {name}.float()."
        )
    check_place(edge_attr, module, name, dtype=True)


def check_values(v: Tensor, num_nodes: int, heads: int, name: str) -> None:
    """Raise unless ``v`` is [N, H, D] for a coupling of ``num_nodes`` nodes and ``heads`` heads (1 broadcasts)."""
    # Before the dtype, since a state without the axis of heads is the usual mistake.
    if isinstance(v, Tensor) and v.dim() != 3:
        raise ValueError(
            f"{name} must have three dimensions [num_nodes, heads, channels]; got {describe(v)}. For one head use "
            f"{name}.unsqueeze(1)."
        )
    check_tensor(v, name, "[num_nodes, heads, channels]")
    if v.size(0) != num_nodes:
        raise ValueError(
            f"{name} must have {num_nodes} rows, one per node of the coupling; got {describe(v)}."
        )
    if heads != 1 and v.size(1) not in (1, heads):
        raise ValueError(
            f"{name} must have {heads} heads (or 1) as the coupling does; got {describe(v)}."
        )


def check_finite(x: Tensor, name: str) -> None:
    """Raise ``ValueError`` if ``x`` holds NaN or infinity (costs one pass; a synchronisation on a GPU)."""
    check_has_values(x, name)
    # Counted only where one is found, since most calls need one pass alone.
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(
            f"{name} must be finite; {bad} of its {x.numel()} entries are NaN or infinite."
        )


@contextmanager
def needed_by(what: str, install: str) -> Iterator[None]:
    """Turn a failed import of an optional package in the body into "``what`` needs …: pip install ``install``"."""
    try:
        yield
    except ModuleNotFoundError as error:
        # The module that is missing may be one that the package itself needs, and its
        # name stays with the error.
        package = (error.name or "a package").partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install {quote(install)}.",
            name=error.name,
        ) from error
