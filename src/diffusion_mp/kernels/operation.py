"""``operation`` declares a kernel: schema, result shapes, precision, and the two ways in which it runs.

The *formula* is plain torch, which torch differentiates. The *fast pair* is a forward and a backward pass that torch
does not look into. The formula runs wherever torch has to look into it: inside the transforms of ``torch.func``, in
forward mode, and for second derivatives. CONTRIBUTING.md has a worked example.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import torch
from torch import Tensor

from diffusion_mp.checks import check_choice
from diffusion_mp.errors import BackendError
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import ALREADY, without_autocast
from diffusion_mp.runtime.torch_private import (
    differentiated_inside,
    in_backward_pass,
)

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

#: The name of a backend, one of :data:`BACKENDS`.
Backend = str
#: The names of all backends, in order; every declaration and :meth:`Operation.add_backend` adds its own.
BACKENDS = dict.fromkeys(["auto", "reference", "cpu", "triton"])
#: Environment variable that names a backend for all operations ("reference") or for some ("spmm=cpu,pairwise=triton").
VARIABLE = "DIFFUSION_MP_BACKEND"
#: The names by which that variable selects operations; every declaration adds its own.
FAMILIES: set[str] = set()


class Implementation(NamedTuple):
    """A way to compute an operation; ``declines(named, *args)`` returns ``None``, or why not: "q is on the CPU"."""

    run: Callable[..., Any]
    declines: Callable[..., str | None] | None = None


def requested(operation: str, backend: str) -> str:
    """Return the backend for an operation that the call names, or else the environment, or else ``"auto"``."""
    check_choice(backend, "backend", BACKENDS)
    if backend != "auto":
        return backend
    chosen = "auto"
    # All entries are read, so that a misspelt one is found whichever operation asks first.
    for entry in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        target, _, name = entry.rpartition("=")
        if name not in BACKENDS or target not in ("", *FAMILIES):
            raise ValueError(
                f"{VARIABLE} has the entry {entry!r}. An entry is a backend of {', '.join(BACKENDS)}, for all "
                f"operations or for one, as in 'spmm=cpu'. The operations are {', '.join(sorted(FAMILIES))}."
            )
        # The first entry that names the operation counts, whatever comes behind it.
        if chosen == "auto" and target in ("", operation):
            chosen = name
    return chosen


def choose(
    operation: str, backend: str, table: Mapping[str, Implementation], *args: Any
) -> Callable[..., Any]:
    """Return the implementation for these arguments; with ``"auto"``, the first in the table that does not decline."""
    if backend == "auto":
        for run, declines in table.values():
            if declines is None or declines(False, *args) is None:
                return run
    if backend in table:
        run, declines = table[backend]
        reason = None if declines is None else declines(True, *args)
        if reason is None:
            return run
        raise BackendError(
            f"backend {backend!r} declines {operation}: {reason}. Take another, or 'auto'."
        )
    # A backend need not have the operations of the derivative.
    if in_backward_pass():
        return choose(operation, "auto", table, *args)
    raise BackendError(
        f"backend {backend!r} does not have {operation}; take one of {', '.join(map(repr, table))}, or 'auto', in the "
        f"call or in {VARIABLE}, which names a backend for all operations of a family."
    )


T = TypeVar("T")

#: An argument promoted to one dtype with all other ``Wide`` and ``Narrow`` ones, at least float32.
Wide = Annotated[Tensor, "wide"]
#: An argument that kernels accept in half precision, since they accumulate in float32; all of these share one dtype.
Narrow = Annotated[Tensor, "narrow"]

#: Schema types of the annotations.
SCHEMA: dict[Any, str] = {
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

#: Types of arguments outside of tracing: no tensor subclasses, and no symbols.
PLAIN = frozenset(
    {Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list, tuple}
)

Formula = Callable[..., Any]

#: The least precision of sums.
LEAST = torch.float32

#: Numbers of a tensor up to which plain torch is the fastest for a training step; eight times as many when
#: ``torch.compile`` fuses its calls, and 32 times as many without gradients.
FEW = 1 << 15
#: Whether torch exports, whose sizes may vary; before torch 2.7 it cannot be told from ``torch.compile``.
exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def operation(
    name: str,
    *,
    formula: Formula | tuple[Operation[Any], str],
    cpu: Formula,
    triton: Implementation | None = None,
    backends: Mapping[str, Implementation] | None = None,
    family: str | None = None,
    small: Callable[..., bool] | None = None,
    dtype: str | None = None,
) -> Callable[[Callable[..., T]], Operation[T]]:
    """Declare an operation; decorates a function that returns empty results of the right shapes.

    The annotations of the function are the schema, and implementations take the same arguments. A ``NamedTuple`` of
    schema types (:data:`SCHEMA`) is one argument. Several results are a tuple; derivatives can refer to the fields of a
    named tuple.

    Args:
        name: name in ``torch.ops.diffusion_mp``, or with a namespace of its own, such as ``"mine::product"``.
        formula: plain torch, the backend "reference". Torch differentiates and maps it, so no value may decide what it
            does, and it may call no operation without a batching rule. The formula of a backward pass can be derived
            from an operation and the names of the arguments whose gradients it returns, as in ``(attention, "q k v")``;
            its own arguments are named as in :meth:`Operation.derivatives`.
        cpu: the fast path on every device, opaque to torch.
        triton: the GPU path, see :func:`.gpu.kernel`. By default there is none.
        backends: further backends by name, which are asked before these two; see :meth:`Operation.add_backend`.
        family: the name by which the environment selects a backend. By default the name of the operation.
        small: returns whether the formula is also the fastest way for these arguments, if no backend is named: the
            calls of the formula cost less than the calls of an autograd function, and ``torch.compile`` fuses them. It
            gets the arguments as they come, and must return true only for tensors of one dtype; the first argument is a
            tensor. See :func:`few_numbers`. By default the formula is never the fastest.
        dtype: the argument whose dtype the (first) result is cast to. By default no result is cast.
    """

    def declare(shapes: Callable[..., T]) -> Operation[T]:
        run = formula
        if isinstance(run, tuple):
            forward, targets = run
            # Of the arguments by their names, since those of the backward pass come in another order.
            run = forward.pulled_back(
                targets, list(inspect.signature(shapes).parameters)
            )
        # In the order in which they are asked.
        table = dict(backends or {})
        if triton is not None:
            table["triton"] = triton
        table["cpu"] = Implementation(cpu)
        table["reference"] = Implementation(run)
        return Operation(shapes, name, family or name, table, small, dtype)

    return declare


def few_numbers(*tensors: Tensor) -> bool:
    """Return whether plain torch is the fastest for these tensors: few numbers, on the CPU and in one dtype."""
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
    # Half precision would have to be widened first, which the operation does.
    if first not in ALREADY:
        return False
    if compiling:
        return largest <= 8 * FEW
    most = FEW if trained and torch.is_grad_enabled() else 32 * FEW
    return largest <= most and values_only()


def empty_like(*tensors: Tensor) -> Any:
    """Return an uninitialised contiguous tensor shaped like the tensor, or a tuple of them."""
    first, *others = tensors
    copy = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (copy, *map(empty_like, others)) if others else copy


def pulled_back(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Any
) -> Any:
    """Return the gradients of ``inputs``, given the gradients of the results: the formula of a backward pass."""
    pull = torch.func.vjp(function, *inputs)[1]
    return pull(grads)


def heads_first(*features: Tensor) -> list[Tensor]:
    """Return [N, D] for one head, [H, N, D] for several: torch differentiates products in their own layout.

    A tensor that is given several times has one view.
    """
    views: dict[int, Tensor] = {}
    for x in features:
        if id(x) not in views:
            views[id(x)] = x.squeeze(1) if x.size(1) == 1 else x.transpose(0, 1)
    return [views[id(x)] for x in features]


class Signature:
    """The arguments and results of a function; the fields of a named tuple are arguments too, "tuple.field"."""

    def __init__(self, function: Callable[..., Any], dtype: str | None) -> None:
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        self.arguments = list(hints)
        #: Every argument's named tuple, or ``None``, with the places of its fields.
        self._tuples: list[tuple[Callable[..., Any] | None, int, int]] = []
        self.flat: dict[str, Any] = {}
        for name, hint in hints.items():
            first = len(self.flat)
            if hasattr(hint, "_fields"):
                fields = get_type_hints(hint, include_extras=True)
                self.flat |= {f"{name}.{field}": kind for field, kind in fields.items()}
                self._tuples.append((hint, first, len(self.flat)))
            else:
                self.flat[name] = hint
                self._tuples.append((None, first, first + 1))
        self.several = returned is not Tensor
        self.results = ["out"]
        self.returned: Callable[..., Any] = lambda *results: results
        if hasattr(returned, "_fields"):
            self.results = list(returned._fields)
            self.returned = returned
        elif self.several:
            self.results = [
                f"out_{position}" for position in range(len(get_args(returned)))
            ]
        kinds = list(enumerate(self.flat.values()))
        self._wide = [
            position for position, kind in kinds if kind in (Wide, Wide | None)
        ]
        self._narrow = [position for position, kind in kinds if kind == Narrow]
        self._promoted = [*self._wide, *self._narrow]
        self.like = None if dtype is None else list(self.flat).index(dtype)

    @property
    def schema(self) -> str:
        """The schema of the registered operation: flat arguments, then the backend."""
        arguments = [
            f"{SCHEMA[kind]} {name.replace('.', '_')}"
            for name, kind in self.flat.items()
        ]
        results = ["Tensor"] * len(self.results)
        return f"({', '.join(arguments)}, str backend) -> ({', '.join(results)})"

    def places(self, name: str) -> list[int]:
        """Return where in flat arguments and results a value is; a tuple stands for all of its fields."""
        # An operation with several results has none of that name: it stands for all of them.
        if name == "out" and name not in self.results:
            return list(range(len(self.flat), len(self.flat) + len(self.results)))
        return [
            position
            for position, part in enumerate([*self.flat, *self.results])
            if name in (part, part.partition(".")[0])
        ]

    def all_places(self, names: str) -> list[int]:
        """Return where the values of several names are."""
        return [position for name in names.split() for position in self.places(name)]

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments, and the fields of those that are named tuples."""
        flat: list[Any] = []
        # The dispatcher of torch takes tensors and numbers, and no tuples of both.
        for (make, *_), arg in zip(self._tuples, args, strict=True):
            flat.extend([arg] if make is None else arg)
        return flat

    def bind(
        self, args: tuple[Any, ...], *, narrow: bool
    ) -> tuple[list[Any], tuple[Any, ...], torch.dtype | None]:
        """Return the arguments in one dtype, flat and as they came, and the result's dtype if one is declared."""
        flat = self.flatten(args)
        dtype = None if self.like is None else flat[self.like].dtype
        common = None
        # A loop, since a comprehension would be a call: what is not arithmetic adds up where graphs are small.
        for position in self._promoted:
            x = flat[position]
            if x is None or x.dtype == common:
                continue
            if common is not None or x.dtype not in ALREADY:
                self.to_one_dtype(flat, narrow=narrow)
                return flat, tuple(self.unflatten(flat)), dtype
            common = x.dtype
        return flat, args, dtype

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Put the fields of named tuples together again; further entries are ignored."""
        return [
            flat[first] if make is None else make(*flat[first:end])
            for make, first, end in self._tuples
        ]

    def to_one_dtype(self, flat: list[Any], *, narrow: bool) -> None:
        """Promote ``flat`` in place; with ``narrow``, keep half precision there."""
        wide = [position for position in self._wide if flat[position] is not None]
        short = reduce(
            torch.promote_types,
            [flat[position].dtype for position in self._narrow] or [LEAST],
        )
        widest = reduce(
            torch.promote_types, [flat[position].dtype for position in wide], short
        )
        # Sums over nodes leave the range of half precision, whatever the arguments have.
        widest = torch.promote_types(widest, LEAST)
        for position in wide:
            flat[position] = flat[position].to(widest)
        for position in self._narrow:
            flat[position] = flat[position].to(short if narrow else widest)

    def cast(self, out: Any, dtype: torch.dtype | None) -> Any:
        """Return a tensor or a tuple of results, the first in this dtype."""
        if not self.several:
            return out if dtype is None else out.to(dtype)
        first, *others = out
        return self.returned(first if dtype is None else first.to(dtype), *others)


class _Derivative(NamedTuple):
    """The gradients of some arguments; ``names`` are the names of the formula's parameters."""

    places: list[int]
    formula: Formula
    names: list[str]


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
        self.backends = dict(table)
        BACKENDS.update(dict.fromkeys(table))
        self._small = small
        self.signature = signature = Signature(shapes, dtype)
        FAMILIES.add(family)
        self._tensor = next(
            position
            for position, kind in enumerate(signature.flat.values())
            if SCHEMA[kind] == "Tensor"
        )
        # Without declared derivatives, the derivatives of the formula, which needs all arguments.
        self._derivatives: list[_Derivative] | None = None
        self._kept = list(range(len(signature.flat)))
        self._without_grad: list[int] = []
        self._materialize = False

        # For torch.compile, which asks for shapes and has no numbers.
        def fake(*flat: Any) -> Any:
            out: Any = shapes(*signature.unflatten(flat))
            return tuple(out) if signature.several else out

        #: As torch knows it.
        self._qualified = name if "::" in name else f"diffusion_mp::{name}"
        self._registered = torch.library.custom_op(
            self._qualified, self._run, mutates_args=(), schema=signature.schema
        )
        self._registered.register_fake(fake)
        self._registered.register_autograd(self._backward, setup_context=self._keep)

    def __call__(self, *args: Any, backend: str = "auto") -> T:
        """Run the formula, or the backend that is named here or by the environment, or the first that does not decline.

        A backend runs directly, as an autograd function, or, where torch has to see it, as the registered operation.

        Args:
            args: the arguments of the declaration.
            backend: the name of a backend. With ``"auto"`` the environment decides, or else the first backend that
                supports the arguments.
        """
        # Nearly always nothing is named, and one look at the environment replaces the call.
        if backend != "auto" or VARIABLE in os.environ:
            backend = requested(self.family, backend)
        # Few numbers are of one dtype, on the CPU, and nothing looks in: the formula needs no preparation, which would
        # take as long as the arithmetic.
        if backend == "auto" and self._small is not None and self._small(*args):
            with without_autocast(args[0]):
                out: Any = self.formula(*args)
            return cast("T", out)
        direct = values_only()
        # A transform looks inside, and then only the formula can be seen, whatever was named.
        if not direct and differentiated_inside():
            backend = "reference"
        flat, args, dtype = self.signature.bind(args, narrow=backend != "reference")
        if backend == "reference":
            out = self._compute(flat, backend, args)
        elif (
            not direct
            or not PLAIN.issuperset(map(type, flat))
            or flat[self._tensor].is_meta
        ):
            out = self._registered(*flat, backend)
        else:
            trained = False
            for x in flat:
                trained = trained or (isinstance(x, Tensor) and x.requires_grad)
            if trained and torch.is_grad_enabled():
                # A fifth of the overhead of the registered operation.
                out = _FastPair.apply(*flat, backend, args, self)
            else:
                out = self._compute(flat, backend, args)
        # A single result without a declared dtype comes back as it is, without one more call.
        if dtype is not None or self.signature.several:
            out = self.signature.cast(out, dtype)
        result: T = out
        return result

    def add_backend(
        self,
        name: str,
        run: Formula,
        declines: Callable[..., str | None] | None = None,
    ) -> None:
        """Add a backend, which calls and ``DIFFUSION_MP_BACKEND`` can then name.

        Derivatives that the backend lacks are taken from the other backends.

        Args:
            name: name of the backend; a backend of that name is replaced.
            run: takes the arguments of the declaration and returns its results, of which torch takes no derivatives.
            declines: ``declines(named, *args)`` returns why these arguments are not supported, or ``None``. A backend
                that nobody named, ``named=False``, is asked before the others. By default all arguments are supported.
        """
        self.backends = {name: Implementation(run, declines), **self.backends}
        BACKENDS.setdefault(name)

    def _compute(self, flat: Sequence[Any], backend: str, args: Sequence[Any]) -> Any:
        """Return what the backend computes from the arguments as they came."""
        run = choose(self.name, backend, self.backends, *args)
        # Autocast is on or off for a device, which the first tensor tells.
        tensor = flat[self._tensor]
        if not torch.is_autocast_enabled(
            "cpu" if tensor.is_cpu else tensor.device.type
        ):
            return run(*args)
        with without_autocast(tensor):
            return run(*args)

    def _run(self, *inputs: Any) -> Any:
        """Run as the registered operation does, on flat arguments and the backend."""
        *flat, backend = inputs
        out = self._compute(flat, backend, self.signature.unflatten(flat))
        return tuple(out) if self.signature.several else out

    def written_out(self, formula: Formula | None = None) -> tuple[Any, Formula]:
        """Return the registered operation, and a formula, by default its own, as a function of flat arguments."""
        namespace, _, name = self._qualified.partition("::")
        registered = getattr(getattr(torch.ops, namespace), name).default
        return registered, self._flat(formula or self.formula)

    def _flat(self, formula: Formula) -> Formula:
        """Return a formula as a function of flat arguments of any dtypes, with a tensor or a plain tuple as result."""
        signature = self.signature

        def run(*flat: Any) -> Any:
            dtype = None if signature.like is None else flat[signature.like].dtype
            # Callers also pass what follows the arguments: results, or the name of a backend.
            wide = list(flat[: len(signature.flat)])
            signature.to_one_dtype(wide, narrow=False)
            out = signature.cast(formula(*signature.unflatten(wide)), dtype)
            return tuple(out) if signature.several else out

        return run

    def pulled_back(self, targets: str, names: Sequence[str]) -> Formula:
        """Return the derivative of the formula as a function of arguments with these names."""
        signature = self.signature
        places = signature.all_places(targets)

        def run(*args: Any) -> Any:
            named = dict(zip(names, args, strict=True))
            flat = signature.flatten([named[name] for name in signature.arguments])
            grads = {
                position: named.get(f"grad_{result}", named.get("grad"))
                for position, result in enumerate(signature.results)
            }
            return self._pull_back(flat, places, grads)

        return run

    def _pull_back(
        self,
        flat: Sequence[Any],
        places: Sequence[int],
        grads: Mapping[int, Tensor | None],
    ) -> Any:
        """Return the gradients of some arguments from the gradients of the results that have any, by the formula."""
        present = {at: grad for at, grad in grads.items() if grad is not None}

        def used_results(*inputs: Tensor) -> tuple[Tensor, ...]:
            values = list(flat)
            for position, x in zip(places, inputs, strict=True):
                values[position] = x
            out = self._flat(self.formula)(*values)
            parts = out if self.signature.several else (out,)
            return tuple(parts[at].to(grad.dtype) for at, grad in present.items())

        inputs = [flat[position] for position in places]
        return pulled_back(used_results, inputs, tuple(present.values()))

    def derivatives(self, formulas: Mapping[str, Formula]) -> None:
        """Declare the first derivatives, if they are cheaper than the derivatives of the formula (the default).

        Args:
            formulas: from names of arguments, such as "q k", to a function or operation that returns their gradients. A
                tuple stands for all of its fields, ``rows.a`` for one field. The parameters of the function are named
                after what it needs: arguments, ``out`` (or a field of several results), ``grad`` (or ``grad_field``),
                ``backend``; only these are saved. A result whose gradient no formula uses is not differentiable. A
                missing gradient is ``None`` for a parameter with that default, else zeros. What the function calls
                should be differentiable for higher derivatives, as operations are.
        """
        signature = self.signature
        self._derivatives = []
        may_miss = False
        for targets, formula in formulas.items():
            places = signature.all_places(targets)
            if isinstance(formula, Operation):
                names = [*formula.signature.arguments, "backend"]
                formula = partial(_with_backend, formula)
            else:
                parameters = inspect.signature(formula).parameters
                names = list(parameters)
                may_miss |= any(at.default is None for at in parameters.values())
            self._derivatives.append(_Derivative(places, formula, names))
        asked = {name for derivative in self._derivatives for name in derivative.names}
        self._kept = sorted({p for name in asked for p in signature.places(name)})
        if "grad" not in asked:
            self._without_grad = [
                position
                for position, result in enumerate(signature.results)
                if f"grad_{result}" not in asked
            ]
        # A single gradient is present whenever backward runs; of several some may be missing.
        several = len(signature.results) - len(self._without_grad) > 1
        self._materialize = several and not may_miss

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the derivatives need, tensors by ``save_for_backward``."""
        results = output if self.signature.several else (output,)
        count = len(self.signature.flat)
        values = (*inputs[:count], *results)
        ctx.backend = inputs[count]
        # Numbers and names, which `save_for_backward` does not take.
        ctx.others = [None] * len(values)
        ctx.tensors = []
        for position in self._kept:
            if isinstance(values[position], Tensor):
                ctx.tensors.append(position)
            else:
                ctx.others[position] = values[position]
        ctx.save_for_backward(*[values[position] for position in ctx.tensors])
        ctx.set_materialize_grads(self._materialize)
        if self._without_grad:
            ctx.mark_non_differentiable(*[results[p] for p in self._without_grad])

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        # Nothing downstream depends on this result.
        if all(grad is None for grad in grads):
            return tuple(gradients)
        values = [*ctx.others]
        for position, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            values[position] = tensor
        needed = [p for p, needs in enumerate(ctx.needs_input_grad) if needs]
        if self._derivatives is None:
            pulled = self._pull_back(values, needed, dict(enumerate(grads)))
            for position, gradient in zip(needed, pulled, strict=True):
                gradients[position] = gradient
            return tuple(gradients)
        named = self._named(values, grads) | {"backend": ctx.backend}
        for places, formula, names in self._derivatives:
            # A derivative may cost as much as the forward pass, and is left out where nobody asks for it.
            if set(places).isdisjoint(needed):
                continue
            out = formula(*[named[name] for name in names])
            if not isinstance(out, tuple):
                out = (out,)
            for position, gradient in zip(places, out, strict=True):
                gradients[position] = gradient if position in needed else None
        return tuple(gradients)

    def _named(
        self, values: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> dict[str, Any]:
        """Return arguments, results and gradients by the names that derivatives use."""
        signature = self.signature
        results = values[len(signature.flat) :]
        named = dict(zip(signature.arguments, signature.unflatten(values), strict=True))
        named |= zip(signature.results, results, strict=True)
        named |= zip([f"grad_{name}" for name in signature.results], grads, strict=True)
        if signature.several:
            named.setdefault("out", signature.returned(*results))
            named["grad"] = signature.returned(*grads)
        else:
            named["grad"] = grads[0]
        return named


class _FastPair(torch.autograd.Function):
    """The fast forward pass of an operation, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *flat, backend, args, called = inputs
        out = called._compute(flat, backend, args)
        if called.signature.several:
            out = tuple(out)
        # The same as of the registered operation, so that both have one backward pass.
        called._keep(ctx, inputs, out)
        ctx.backward_of = called._backward
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.backward_of(ctx, *grads)


def _with_backend(operation: Formula, *args: Any) -> Any:
    """Call an operation with its backend as the last argument."""
    return operation(*args[:-1], backend=args[-1])
