"""Checks whether a coupling is what it declares, which Theorem T1 of docs/certified.md requires."""

from __future__ import annotations

import torch

from diffusion_mp.couplings import Coupling, ScaledCoupling, SparseCoupling, SumCoupling

CHECKED_NODES = (
    32  # nodes between which entries of a coupling that is not sparse are checked
)


def coupling_flaw(coupling: Coupling, convex: bool) -> str | None:
    """Return a sentence naming a promise that a coupling does not give, or that its entries contradict, or ``None``.

    The entries of all observed edges are examined, or the entries between the first nodes.
    """
    for promise in ("symmetric", "nonnegative"):
        if not getattr(coupling, promise):
            part = _innermost(coupling, promise)
            return f"the term's coupling is not promised to be {promise}, for {part!r} is not."
    for term, base in weighted_terms(coupling):
        # Multiples are examined as a whole, since a negative weight breaks the promise too.
        if (flaw := _entries_flaw(term, base, convex)) is not None:
            return flaw
    return None


def _innermost(coupling: Coupling, promise: str) -> Coupling:
    """Return the innermost part that does not give a promise: it is what the user wrote, and can change."""
    for part in getattr(coupling, "terms", [getattr(coupling, "coupling", None)]):
        if isinstance(part, Coupling) and not getattr(part, promise):
            return _innermost(part, promise)
    return coupling


def _entries_flaw(term: Coupling, base: Coupling, convex: bool) -> str | None:
    """Return a sentence naming entries of a multiple of ``base`` that contradict what it declares, or ``None``."""
    nodes = min(term.num_nodes, CHECKED_NODES)
    first = torch.arange(nodes, device=term.device)
    pairs = torch.cartesian_prod(first, first).T
    sparse = isinstance(base, SparseCoupling)
    if isinstance(base, SparseCoupling):
        pairs = base.graph.edges
    if not pairs.numel():
        return None
    forth = term.at(pairs).double()
    back = term.at(pairs.flip(0)).double()
    size = forth.abs() + back.abs()
    eps = torch.finfo(term.dtype).eps
    # Entries computed from a state are only as exact as its squares.
    rounding = 64 * eps * size if sparse else eps**0.5 * size.max()
    apart = (forth - back).abs()
    if not bool(size.isfinite().all()):
        return f"A has entries that are not finite, in {term!r}."
    if bool((forth < -rounding).any()):
        return f"A has the negative entry {float(forth.min()):g}, which {term!r} promises not to have."
    if bool((apart > rounding).any()):
        return f"A has two entries a_ij and a_ji that differ by {float(apart.max()):g}, in {term!r}."
    if not (convex or sparse) and term.positive_semidefinite:
        matrices = forth.T.unflatten(1, (nodes, nodes))
        least = float(torch.linalg.eigvalsh(matrices).min())
        if least < -nodes * float(rounding):
            return f"A has the negative eigenvalue {least:g}, which {term!r} promises not to have."
    return None


def weighted_terms(coupling: Coupling) -> list[tuple[Coupling, Coupling]]:
    """Return the terms of a sum of multiples, each with the coupling of which it is a multiple."""
    if isinstance(coupling, SumCoupling):
        return [pair for term in coupling.terms for pair in weighted_terms(term)]
    if isinstance(coupling, ScaledCoupling):
        scale = coupling.scale
        positive = coupling._positive
        return [
            (ScaledCoupling(scale, term, nonnegative=positive), base)
            for term, base in weighted_terms(coupling.coupling)
        ]
    return [(coupling, coupling)]
