"""The laws of energy terms: the half gradient is right, and the bound gives a majorant, also at adversarial states."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

from diffusion_mp.checks import Count, Seed, check_finite, check_values, checked
from diffusion_mp.energies.counterexamples import (
    SCALES,
    functions_at,
    numbers_flaw,
    overflows,
    rescaled,
    term_flaw,
)
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.terms import EnergyTerm
from diffusion_mp.graph import Graph


@checked
@torch.inference_mode(False)
@torch.enable_grad()
def check_energy_term(
    term: EnergyTerm,
    z: HeadState,
    graph: Graph,
    *,
    starts: Count = 8,
    ascent: Count = 20,
    seed: Seed = 0,
) -> None:
    """Check that certified steps may use an energy term (Theorem T11 of docs/certified.md).

    Let V be the value, g the half gradient and p the bound of the term at z. Certified steps need that g is half of the
    gradient of V, and that

        V(z′) ≤ V(z) + 2⟨g, z′ − z⟩ + 2 Σ_i p_i ‖z′_i − z_i‖²

    holds at all states z′, also at states outside of the constraint of a block. If the Hessian of V is at most L times
    the identity, L / 4 is a bound. Training differentiates the steps, so g must carry gradients to z.

    The states z′ that are tried are random ones, the states to which gradient ascent on the difference leads (of all
    nodes and of single nodes), and states in the direction in which the half gradient changes most. The same is tested
    with z contracted and spread about the mean of each graph, by factors from 10⁻³ to 10³, in double precision. The
    check is a search for a counterexample and proves nothing.

    A term that declares ``depends_on = "rows"`` must be the sum of its terms of some rows each, ``term.block(rows)``.

    Args:
        term: the term. Its parameters keep the gradients that they have.
        z: a state [N, H, D] to check the term at.
        graph: the graph of the N nodes.
        starts: number of adversarial states. The default 8 covers four scales, for all nodes and for a single node.
        ascent: number of steps of gradient ascent that lead to each adversarial state.
        seed: seed of the states at which the ascent begins; with the default 0 every run searches alike.

    Raises:
        AssertionError: the half gradient or the bound is wrong, or a declaration. The message is a sentence.

    Examples:
        >>> check_energy_term(SourceTerm(x), x.unsqueeze(1), graph)
    """
    check_values(z, graph.num_nodes, 1, "z")
    check_finite(z, "z")
    # In double precision a wrong bound shows long before rounding does.
    z = z.detach().double()
    _check_gradient(term, z, graph)
    _check_derivative(term, z, graph)
    if term.depends_on == "rows":
        _check_rows(term, z, graph)
    moves = _adversarial_moves(term, z, graph, starts, ascent, seed)
    if (flaw := term_flaw(term, z, graph, moves)) is not None:
        raise AssertionError(flaw)
    for scale in SCALES:
        state = rescaled(z, graph, scale)
        # A value beyond the range of the dtype says nothing about the bound.
        if overflows(state, term.value(state, graph)):
            continue
        _check_gradient(term, state, graph)
        if (flaw := term_flaw(term, state, graph)) is not None:
            raise AssertionError(
                f"at the state scaled by {scale:g} about the mean of each graph: {flaw}"
            )


def _check_gradient(term: EnergyTerm, z: HeadState, graph: Graph) -> None:
    """Raise unless the half gradient at z is half of the gradient of the value."""
    if (flaw := numbers_flaw(term, z, graph)) is not None:
        raise AssertionError(flaw)
    half = term.half_gradient(z, graph).detach()
    bound = term.bound(z, graph)
    variable = z.clone().requires_grad_()
    value = term.value(variable, graph)
    # The value need not depend on the state.
    (gradient,) = torch.autograd.grad(value + 0 * variable.sum(), variable)
    # A half gradient p z − … is only as exact as p z, however little is left of it: far
    # apart, nodes attract each other next to nothing.
    rounding = 64 * torch.finfo(z.dtype).eps * (bound * z).abs()
    error = (2 * half - gradient).abs()
    excess = error - 1e-6 * gradient.abs() - rounding
    largest = gradient.norm(torch.inf)
    if not bool((excess <= 1e-8 * largest).all()):
        raise AssertionError(
            f"{term!r}: half_gradient is not half of the gradient of value; off by {float(error.max()):.3g}."
        )


def _check_derivative(term: EnergyTerm, z: HeadState, graph: Graph) -> None:
    """Raise unless autograd differentiates the half gradient as finite differences do, in a random direction."""
    # In proportion to the state, or the difference would lose its digits.
    step = 1e-6 * (1 + float(z.norm(torch.inf)))
    half_gradient = partial(term.half_gradient, graph=graph)
    variable = z.clone().requires_grad_()
    try:
        # A lost gradient shows in nearly every direction, so one is enough.
        gradcheck(
            half_gradient, variable, eps=step, atol=1e-4, rtol=1e-4, fast_mode=True
        )
    except GradcheckError as error:
        raise AssertionError(
            f"{term!r}: half_gradient loses gradients, so a block with this term would train wrongly. Look for "
            f"detach() and for functions without a gradient. {error}"
        ) from None


def _check_rows(term: EnergyTerm, z: HeadState, graph: Graph) -> None:
    """Raise unless the term is a sum over rows: of the first third of the rows, and of the others."""
    # Parts of different size, so that rows cut at the wrong offset show.
    cut = len(z) // 3
    whole = functions_at(term, z, graph)
    # A bound may be one number for all nodes.
    whole["bound"] = whole["bound"].expand(len(z), -1, -1)
    total = torch.zeros_like(whole["value"])
    compared = []
    for rows in (slice(0, cut), slice(cut, len(z))):
        part = functions_at(term.block(rows), z[rows], Graph(len(z[rows])))
        total = total + part["value"]
        for name in ("half_gradient", "bound"):
            compared.append((name, part[name], whole[name][rows]))
    compared.append(("value", total, whole["value"]))
    for name, found, expected in compared:
        if not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
            raise AssertionError(
                f'{term!r} declares depends_on = "rows", but the {name} of term.block(rows) is not its {name} at '
                f"these rows. Declare another dependence, or cut in block() what the term holds for every row."
            )


def _adversarial_moves(
    term: EnergyTerm,
    z: HeadState,
    graph: Graph,
    starts: int,
    ascent: int,
    seed: int,
) -> list[Tensor]:
    """Return the moves to which gradient ascent on V(z′) less the majorant leads, of all nodes and of single nodes."""
    with torch.no_grad():
        half, bound, value = functions_at(term, z, graph).values()
    generator = torch.Generator().manual_seed(seed)
    node = torch.arange(len(z)).view(-1, 1, 1)
    moves = []
    for start in range(starts):
        # Each scale twice, for all nodes and for one.
        scale = 10.0 ** (start // 2 % 4 - 2)
        moving = torch.ones_like(node)
        if start % 2:  # one node alone: where all move, others make up for it
            moving = node == torch.randint(max(len(z), 1), (), generator=generator)
        moving = moving.to(z)
        drawn = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        move = scale * moving * drawn.to(z.device)
        move.requires_grad_()
        # Steps in proportion to the move, so that small moves are searched as finely as large ones.
        optimizer = torch.optim.Adam([move], lr=0.1 * scale)
        for _ in range(ascent):
            away = moving * move
            rise = 2 * half * away + 2 * bound * away.square()
            slack = value + rise.sum() - term.value(z + away, graph)
            optimizer.zero_grad()
            # Of the move alone: what a term was computed from is not there a second
            # time, and its parameters keep the gradients that they have.
            (slack / away.square().sum()).backward(inputs=[move])
            optimizer.step()
        moves.append((moving * move).detach())
    return moves
