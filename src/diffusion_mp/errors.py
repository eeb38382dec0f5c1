"""Checks at the boundary, and the errors they raise.

Every sentence names the argument, says what came and what was expected, and shows the way out.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from operator import index
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric import EdgeIndex, Index

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class CouplingMismatchError(ValueError):
    """An update or a theorem needs a property that the coupling does not declare.

    Examples:
        >>> try:
        ...     CrankNicolson(tau=0.5)(x, GATDiffusivity(4)(x, graph))  # softmax over edges is not reversible
        ... except CouplingMismatchError:
        ...     print("refused")
        refused
    """


class SingularSystemError(ValueError):
    """A steady state was asked for that does not exist or is not unique.

    Examples:
        >>> issubclass(SingularSystemError, Exception)
        True
    """


class ConvergenceError(RuntimeError):
    """An iteration used up its budget before it reached its tolerance.

    Examples:
        >>> issubclass(ConvergenceError, RuntimeError)
        True
    """


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot compute this."""


class _Brief(reprlib.Repr):
    """What a container holds, in short; of tensors and arrays what they are, never their numbers."""

    def repr1(self, x: Any, level: int) -> str:
        return describe(x) if isinstance(x, (Tensor, np.ndarray, nn.Module)) else super().repr1(x, level)


_brief = _Brief()


def describe(value: object) -> str:
    """What came, in words: for tensors dtype and shape, for anything else its value, if short, and its type."""
    if isinstance(value, Tensor):
        kind = "tensor" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} tensor"
        place = "" if value.device.type != "meta" else " on the meta device"
        return f"a {str(value.dtype).removeprefix('torch.')} {kind} of shape {list(value.shape)}{place}"
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__})"
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array of shape {list(value.shape)}"
    return f"{_brief.repr(value)} ({type(value).__name__})"


def check_choice(value: object, name: str, choices: Iterable[Any]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    options = list(choices)
    if not (value is None or isinstance(value, str)) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {describe(value)}.")


def _check_real(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {describe(value)}.")


def check_positive(value: float, name: str, *, allow_zero: bool = False) -> None:
    """Raise unless ``value`` is a finite number above zero (or, with ``allow_zero``, at least zero)."""
    _check_real(value, name)
    finite = torch.compiler.is_compiling() or math.isfinite(value)  # it may be a symbol there
    if not finite or value < 0 or (value == 0 and not allow_zero):
        raise ValueError(f"{name} must be finite and {'>= 0' if allow_zero else '> 0'}; got {value}.")


def check_number(value: float, name: str) -> None:
    """Raise unless ``value`` is a finite number."""
    _check_real(value, name)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value}.")


def found_later(channels: object) -> bool:
    """Whether channels are -1, which stands for those of the first call."""
    return type(channels) is int and channels == -1


def check_counts(**counts: int) -> None:
    """Raise unless every named value is a positive integer (numbers of heads, channels or layers)."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer; got {describe(value)}.")
        if value < 1:
            lazy = " Only what begins with one linear map finds it out at the first call (GCNConv, DIFFormer, …)."
            way_out = lazy if name == "in_channels" and value == -1 else ""
            raise ValueError(f"{name} must be at least 1; got {value}.{way_out}")


def as_whole(value: object, name: str, way_out: str = "") -> int:
    """Return a whole number, also one of NumPy or PyTorch, as an int.

    Raises:
        TypeError: ``value`` is not a whole number or is a bool; the message ends with ``way_out``.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number; got {describe(value)}.{way_out and f' {way_out}'}")
    return number


def as_size(size: Any) -> Any:
    """A size, which is a tensor where ``torch.jit.trace`` looks on, as the integer that the traced program then has."""
    return int(size) if isinstance(size, Tensor) and torch._C._get_tracing_state() is not None else size


def check_flags(**flags: bool) -> None:
    """Raise unless every named value is True or False; any other object would count as one of them without a word."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {describe(value)}.")


def check_seed(seed: int, name: str = "seed") -> None:
    """Raise unless ``seed`` is an integer that a generator takes, −2⁶³ … 2⁶³ − 1."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{name} must be an integer; got {describe(seed)}.")
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"{name} must fit into 64 bits; got {seed}.")


def check_generator(generator: object) -> None:
    """Raise unless ``generator`` is a source of randomness, or ``None``."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None; got {describe(generator)}. "
            f"torch.Generator().manual_seed(0) makes one."
        )


def check_function(value: object, name: str, what: str) -> None:
    """Raise unless ``value`` can be called; ``what`` says with what."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, {what}; got {describe(value)}.")


def check_kind(value: object, name: str, kind: type | tuple[Any, ...], what: str) -> None:
    """Raise ``TypeError`` unless ``value`` is of ``kind``, which a reader knows as ``what``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}; got {describe(value)}.")


def check_probability(value: float, name: str) -> None:
    """Raise unless ``value`` lies in [0, 1)."""
    _check_real(value, name)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be a probability in [0, 1); got {value!r}.")


def check_share(value: float, name: str, what: str) -> None:
    """Raise unless ``value`` lies in [0, 1]; ``what`` says of what it is the weight."""
    _check_real(value, name)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], the weight of {what}; got {value!r}.")


def check_tensor(value: object, name: str, shape: str) -> None:
    """Raise unless ``value`` is a dense floating-point tensor; ``shape`` says in words which one was expected."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}; got {describe(value)}.")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor {shape}; got {describe(value)}. Use {name}.to_dense().")
    if not value.is_floating_point():
        way = "Pass its real part." if value.is_complex() else f"Convert it with {name}.float()."
        raise TypeError(f"{name} must be floating point; got {describe(value)}. {way}")


def check_has_values(value: Tensor, name: str) -> None:
    """Raise ``ValueError`` where a tensor is on the meta device, so that nothing can depend on what it holds."""
    if value.is_meta:
        raise ValueError(f"{name} must have values; got {describe(value)}, where there are none.")


def floating(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """Ones of a floating dtype on a device, for options ``dtype`` and ``device`` that say where something lives."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype; got {describe(dtype)}.")
    try:
        return torch.ones(shape, dtype=dtype, device=device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device must be a torch.device or its name; got {describe(device)}: {error}.") from error


def as_device(device: object) -> torch.device:
    """A device, from what names one."""
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device must be a torch.device or the name of one; got {describe(device)}.") from error


def check_device(value: Tensor, name: str, device: torch.device, other: str) -> None:
    """Raise unless ``value`` lies on ``device``, which is that of ``other``."""
    if value.device != device:
        raise ValueError(
            f"{name} must be on the device of {other}, {device}; it is on {value.device}. "
            f"Move one of them with .to(device)."
        )


def check_fits(x: Tensor, module: nn.Module, name: str = "x") -> None:
    """Raise unless ``x`` has the device and, without autocast, the dtype of the parameters of ``module``."""
    parameter = check_place(x, module, name)
    if parameter is None:
        return
    if x.dtype != parameter.dtype and parameter.is_floating_point() and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} must be {_named(parameter.dtype)}, as the parameters of {type(module).__name__} are; got "
            f"{describe(x)}. Convert it with {name}.to({parameter.dtype}), or the module with .to({x.dtype})."
        )


def check_place(x: Tensor, module: nn.Module, name: str = "x") -> Tensor | None:
    """Raise unless ``x`` is on the device of the parameters of ``module``; gives one of them, if there is any."""
    parameter = None if torch.compiler.is_compiling() else _first_array(module)
    if parameter is not None and x.device != parameter.device:
        check_device(x, name, parameter.device, f"the parameters of {type(module).__name__}")
    return parameter


def _first_array(module: nn.Module) -> Tensor | None:
    """A parameter that is no scalar, for scalars go with any dtype. (``parameters()`` takes ten times as long.)"""
    modules: list[nn.Module | None] = [module]
    while modules:
        part = modules.pop()
        if part is not None:
            for parameter in part._parameters.values():
                if parameter is not None and not is_lazy(parameter) and parameter.dim():
                    return parameter
            modules += [*part._modules.values()][::-1]
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_state(x: Tensor, name: str = "x", channels: int | None = None, *, module: nn.Module | None = None) -> None:
    """Raise unless ``x`` is a floating-point state [N, C], with C = ``channels`` where that is known.

    With ``module``, unless it also has the dtype and the device of its parameters.
    """
    # Every layer and diffusivity asks: what fits passes at one look, and only what does not is told why.
    if not (
        isinstance(x, Tensor)
        and x.dim() == 2
        and (channels is None or x.size(1) == channels)
        and x.is_floating_point()
        and x.layout is torch.strided
    ):
        _refuse_state(x, name, channels)
    if module is not None:
        check_fits(x, module, name)


def _refuse_state(x: Tensor, name: str, channels: int | None) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [num_nodes, channels]; got {describe(x)}.{_one_state(x, name)}")
    if x.dim() != 2:
        raise ValueError(
            f"{name} must have two dimensions [num_nodes, channels]; got {describe(x)}. "
            f"Flatten a padded batch to its real rows and pass `batch`."
        )
    check_tensor(x, name, "[num_nodes, channels]")
    raise ValueError(f"{name} must have {channels} channels as the layer was built for; got {describe(x)}.")


def _one_state(x: object, name: str) -> str:
    """The way out for PyG's pair of states, and for its dictionary of them."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
        return (
            f" A coupling here is between nodes of one kind. Number the senders first and the receivers after them, "
            f"{name} = torch.cat([{name}_src, {name}_dst]) and edge_index[1] + len({name}_src), and take the last rows "
            f"of the result; GINConv, and GATConv with self_loops='keep', take the pair as it is."
        )
    return " Pass data.to_homogeneous(), which numbers all nodes in one run." if isinstance(x, dict) else ""


def check_rows(value: Tensor, name: str, x: Tensor, *, module: nn.Module | None = None) -> None:
    """Raise unless ``value`` is a floating-point [N, F] with the rows and on the device of the state ``x``.

    With ``module``, unless it also has the dtype and the device of its parameters.
    """
    check_state(value, name, module=module)
    if value.size(0) != x.size(0):
        raise ValueError(f"{name} must have {x.size(0)} rows, one per node, as the state has; got {describe(value)}.")
    check_device(value, name, x.device, "the state")


def index_vector(value: object, name: str, length: str) -> Tensor:
    """Indices [length] as int64: a tensor of any integer type, or a list or array of integers.

    Raises:
        TypeError, ValueError: anything else.
    """
    indices = as_tensor(value, name, f"a tensor {length} of integers")
    if indices.dtype not in INTEGERS:
        raise TypeError(f"{name} must hold integers; got {describe(indices)}. Convert it with {name}.long().")
    if indices.dim() != 1 or indices.layout != torch.strided:
        raise ValueError(f"{name} must be one-dimensional, {length}; got {describe(indices)}.")
    check_has_values(indices, name)
    return indices.long()


def float_vector(value: object, name: str, device: torch.device) -> Tensor:
    """A floating-point tensor on ``device``; a list or an array is taken there in the default precision.

    Raises:
        TypeError, ValueError: anything else.
    """
    vector = as_tensor(value, name, "a floating-point tensor")
    if not isinstance(value, Tensor):
        vector = vector.to(device, torch.get_default_dtype())
    check_tensor(vector, name, "of one dimension")
    check_device(vector, name, device, "edge_index")
    return vector


def check_pairs(
    pairs: object, name: str, num_nodes: int, device: torch.device, shape: str = "[2, num_pairs] of int64"
) -> Tensor:
    """Listed pairs [2, E] of nodes on ``device`` as int64, the first row sends, the second receives; also from a list.

    Raises:
        TypeError, ValueError: another shape, no integers, or, unless ``torch.compile`` is looking, a node that does not
            exist.
    """
    listed = as_tensor(pairs, name, f"a tensor {shape}")
    if not isinstance(plain(pairs), Tensor):
        listed = listed.to(device)
    check_integer_pairs(listed, name, shape)
    check_device(listed, name, device, "the coupling")
    if listed.numel() and not torch.compiler.is_compiling():
        check_range(listed, name, num_nodes)
    return listed.long()


def check_integer_pairs(pairs: Tensor, name: str, shape: str = "[2, num_edges]") -> None:
    """Raise unless ``pairs`` is a dense integer tensor [2, E]."""
    if pairs.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor [2, E]; got {describe(pairs)}.")
    if pairs.dim() != 2 or pairs.size(0) != 2:
        hint = f" It looks transposed: pass {name}.t()." if pairs.dim() == 2 and pairs.size(1) == 2 else ""
        raise ValueError(f"{name} must be {shape}; got {describe(pairs)}.{hint}")
    if pairs.dtype not in INTEGERS:
        raise TypeError(f"{name} must hold integers; got {describe(pairs)}. Convert it with {name}.long().")


def check_range(pairs: Tensor, name: str, num_nodes: int) -> None:
    """Raise unless every index lies in 0 … N − 1."""
    low, high = (int(end) for end in pairs.aminmax())
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"{name} must lie in [0, {num_nodes - 1}] for {num_nodes} nodes; it reaches from {low} to {high}."
        )


def plain(value: object) -> object:
    """A plain tensor out of PyG's ``EdgeIndex`` and ``Index``, tensors that know more; any other object as it is."""
    return value.as_tensor() if isinstance(value, (EdgeIndex, Index)) else value


def as_tensor(value: object, name: str, what: str) -> Tensor:
    """A plain tensor out of PyG's subclasses, a list, a tuple or an array."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        try:
            return torch.as_tensor(value if len(value) else [], dtype=None if len(value) else torch.long)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be {what}; got {describe(value)}, which is none: {error}.") from error
    raise TypeError(f"{name} must be {what}; got {describe(value)}.")


def check_sequences(x: Tensor, mask: Tensor | None, channels: int, module: nn.Module | None) -> None:
    """Raise unless ``x`` is a state [B, L, C] that fits ``module``, and ``mask`` is [B, L] of bool, or None."""
    check_tensor(x, "x", f"[batch, length, {channels}]")
    if x.dim() != 3 or x.size(2) != channels:
        raise ValueError(f"x must be [batch, length, {channels}]; got {describe(x)}.")
    if module is not None:
        check_fits(x, module)
    check_mask(mask, x)


def check_mask(mask: Tensor | None, x: Tensor, name: str = "mask") -> None:
    """Raise unless ``mask`` is None or says for each position of ``x`` [B, L, …] whether it is a token."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.layout != torch.strided:
        raise TypeError(f"{name} must be a bool tensor, true where there is a token; got {describe(mask)}.")
    check_has_values(mask, name)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} must be {list(x.shape[:2])}, one entry per position of x; got {describe(mask)}.")
    check_device(mask, name, x.device, "x")


def check_edge_rows(edge_attr: Tensor, num_edges: int, name: str = "edge_attr") -> None:
    """Raise unless ``edge_attr`` has a row for every edge."""
    check_kind(edge_attr, name, Tensor, "a tensor [num_edges, channels], one row per edge")
    if not edge_attr.dim() or edge_attr.size(0) != num_edges:
        raise ValueError(f"{name} must have one row for each of {num_edges} edges; got {describe(edge_attr)}.")


def check_values(v: Tensor, num_nodes: int, heads: int, name: str = "v") -> None:
    """Raise unless ``v`` is [N, H, D] for a coupling of ``num_nodes`` nodes and ``heads`` heads (1 broadcasts)."""
    if isinstance(v, Tensor) and v.dim() != 3:
        raise ValueError(
            f"{name} must have three dimensions [num_nodes, heads, channels]; got {describe(v)}. "
            f"For one head use {name}.unsqueeze(1)."
        )
    check_tensor(v, name, "[num_nodes, heads, channels]")
    if v.size(0) != num_nodes:
        raise ValueError(f"{name} must have {num_nodes} rows, one per node of the coupling; got {describe(v)}.")
    if heads != 1 and v.size(1) not in (1, heads):
        raise ValueError(f"{name} must have {heads} heads (or 1) as the coupling does; got {describe(v)}.")


def check_finite(x: Tensor, name: str) -> None:
    """Raise ``ValueError`` if ``x`` holds NaN or infinity (costs one pass; a synchronisation on a GPU)."""
    check_has_values(x, name)
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"{name} must be finite; {bad} of its {x.numel()} entries are NaN or infinite.")
