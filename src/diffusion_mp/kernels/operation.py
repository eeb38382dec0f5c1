"""``operation`` declares a kernel: schema, result shapes, precision, backends and derivatives in one place.

CONTRIBUTING.md has a worked example.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from diffusion_mp.errors import BackendError, check_choice
from diffusion_mp.graph.cache import values_only
from diffusion_mp.kernels.precision import ALREADY, without_autocast

__all__ = ["Narrow", "Operation", "Wide", "empty_like", "heads_first", "once_differentiable", "operation"]

Backend = Literal["auto", "reference", "cpu", "triton"]
BACKENDS = get_args(Backend)
#: Environment variable that names a backend for all operations ("reference") or for some ("spmm=cpu,pairwise=triton").
VARIABLE = "DIFFUSION_MP_BACKEND"


class Implementation(NamedTuple):
    """A way to compute an operation; ``declines(named, *args)`` is ``None``, or why not: "q is on the CPU"."""

    run: Callable[..., Any]
    declines: Callable[..., str | None] | None = None


def requested(operation: str, backend: str) -> str:
    """Return the backend that the call, or else the environment, names for an operation, or ``"auto"``."""
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
    """Return the implementation for these arguments; with ``"auto"`` the first of the table that does not decline."""
    named = backend != "auto"
    if named and backend not in table:
        has = f"it has {', '.join(map(repr, table))}"
        raise BackendError(f"backend {backend!r} does not have {operation}; {has}. Take one of these, or 'auto'.")
    for name in [backend] if named else table:
        run, declines = table[name]
        reason = None if declines is None else declines(named, *args)
        if reason is None:
            return run
    raise BackendError(f"backend {name!r} declines {operation}: {reason}. Take another, or 'auto'.")


T = TypeVar("T")

#: An argument promoted to one dtype with all other ``Wide`` and ``Narrow`` ones, at least float32.
Wide = Annotated[Tensor, "wide"]
#: An argument that kernels accept in half precision, since they accumulate in float32; all of these share one dtype.
Narrow = Annotated[Tensor, "narrow"]

#: Schema types of the annotations.
SCHEMA: dict[Any, str] = {
    **{Tensor: "Tensor", Wide: "Tensor", Narrow: "Tensor", Tensor | None: "Tensor?", Wide | None: "Tensor?"},
    **{Sequence[int]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str"},
}

#: Types of arguments outside of tracing: no tensor subclasses, and no symbols.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, tuple})

Formula = Callable[..., Any]

#: Numbers of a tensor up to which plain torch is the fastest for a training step; eight times as many when
#: ``torch.compile`` fuses its calls, and 32 times as many without gradients.
FEW = 1 << 15
#: Whether torch exports, whose sizes may vary; before torch 2.7 it cannot be told from ``torch.compile``.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def operation(
    name: str, *, family: str | None = None, reference: Formula | None = None, cpu: Formula | None = None,
    triton: Implementation | None = None, small: Formula | None = None, traced: Formula | None = None,
    dtype: str | None = None,
) -> Callable[[Callable[..., T]], Operation[T]]:  # fmt: skip
    """Declare an operation; decorates a function that returns empty results of the right shapes.

    Its annotations are the schema, and implementations take the same arguments. A ``NamedTuple`` of schema types
    (:data:`SCHEMA`) is one argument. Several results are a tuple; derivatives can refer to the fields of a named one.

    Args:
        name: in ``torch.ops.diffusion_mp``, or with a namespace of its own, ``"mine::product"``.
        family: the name by which the environment selects a backend; by default that of the operation.
        reference: plain torch, differentiated by torch; used when named, or when there is nothing else.
        cpu, triton: the fast path on every device, opaque to torch, and the GPU path: see :func:`.gpu.kernel`.
        small: plain torch for few numbers of one graph on the CPU (:data:`FEW`), unless a backend is named: its calls
            cost less than those of an autograd function, and ``torch.compile`` fuses them. It may return ``None``.
        traced: such a formula for ``torch.compile`` alone, if it takes another.
        dtype: the argument whose dtype the (first) result is cast to.
    """
    rows = {"triton": triton, "cpu": cpu and Implementation(cpu), "reference": reference and Implementation(reference)}
    table = {backend: row for backend, row in rows.items() if row is not None}
    return lambda shapes: Operation(shapes, name, family or name, table, small, traced or small, dtype)


def once_differentiable(name: str, instead: str) -> Mapping[str, Formula]:
    """Derivatives of a backward operation that has none: raise an error that says what to do instead."""

    def refuse() -> NoReturn:
        reason = "its backward recomputes in blocks and has no derivative itself"
        raise RuntimeError(f"{name} is once differentiable: {reason}. For second derivatives {instead}.")

    return {"*": refuse}


def empty_like(*tensors: Tensor) -> Any:
    """Return an uninitialised contiguous tensor shaped like the tensor, or a tuple of them."""
    first, *others = tensors
    found = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (found, *map(empty_like, others)) if others else found


def heads_first(*features: Tensor) -> list[Tensor]:
    """Return [N, D] of features of one head, or [H, N, D]: torch differentiates products in their own layout.

    A tensor that is given several times has one view.
    """
    views: dict[int, Tensor] = {}
    for x in features:
        if id(x) not in views:
            views[id(x)] = x.squeeze(1) if x.size(1) == 1 else x.transpose(0, 1)
    return [views[id(x)] for x in features]


class Signature:
    """The arguments and results of a function, with named tuples flattened into ``tuple.field``."""

    def __init__(self, function: Callable[..., Any], dtype: str | None = None) -> None:
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        self.arguments = list(hints)
        self.tuples: dict[str, Any] = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
        self.flat: dict[str, Any] = {}
        self.parts: dict[str, list[str]] = {}
        self._places: list[tuple[Callable[..., Any] | None, int, int]] = []
        for name, hint in hints.items():
            fields = get_type_hints(hint, include_extras=True) if name in self.tuples else {}
            parts = {f"{name}.{field}": kind for field, kind in fields.items()} or {name: hint}
            self._places.append((self.tuples.get(name), len(self.flat), len(self.flat) + len(parts)))
            self.parts[name], self.flat = list(parts), self.flat | parts
        unknown = {name: kind for name, kind in self.flat.items() if kind not in SCHEMA}
        if unknown:
            raise TypeError(f"an operation takes {', '.join(SCHEMA.values())} and tuples of these; got {unknown}.")
        self.several = returned is not Tensor
        # Results are named after their fields; "out" is the only result, or the tuple of all.
        numbered = [f"out_{place}" for place in range(len(get_args(returned)))]
        self.results = [*getattr(returned, "_fields", numbered)] if self.several else ["out"]
        self.returned: Callable[..., Any] = returned if hasattr(returned, "_fields") else lambda *results: results
        shared = set(self.flat) & set(self.results)
        if shared:
            raise TypeError(f"arguments and results of an operation have names of their own; got {shared} twice.")
        self.parts |= {name: [name] for name in self.results if name not in self.parts}
        if "out" not in self.parts:
            self.parts["out"], self.tuples["out"] = self.results, self.returned
        self._wide = [place for place, kind in enumerate(self.flat.values()) if kind in (Wide, Wide | None)]
        self._narrow = [place for place, kind in enumerate(self.flat.values()) if kind == Narrow]
        self._either = [*self._wide, *self._narrow]
        self.like = None if dtype is None else list(self.flat).index(dtype)

    @property
    def schema(self) -> str:
        """The schema of the registered operation: flat arguments, then the backend."""
        arguments = [f"{SCHEMA[kind]} {name.replace('.', '_')}" for name, kind in self.flat.items()]
        return f"({', '.join(arguments)}, str backend) -> ({', '.join('Tensor' for _ in self.results)})"

    def bind(self, args: tuple[Any, ...], *, narrow: bool) -> tuple[list[Any], tuple[Any, ...], torch.dtype | None]:
        """Return the arguments in one dtype, flat and as they came, and the dtype of the result if one is declared."""
        flat: list[Any] = []
        for (make, *_), arg in zip(self._places, args, strict=True):
            flat.extend([arg] if make is None else arg)
        dtype, found = None if self.like is None else flat[self.like].dtype, None
        for place in self._either:
            if flat[place] is None or flat[place].dtype is found:
                continue
            if found is not None or flat[place].dtype not in ALREADY:
                self.to_one_dtype(flat, narrow=narrow)
                return flat, tuple(self.unflatten(flat)), dtype
            found = flat[place].dtype
        return flat, args, dtype

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Put the fields of named tuples together again; further entries are ignored."""
        return [flat[first] if make is None else make(*flat[first:end]) for make, first, end in self._places]

    def to_one_dtype(self, flat: list[Any], *, narrow: bool) -> None:
        """Promote ``flat`` in place; with ``narrow``, keep half precision there."""
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


class Operation(Generic[T]):
    """An operation declared by :func:`operation`: a function of its arguments and ``backend``."""

    def __init__(
        self, shapes: Callable[..., T], name: str, family: str, table: Mapping[str, Implementation],
        small: Formula | None, traced: Formula | None, dtype: str | None,
    ) -> None:  # fmt: skip
        self.__doc__ = shapes.__doc__
        self.name, self.family, self._table, self._shapes = name, family, table, shapes
        self._small, self._traced = small, traced
        self._signature = signature = Signature(shapes, dtype)
        # Without a reference it is part of another operation, such as its derivative, which passes its own backend.
        self._asks_environment = "reference" in table
        # The first that does not decline on the CPU: GPU kernels do unless they are named.
        self._on_cpu = table["cpu"].run if "cpu" in table else None
        self._always_plain = list(table) == ["reference"]
        self._tensor = next(place for place, kind in enumerate(signature.flat.values()) if SCHEMA[kind] == "Tensor")

        def fake(*flat: Any) -> Any:
            out: Any = shapes(*signature.unflatten(flat))
            return tuple(out) if signature.several else out

        full = name if "::" in name else f"diffusion_mp::{name}"
        self._registered = torch.library.custom_op(full, self._run, mutates_args=(), schema=signature.schema)
        self._registered.register_fake(fake)
        self._function: type[torch.autograd.Function] | None = None
        self._for_func: type[torch.autograd.Function] | None = None

    def __call__(self, *args: Any, backend: str = "auto") -> T:
        """Run the backend that is named here or by the environment (or raise), or the first that does not decline.

        It computes directly, by an autograd function, or, where torch has to see it, by the registered operation.
        """
        signature = self._signature
        if self._asks_environment:
            if backend != "auto" or VARIABLE in os.environ:
                backend = requested(self.family, backend)
            if forward_ad._current_level >= 0:  # only torch's own formulas have derivatives in forward mode
                backend = "reference"
        flat, args, dtype = signature.bind(args, narrow=backend != "reference")
        # Plain torch runs outside of the registered operation, so that torch differentiates it.
        function, direct = None, self._always_plain or backend == "reference"
        if not direct:
            # Does torch trace, watch or transform, or is something not a plain value?
            watched = not values_only() or not PLAIN.issuperset(map(type, flat)) or flat[self._tensor].is_meta
            few = self._traced if watched else self._small
            if few is not None and backend == "auto" and self._few(flat, dtype, watched):
                with without_autocast(flat[self._tensor]) if torch._C._is_any_autocast_enabled() else nullcontext():
                    found = few(*args)
                if found is not None:
                    return found
            if watched:
                # torch.func differentiates autograd functions, but not registered operations.
                by_func = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
                function = self._for_func if by_func and torch._C._any_requires_grad(*flat) else None
            elif torch.is_grad_enabled() and torch._C._any_requires_grad(*flat):
                function = self._function  # a fifth of the overhead of the registered operation
            else:
                direct = True
        if direct:
            out = self._compute(None, *flat, backend, args)
        elif function is not None:
            out = function.apply(*flat, backend, args)
        else:
            out = self._registered(*flat, backend)
        if not signature.several:
            return out if dtype in (None, out.dtype) else out.to(dtype)
        return signature.returned(out[0] if dtype in (None, out[0].dtype) else out[0].to(dtype), *out[1:])

    def _few(self, flat: Sequence[Any], dtype: torch.dtype | None, watched: bool) -> bool:
        """Return whether ``small`` takes these; row boundaries, which are integers, say that there are more graphs."""
        if dtype not in ALREADY or (watched and (_exporting() or not torch.compiler.is_compiling())):
            return False
        trained = not watched and torch.is_grad_enabled() and torch._C._any_requires_grad(*flat)
        most = FEW * (8 if watched else 1 if trained else 32)
        for x in flat:  # noqa: SIM110 - a generator takes longer than all the rest
            if isinstance(x, Tensor) and (x.dtype != dtype or not x.is_cpu or x.numel() > most):
                return False
        return True

    def _compute(self, ctx: Any, *inputs: Any) -> Any:
        """Return a tensor or a plain tuple, and keep in ``ctx``, unless that is ``None``, what derivatives need."""
        tensor, backend, args = inputs[self._tensor], *inputs[-2:]
        run = self._on_cpu if backend == "auto" and tensor.is_cpu else None
        run = run or choose(self.family, backend, self._table, *args)
        with without_autocast(tensor) if torch._C._is_any_autocast_enabled() else nullcontext():
            out = run(*args)
        out = tuple(out) if self._signature.several else out
        if ctx is not None:
            self._keep(ctx, inputs, out)
        return out

    def _run(self, *flat: Any) -> Any:
        """Run as the registered operation does, on flat arguments and the backend."""
        return self._compute(None, *flat, self._signature.unflatten(flat))

    def written_out(self, formula: Callable[..., Any] | None = None) -> tuple[OpOverload[Any, Any], Callable[..., Any]]:
        """Return the registered operation, and ``formula``, by default its reference, with flat arguments."""
        signature, compute = self._signature, formula or self._table["reference"].run

        def run(*flat: Any) -> Any:
            wide = list(flat[: len(signature.flat)])
            signature.to_one_dtype(wide, narrow=False)
            out = compute(*signature.unflatten(wide))
            first = out[0] if signature.several else out
            first = first if signature.like is None else first.to(flat[signature.like].dtype)
            return (first, *out[1:]) if signature.several else first

        return self._registered._opoverload, run

    def derivatives(self, formulas: Mapping[str, Formula]) -> None:
        """Declare the derivatives; without them the operation has none.

        Args:
            formulas: "q k" (arguments; a tuple stands for all of its fields, ``rows.a`` for one) → a function, or
                operation, that returns their gradients. Its parameters are named after what it needs: arguments,
                ``out`` (or a field of several results), ``grad`` (or ``grad_field``), ``backend``. Only that is saved.
                A result whose gradient no formula uses is not differentiable, and a missing gradient is ``None`` for a
                parameter with that default, else zeros. See also :func:`once_differentiable`.
        """
        signature = self._signature
        flat, results, self._formulas = list(signature.flat), signature.results, []
        for arguments, formula in formulas.items():
            names = flat if arguments == "*" else arguments.split()
            places = [flat.index(part) for name in names for part in signature.parts.get(name, [name])]
            self._formulas.append((places, *_by_position(formula)))
        asked = {name for *_, names in self._formulas for name in names}
        kept = {part for name in asked for part in signature.parts.get(name, ())}
        self._kept = [(place, part) for place, part in enumerate([*flat, *results]) if part in kept]
        self._grads = [f"grad_{result}" for result in results] if signature.several else ["grad"]
        unasked = [place for place, grad in enumerate(self._grads) if not asked & {grad, "grad"}]
        self._without_grad = unasked if len(unasked) < len(self._grads) else []  # a refusal asks for no gradient
        self._registered.register_autograd(self._backward, setup_context=self._keep)

        # A single gradient is present whenever backward runs; zeros are needed for missing ones of several results,
        # unless a formula takes ``None`` for them.
        plain = [formula for formula in formulas.values() if not isinstance(formula, Operation)]
        missing = any(at.default is None for formula in plain for at in inspect.signature(formula).parameters.values())
        self._materialize = len(self._grads) - len(self._without_grad) > 1 and not missing

        def function(**methods: Callable[..., Any]) -> type[torch.autograd.Function]:
            static = {name: staticmethod(method) for name, method in methods.items()}
            return type(self._shapes.__name__.strip("_"), (torch.autograd.Function,), static)

        # Two classes: with ``setup_context``, which torch.func needs, every call binds its arguments again.
        self._function = function(forward=self._compute, backward=self._backward)
        computed = partial(self._compute, None)
        self._for_func = function(forward=computed, setup_context=self._keep, backward=self._backward)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the formulas need, tensors by ``save_for_backward``."""
        results, count = output if self._signature.several else (output,), len(self._signature.flat)
        values = (*inputs[:count], *results)
        tensors: dict[str, Tensor] = {}
        ctx.others = {"backend": inputs[count]}
        for place, part in self._kept:
            (tensors if isinstance(values[place], Tensor) else ctx.others)[part] = values[place]
        ctx.tensors = list(tensors)
        ctx.save_for_backward(*tensors.values())
        ctx.set_materialize_grads(self._materialize)
        if self._without_grad:
            ctx.mark_non_differentiable(*map(results.__getitem__, self._without_grad))

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if all(grad is None for grad in grads):
            return tuple(out)
        signature = self._signature
        values = ctx.others | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        values |= zip(self._grads, grads, strict=True)
        if signature.several:
            values.setdefault("grad", signature.returned(*grads))
        for places, formula, names in self._formulas:
            if not any(ctx.needs_input_grad[place] for place in places):
                continue
            for name in signature.tuples.keys() & set(names):
                values[name] = signature.tuples[name](*(values[part] for part in signature.parts[name]))
            found = formula(*(values[name] for name in names))
            for place, grad in zip(places, found if isinstance(found, tuple) else (found,), strict=True):
                out[place] = grad if ctx.needs_input_grad[place] else None
        return tuple(out)


def _by_position(formula: Formula) -> tuple[Formula, list[str]]:
    """Return a formula as a function of positional arguments, and the names of these."""
    if not isinstance(formula, Operation):
        return formula, list(inspect.signature(formula).parameters)
    call: Operation[Any] = formula
    return lambda *values: call(*values[:-1], backend=values[-1]), [*call._signature.arguments, "backend"]
