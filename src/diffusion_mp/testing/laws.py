"""Tolerances by operation and dtype, and laws: functions whose docstrings state what must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffusion_mp.checks import Seed, check_kind, checked


class Tolerance(NamedTuple):
    """Largest allowed difference between two numbers: |got − expected| ≤ atol + rtol · |expected|, elementwise.

    Attributes:
        rtol: the relative part, a multiple of |expected|.
        atol: the absolute part.

    Examples:
        >>> torch.allclose(x, x + 1e-6, **Tolerance(rtol=1e-4, atol=1e-5)._asdict())
        True
    """

    rtol: float
    atol: float


_SINGLE = Tolerance(1e-4, 1e-5)


def _row(
    double: Tolerance, single: Tolerance = _SINGLE
) -> dict[torch.dtype, Tolerance]:
    # In half precision inputs, scores and results are rounded; sums are taken in
    # float32.
    half = {torch.bfloat16: Tolerance(4e-2, 4e-2), torch.float16: Tolerance(1e-2, 1e-2)}
    return {torch.float64: double, torch.float32: single, **half}


TOLERANCES: dict[str, dict[torch.dtype, Tolerance]] = {
    # In double a few units in the last place of sums over a hundred nodes; gradients
    # and iterations lose more digits.
    "product": _row(Tolerance(1e-10, 1e-10)),  # a coupling against its dense matrix
    "degree": _row(Tolerance(1e-10, 1e-10)),
    "entries": _row(Tolerance(1e-12, 1e-12)),
    "dirichlet": _row(Tolerance(1e-9, 1e-9), Tolerance(1e-3, 1e-4)),
    "gradient": _row(Tolerance(1e-8, 1e-9), Tolerance(1e-3, 1e-4)),
    "rearranged": _row(
        Tolerance(1e-10, 1e-11)
    ),  # the same result for permuted, batched or doubled inputs
    "layer": _row(Tolerance(1e-9, 1e-10)),  # a layer or an update against its formula
    "parity": _row(Tolerance(1e-10, 1e-10)),  # or against another library
    "solve": _row(
        Tolerance(1e-8, 1e-8)
    ),  # iterative solvers and matrix functions against dense linear algebra
    "energy": _row(Tolerance(1e-10, 1e-12)),  # may rise by rounding only
    "autocast": _row(Tolerance(4e-2, 4e-2), Tolerance(4e-2, 4e-2)),  # float32 modules
}
"""Tolerances of the checks of this module, as ``TOLERANCES[operation][dtype]``; :func:`tolerance` looks one up.

Examples:
    >>> TOLERANCES["product"][torch.float64]
    Tolerance(rtol=1e-10, atol=1e-10)
"""


def tolerance(operation: str, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance that the checks allow for an operation at a dtype.

    Args:
        operation: a key of :data:`TOLERANCES`, such as ``"product"`` or ``"gradient"``.
        dtype: ``torch.float64``, ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        KeyError: the table has no such operation, or no such dtype.

    Examples:
        >>> tolerance("product", torch.float64).rtol < 1e-8
        True
    """
    return TOLERANCES[operation][dtype]


Case = TypeVar("Case")
Law = Callable[[Case], None]


class LawBroken(AssertionError):
    """A law does not hold; the message is a sentence that says where."""


def expect(condition: bool, sentence: str) -> None:
    """Raise `LawBroken` with the sentence unless the condition holds."""
    if not condition:
        raise LawBroken(sentence)


# Laws are written with these instead of assert, whose message would show the code of a
# law, and which `python -O` leaves out.
def expect_equal(got: object, expected: object, what: str) -> None:
    """Raise `LawBroken` unless two objects are equal; ``what`` names the first one."""
    expect(got == expected, f"{what} is {got}, expected {expected}")


def expect_flags(subject: object, *names: str) -> None:
    """Raise `LawBroken` unless every named attribute of an object is True or False."""
    for name in names:
        value = getattr(subject, name)
        expect(isinstance(value, bool), f"{name} is {value!r}, expected True or False")


def expect_close(
    got: Tensor, expected: Tensor, operation: str, what: str = "the result"
) -> None:
    """Raise `LawBroken` unless two tensors have one shape and close values; ``operation`` names the tolerance."""
    expect_equal(tuple(got.shape), tuple(expected.shape), f"the shape of {what}")
    if got.numel() == 0:
        return
    # By the dtype of what was computed: the reference is often in double.
    rtol, atol = tolerance(operation, got.dtype)
    # Differences are taken in double: in half precision they would be rounded
    # themselves, or overflow.
    got64 = got.detach().double()
    expected64 = expected.detach().double()
    excess = (got64 - expected64).abs() - atol - rtol * expected64.abs()
    worst = torch.unravel_index(
        excess.argmax(), got.shape
    )  # the place of a NaN, if there is one
    if not excess[worst] <= 0:  # and not "> 0", which is false for a NaN
        raise LawBroken(
            f"{what} at {[int(i) for i in worst]} is {got64[worst]:.12g}, expected {expected64[worst]:.12g} "
            f"(largest difference {(got64 - expected64).abs().max():.3g}, allowed {atol:g} + {rtol:g}·|expected|)"
        )


def expect_writable(
    call: Callable[[], Tensor], what: str, *arguments: Tensor | None
) -> None:
    """Raise `LawBroken` if writing to the result of ``call`` changes another entry, an argument or a later result."""
    result = call().detach()
    expected = result.clone()
    tensors = [argument for argument in arguments if argument is not None]
    before = [tensor.detach().clone() for tensor in tensors]
    # torch refuses to write to entries that share memory, where nothing else would
    # show.
    strides = zip(result.shape, result.stride(), strict=True)
    repeated = any(size > 1 and stride == 0 for size, stride in strides)
    expect(not repeated, f"entries of {what} share memory: return a copy")
    # A number that no result has: whatever shares the memory shows it.
    result.fill_(77)
    for tensor, copy in zip(tensors, before, strict=True):
        sentence = f"writing to {what} changes what it was computed from: return a copy"
        expect(torch.equal(tensor.detach(), copy), sentence)
    sentence = f"writing to {what} changes what the next call returns: return a copy"
    expect(torch.equal(call().detach(), expected), sentence)


@contextmanager
def expect_rng_untouched(what: str) -> Iterator[None]:
    """Raise `LawBroken` if the body draws from the global random state or seeds it."""
    before = torch.get_rng_state()
    yield
    expect(
        torch.equal(before, torch.get_rng_state()),
        f"{what} moved torch's global random state, expected no change",
    )


@checked
@contextmanager
def seeded(seed: Seed) -> Iterator[None]:
    """Seed the global random state for the body and restore it afterwards."""
    # Without devices=[] every GPU would be initialised, which takes seconds and fails
    # in a forked process.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def by_name(laws: Sequence[Law[Case]]) -> dict[str, Law[Case]]:
    """Return the laws by their names, which are those of the functions."""
    names = {law.__name__.strip("_").replace("_", " "): law for law in laws}
    # Of two laws of one name only the last would be checked.
    if len(names) < len(laws):
        raise ValueError(f"laws must have different names; got {[*names]}.")
    return names


def run_laws(
    subject: str,
    laws: Sequence[Law[Case]],
    case: Case,
    skip: Mapping[str, str] | None = None,
    seed: int | None = None,
) -> None:
    """Call all laws except the skipped ones, and raise one `AssertionError` with a sentence for every broken law.

    Args:
        subject: the name of what is checked, for the sentences.
        laws: functions of the case; the first line of the docstring of a law says what must hold.
        case: what the laws are called with.
        skip: the names of the laws to leave out, each with the reason.
        seed: what the case was drawn from, for the sentences. ``None`` if the laws are part of another law.
    """
    check_kind(
        skip, "skip", (Mapping, NoneType), "a mapping from the names of laws to reasons"
    )
    skipped = dict(skip or {})
    names = by_name(laws)
    if unknown := sorted(skipped.keys() - names):
        raise ValueError(
            f"skip names the laws {unknown}, expected some of {sorted(names)}"
        )
    broken: dict[str, list[str]] = {}
    first: Exception | None = None
    for name, law in names.items():
        if name in skipped:
            continue
        # A law that raises is broken like any other, and the laws after it are still
        # checked: one run names all faults.
        try:
            with torch.inference_mode(False), torch.enable_grad():
                law(case)
        except Exception as error:
            kind = "" if isinstance(error, LawBroken) else f"{type(error).__name__}: "
            broken.setdefault(f"{kind}{error}", []).append(name)
            first = first or error
    if not broken:
        return
    sentences = []
    # A module that cannot be called breaks all laws, which one sentence says.
    for flaw, (name, *others) in broken.items():
        statement = (names[name].__doc__ or "").partition("\n")[0]
        also = f", and likewise {', '.join(map(repr, others))}" if others else ""
        sentences.append(
            f"{subject} breaks the law '{name}' ({statement}){also}: {flaw}"
        )
    if seed is not None:
        sentences.append(
            f"States and graphs were drawn with seed={seed}. A law that does not apply is left out with a reason: "
            f"skip={{'{name}': 'why'}}."
        )
    raise AssertionError("\n".join(sentences)) from first
