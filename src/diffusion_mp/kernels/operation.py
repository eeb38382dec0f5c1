"""``operation``: declares a kernel. Schema, shapes, precision, backends and derivatives stand in one place.

    @operation(
        "spmm",                       # its name in torch.ops.diffusion_mp
        family="spmm",                # the name by which its backend can be chosen in the environment
        reference=reference.spmm,     # plain torch: the truth, and what torch.func can look into
        cpu=compressed.spmm,          # the fast paths, which torch does not look into
        dtype="v",                    # the argument whose dtype the result gets
    )
    def _spmm(pattern: Pattern, weight: Wide, v: Wide) -> Tensor:
        return empty_like(v)          # run on fake tensors: only the shape of the result matters

    _spmm.derivatives({
        "weight": lambda grad, pattern, v, backend: _sddmm(pattern, grad, v, backend=backend),
        "v": lambda grad, pattern, weight, backend: _spmm(pattern.T, weight, grad, backend=backend),
    })

The annotations of the function are the schema, and say what happens to tensors first (:data:`Wide`, :data:`Narrow`).
Calling what was declared chooses a backend, brings the arguments to one dtype, and runs it without autocast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, Generic, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from diffusion_mp.kernels.dispatch import Implementation, always, choose, requested
from diffusion_mp.kernels.precision import without_autocast

T = TypeVar("T")

Wide = Annotated[Tensor, "wide"]
"""An argument that is brought to one dtype with all other ``Wide`` and ``Narrow`` ones, at least float32."""

Narrow = Annotated[Tensor, "narrow"]
"""An argument that kernels may get in half precision, since they accumulate in float32: one dtype for all of these."""

#: How annotations read in the schema of an operation.
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

Formula = Callable[..., Any]


class _Parameter(NamedTuple):
    """An argument, and where its parts stand among the flat arguments of the registered operation."""

    name: str
    place: slice
    kind: type | None
    """The named tuple that the parts make up; ``None``: there is one part, and it is the argument."""


class _Derivative(NamedTuple):
    """Gradients of some flat arguments, by a formula of the values that its parameters name."""

    places: list[int]
    formula: Formula
    names: list[str]


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
    """Declare an operation; decorates a function that makes results of the right shape from (fake) arguments.

    The function's annotations are the schema. A ``NamedTuple`` of what the schema knows (see :data:`SCHEMA`) is one
    argument. Several results are a tuple, best a ``NamedTuple``: then derivatives can ask for them by name.

    Args:
        name: in ``torch.ops.diffusion_mp``, or with a namespace of its own, ``"mine::product"``.
        family: under this name the environment chooses the backend of the operation (see `kernels.dispatch`).
            ``None``: there is one implementation, ``cpu``, and nothing to choose.
        reference: plain torch, which is differentiated by torch; taken by name, or where there is nothing else.
        cpu: the fast path on every device, which torch does not look into.
        triton: that on the GPU, see :func:`diffusion_mp.kernels.gpu.kernel`.
        flex: another that torch differentiates itself, taken by name only.
        dtype: the argument to whose dtype the result, or the first of several, is brought in the end.

    Every implementation takes the arguments in the order of the function.
    """
    rows = {
        "triton": triton,
        "cpu": cpu and Implementation(cpu, always),
        "flex": flex,
        "reference": reference and Implementation(reference, always),
    }
    table = {backend: row for backend, row in rows.items() if row is not None}

    def declare(shapes: Callable[..., T]) -> Operation[T]:
        return Operation(shapes, name, family, table, dtype)

    return declare


def once_differentiable(name: str, instead: str) -> Mapping[str, Formula]:
    """The derivatives of a backward operation that has none: a sentence that says what to do instead."""

    def refuse() -> NoReturn:
        raise RuntimeError(
            f"{name} is once differentiable: its backward recomputes in blocks and has no derivative itself. "
            f"For second derivatives {instead}."
        )

    return {"*": refuse}


def empty_like(*tensors: Tensor) -> Any:
    """A contiguous result shaped like the tensor, or like every one of several."""
    found = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)
    return found if len(found) > 1 else found[0]


class Operation(Generic[T]):
    """What :func:`operation` declares: a function of its arguments and ``backend``."""

    def __init__(
        self,
        shapes: Callable[..., T],
        name: str,
        family: str | None,
        table: Mapping[str, Implementation],
        dtype: str | None,
    ) -> None:
        self.__doc__ = shapes.__doc__
        self.family, self.table = family, table
        self._shapes = shapes
        self._read_signature(get_type_hints(shapes, include_extras=True))
        self._result = None if dtype is None else self._flat.index(dtype)
        # Plain torch runs outside of the registered operation, where torch sees it.
        self._plain = {backend for backend in ("reference", "flex") if backend in table}
        self._only_plain = len(self._plain) == len(table)
        self._op = self._register(name if "::" in name else f"diffusion_mp::{name}")

    def __call__(self, *args: Any, backend: str = "auto") -> T:
        """The result, by the backend that was named, or the environment names, or the first that does not decline.

        Raises:
            BackendError: the named backend declines these arguments, or does not have the operation.
        """
        # What has no reference is a part of another operation, such as its derivative, and does as it is told.
        chosen = requested(self.family, backend) if self.family and "reference" in self.table else backend
        flat = self._flatten(args)
        out_dtype = None if self._result is None else flat[self._result].dtype
        self._bring_to_one_dtype(flat, narrow=chosen != "reference")
        if chosen in self._plain or self._only_plain:
            out = self._run(chosen, flat)
        else:
            out = self._op(*flat, chosen) if self.family else self._op(*flat)
        if out_dtype is not None:
            out = (out[0].to(out_dtype), *out[1:]) if self._many else out.to(out_dtype)
        return self._named(out) if self._many else out

    def _named(self, results: Sequence[Any]) -> Any:
        return self._many(*results) if hasattr(self._many, "_fields") else tuple(results)

    # ---------------------------------------------------------------- arguments

    def _read_signature(self, hints: dict[str, Any]) -> None:
        """Where every argument and result stands in the flat lists, and what it is."""
        returned = hints.pop("return")
        self._parameters: list[_Parameter] = []
        kinds: dict[str, Any] = {}
        for name, hint in hints.items():
            first, fields = len(kinds), getattr(hint, "_fields", None)
            parts = get_type_hints(hint, include_extras=True) if fields else {}
            kinds |= {f"{name}.{field}": parts[field] for field in fields} if fields else {name: hint}
            self._parameters.append(_Parameter(name, slice(first, len(kinds)), hint if fields else None))
        self._flat = list(kinds)
        self._wide = [place for place, kind in enumerate(kinds.values()) if kind in (Wide, Wide | None)]
        self._narrow = [place for place, kind in enumerate(kinds.values()) if kind == Narrow]
        self._tensor = next(place for place, kind in enumerate(kinds.values()) if SCHEMA.get(kind) == "Tensor")
        self._many: Any = None if returned is Tensor else returned
        fields = getattr(returned, "_fields", None) or [f"out_{place}" for place in range(len(get_args(returned)))]
        self._results = ["out"] if self._many is None else list(fields)
        self._all = [*self._flat, *self._results]
        unknown = {name: kind for name, kind in kinds.items() if kind not in SCHEMA}
        if unknown:
            raise TypeError(f"an operation takes {', '.join(SCHEMA.values())} and tuples of these; got {unknown}.")
        self._schema = [SCHEMA[kind] for kind in kinds.values()] + ["Tensor"] * len(self._results)

    def _places(self, name: str) -> slice:
        """Where an argument or a result stands; nowhere if it is a gradient or the backend."""
        places = {parameter.name: parameter.place for parameter in self._parameters}
        places |= {result: slice(place, place + 1) for place, result in enumerate(self._results, len(self._flat))}
        places.setdefault("out", slice(len(self._flat), None))
        return places.get(name, slice(0))

    def _flatten(self, args: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for parameter, arg in zip(self._parameters, args, strict=True):
            if parameter.kind is None:
                flat.append(arg)
            else:
                flat.extend(arg)
        return flat

    def _unflatten(self, flat: Sequence[Any]) -> list[Any]:
        return [flat[p.place.start] if p.kind is None else p.kind(*flat[p.place]) for p in self._parameters]

    def _bring_to_one_dtype(self, flat: list[Any], narrow: bool) -> None:
        """In place; with ``narrow``, what kernels take in half precision stays in it."""
        dtypes = [flat[place].dtype for place in self._narrow]
        places = [place for place in self._wide if flat[place] is not None]
        wide = reduce(torch.promote_types, [flat[place].dtype for place in places] + dtypes, torch.float32)
        short = reduce(torch.promote_types, dtypes) if narrow and dtypes else wide
        for place in places:
            flat[place] = flat[place].to(wide)
        for place in self._narrow:
            flat[place] = flat[place].to(short)

    # ---------------------------------------------------------------- what torch is told

    def _register(self, name: str) -> Any:
        arguments = [f"{kind} {name.replace('.', '_')}" for kind, name in zip(self._schema, self._flat, strict=False)]
        results = f"({', '.join(['Tensor'] * len(self._results))})" if self._many else "Tensor"
        backend = ["str backend"] if self.family else []
        schema = f"({', '.join([*arguments, *backend])}) -> {results}"
        number = len(self._flat)

        def run(*flat: Any) -> Any:
            return self._run(flat[number] if self.family else "auto", flat[:number])

        def fake(*flat: Any) -> Any:
            out = self._shapes(*self._unflatten(flat[:number]))
            return tuple(out) if self._many else out  # type: ignore[arg-type]

        registered = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
        registered.register_fake(fake)
        return registered

    def _run(self, backend: str, flat: Sequence[Any]) -> Any:
        args = self._unflatten(flat)
        with without_autocast(flat[self._tensor]):
            out = choose(self.family or "the operation", backend, self.table, *args)(*args)
        return tuple(out) if self._many else out

    # ---------------------------------------------------------------- derivatives

    def derivatives(self, formulas: Mapping[str, Formula]) -> None:
        """Declare the derivatives; without them the operation has none.

        Args:
            formulas: "q k" (arguments, or ``rows.a``, a field of one) → a function that returns their gradients, one or
                a tuple. Its parameters say by name what it wants: arguments, ``out`` (or a field of several results),
                ``grad`` (of several results ``grad_field``), ``backend``. Only what is asked for is kept, and a formula
                runs where one of its gradients is wanted. Results whose gradient no formula asks for have none.
                See also :func:`once_differentiable`.
        """
        self._formulas = []
        for arguments, formula in formulas.items():
            names = self._flat if arguments == "*" else arguments.split()
            wanted = list(inspect.signature(formula).parameters)
            self._formulas.append(_Derivative([self._flat.index(name) for name in names], formula, wanted))
        asked = {name for derivative in self._formulas for name in derivative.names}
        kept = sorted({place for name in asked for place in range(len(self._all))[self._places(name)]})
        self._kept_tensors = [place for place in kept if self._schema[place].startswith("Tensor")]
        self._kept_others = [place for place in kept if place not in self._kept_tensors]
        grads = [f"grad_{result}" for result in self._results]
        self._grads = grads if len(grads) > 1 else ["grad"]
        unasked = [place for place, grad in enumerate(self._grads) if grad not in asked]
        self._without_grad = unasked if len(unasked) < len(self._grads) else []  # who refuses asks for none
        self._op.register_autograd(self._backward, setup_context=self._keep)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the formulas ask for."""
        results = output if self._many else (output,)
        values = (*inputs[: len(self._flat)], *results)
        ctx.backend = inputs[-1] if self.family else "auto"
        ctx.save_for_backward(*(values[place] for place in self._kept_tensors))
        ctx.others = [values[place] for place in self._kept_others]
        ctx.mark_non_differentiable(*(results[place] for place in self._without_grad))

    def _backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are wanted, by the formulas."""
        values = [None] * len(self._all)
        for places, found in ((self._kept_tensors, ctx.saved_tensors), (self._kept_others, ctx.others)):
            for place, value in zip(places, found, strict=True):
                values[place] = value
        named = dict(zip(self._all, values, strict=True))
        named |= zip((p.name for p in self._parameters), self._unflatten(values), strict=True)
        named |= zip(self._grads, grads, strict=True)
        if self._many is not None:
            named.setdefault("out", self._named(values[len(self._flat) :]))
        named["backend"] = ctx.backend
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for places, formula, names in self._formulas:
            if any(ctx.needs_input_grad[place] for place in places):
                found = formula(*(named[name] for name in names))
                for place, grad in zip(places, found if isinstance(found, tuple) else (found,), strict=True):
                    out[place] = grad
        return tuple(out)
