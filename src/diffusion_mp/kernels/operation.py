"""``operation``: declares a kernel. Schema, shapes, precision, backends and derivatives stand in one place.

    @operation(
        "spmm",                       # its name in torch.ops.diffusion_mp
        family="spmm",                # the name by which its backend can be chosen in the environment
        reference=reference.spmm,     # plain torch: the truth, and what torch.func can vectorise
        cpu=compressed.spmm,          # the fast paths, which torch does not look into
        dtype="v",                    # the argument whose dtype the result gets
    )
    def _spmm(entries: Entries, weight: Wide, v: Wide) -> Tensor:
        return empty_like(v)          # run on fake tensors: only the shape of the result matters

    _spmm.derivatives({
        "weight": lambda grad, entries, v, backend: _sddmm(entries, grad, v, backend=backend),
        "v": lambda grad, entries, weight, backend: _spmm(entries.T, weight, grad, backend=backend),
    })

The annotations of the function are the schema, and say what happens to tensors first (:data:`Wide`, :data:`Narrow`).
Calling what was declared chooses a backend, brings the arguments to one dtype, and runs it without autocast: in the
registered operation where torch has to see one, or else in a function of autograd, which costs a fifth of that.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload

from diffusion_mp.errors import BackendError, check_choice
from diffusion_mp.graph.cache import values_only
from diffusion_mp.kernels.precision import ALREADY, without_autocast

__all__ = ["Narrow", "Operation", "Wide", "empty_like", "once_differentiable", "operation"]


Backend = Literal["auto", "reference", "cpu", "triton", "flex"]

BACKENDS = ("auto", "reference", "cpu", "triton", "flex")

#: Names a backend for all operations ("reference"), or for some ("linear_attention=triton,pairwise=cpu").
VARIABLE = "DIFFUSION_MP_BACKEND"


class Implementation(NamedTuple):
    """A way to compute an operation."""

    run: Callable[..., Any]
    """The computation, on the arguments of the operation."""
    declines: Callable[..., str | None] | None = None
    """Called with whether it was named, and the arguments: why not on these, as the end of a sentence ("q is on the
    CPU"), or ``None`` if it can. Without such a function it always can."""


def requested(operation: str, backend: str) -> str:
    """The backend that the call or else the environment names for an operation; ``"auto"`` where neither does.

    Raises:
        ValueError: it is none of the backends.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
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
    """The implementation for these arguments; with ``"auto"`` the first of the table that does not decline.

    Raises:
        BackendError: the named backend declines, or does not have the operation. Nothing else is taken instead.
    """
    named = backend != "auto"
    if named and backend not in table:
        raise BackendError(
            f"backend {backend!r} does not have {operation}; it has {', '.join(map(repr, table))}. "
            f"Take one of these, or 'auto'."
        )
    for name in [backend] if named else table:
        run, declines = table[name]
        reason = None if declines is None else declines(named, *args)
        if reason is None:
            return run
    raise BackendError(f"backend {name!r} declines {operation}: {reason}. Take another, or 'auto'.")


T = TypeVar("T")

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

#: What arguments are when nobody traces: no subclasses of tensors, and no symbols.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, tuple})

Formula = Callable[..., Any]


def operation(
    name: str,
    *,
    family: str | None = None,
    reference: Callable[..., Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    triton: Implementation | None = None,
    flex: Implementation | None = None,
    dtype: str | None = None,
) -> Callable[[Callable[..., T]], Operation[T]]:
    """Declare an operation; decorates a function that makes empty results of the right shapes from its arguments.

    The function's annotations are the schema. A ``NamedTuple`` of what the schema knows (:data:`SCHEMA`) is one
    argument. Several results are a tuple, best a ``NamedTuple``: then derivatives can ask for them by name.

    Args:
        name: in ``torch.ops.diffusion_mp``, or with a namespace of its own, ``"mine::product"``.
        family: under this name the environment chooses the backend of the operation (see `kernels.operation`).
            ``None``: there is one implementation, ``cpu``, and nothing to choose.
        reference: plain torch, which is differentiated by torch; taken by name, or where there is nothing else.
        cpu: the fast path on every device, which torch does not look into.
        triton: that on the GPU, see :func:`diffusion_mp.kernels.gpu.kernel`.
        flex: another that torch differentiates itself, taken by name only.
        dtype: the argument to whose dtype the result, or the first of several, is brought in the end.

    Returns:
        A decorator that makes an :class:`Operation` of the function. Every implementation takes its arguments in the
        order of that function.
    """
    rows = {
        "triton": triton,
        "cpu": cpu and Implementation(cpu),
        "flex": flex,
        "reference": reference and Implementation(reference),
    }
    table = {backend: row for backend, row in rows.items() if row is not None}

    def declare(shapes: Callable[..., T]) -> Operation[T]:
        return Operation(shapes, name, family, table, dtype)

    return declare


def once_differentiable(name: str, instead: str) -> Mapping[str, Formula]:
    """Derivatives for a backward operation without any: raise an error that says what to do instead."""

    def refuse() -> NoReturn:
        raise RuntimeError(
            f"{name} is once differentiable: its backward recomputes in blocks and has no derivative itself. "
            f"For second derivatives {instead}."
        )

    return {"*": refuse}


def empty_like(*tensors: Tensor) -> Any:
    """A contiguous result shaped like the tensor, or like every one of several."""
    first, *others = tensors
    found = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (found, *map(empty_like, others)) if others else found


class Signature:
    """The arguments and results of a function, with named tuples flattened into ``tuple.field``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        self.arguments = list(hints)
        tuples = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
        self.tuples: dict[str, Callable[..., Any]] = tuples
        self.flat: dict[str, Any] = {}
        self.parts: dict[str, list[str]] = {}
        self._places: list[tuple[Callable[..., Any] | None, int, int]] = []
        for name, hint in hints.items():
            fields = get_type_hints(hint, include_extras=True) if name in self.tuples else {}
            parts = {f"{name}.{field}": kind for field, kind in fields.items()} or {name: hint}
            first = len(self.flat)
            self.parts[name], self.flat = list(parts), self.flat | parts
            self._places.append((tuples.get(name), first, len(self.flat)))
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
        self._either = [*self._wide, *self._narrow]

    def schema(self, *more: str) -> str:
        """That of the flat operation, with ``more`` arguments at the end."""
        arguments = [f"{SCHEMA[kind]} {name.replace('.', '_')}" for name, kind in self.flat.items()]
        results = f"({', '.join('Tensor' for _ in self.results)})" if self.several else "Tensor"
        return f"({', '.join([*arguments, *more])}) -> {results}"

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """The parts of arguments."""
        flat: list[Any] = []
        for (make, *_), arg in zip(self._places, args, strict=True):
            if make is None:
                flat.append(arg)
            else:
                flat.extend(arg)
        return flat

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Arguments from their parts; what comes after them is left out."""
        return [flat[first] if make is None else make(*flat[first:end]) for make, first, end in self._places]

    def to_one_dtype(self, flat: list[Any], *, narrow: bool) -> bool:
        """In place, and whether there is anything to do; with ``narrow`` half precision stays where kernels take it."""
        found = None
        for place in self._either:
            if flat[place] is None or flat[place].dtype is found:
                continue
            if found is not None or flat[place].dtype not in ALREADY:
                break
            found = flat[place].dtype
        else:
            return False
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
        return True


def _plain_tuple(*results: Tensor) -> tuple[Tensor, ...]:
    return results


class Operation(Generic[T]):
    """An operation declared by :func:`operation`: a function of its arguments and ``backend``."""

    def __init__(
        self,
        shapes: Callable[..., T],
        name: str,
        family: str | None,
        table: Mapping[str, Implementation],
        dtype: str | None,
    ) -> None:
        self.__doc__ = shapes.__doc__
        self.name = name
        self.family, self._table, self._shapes = family, table, shapes
        self._signature = signature = Signature(shapes)
        # What has no reference is a part of another operation, such as its derivative, and gets its backend from there.
        self._asks_environment = family is not None and "reference" in table
        # The first that does not decline there: kernels for the GPU do, unless they were named.
        self._on_cpu = table["cpu"].run if "cpu" in table else None
        # Plain torch runs outside of the registered operation, where torch sees it.
        self._plain = [backend for backend in ("reference", "flex") if backend in table]
        self._tensor = next(place for place, kind in enumerate(signature.flat.values()) if SCHEMA[kind] == "Tensor")
        self._like = None if dtype is None else list(signature.flat).index(dtype)
        self._registered = torch.library.custom_op(
            name if "::" in name else f"diffusion_mp::{name}",
            self._run,
            mutates_args=(),
            schema=signature.schema("str backend") if family else signature.schema(),
        )
        self._registered.register_fake(self._fake)
        self._function: type[torch.autograd.Function] | None = None
        self._for_func: type[torch.autograd.Function] | None = None

    def __call__(self, *args: Any, backend: str = "auto") -> T:
        """The result, by the backend that was named, or the environment names, or the first that does not decline.

        Raises:
            BackendError: the named backend declines these arguments, or does not have the operation.
        """
        if self.family is not None and self._asks_environment and (backend != "auto" or VARIABLE in os.environ):
            backend = requested(self.family, backend)
        flat = self._signature.flatten(args) if self._signature.tuples else [*args]
        dtype = None if self._like is None else flat[self._like].dtype
        if self._signature.to_one_dtype(flat, narrow=backend != "reference"):
            args = tuple(self._signature.unflatten(flat))
        tensor = flat[self._tensor]
        # Plain torch is differentiated by torch; else what torch has to see is the registered operation.
        plain = backend in self._plain or len(self._plain) == len(self._table)
        seen = not plain and (not values_only() or not PLAIN.issuperset(map(type, flat)) or tensor.is_meta)
        derived = not (plain or seen) and torch.is_grad_enabled() and torch._C._any_requires_grad(*flat)
        function, out = self._function, None
        if seen and function and _differentiated_by_func(flat):
            function, derived, seen = self._for_func, True, False
        if seen or (derived and function is None):
            out = self._registered(*flat) if self.family is None else self._registered(*flat, backend)
        elif derived and function:
            out = function.apply(*flat, backend, args)
        else:
            out = self._compute(args, tensor, backend)
        if not self._signature.several:
            return out if dtype in (None, out.dtype) else out.to(dtype)
        out = out if dtype in (None, out[0].dtype) else (out[0].to(dtype), *out[1:])
        result: T = self._signature.returned(*out)
        return result

    def _run(self, *flat: Any) -> Any:
        """In the registered operation, on flat arguments."""
        backend = "auto" if self.family is None else flat[-1]
        out = self._compute(self._signature.unflatten(flat), flat[self._tensor], backend)
        return tuple(out) if self._signature.several else out

    def _compute(self, args: Sequence[Any], tensor: Tensor, backend: str) -> Any:
        """The implementation that is chosen, without autocast."""
        run = self._on_cpu if backend == "auto" and tensor.is_cpu else None
        run = run or choose(self.family or "the operation", backend, self._table, *args)
        if not torch._C._is_any_autocast_enabled():
            return run(*args)
        with without_autocast(tensor):
            return run(*args)

    def _fake(self, *flat: Any) -> Any:
        """Results without values, when torch traces."""
        out: Any = self._shapes(*self._signature.unflatten(flat))
        return tuple(out) if self._signature.several else out

    def written_out(self, formula: Callable[..., Any] | None = None) -> tuple[OpOverload[Any, Any], Callable[..., Any]]:
        """The registered operation, and as a function of its flat arguments a formula that torch looks into.

        Args:
            formula: in plain torch, with the arguments of the operation; ``None`` is its reference.
        """
        compute = formula or self._table["reference"].run
        count = len(self._signature.flat)

        def run(*flat: Any) -> Any:
            wide = list(flat[:count])
            self._signature.to_one_dtype(wide, narrow=False)
            out = compute(*self._signature.unflatten(wide))
            dtype = None if self._like is None else flat[self._like].dtype
            if not self._signature.several:
                return out if dtype is None else out.to(dtype)
            return tuple(out) if dtype is None else (out[0].to(dtype), *out[1:])

        return self._registered._opoverload, run

    def derivatives(self, formulas: Mapping[str, Formula]) -> None:
        """Declare the derivatives; without them the operation has none.

        Args:
            formulas: "q k" (arguments; all fields of one, or ``rows.a``) → a function that returns their gradients,
                one or a tuple. Its parameters say by name what it wants: arguments, ``out`` (or a field of several
                results), ``grad`` (or ``grad_field``), ``backend``. Only what is asked for is kept, and a formula runs
                where one of its gradients is wanted. Results whose gradient no formula asks for have none.
                A formula may be an operation, whose arguments have such names. See also :func:`once_differentiable`.
        """
        flat, results, self._formulas = list(self._signature.flat), self._signature.results, []
        for arguments, formula in formulas.items():
            names = flat if arguments == "*" else arguments.split()
            places = [flat.index(part) for name in names for part in self._signature.parts.get(name, [name])]
            self._formulas.append((places, formula, _wanted(formula)))
        asked = {name for *_, names in self._formulas for name in names}
        kept = {part for name in asked for part in self._signature.parts.get(name, ())}
        self._kept = [(place, part) for place, part in enumerate([*flat, *results]) if part in kept]
        self._grads = [f"grad_{result}" for result in results] if self._signature.several else ["grad"]
        unasked = [place for place, grad in enumerate(self._grads) if not asked & {grad, "grad"}]
        self._without_grad = unasked if len(unasked) < len(self._grads) else []  # who refuses asks for none
        self._registered.register_autograd(self._backward, setup_context=self._keep)

        # Where one gradient comes it is there, and zeros for the results that have none are not to be made.
        materialize = len(self._grads) - len(self._without_grad) > 1

        def computed(*inputs: Any) -> Any:
            *flat, backend, args = inputs
            output = self._compute(args, flat[self._tensor], backend)
            return tuple(output) if self._signature.several else output

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            self._keep(ctx, inputs, output)
            ctx.set_materialize_grads(materialize)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = computed(*inputs)
            keep(ctx, inputs, output)
            return output

        def function(**methods: Callable[..., Any]) -> type[torch.autograd.Function]:
            static = {name: staticmethod(method) for name, method in methods.items()}
            return type(self._shapes.__name__.strip("_"), (torch.autograd.Function,), static)

        # The form that torch.func takes binds its arguments anew in every call, which small graphs would feel.
        self._function = function(forward=forward, backward=self._backward)
        self._for_func = function(forward=computed, setup_context=keep, backward=self._backward)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the formulas ask for: tensors where autograd wants them, the rest as it is."""
        results, count = output if self._signature.several else (output,), len(self._signature.flat)
        values = (*inputs[:count], *results)
        tensors: dict[str, Tensor] = {}
        ctx.others = {"backend": "auto" if self.family is None else inputs[count]}
        for place, part in self._kept:
            (tensors if isinstance(values[place], Tensor) else ctx.others)[part] = values[place]
        ctx.tensors = list(tensors)
        ctx.save_for_backward(*tensors.values())
        if self._without_grad:
            ctx.mark_non_differentiable(*map(results.__getitem__, self._without_grad))

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients that are wanted, by the formulas."""
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        values = ctx.others | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        values |= zip(self._grads, grads, strict=True)
        if self._signature.several:
            values.setdefault("grad", self._signature.returned(*grads))
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for places, formula, names in self._formulas:
            if not any(ctx.needs_input_grad[place] for place in places):
                continue
            for name in names:
                if name in self._signature.tuples:
                    values[name] = self._signature.tuples[name](*(values[part] for part in self._signature.parts[name]))
            found = _call(formula, [values[name] for name in names])
            for place, grad in zip(places, found if isinstance(found, tuple) else (found,), strict=True):
                out[place] = grad if ctx.needs_input_grad[place] else None
        return tuple(out)


def _differentiated_by_func(flat: Sequence[Any]) -> bool:
    """Whether torch.func differentiates: it supports autograd functions, but not registered operations."""
    transforming = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
    return transforming and torch._C._any_requires_grad(*flat)


def _wanted(formula: Formula) -> list[str]:
    """The names of the arguments of a formula."""
    if isinstance(formula, Operation):
        return [*formula._signature.arguments, "backend"]
    return list(inspect.signature(formula).parameters)


def _call(formula: Formula, values: list[Any]) -> Any:
    return formula(*values[:-1], backend=values[-1]) if isinstance(formula, Operation) else formula(*values)
