"""Public names that others return, or that stand for a kind: each is what its docstring says."""

import pytest
import torch
from torch.testing import assert_close

from diffusion_mp import AdjacencyDiffusivity, Graph, certify
from diffusion_mp.couplings import with_constant
from diffusion_mp.diagnostics import Perturbation
from diffusion_mp.diffusivities import FrictionAttention
from diffusion_mp.energies import Certificate
from diffusion_mp.updates import teleport, teleport_limit
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
