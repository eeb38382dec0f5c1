"""Public names that others return, or that stand for a kind: each is what its docstring says."""

from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from diffusion_mp import AdjacencyDiffusivity, Graph, certify
from diffusion_mp.couplings import with_constant
from diffusion_mp.diagnostics import Perturbation
from diffusion_mp.diffusivities import FrictionAttention
from diffusion_mp.energies import Certificate
from diffusion_mp.kernels.log_linear_attention import log_linear_pool, log_linear_read
from diffusion_mp.kernels.pairwise import log_score
from diffusion_mp.kernels.sparse_flow import (
    RowTerms,
    entries,
    log_entries,
    sparse_flow_potentials,
)
from diffusion_mp.testing import TOLERANCES, Tolerance
from diffusion_mp.updates import Form, teleport, teleport_limit
from helpers import randn

ENDS = torch.stack([torch.arange(5), torch.arange(5).roll(-1)])
RING = Graph(5, torch.cat([ENDS, ENDS.flip(0)], 1))
X = randn(5, 3, seed=1)
ADJACENCY = AdjacencyDiffusivity("sym")(X, RING)


def test_teleports_are_those_of_personalised_pagerank():
    h = randn(5, 3, seed=2)
    alpha = 0.2
    step = (1 - alpha) * (ADJACENCY @ X) + alpha * h
    assert_close(teleport(alpha)(X, ADJACENCY, source=h), step)
    kept = torch.eye(5, dtype=torch.float64) - (1 - alpha) * ADJACENCY.to_dense()[0]
    limit = alpha * torch.linalg.solve(kept, h)
    assert_close(teleport_limit(alpha)(X, ADJACENCY, source=h), limit)


def test_a_friction_is_an_attention_of_its_own():
    friction = FrictionAttention(3, heads=2, head_channels=4).double()
    query, key = friction(X, RING)
    assert_close(query / friction.scale, friction.query(X).unflatten(1, (2, 4)))
    keys = friction.key(X).unflatten(1, (2, 4))
    # A shift of all keys changes no friction.
    assert_close(key - key[:1], keys - keys[:1])


def test_entries_of_solved_rows_exist_in_logarithms_too():
    q, k, fq, fk = (0.5 * randn(6, 1, 3, seed=seed) for seed in range(4))
    lam, leak = torch.full((2, 6, 1), 0.5, dtype=torch.float64)
    solved = sparse_flow_potentials(q, k, fq, fk, lam, leak)
    s, u = (torch.einsum("ihf,jhf->ijh", *pair) for pair in ((q, k), (fq, fk)))
    terms = RowTerms(*(part.unsqueeze(1) for part in solved[:7]))
    best = terms.best == torch.arange(6).view(1, 6, 1)
    flow = entries(s, u, terms, best)
    assert_close(log_entries(s, u, terms, best).exp(), flow)


def test_rows_that_read_pooled_senders_are_attention():
    log_q = randn(6, 1, 4)
    log_k = randn(6, 1, 4, seed=1)
    shift = randn(6, 1, 1, seed=2)
    v = randn(6, 1, 3, seed=3)
    rows, _ = log_linear_read(log_q, None, *log_linear_pool(log_k, shift, v))
    weight = torch.einsum("ihf,jhf->hij", log_q.exp(), (log_k + shift).exp())
    weight = weight / weight.sum(2, keepdim=True)
    assert_close(rows, torch.einsum("hij,jhd->ihd", weight, v))


def test_the_logarithm_of_a_score_is_that():
    assert_close(log_score(X, "sigmoid"), X.sigmoid().log())


def test_tolerances_are_relative_and_absolute():
    for row in TOLERANCES.values():
        assert all(isinstance(tolerance, Tolerance) for tolerance in row.values())


@pytest.mark.parametrize("form", get_args(Form))
def test_every_form_of_a_laplacian_has_a_certificate(form):
    assert certify(ADJACENCY, tau=0.5, form=form)


def test_a_constant_is_added_to_an_inner_product():
    x = randn(4, 2, 3)
    query = with_constant(x, 2.0)
    key = with_constant(x, 3.0)
    assert_close((query * key).sum(2), (x * x).sum(2) + 6)


def test_a_certificate_is_true_where_the_energy_falls():
    certificate = certify(ADJACENCY, tau=0.5, form="residual")
    assert isinstance(certificate, Certificate)
    assert certificate
    expected = 0.5 / (2 - 0.5 * certificate.eigenvalue) / 2
    assert certificate.lam == pytest.approx(expected)


def test_estimates_of_a_perturbation_are_products():
    found = Perturbation(
        truth=1.0, lipschitz=2.0, step=3.0, step_bound=4.0, roughness=5.0, size=2.0
    )
    assert found.estimate == 6.0
    assert found.roughness_estimate == 8.0
    assert found.relative_roughness == 1.25
    nothing = Perturbation(
        truth=0.0, lipschitz=2.0, step=0.0, step_bound=None, roughness=0.0, size=0.0
    )
    assert nothing.roughness_estimate is None
    assert nothing.relative_roughness == 0
