"""Checks whether a coupling is what it declares, which Theorem T1 of docs/certified.md requires."""

from __future__ import annotations

import torch

from diffusion_mp.couplings import Coupling, ScaledCoupling, SparseCoupling, SumCoupling

CHECKED_NODES = (
    32  # nodes between which entries of a coupling that is not sparse are checked
)


def not_declared(whose: str, coupling: Coupling | None) -> str | None:
    """Return a sentence naming the innermost part of a coupling that does not promise symmetry or nonnegativity."""
    for promise in ("symmetric", "nonnegative"):
        if coupling is None or getattr(coupling, promise):
            continue
        # The innermost part is what the user wrote, and can change.
        while True:
            parts = getattr(coupling, "terms", [getattr(coupling, "coupling", None)])
            broken = [
                part
                for part in parts
                if isinstance(part, Coupling) and not getattr(part, promise)
            ]
            if not broken:
                return f"the {whose} coupling is not promised to be {promise}, for {coupling!r} is not."
            coupling = broken[0]
    return None


def not_as_declared(coupling: Coupling | None, convex: bool) -> str | None:
    """Return a sentence naming entries that contradict what a coupling declares.

    The entries of all observed edges are examined, or the entries between the first nodes.
    """
    for term, base in [] if coupling is None else weighted_terms(coupling):
        sparse = isinstance(base, SparseCoupling)
        first = torch.arange(min(term.num_nodes, CHECKED_NODES), device=term.device)
        pairs = torch.cartesian_prod(first, first).T
        if isinstance(base, SparseCoupling):
            pairs = base.graph.edges
        if not pairs.numel():
            continue
        # Multiples are examined as a whole, since a negative weight breaks the promise too.
        forth = term.at(pairs).double()
        back = term.at(pairs.flip(0)).double()
        size = forth.abs() + back.abs()
        rounding = 64 * torch.finfo(term.dtype).eps * size
        if not sparse:
            # Entries computed from a state are only as exact as its squares.
            rounding = torch.finfo(term.dtype).eps ** 0.5 * size.max()
        if not bool(size.isfinite().all()):
            return f"A has entries that are not finite, in {term!r}."
        if bool((forth < -rounding).any()):
            return f"A has the negative entry {float(forth.min()):g}, which {term!r} promises not to have."
        if bool(((forth - back).abs() > rounding).any()):
            return f"A has two entries a_ij and a_ji that differ by {float((forth - back).abs().max()):g}, in {term!r}."
        if not (convex or sparse) and term.positive_semidefinite:
            matrices = forth.view(len(first), len(first), -1).permute(2, 0, 1)
            least = float(torch.linalg.eigvalsh(matrices).min())
            if least < -len(first) * float(rounding):
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
