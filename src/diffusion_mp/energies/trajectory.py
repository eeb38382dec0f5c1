"""``certify_trajectory``: one λ for all steps of a run, from its first state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.function import find_flaw
from diffusion_mp.energies.pairs import State, blocks, find_distance_above
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.errors import check_kind, check_positive, describe

THEOREM = "Theorem T2"


@torch.no_grad()
def certify_trajectory(penalty: Penalty, x: State, tau: float, *, ptr: Tensor | None = None) -> Certificate:
    """Certify all steps z ← z − τ(z − D̄⁻¹Ωz) from ``x``, Ω made anew at every state (Theorem T2 of docs/certified.md).

    For τ ≤ 1 states stay within the convex hull of the first, of diameter D, so all degrees of a graph of n nodes are
    at least d = f(0) + (n − 1) f(D²), and l_max ≤ 2(1 − 1/n). Hence E(Z_{k+1}, k) ≤ E(Z_k, k − 1) at every k for every
    λ ≥ τ / (2d(2 − τ l_max)), the certificate's. O(N d): D is at most twice the distance of a node to the mean.

    Args:
        penalty: δ, with f = δ′.
        x: the first state, [N, C] or [N, H, D]; with H heads the certificate is that of the worst.
        tau: τ > 0; not covered above 1.
        ptr: bounds [B + 1] of the graphs of a ragged batch.

    Raises:
        TypeError, ValueError: no penalty, τ ≤ 0 or not finite, shapes that do not fit.

    Examples:
        >>> bool(certify_trajectory(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.1))
        True
    """
    check_kind(penalty, "penalty", Penalty, "a Penalty")
    check_positive(tau, "tau")
    parts = blocks(x, ptr)
    if x.is_meta:
        raise ValueError(f"x must have values, on which the certificate depends; got {describe(x)}.")
    flaw = find_flaw(penalty)
    if flaw is not None:
        return Certificate.refused(THEOREM, tau, f"{penalty!r} is no penalty on {penalty.domain}: {flaw}")
    if tau > 1:
        reason = "above τ = 1 a step may leave the convex hull of the state, and no later degree is known."
        return replace(Certificate.refused(THEOREM, tau, reason), tau_max=1.0)
    degree, stiffness, limit = float("inf"), 0.0, penalty.reach(x.dtype)
    for part in parts:
        wide = part.double()
        across = 4 * (wide - wide.mean(0)).square().sum(1).max()
        if not across <= limit:  # the bound of D leaves the domain; D itself may not
            beyond = find_distance_above(limit, part)
            if beyond is not None:
                reason = f"a pair is at squared distance {beyond:.6g}, beyond the domain of {penalty!r}."
                return Certificate.refused(THEOREM, tau, reason)
            across = across.new_tensor(penalty.domain[1])
        nearest, farthest = penalty.f(torch.stack([across.new_zeros(()), across])).tolist()
        degree = min(degree, nearest + (len(part) - 1) * max(farthest, 0.0))
        stiffness = max(stiffness, 2 * (1 - 1 / len(part)))
    facts = f"d >= {degree:.6g} and l_max <= {stiffness:.6g} at every state of the run"
    found = Certificate.of_step(THEOREM, tau, stiffness, 0.0, facts, weight=degree)
    return replace(found, tau_max=1.0)
