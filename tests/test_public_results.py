"""Public names that others return, or that stand for a kind: each is what its docstring says."""

from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from diffusion_mp import AdjacencyDiffusivity, Graph, SimpleDiffusivity, certify
from diffusion_mp.couplings import with_constant
from diffusion_mp.diagnostics import Perturbation
from diffusion_mp.diffusivities import (
    FrictionAttention,
    ScaledDiffusivity,
    SumDiffusivity,
)
from diffusion_mp.energies import Certificate
from diffusion_mp.kernels.log_linear_attention import log_linear_pool, log_linear_read
from diffusion_mp.kernels.neumann import Boundary, neumann_product
from diffusion_mp.kernels.pairwise import log_score
from diffusion_mp.kernels.sparse_flow import (
    RowPotentials,
    RowTerms,
    entries,
    log_entries,
    sparse_flow_potentials,
)
from diffusion_mp.testing import TOLERANCES, Tolerance, tolerance
from diffusion_mp.updates import teleport, teleport_limit
from helpers import randn

ENDS = torch.stack([torch.arange(5), torch.arange(5).roll(-1)])
RING = Graph(5, torch.cat([ENDS, ENDS.flip(0)], 1))


def test_teleports_the_algebra_of_diffusivities_and_a_friction_of_its_own():
    x = randn(5, 3, seed=1)
    h = randn(5, 3, seed=2)
    alpha = 0.2
    S = AdjacencyDiffusivity("sym")(x, RING)
    limit = alpha * torch.linalg.solve(
        torch.eye(5, dtype=torch.float64) - (1 - alpha) * S.to_dense()[0], h
    )
    assert_close(teleport_limit(alpha)(x, S, source=h), limit)
    assert_close(teleport(alpha)(x, S, source=h), (1 - alpha) * (S @ x) + alpha * h)
    assert isinstance(
        0.25 * SimpleDiffusivity() + AdjacencyDiffusivity("row"), SumDiffusivity
    )
    assert isinstance(0.25 * SimpleDiffusivity(), ScaledDiffusivity)
    friction = FrictionAttention(3, heads=2, head_channels=4).double()
    query, key = friction(x, RING)
    assert_close(query / friction.scale, friction.query(x).unflatten(1, (2, 4)))
    keys = friction.key(x).unflatten(1, (2, 4))
    assert_close(
        key - key[:1], keys - keys[:1]
    )  # a shift of all of them changes no friction


def test_solved_rows_have_entries_that_exist_in_logarithms_too():
    q, k, fq, fk = (0.5 * randn(6, 1, 3, seed=seed) for seed in range(4))
    lam, leak = torch.full((2, 6, 1), 0.5, dtype=torch.float64)
    solved = sparse_flow_potentials(q, k, fq, fk, lam, leak)
    assert isinstance(solved, RowPotentials)
    s, u = (torch.einsum("ihf,jhf->ijh", *pair) for pair in ((q, k), (fq, fk)))
    terms = RowTerms(*(part.unsqueeze(1) for part in solved[:7]))
    best = terms.best == torch.arange(6).view(1, 6, 1)
    flow = entries(s, u, terms, best)
    assert_close(log_entries(s, u, terms, best).exp(), flow)
    assert (flow >= 0).all()


def test_small_functions_and_halves_of_kernels():
    log_q = randn(6, 1, 4)
    log_k = randn(6, 1, 4, seed=1)
    shift = randn(6, 1, 1, seed=2)
    v = randn(6, 1, 3, seed=3)
    found, _ = log_linear_read(log_q, None, *log_linear_pool(log_k, shift, v))
    weight = torch.einsum("ihf,jhf->hij", log_q.exp(), (log_k + shift).exp())
    assert_close(
        found, torch.einsum("hij,jhd->ihd", weight / weight.sum(2, keepdim=True), v)
    )
    x = randn(4, 2, 3)
    assert_close(log_score(x, "sigmoid"), x.sigmoid().log())
    query = with_constant(x, 2.0)
    key = with_constant(x, 3.0)
    assert_close((query * key).sum(2), (x * x).sum(2) + 6)
    for boundary in get_args(Boundary):
        neumann_product(
            x, torch.full((1, 2), 0.25, dtype=torch.float64), (1,), boundary
        )
    assert isinstance(tolerance("product", torch.float64), Tolerance)
    assert all(
        isinstance(found, Tolerance)
        for row in TOLERANCES.values()
        for found in row.values()
    )


def test_what_certificates_and_measurements_are():
    x = randn(5, 3)
    S = AdjacencyDiffusivity("sym")(x, RING)
    certificate = certify(S, tau=0.5, form="residual")
    assert isinstance(certificate, Certificate)
    assert certificate
    assert certificate.lam == pytest.approx(
        0.5 / (2 - 0.5 * certificate.eigenvalue) / 2
    )
    found = Perturbation(
        truth=1.0, lipschitz=2.0, step=3.0, step_bound=4.0, roughness=5.0, size=2.0
    )
    assert (found.estimate, found.roughness_estimate, found.relative_roughness) == (
        6.0,
        8.0,
        1.25,
    )
    unknown = Perturbation(
        truth=0.0, lipschitz=2.0, step=0.0, step_bound=None, roughness=0.0, size=0.0
    )
    assert unknown.roughness_estimate is None
    assert unknown.relative_roughness == 0
