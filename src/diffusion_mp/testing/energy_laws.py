"""The laws of terms of an energy: a gradient, and a majorant at adversarial states."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_mp.checks import Count, Seed, check_finite, check_values, checked
from diffusion_mp.energies.counterexamples import (
    SCALES,
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
    """Check that a term is what certified steps need of it (Theorem T11 of docs/certified.md).

    Its half gradient is half of the gradient of its value, as that of a majorant which touches it has to be, and

        value(z′) ≤ value(z) + 2⟨half_gradient, z′ − z⟩ + 2 Σ_i bound_i ‖z′_i − z_i‖²

    at arbitrary states z′, at those where gradient ascent on the difference leads, of all nodes and of single ones, and
    in the direction in which the half gradient changes most. The same is tested at z contracted and spread about the
    mean of each graph, by factors from 10⁻³ to 10³. In double precision. It is a search and no proof. Where the Hessian
    of V is at most L times the identity, L / 4 is a bound. The inequality must hold at all states, also outside of the
    constraint of a block.

    Args:
        term, z, graph: the term, and a state and a graph to check it at; no gradients of theirs are computed.
        starts, ascent, seed: number of adversarial states, steps of ascent to each, and the seed of where they begin.

    Raises:
        AssertionError: a law is broken, in a sentence.

    Examples:
        >>> check_energy_term(SourceTerm(x), x.unsqueeze(1), graph)
    """
    check_values(z, graph.num_nodes, 1, "z")
    check_finite(z, "z")
    z = z.detach().double()
    _check_gradient(term, z, graph)
    moves = _adversarial_moves(term, z, graph, starts, ascent, seed)
    if (flaw := term_flaw(term, z, graph, moves)) is not None:
        raise AssertionError(flaw)
    for scale in SCALES:
        state = rescaled(z, graph, scale)
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
    variable = z.clone().requires_grad_()
    value = term.value(variable, graph)
    # The value need not depend on the state.
    (gradient,) = torch.autograd.grad(value + 0 * variable.sum(), variable)
    # A half gradient p z − … is only as exact as p z, however little is left of it: far
    # apart, nodes attract each other next to nothing.
    rounding = 64 * torch.finfo(z.dtype).eps * (term.bound(z, graph) * z).abs()
    excess = (2 * half - gradient).abs() - 1e-6 * gradient.abs() - rounding
    if not bool((excess <= 1e-8 * gradient.norm(torch.inf)).all()):
        worst = float((2 * half - gradient).abs().max())
        raise AssertionError(
            f"{term!r}: half_gradient is not half of the gradient of value; off by {worst:.3g}."
        )


def _adversarial_moves(
    term: EnergyTerm,
    z: HeadState,
    graph: Graph,
    starts: int,
    ascent: int,
    seed: int,
) -> list[Tensor]:
    """Return moves to which gradient ascent on V(z′) less the majorant leads, of all nodes and of single ones."""
    value = term.value(z, graph).detach()
    half = term.half_gradient(z, graph).detach()
    bound = term.bound(z, graph).detach()
    generator = torch.Generator().manual_seed(seed)
    node = torch.arange(len(z)).view(-1, 1, 1)
    moves = []
    for start in range(starts):
        scale = 10.0 ** (start // 2 % 4 - 2)
        moving = torch.ones_like(node)
        if start % 2:  # one node alone: where all move, others make up for it
            moving = node == torch.randint(max(len(z), 1), (), generator=generator)
        moving = moving.to(z)
        drawn = scale * torch.randn(z.shape, generator=generator, dtype=z.dtype)
        move = (moving * drawn.to(z.device)).requires_grad_()
        optimizer = torch.optim.Adam([move], lr=0.1 * scale)
        for _ in range(ascent):
            away = moving * move
            majorant = value + (2 * half * away + 2 * bound * away.square()).sum()
            slack = majorant - term.value(z + away, graph)
            optimizer.zero_grad()
            # Of the move alone: what a term was computed from is not there a second
            # time, and its parameters keep the gradients that they have.
            (slack / away.square().sum()).backward(inputs=[move])
            optimizer.step()
        moves.append((moving * move).detach())
    return moves
