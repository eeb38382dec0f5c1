"""SFi-attention against its definition, and the edge form against the all-pair form."""

import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from diffusion_mp.diffusivities import EdgeSparseFlowDiffusivity, SparseFlowDiffusivity
from diffusion_mp.graph import Graph
from flow_rows import solve_rows
from helpers import agree, built, close, randn, refuses


def build(cls=SparseFlowDiffusivity, **options):
    return built(lambda: cls(6, **options)).double()


def scores(query, key, x, heads):
    q, k = (
        (x @ projection.weight.T).unflatten(1, (heads, -1))
        for projection in (query, key)
    )
    return torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.size(2))


@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_definition_in_values_and_gradients(alpha):
    """Row i is the sink (S4): r = softmax_j(−q_i·k_j/√d), f = softmax_j(q̃_i·k̃_j/√d), λ = λ*/n."""
    module = build(heads=2, head_channels=4, lam=2.0, alpha=alpha)
    x = randn(9, 6).requires_grad_()
    s = scores(module.query, module.key, x, 2)
    u = scores(module.friction.query, module.friction.key, x, 2)
    expected, mu = solve_rows(-(-s).softmax(2).log(), 2.0 / 9 * u.softmax(2), alpha)
    coupling = module(x)
    leaves = [x, *module.parameters()]
    close(coupling.to_dense(), expected)
    close(coupling.potentials, mu.t())
    assert coupling.row_stochastic == module.row_stochastic == (alpha == math.inf)
    sums = coupling.degree()
    if alpha == math.inf:
        close(sums, torch.ones_like(sums))
    else:
        assert (sums < 1).all()
    assert len(leaves) == 5
    v = randn(9, 6, seed=1).unflatten(1, (2, 3))
    product = torch.einsum("hij,jhd->ihd", expected, v)
    agree(coupling @ v, product, leaves, (1e-10, 1e-10), (1e-8, 1e-9))


def test_unit_queries_and_keys_are_those_of_the_state_itself():
    """Keys are shifted where that changes no score; a shifted key would be another unit vector."""
    module = build(heads=2, head_channels=4, lam=0.0, normalize="row")
    x = 3 + randn(9, 6)
    q, k = (
        normalize((x @ projection.weight.T).unflatten(1, (2, 4)), dim=2)
        for projection in (module.query, module.key)
    )
    expected = torch.einsum("ihd,jhd->hij", q, k) / 2
    close(module(x).to_dense(), expected.softmax(2))


def test_without_friction_it_is_softmax_and_more_friction_is_sparser():
    module = build(lam=0.0)
    x = randn(9, 6)
    close(module(x).to_dense(), scores(module.query, module.key, x, 1).softmax(2))
    assert [name for name, _ in module.named_parameters()] == [
        "query.weight",
        "key.weight",
    ]
    assert module.row_stochastic
    nearly = build(lam=1e-12, alpha=math.inf)
    nearly.load_state_dict(module.state_dict(), strict=False)
    assert_close(nearly(x).to_dense(), module(x).to_dense(), rtol=0, atol=1e-9)
    densities = [
        float(build(lam=lam)(randn(40, 6)).density()) for lam in (0.1, 1.0, 10.0)
    ]
    assert densities[0] > densities[1] > densities[2] > 0


def test_the_published_scale_depends_on_batch_mates_and_the_default_does_not():
    small = randn(4, 6)
    large = randn(20, 6, seed=1)
    x = torch.cat([small, large])
    batch = torch.tensor([0] * 4 + [1] * 20)
    together = Graph(24, batch=batch)
    for scale, same in (("own", True), ("batch_max", False)):
        module = build(lam_scale=scale)
        alone = module(small).to_dense()
        batched = module(x, together).to_dense()[:, :4, :4]
        assert torch.allclose(alone, batched, rtol=1e-10, atol=1e-10) == same
        close(module(large).to_dense(), module(x, together).to_dense()[:, 4:, 4:])


class Distance(torch.nn.Module):
    """Friction grows with the distance: −½‖x_i − x_j‖² with its sign turned."""

    def forward(self, x, graph):
        half = 0.5 * x.square().sum(1, keepdim=True)
        one = torch.ones(len(x), 1).to(x)
        return torch.cat([-x, half, one], 1).unsqueeze(1), torch.cat(
            [x, one, half], 1
        ).unsqueeze(1)


def test_frictions_are_pluggable():
    x = randn(9, 6)
    module = build(friction=Distance(), alpha=math.inf)
    s = scores(module.query, module.key, x, 1)
    u = 0.5 * torch.cdist(x, x).square()[None]
    close(
        module(x).to_dense(),
        solve_rows(-(-s).softmax(2).log(), u.softmax(2) / 9, math.inf)[0],
    )
    constant = build(friction="constant", alpha=0.1)
    s = scores(constant.query, constant.key, x, 1)
    close(
        constant(x).to_dense(),
        solve_rows(-(-s).softmax(2).log(), torch.full_like(s, 1 / 81), 0.1)[0],
    )


@pytest.mark.parametrize("friction", ["attention", "constant"])
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("hops", [1, 2])
def test_on_the_complete_graph_the_edge_form_is_the_all_pair_form(
    friction, alpha, hops
):
    x = randn(9, 6)
    nodes = torch.arange(9)
    options = {
        "heads": 2,
        "head_channels": 3,
        "friction": friction,
        "alpha": alpha,
        "lam": 1.5,
    }
    everywhere = build(**options)
    on_edges = build(EdgeSparseFlowDiffusivity, hops=hops, **options)
    complete = Graph(9, torch.cartesian_prod(nodes, nodes).T)
    close(on_edges(x, complete).to_dense(), everywhere(x).to_dense())


def test_the_edge_form_stays_on_its_edges_and_costs_what_they_cost():
    x = randn(30, 6)
    path = torch.stack([torch.arange(29), torch.arange(1, 30)])
    module = build(EdgeSparseFlowDiffusivity, self_loops="keep", alpha=math.inf)
    dense = module(x, Graph(30, path)).to_dense()[0]
    # One sender each; node 0 has none.
    close(dense, torch.diag(torch.ones(29, dtype=torch.float64), -1))
    far = build(EdgeSparseFlowDiffusivity, hops=3)(x, Graph(30, path))
    i = far.graph.edges[1]
    j = far.graph.edges[0]
    assert bool(((i - j >= 0) & (i - j <= 3)).all())
    assert far.graph.num_edges == 30 + 29 + 28 + 27


test_mistakes_are_answered_in_sentences = refuses(
    (
        lambda: build(friction=Distance(), heads=2)(randn(9, 6)),
        r"friction must return two tensors \[num_nodes, heads,",
    ),
    (lambda: build(EdgeSparseFlowDiffusivity)(randn(9, 6)), "works on observed edges"),
    error=ValueError,
)
