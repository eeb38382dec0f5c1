"""``operation`` declares a kernel: schema, result shapes, precision, and the two ways in which it runs.

The *formula* is plain torch, which torch differentiates; the *fast pair* is a forward and a backward pass that torch
does not look into. Wherever torch has to look, the formula runs: inside the transforms of ``torch.func`` and in forward
mode, and for second derivatives. CONTRIBUTING.md has a worked example.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_type_hints,
)

import torch
from torch import Tensor

from diffusion_mp.checks import check_choice
from diffusion_mp.errors import BackendError
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import ALREADY, without_autocast
from diffusion_mp.runtime.torch_private import differentiated_inside

__all__ = [
    "Narrow",
    "Operation",
    "Wide",
    "empty_like",
    "few_numbers",
    "heads_first",
    "operation",
    "pulled_back",
]

Backend = Literal["auto", "reference", "cpu", "triton"]
BACKENDS = get_args(Backend)
#: Environment variable that names a backend for all operations ("reference") or for some ("spmm=cpu,pairwise=triton").
VARIABLE = "DIFFUSION_MP_BACKEND"
#: The names by which that variable selects operations; every declaration adds its own.
FAMILIES: set[str] = set()


class Implementation(NamedTuple):
    """A way to compute an operation; ``declines(named, *args)`` is ``None``, or why not: "q is on the CPU"."""

    run: Callable[..., Any]
    declines: Callable[..., str | None] | None = None


def requested(operation: str, backend: str) -> str:
    """Return the backend that the call, or else the environment, names for an operation, or ``"auto"``."""
    check_choice(backend, "backend", BACKENDS)
    if backend != "auto":
        return backend
    for target, name in _named_backends(os.environ.get(VARIABLE, "")):
        if target in ("", operation):
            return name
    return "auto"


def _named_backends(value: str) -> list[tuple[str, str]]:
    """Return the pairs of operation and backend in a value of :data:`VARIABLE`; "" stands for all operations."""
    pairs = []
    for part in filter(None, map(str.strip, value.split(","))):
        target, _, name = part.rpartition("=")
        if target and target not in FAMILIES:
            raise ValueError(
                f"{VARIABLE} names the operation {target!r}, which does not exist; got {value!r}. The operations are "
                f"{', '.join(sorted(FAMILIES))}."
            )
        if name not in BACKENDS:
            raise ValueError(
                f"{VARIABLE} names the backend {name!r}, which does not exist; got {value!r}. The backends are "
                f"{', '.join(BACKENDS)}, for all operations or for one, as in 'spmm=cpu'; the operations are "
                f"{', '.join(sorted(FAMILIES))}."
            )
        pairs.append((target, name))
    return pairs


def choose(
    operation: str, backend: str, table: Mapping[str, Implementation], *args: Any
) -> Callable[..., Any]:
    """Return the implementation for these arguments; with ``"auto"`` the first of the table that does not decline."""
    named = backend != "auto"
    if named and backend not in table:
        has = f"it has {', '.join(map(repr, table))}"
        raise BackendError(
            f"backend {backend!r} does not have {operation}; {has}. Take one of these, or 'auto'."
        )
    for name in [backend] if named else table:
        run, declines = table[name]
        reason = None if declines is None else declines(named, *args)
        if reason is None:
            return run
    raise BackendError(
        f"backend {name!r} declines {operation}: {reason}. Take another, or 'auto'."
    )


T = TypeVar("T")

#: An argument promoted to one dtype with all other ``Wide`` and ``Narrow`` ones, at least float32.
Wide = Annotated[Tensor, "wide"]
#: An argument that kernels accept in half precision, since they accumulate in float32; all of these share one dtype.
Narrow = Annotated[Tensor, "narrow"]

#: Schema types of the annotations.
SCHEMA: dict[Any, str] = {
    **{
        Tensor: "Tensor",
        Wide: "Tensor",
        Narrow: "Tensor",
        Tensor | None: "Tensor?",
        Wide | None: "Tensor?",
    },
    **{
        Sequence[int]: "SymInt[]",
        int: "SymInt",
        float: "float",
        bool: "bool",
        str: "str",
    },
}

#: Types of arguments outside of tracing: no tensor subclasses, and no symbols.
PLAIN = frozenset(
    {Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, tuple}
)

Formula = Callable[..., Any]

#: Numbers of a tensor up to which plain torch is the fastest for a training step; eight times as many when
#: ``torch.compile`` fuses its calls, and 32 times as many without gradients.
FEW = 1 << 15
#: Whether torch exports, whose sizes may vary; before torch 2.7 it cannot be told from ``torch.compile``.
exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def operation(
    name: str,
    *,
    formula: Formula,
    cpu: Formula | None = None,
    triton: Implementation | None = None,
    family: str | None = None,
    small: Callable[..., bool] | None = None,
    dtype: str | None = None,
) -> Callable[[Callable[..., T]], Operation[T]]:
    """Declare an operation; decorates a function that returns empty results of the right shapes.

    Its annotations are the schema, and implementations take the same arguments. A ``NamedTuple`` of schema types
    (:data:`SCHEMA`) is one argument. Several results are a tuple; derivatives can refer to the fields of a named one.

    Args:
        name: in ``torch.ops.diffusion_mp``, or with a namespace of its own, ``"mine::product"``.
        formula: plain torch, the backend "reference", which torch differentiates and maps: no value decides what it
            does, and it calls no operation without a batching rule.
        cpu, triton: the fast path on every device, opaque to torch, and the GPU path: see :func:`.gpu.kernel`.
        family: the name by which the environment selects a backend; by default that of the operation.
        small: whether the formula is also the fastest way for these arguments, if no backend is named: its calls cost
            less than those of an autograd function, and ``torch.compile`` fuses them. It gets them as they come, and
            says yes to tensors of one dtype only; the first argument is one. See :func:`few_numbers`.
        dtype: the argument whose dtype the (first) result is cast to.
    """
    rows = {
        "triton": triton,
        "cpu": cpu and Implementation(cpu),
        "reference": Implementation(formula),
    }
    table = {backend: row for backend, row in rows.items() if row is not None}
    return lambda shapes: Operation(shapes, name, family or name, table, small, dtype)


def few_numbers(*tensors: Tensor) -> bool:
    """Return whether these are so few numbers, on the CPU and in one dtype, that plain torch is the fastest."""
    compiling = torch.compiler.is_compiling()
    # A question about the size of an exported program would be a condition on the sizes that it accepts.
    if compiling and exporting():
        return False
    first = tensors[0].dtype
    largest = 0
    trained = False
    for x in tensors:
        if x.dtype != first or not x.is_cpu or type(x) not in PLAIN:
            return False
        largest = max(largest, x.numel())
        trained = trained or x.requires_grad
    if first not in ALREADY:
        return False
    if compiling:
        return largest <= 8 * FEW
    most = FEW if trained and torch.is_grad_enabled() else 32 * FEW
    return largest <= most and values_only()


def _requires_grad(values: Sequence[Any]) -> bool:
    for x in values:  # noqa: SIM110 - a generator takes longer than all the rest
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def empty_like(*tensors: Tensor) -> Any:
    """Return an uninitialised contiguous tensor shaped like the tensor, or a tuple of them."""
    first, *others = tensors
    found = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (found, *map(empty_like, others)) if others else found


def pulled_back(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Any
) -> Any:
    """Return the gradients of ``inputs``, given those of the results: the formula of a backward pass."""
    pull = torch.func.vjp(function, *inputs)[1]
    return pull(grads)


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
        self.tuples: dict[str, Any] = {
            name: hint for name, hint in hints.items() if hasattr(hint, "_fields")
        }
        self.flat: dict[str, Any] = {}
        self.parts: dict[str, list[str]] = {}
        self._places: list[tuple[Callable[..., Any] | None, int, int]] = []
        for name, hint in hints.items():
            if name in self.tuples:
                fields = get_type_hints(hint, include_extras=True)
            else:
                fields = {}
            parts = {f"{name}.{field}": kind for field, kind in fields.items()} or {
                name: hint
            }
            self._places.append(
                (self.tuples.get(name), len(self.flat), len(self.flat) + len(parts))
            )
            self.parts[name], self.flat = list(parts), self.flat | parts
        unknown = {name: kind for name, kind in self.flat.items() if kind not in SCHEMA}
        if unknown:
            raise TypeError(
                f"an operation takes {', '.join(SCHEMA.values())} and tuples of these; got {unknown}."
            )
        self.several = returned is not Tensor
        # Results are named after their fields; "out" is the only result, or the tuple of all.
        numbered = [f"out_{place}" for place in range(len(get_args(returned)))]
        if self.several:
            self.results = [*getattr(returned, "_fields", numbered)]
        else:
            self.results = ["out"]
        self.returned: Callable[..., Any] = (
            returned if hasattr(returned, "_fields") else lambda *results: results
        )
        shared = set(self.flat) & set(self.results)
        if shared:
            raise TypeError(
                f"arguments and results of an operation have names of their own; got {shared} twice."
            )
        self.parts |= {name: [name] for name in self.results if name not in self.parts}
        if "out" not in self.parts:
            self.parts["out"], self.tuples["out"] = self.results, self.returned
        self._wide = [
            place
            for place, kind in enumerate(self.flat.values())
            if kind in (Wide, Wide | None)
        ]
        self._narrow = [
            place for place, kind in enumerate(self.flat.values()) if kind == Narrow
        ]
        self._either = [*self._wide, *self._narrow]
        self.like = None if dtype is None else list(self.flat).index(dtype)
        #: The names of the gradients of the results.
        if self.several:
            self.grads = [f"grad_{result}" for result in self.results]
        else:
            self.grads = ["grad"]

    @property
    def schema(self) -> str:
        """The schema of the registered operation: flat arguments, then the backend."""
        arguments = [
            f"{SCHEMA[kind]} {name.replace('.', '_')}"
            for name, kind in self.flat.items()
        ]
        return f"({', '.join(arguments)}, str backend) -> ({', '.join('Tensor' for _ in self.results)})"

    def bind(
        self, args: tuple[Any, ...], *, narrow: bool
    ) -> tuple[list[Any], tuple[Any, ...], torch.dtype | None]:
        """Return the arguments in one dtype, flat and as they came, and the dtype of the result if one is declared."""
        flat: list[Any] = []
        for (make, *_), arg in zip(self._places, args, strict=True):
            flat.extend([arg] if make is None else arg)
        dtype = None if self.like is None else flat[self.like].dtype
        found = None
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
        return [
            flat[first] if make is None else make(*flat[first:end])
            for make, first, end in self._places
        ]

    def to_one_dtype(self, flat: list[Any], *, narrow: bool) -> None:
        """Promote ``flat`` in place; with ``narrow``, keep half precision there."""
        if self._narrow:
            short = flat[self._narrow[0]].dtype
        else:
            short = torch.float32
        for place in self._narrow:
            short = torch.promote_types(short, flat[place].dtype)
        wide = torch.promote_types(short, torch.float32)
        for place in self._wide:
            if flat[place] is None:
                wide = wide
            else:
                wide = torch.promote_types(wide, flat[place].dtype)
        for place in self._wide:
            flat[place] = None if flat[place] is None else flat[place].to(wide)
        for place in self._narrow:
            flat[place] = flat[place].to(short if narrow else wide)


class Operation(Generic[T]):
    """An operation declared by :func:`operation`: a function of its arguments and ``backend``."""

    def __init__(
        self,
        shapes: Callable[..., T],
        name: str,
        family: str,
        table: Mapping[str, Implementation],
        small: Callable[..., bool] | None,
        dtype: str | None,
    ) -> None:
        self.__doc__ = shapes.__doc__
        self.name = name
        self.family = family
        self.formula = table["reference"].run
        self._table = table
        self._small = small
        self.signature = signature = Signature(shapes, dtype)
        FAMILIES.add(family)
        # The first that does not decline on the CPU: GPU kernels do unless they are named.
        self._on_cpu = table["cpu" if "cpu" in table else "reference"].run
        self._only_formula = list(table) == ["reference"]
        self._tensor = next(
            place
            for place, kind in enumerate(signature.flat.values())
            if SCHEMA[kind] == "Tensor"
        )
        self._derivatives: list[tuple[list[int], Formula, list[str]]] | None = None
        self._kept = [(place, name) for place, name in enumerate(signature.flat)]
        self._without_grad: list[int] = []
        self._materialize = False

        def fake(*flat: Any) -> Any:
            out: Any = shapes(*signature.unflatten(flat))
            return tuple(out) if signature.several else out

        self._qualified = name if "::" in name else f"diffusion_mp::{name}"
        self._registered = torch.library.custom_op(
            self._qualified, self._run, mutates_args=(), schema=signature.schema
        )
        self._registered.register_fake(fake)
        self._registered.register_autograd(self._backward, setup_context=self._keep)

    def __call__(self, *args: Any, backend: str = "auto") -> T:
        """Run the formula, or the backend that is named here or by the environment, or the first that does not decline.

        A backend runs directly, as an autograd function, or, where torch has to see it, as the registered operation.
        """
        signature = self.signature
        if backend != "auto" or VARIABLE in os.environ:
            backend = requested(self.family, backend)
        # Few numbers are of one dtype, on the CPU, and nothing looks in: the formula needs no preparation, which would
        # take as long as the arithmetic.
        if backend == "auto" and self._small is not None and self._small(*args):
            with without_autocast(args[0]):
                out: Any = self.formula(*args)
            return signature.returned(*out) if signature.several else out
        if self._only_formula or differentiated_inside():
            backend = "reference"
        flat, args, dtype = signature.bind(args, narrow=backend != "reference")
        if backend == "reference":
            out = self._compute(flat, backend, args)
        elif (
            not values_only()
            or not PLAIN.issuperset(map(type, flat))
            or flat[self._tensor].is_meta
        ):
            out = self._registered(*flat, backend)
        elif torch.is_grad_enabled() and _requires_grad(flat):
            # a fifth of the overhead of the registered operation.
            out = _FastPair.apply(*flat, backend, args, self)
        else:
            out = self._compute(flat, backend, args)
        if not signature.several:
            return out if dtype in (None, out.dtype) else out.to(dtype)
        return signature.returned(
            out[0] if dtype in (None, out[0].dtype) else out[0].to(dtype), *out[1:]
        )

    def _compute(self, flat: Sequence[Any], backend: str, args: Sequence[Any]) -> Any:
        """Return a tensor or a plain tuple."""
        tensor = flat[self._tensor]
        if backend == "auto" and tensor.is_cpu:
            run = self._on_cpu
        else:
            run = choose(self.family, backend, self._table, *args)
        with without_autocast(tensor):
            out = run(*args)
        return tuple(out) if self.signature.several else out

    def _run(self, *inputs: Any) -> Any:
        """Run as the registered operation does, on flat arguments and the backend."""
        *flat, backend = inputs
        return self._compute(flat, backend, self.signature.unflatten(flat))

    def written_out(self, formula: Formula | None = None) -> tuple[Any, Formula]:
        """Return the registered operation, and a formula, by default its own, as a function of flat arguments."""
        namespace, _, name = self._qualified.partition("::")
        return getattr(getattr(torch.ops, namespace), name).default, self._flat(
            formula or self.formula
        )

    def _flat(self, formula: Formula) -> Formula:
        """Return a formula as a function of flat arguments of any dtypes, with a tensor or a plain tuple as result."""
        signature = self.signature

        def run(*flat: Any) -> Any:
            wide = list(flat[: len(signature.flat)])
            signature.to_one_dtype(wide, narrow=False)
            out = formula(*signature.unflatten(wide))
            first = out[0] if signature.several else out
            if signature.like is None:
                first = first
            else:
                first = first.to(flat[signature.like].dtype)
            return (first, *out[1:]) if signature.several else first

        return run

    def derivatives(self, formulas: Mapping[str, Formula]) -> None:
        """Declare the first derivatives, if they take less than those of the formula, which are the default.

        Args:
            formulas: "q k" (arguments; a tuple stands for all of its fields, ``rows.a`` for one) → a function, or
                operation, that returns their gradients. Its parameters are named after what it needs: arguments,
                ``out`` (or a field of several results), ``grad`` (or ``grad_field``), ``backend``. Only that is saved.
                A result whose gradient no formula uses is not differentiable, and a missing gradient is ``None`` for a
                parameter with that default, else zeros. What it calls should be differentiable for higher derivatives:
                operations are.
        """
        signature = self.signature
        flat = list(signature.flat)
        results = signature.results
        derivatives = []
        for arguments, formula in formulas.items():
            places = [
                flat.index(part)
                for name in arguments.split()
                for part in signature.parts.get(name, [name])
            ]
            derivatives.append((places, *_by_position(formula)))
        self._derivatives = derivatives
        asked = {name for *_, names in derivatives for name in names}
        kept = {part for name in asked for part in signature.parts.get(name, ())}
        self._kept = [
            (place, part)
            for place, part in enumerate([*flat, *results])
            if part in kept
        ]
        self._without_grad = [
            place
            for place, grad in enumerate(signature.grads)
            if not asked & {grad, "grad"}
        ]

        # A single gradient is present whenever backward runs; zeros are needed for missing ones of several results,
        # unless a formula takes ``None`` for them.
        plain = [
            formula
            for formula in formulas.values()
            if not isinstance(formula, Operation)
        ]
        missing = any(
            at.default is None
            for formula in plain
            for at in inspect.signature(formula).parameters.values()
        )
        self._materialize = len(results) - len(self._without_grad) > 1 and not missing

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the derivatives need, tensors by ``save_for_backward``."""
        results = output if self.signature.several else (output,)
        count = len(self.signature.flat)
        values = (*inputs[:count], *results)
        tensors: dict[str, Tensor] = {}
        ctx.others = {"backend": inputs[count]}
        for place, part in self._kept:
            (tensors if isinstance(values[place], Tensor) else ctx.others)[part] = (
                values[place]
            )
        ctx.tensors = list(tensors)
        ctx.save_for_backward(*tensors.values())
        ctx.set_materialize_grads(self._materialize)
        if self._without_grad:
            ctx.mark_non_differentiable(*map(results.__getitem__, self._without_grad))

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if all(grad is None for grad in grads):
            return tuple(out)
        signature = self.signature
        values = ctx.others | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        if self._derivatives is None:
            places = [
                place
                for place in range(len(signature.flat))
                if ctx.needs_input_grad[place]
            ]
            for place, grad in zip(
                places, self._by_formula(values, places, grads), strict=True
            ):
                out[place] = grad
            return tuple(out)
        values |= zip(signature.grads, grads, strict=True)
        if signature.several:
            values.setdefault("grad", signature.returned(*grads))
        for places, formula, names in self._derivatives:
            if not any(ctx.needs_input_grad[place] for place in places):
                continue
            for name in signature.tuples.keys() & set(names):
                values[name] = signature.tuples[name](
                    *(values[part] for part in signature.parts[name])
                )
            gradients = formula(*(values[name] for name in names))
            for place, grad in zip(
                places,
                gradients if isinstance(gradients, tuple) else (gradients,),
                strict=True,
            ):
                out[place] = grad if ctx.needs_input_grad[place] else None
        return tuple(out)

    def _by_formula(
        self,
        values: Mapping[str, Any],
        places: Sequence[int],
        grads: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the arguments at ``places``; the forward pass is repeated by the formula."""
        flat = [values[name] for name in self.signature.flat]
        with torch.enable_grad():
            # Views tell equal tensors apart.
            inputs = [flat[place].view_as(flat[place]) for place in places]
            for place, x in zip(places, inputs, strict=True):
                flat[place] = x
            out = self._flat(self.formula)(*flat)
            pairs = zip(out if self.signature.several else (out,), grads, strict=True)
            used = [
                (x.to(grad.dtype), grad)
                for x, grad in pairs
                if grad is not None and x.requires_grad
            ]
        if not used:
            return tuple(torch.zeros_like(x) for x in inputs)
        results, pulled = zip(*used, strict=True)
        options = {"create_graph": torch.is_grad_enabled(), "materialize_grads": True}
        return torch.autograd.grad(results, inputs, pulled, **options)


class _FastPair(torch.autograd.Function):
    """The fast forward pass of an operation, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *flat, backend, args, called = inputs
        out = called._compute(flat, backend, args)
        called._keep(ctx, inputs, out)
        ctx.backward_of = called._backward
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.backward_of(ctx, *grads)


def _by_position(formula: Formula) -> tuple[Formula, list[str]]:
    """Return a formula as a function of positional arguments, and the names of these."""
    if not isinstance(formula, Operation):
        return formula, list(inspect.signature(formula).parameters)
    call: Operation[Any] = formula
    return lambda *values: call(*values[:-1], backend=values[-1]), [
        *call.signature.arguments,
        "backend",
    ]
