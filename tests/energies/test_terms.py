"""Theorem T11: terms of an energy bound themselves, and a step down their sum never raises it, for any parameters."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from cases import (
    CHANNELS,
    HEADS,
    NODES,
    RELATIONS,
    TERMS,
    attention_term,
    matrix_term,
    mlp_term,
    random,
    symmetric_weights,
    term_graph,
)
from diffusion_mp import Graph
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import Energy, certify, certify_step
from diffusion_mp.energies.certification import layer_certificates
from diffusion_mp.energies.counterexamples import term_flaw
from diffusion_mp.energies.matrix_terms import (
    AttentionTerm,
    MatrixTerm,
    norm_bounds,
)
from diffusion_mp.energies.penalties import get_penalty
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EnergyTerm,
    Mean,
    PairTerm,
    ScaledTerm,
    SourceTerm,
)
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    RowAttention,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.testing import check_energy_term
from energy_forms import Joint
from helpers import agree, largest_rise, refuses

pytestmark = pytest.mark.usefixtures("fixed_seed")
DOUBLE = torch.float64
CONVEX = (None, "nonnegative", "ball", "nonnegative_ball")
CONSTRAINTS = (*CONVEX, "sphere")


def pairs_of_nodes() -> Graph:
    """Every node has one neighbour, so that bounds are attained."""
    ends = torch.arange(8)
    return Graph(NODES, torch.stack([ends, ends ^ 1]))


class Bounded(EnergyTerm):
    """A term with another bound."""

    def __init__(self, term: EnergyTerm, factor: float) -> None:
        self.term = term
        self.factor = factor
        self.quadratic = term.quadratic

    def weighted_mean(self, z: Tensor) -> Mean | None:
        return self.term.weighted_mean(z) if self.factor == 1 else None

    def value(self, z: Tensor, graph: Graph) -> Tensor:
        return self.term.value(z, graph)

    def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
        return self.term.half_gradient(z, graph)

    def bound(self, z: Tensor, graph: Graph) -> Tensor:
        return self.factor * self.term.bound(z, graph)


@pytest.mark.parametrize("name", TERMS)
def test_a_weighted_mean_is_the_half_gradient(name: str) -> None:
    graph = term_graph()
    z = random(NODES, 1, CHANNELS)
    term = TERMS[name](graph)
    if (mean := term.weighted_mean(z)) is None:
        return
    half, damping, *_ = term.majorant(z, graph, True)
    moved = mean.damping * z - (0 if mean.pull is None else mean.scale * mean.pull(z))
    torch.testing.assert_close(
        moved if mean.constant is None else moved - mean.constant, half
    )
    torch.testing.assert_close(mean.damping.expand_as(damping), damping)
    if term.quadratic and mean.pull is not None:
        torch.testing.assert_close((moved * z).sum(), term.value(z, graph))


@pytest.mark.parametrize(
    "name", ["source", "graph", "one symmetric matrix", "attention to neighbours"]
)
def test_a_smaller_bound_is_found_out(name: str) -> None:
    graph = pairs_of_nodes()
    z = random(NODES, 1, CHANNELS)
    eye = torch.eye(CHANNELS, dtype=DOUBLE)[None]
    sharp = {
        "one symmetric matrix": MatrixTerm(SparseCoupling(graph), -eye, symmetric=True),
        "attention to neighbours": AttentionTerm(eye, eye, prior=SparseCoupling(graph)),
    }
    term = sharp.get(name) or TERMS[name](graph)
    check_energy_term(term, z, graph)
    with pytest.raises(AssertionError, match="exceeds its majorant"):
        check_energy_term(Bounded(term, 0.4), z, graph)


def test_a_wrong_gradient_is_found_out() -> None:
    class Wrong(Bounded):
        def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
            return 1.01 * self.term.half_gradient(z, graph)

    with pytest.raises(AssertionError, match="half of the gradient"):
        check_energy_term(
            Wrong(mlp_term("tanh"), 1.0), random(NODES, 1, CHANNELS), term_graph()
        )


def test_a_half_gradient_without_a_gradient_is_found_out() -> None:
    class Detached(Bounded):
        def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
            return self.term.half_gradient(z, graph).detach() + 0 * z

    with pytest.raises(AssertionError, match="loses gradients"):
        check_energy_term(
            Detached(mlp_term("tanh"), 1.0), random(NODES, 1, CHANNELS), term_graph()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pairs_with_a_projection_have_a_majorant_in_half_precision(dtype) -> None:
    eye = torch.eye(CHANNELS, dtype=DOUBLE)[None]
    term = PairTerm(get_penalty("gaussian"), 0.5 * eye)
    z = random(NODES, 1, CHANNELS)
    half, bound = term.majorant(z, term_graph(), True)
    narrow, narrow_bound = term.majorant(z.to(dtype), term_graph(), True)
    torch.testing.assert_close(narrow.double(), half, rtol=0.05, atol=0.05)
    torch.testing.assert_close(narrow_bound.double(), bound, rtol=0.05, atol=0.05)


class Well(EnergyTerm):
    """Σ_i r⁴ / (1 + r²), r = ‖z_i‖, whose Hessian is at most 5/2, so that 5/8 is a bound."""

    def __init__(self, p: float) -> None:
        self.p = p

    def value(self, z: Tensor, graph: Graph) -> Tensor:
        squares = z.double().square().sum(2)
        return (squares**2 / (1 + squares)).sum()

    def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
        return z * (1 - (1 + z.square().sum(2, keepdim=True)) ** -2)

    def bound(self, z: Tensor, graph: Graph) -> Tensor:
        return torch.full_like(z[:, :, :1], self.p)


def test_a_bound_that_fails_for_single_nodes_alone_is_found() -> None:
    z = torch.nn.functional.normalize(random(60, 1, 8), dim=2)
    check_energy_term(Well(5 / 8), z, Graph(60))
    with pytest.raises(AssertionError, match="its bound is too small"):
        check_energy_term(Well(0.6), z, Graph(60))


def test_the_terms_equal_dense_formulas() -> None:
    graph = term_graph()
    z = random(NODES, 1, CHANNELS)
    flat = z.squeeze(1)
    term = matrix_term(graph, hops=2)
    dense = term.forward.to_dense()
    walks = dense @ dense
    along = torch.einsum("ic,rij,rcd,jd->", flat, walks, term.matrix, flat)
    norms = torch.linalg.matrix_norm(term.matrix, 2)
    sizes = SparseCoupling(graph, term.forward.weight.abs()).to_dense()
    reach = sizes @ sizes
    k = ((reach.sum(2) + reach.sum(1)) / 2 * norms[:, None]).sum(0)
    exact = MatrixTerm(term.forward, term.matrix, norms, hops=2)
    assert torch.allclose(
        exact.value(z, graph), (k * flat.square().sum(1)).sum() - along
    )
    weights = attention_term(graph)
    q, k = (torch.einsum("hdc,nc->hnd", w, flat) for w in (weights.query, weights.key))
    scores = -0.35 * torch.cdist(q, k).square()
    value = -2 / 0.7 * (scores.logsumexp(2) - math.log(NODES)).sum()
    assert torch.allclose(weights.value(z, graph), value)
    omega = scores.softmax(2)
    half = torch.einsum("hdc,hnd->nc", weights.query, q - omega @ k)
    half = half + torch.einsum(
        "hdc,hnd->nc", weights.key, omega.sum(1).unsqueeze(2) * k - omega.mT @ q
    )
    assert torch.allclose(weights.half_gradient(z, graph).squeeze(1), half)


@pytest.mark.parametrize("directed", [False, True], ids=["symmetric", "directed"])
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("relations", [1, RELATIONS])
def test_diagonals_equal_diagonal_matrices(
    relations: int, hops: int, directed: bool
) -> None:
    graph = term_graph()
    weight = random(24, relations)
    if not directed:
        graph = Graph(NODES, torch.cat([graph.edges, graph.edges.flip(0)], 1))
        weight = weight.repeat(2, 1)
    given = [random(NODES, 1, CHANNELS), random(relations, CHANNELS), weight]
    pull = random(NODES, 1, CHANNELS)
    found = []
    for form in (torch.clone, torch.diag_embed):
        z, diagonals, weight = leaves = [
            tensor.clone().requires_grad_() for tensor in given
        ]
        coupling = SparseCoupling(graph, weight, symmetric=not directed)
        term = MatrixTerm(
            coupling,
            form(diagonals),
            norm_bounds(diagonals),
            hops=hops,
            symmetric=not directed,
        )
        results = (
            term.value(z, graph),
            term.half_gradient(z, graph),
            term.bound(z, graph),
        )
        total = results[0] + (pull * results[1]).sum() + results[2].square().sum()
        found.append([*results, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["full", "diagonal", "identity"])
def test_a_directed_graph_takes_one_product_with_its_symmetric_part(form: str) -> None:
    # Parallel edges, an edge both ways, and a loop.
    source = torch.tensor([0, 0, 1, 2, 3, 3, 4, 6])
    target = torch.tensor([1, 1, 0, 4, 3, 5, 6, 2])
    weight = torch.rand(8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    graph = Graph(NODES, torch.stack([source, target]), weight)
    shape = (1, CHANNELS, CHANNELS) if form == "full" else (1, CHANNELS)
    drawn = random(*shape)
    z, pull = random(2, NODES, 1, CHANNELS)
    found = []
    # Weights that are not the graph's own take two products, as matrices without the promise do.
    for coupling in (SparseCoupling(graph), SparseCoupling(graph, weight.clone())):
        state, leaf = leaves = [x.clone().requires_grad_() for x in (z, drawn)]
        matrix = leaf if form == "diagonal" else (leaf + leaf.mT) / 2
        if form == "identity":
            matrix = None
            leaves.pop()
        term = MatrixTerm(coupling, matrix, symmetric=True)
        half = term.half_gradient(state, graph)
        results = (term.value(state, graph), half, term.bound(state, graph))
        total = results[0] + (pull * half).sum() + results[2].square().sum()
        found.append([*results, *torch.autograd.grad(total, leaves)])
        assert (term.backward is None) == coupling.own
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    term = MatrixTerm(SparseCoupling(graph), None)
    dense = SparseCoupling(graph).to_dense()
    torch.testing.assert_close(term.forward.to_dense(), (dense + dense.mT) / 2)
    # Kept by the graph until a weight changes.
    assert MatrixTerm(SparseCoupling(graph), None).forward.graph is term.forward.graph
    weight[0] += 1
    changed = MatrixTerm(SparseCoupling(graph), None)
    dense = SparseCoupling(graph).to_dense()
    torch.testing.assert_close(changed.forward.to_dense(), (dense + dense.mT) / 2)
    assert not torch.equal(changed.degree, term.degree)


def test_learned_weights_of_a_graph_get_gradients_through_the_symmetric_part() -> None:
    weight = torch.rand(24, dtype=DOUBLE).requires_grad_()
    graph = term_graph()
    z = random(NODES, 1, CHANNELS)
    term = MatrixTerm(SparseCoupling(Graph(NODES, graph.edges, weight)), None)
    assert term.backward is None
    (grad,) = torch.autograd.grad(term.value(z, graph), [weight])
    plain = MatrixTerm(SparseCoupling(Graph(NODES, graph.edges), weight), None)
    torch.testing.assert_close(
        grad, torch.autograd.grad(plain.value(z, graph), [weight])[0]
    )


def test_without_matrices_the_identity_is_meant() -> None:
    graph = term_graph()
    z = random(NODES, 1, CHANNELS)
    coupling = SparseCoupling(graph, random(24, RELATIONS))
    ones = torch.ones(RELATIONS, CHANNELS, dtype=DOUBLE)
    for hops, norms in ((1, None), (2, torch.rand(RELATIONS, dtype=DOUBLE) + 1)):
        got, expected = (
            MatrixTerm(coupling, matrix, norms, hops=hops) for matrix in (None, ones)
        )
        for name in ("value", "half_gradient", "bound"):
            torch.testing.assert_close(
                getattr(got, name)(z, graph),
                getattr(expected, name)(z, graph),
                msg=name,
            )
    with pytest.raises(ValueError, match="reads states of one head"):
        got.value(z.expand(-1, 2, -1), graph)


def test_the_identity_between_neighbours_is_the_term_of_the_graph() -> None:
    ends = term_graph().edges
    z = random(NODES, 1, CHANNELS)
    graph = Graph(NODES, torch.cat([ends, ends.flip(0)], 1))
    part = WeightedGraph(CHANNELS, 0.3, matrix="identity").double()
    got = part(z.squeeze(1), graph)
    expected = 0.3 * CouplingTerm(part.adjacency(z.squeeze(1), graph))
    torch.testing.assert_close(got.value(z, graph), expected.value(z, graph))
    torch.testing.assert_close(
        got.half_gradient(z, graph), expected.half_gradient(z, graph)
    )


@pytest.mark.parametrize(
    "learned", [False, True], ids=["fixed weights", "learned weights"]
)
@pytest.mark.parametrize("dims", [2, 1], ids=["matrices", "diagonals"])
@pytest.mark.parametrize("edges", [0, 1, 31])
def test_multiplying_only_by_matrices_of_own_relations_changes_nothing(
    edges: int, dims: int, learned: bool
) -> None:
    ends = torch.randint(NODES - 2, (2, edges))  # the last nodes are isolated
    graph = Graph(NODES, torch.cat([ends, ends[:, :5]], 1))  # multi-edges
    weight = random(graph.num_edges, RELATIONS) * torch.randint(
        2, (graph.num_edges, RELATIONS)
    )
    weight[:, 1] = 0  # a relation without edges
    given = [random(NODES, CHANNELS), random(RELATIONS, *[CHANNELS] * dims), weight]
    pull = random(NODES, CHANNELS)
    found = []
    for path in (SparseCoupling, Coupling):
        v, matrix, weight = (tensor.clone().requires_grad_() for tensor in given)
        out = path.transformed(
            SparseCoupling(graph, weight if learned else given[2]), v, matrix
        )
        leaves = [v, matrix, weight][: 3 if learned else 2]
        found.append([out, *torch.autograd.grad((pull * out).sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_blocks_share_the_couplings_of_relations_until_edge_attr_changes() -> None:
    graph = term_graph()
    source = random(NODES, CHANNELS)
    edge_attr = random(24, RELATIONS)
    parts = [WeightedGraph(CHANNELS, edge_dim=RELATIONS).double() for _ in range(2)]
    first, second = (part(source, graph, edge_attr).term.forward for part in parts)
    assert first is second
    for write in (
        lambda: edge_attr.mul_(2),
        lambda: edge_attr.numpy().__imul__(3),
        lambda: edge_attr.data.__setitem__(0, 7.0),
    ):
        write()
        term, fresh = (
            parts[0](source, graph, given).term
            for given in (edge_attr, edge_attr.clone())
        )
        assert torch.equal(term.forward.weight, fresh.forward.weight)
        assert not torch.equal(term.forward.weight, first.weight)
        first = term.forward


def test_the_batch_of_graphs_has_the_sum_of_their_values() -> None:
    sizes = (4, 0, 5)
    query = random(HEADS, 4, CHANNELS)
    key = random(HEADS, 4, CHANNELS)
    z = random(NODES, 1, CHANNELS)
    term = AttentionTerm(query, key, 0.7)
    batch = Graph(NODES, ptr=torch.tensor([0, *sizes]).cumsum(0))
    parts = z.split(sizes)
    one_by_one = sum(term.value(part, Graph(len(part))) for part in parts)
    assert torch.allclose(term.value(z, batch), torch.as_tensor(one_by_one))
    halves = torch.cat([term.half_gradient(part, Graph(len(part))) for part in parts])
    assert torch.allclose(term.half_gradient(z, batch), halves)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_norms_are_bounded_from_above_and_closely(scale: float) -> None:
    for shape in [(4, 30, 30), (2, 3, 11), (2, 11, 3), (1, 1, 1)]:
        for dtype in (torch.float32, DOUBLE):
            w = scale * torch.randn(shape, dtype=dtype)
            exact = torch.linalg.matrix_norm(w.double(), 2)
            bound = norm_bounds(w).double()
            assert bool(((bound >= exact) & (bound <= 1.03 * exact)).all())
    nothing = torch.zeros(2, 3, 3, requires_grad=True)
    assert norm_bounds(nothing).tolist() == [0, 0]
    assert not torch.autograd.grad(norm_bounds(nothing).sum(), nothing)[0].any()


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 5), (2, 5, 3), (1, 1, 1)])
def test_bounds_on_norms_have_their_gradients(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(norm_bounds, w)
    assert torch.autograd.gradgradcheck(norm_bounds, w)
    small = (1e-30 * w.detach().float()).requires_grad_()
    # The same at every scale.
    slopes = [
        torch.autograd.grad(norm_bounds(x).sum(), x)[0].double() for x in (w, small)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


def blocks(
    constraint: str | None, dtype: torch.dtype
) -> list[tuple[str, CertifiedBlock]]:
    """A block for every combination of terms, with parameters over many orders of magnitude."""
    found = []
    for with_graph in (None, "sum", "directed", "relations"):
        for with_attention in (None, "all", "neighbours"):
            for activation in (None, "relu", "tanh"):
                terms: list[torch.nn.Module] = []
                if with_graph is not None:
                    if with_graph == "relations":
                        options = {"edge_dim": RELATIONS, "gate": True}
                    else:
                        options = {}
                    terms.append(
                        WeightedGraph(
                            CHANNELS, symmetric=with_graph != "directed", **options
                        )
                    )
                if with_attention is not None:
                    terms.append(
                        RowAttention(
                            CHANNELS, 1, neighbours=with_attention == "neighbours"
                        )
                    )
                if activation is not None:
                    terms.append(TiedMLP(CHANNELS, 7, activation=activation))
                block = CertifiedBlock(
                    CHANNELS, terms, 3, constraint=constraint, radius=1.5
                ).to(dtype)
                with torch.no_grad():
                    for parameter in block.parameters():
                        parameter.mul_(10 ** float(torch.empty(()).uniform_(-1, 1)))
                        parameter.add_(
                            float(torch.empty(()).uniform_(-3, 3))
                            if parameter.dim() == 0
                            else 0
                        )
                found.append((f"{with_graph}, {with_attention}, {activation}", block))
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(DOUBLE, 1e-12), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_no_combination_of_terms_raises_its_energy(
    constraint: str | None, dtype: torch.dtype, tolerance: float
):
    graph = term_graph()
    for name, block in blocks(constraint, dtype):
        edge_attr = (
            torch.randn(graph.num_edges, RELATIONS, dtype=dtype)
            if block.reads
            else None
        )
        for scale in (0.1, 1.0, 30.0):
            source = scale * torch.randn(NODES, CHANNELS, dtype=dtype)
            block.requires_grad_(False)
            states = [*block.states(source, graph, edge_attr=edge_attr)]
            rise = largest_rise(
                block.energy(source, graph, edge_attr=edge_attr), states
            )
            assert rise <= tolerance, (name, scale, rise)


def test_a_certificate_needs_terms_that_bound_themselves() -> None:
    graph = pairs_of_nodes()
    z = random(NODES, 1, CHANNELS)
    term = MatrixTerm(
        SparseCoupling(graph), -torch.eye(CHANNELS, dtype=DOUBLE)[None], symmetric=True
    )
    good = certify_step(Joint(source=z, terms=[term], graph=graph), z)
    assert good.holds
    assert good.theorem == "Theorem T11"
    assert "MatrixTerm" in good.energy
    refused = certify_step(Joint(source=z, terms=[Bounded(term, 0.4)], graph=graph), z)
    assert not refused
    assert "exceeds its majorant" in refused.reason
    term.matrix.fill_(math.nan)
    assert "not finite" in str(term_flaw(term, z, graph))


def test_a_certificate_looks_far_away() -> None:
    """Two hundred away this term begins to rise, and its bound says that it never does."""

    class Far(EnergyTerm):
        def value(self, z: Tensor, graph: Graph) -> Tensor:
            return (z.norm() - 200).relu()

        def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
            return torch.zeros_like(z)

        def bound(self, z: Tensor, graph: Graph) -> Tensor:
            return z.new_zeros(1, 1, 1)

    assert "exceeds its majorant" in str(
        term_flaw(Far(), torch.zeros(NODES, 1, CHANNELS), pairs_of_nodes())
    )


@pytest.mark.parametrize("attention", [False, True])
def test_autocast_leaves_a_block_in_single_precision(attention: bool) -> None:
    """In half precision a bound on norms may be too small, and a step may go up."""
    terms = [
        WeightedGraph(CHANNELS),
        TiedMLP(CHANNELS, 8),
        *([RowAttention(CHANNELS)] if attention else []),
    ]
    block = CertifiedBlock(CHANNELS, terms)
    graph = term_graph()
    x = random(NODES, CHANNELS).float().requires_grad_()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = block(x, graph)
            energies = block.energies(x, graph)
        found.append(
            [
                out,
                energies,
                *torch.autograd.grad(out.square().sum(), [x, *block.parameters()]),
            ]
        )
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_block_knows_its_energies_and_its_certificate() -> None:
    block = CertifiedBlock(
        CHANNELS, [WeightedGraph(CHANNELS, edge_dim=RELATIONS), TiedMLP(CHANNELS, 3)], 4
    ).double()
    graph = term_graph()
    x = random(NODES, CHANNELS)
    data = Data(
        x=x, edge_index=graph.edges, edge_attr=random(graph.num_edges, RELATIONS)
    )
    energies = block.energies(x, data.edge_index, edge_attr=data.edge_attr)
    assert energies.shape == (5,)
    assert bool((energies.diff() <= 0).all())
    assert float(energies[-1]) < float(energies[0])
    assert certify(block, data)
    assert certify(block)
    whole = nn.Sequential(block)
    assert layer_certificates(whole, None).keys() == {"0"}
    block.fixed = (
        Bounded(
            MatrixTerm(SparseCoupling(graph), -torch.eye(CHANNELS, dtype=DOUBLE)[None]),
            0.4,
        ),
    )
    assert "exceeds its majorant" in certify(block, data).reason
    block.beta.raw.data.fill_(math.nan)
    assert "not finite" in certify(block, data).reason


@pytest.mark.parametrize("constraint", CONVEX)  # on a sphere there may be several
@pytest.mark.parametrize(
    "fixed", [False, True], ids=["", "beside quadratic terms without a fixed mean"]
)
@pytest.mark.parametrize(
    "num_steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_the_state_at_rest_is_the_limit_of_the_steps_with_its_gradient(
    constraint, fixed, num_steps
) -> None:
    graph = term_graph()
    source = random(NODES, CHANNELS).requires_grad_()
    if fixed:
        more = [
            CouplingTerm(symmetric_weights(graph)),
            2.0 * SourceTerm(random(NODES, CHANNELS)),
        ]
    else:
        more = []
    block = CertifiedBlock(
        CHANNELS, [WeightedGraph(CHANNELS), *more], constraint=constraint
    ).double()
    found = []
    for block.num_layers in (None, num_steps):
        found.append(block(source, graph))
    agree(*found, [source, *block.parameters()], (0, 1e-9), (0, 1e-7))


class Flat(SourceTerm):
    """Written as if a state were [N, C]."""

    majorant = EnergyTerm.majorant

    def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
        return (z - self.source).squeeze(1)

    def bound(self, z: Tensor, graph: Graph) -> Tensor:
        return z.new_ones(len(z), 1, 1)


def test_functions_of_another_shape_are_refused_not_broadcast() -> None:
    graph = term_graph()
    z = random(NODES, 1, CHANNELS)
    term = Flat(random(NODES, CHANNELS))
    with pytest.raises(
        AssertionError, match=r"half_gradient .* must have the shape \[9, 1, 5\]"
    ):
        check_energy_term(term, z, graph)
    with pytest.raises(
        ValueError, match=r"half_gradient .* must have the shape \[9, 1, 5\]"
    ):
        CertifiedBlock(CHANNELS, [term], 1).double()(z.squeeze(1), graph)
    certificate = certify_step(Joint(terms=[term], graph=graph), z)
    assert "must have the shape" in certificate.reason
    assert certificate.theorem == "Theorem T11"


def test_the_linear_system_at_rest_is_solved_for_parameters_of_any_size() -> None:
    graph = term_graph()
    source = random(NODES, CHANNELS)
    for _ in range(50):
        beta, mu, size = (
            10 ** float(torch.empty(()).uniform_(-4, 4)) for _ in range(3)
        )
        block = CertifiedBlock(
            CHANNELS, [WeightedGraph(CHANNELS, mu)], None, constraint=None, beta=beta
        ).double()
        with torch.no_grad():
            block.terms[0].matrix.mul_(size)
            z = block(source, graph).unsqueeze(1)
            terms = block.energy(source, graph).terms
            parts = [term.majorant(z, graph, True) for term in terms]
            left = sum(part.half_gradient for part in parts)
            assert float(left.norm()) <= 1e-11 * float(
                (sum(part.damping for part in parts) * z).norm()
            )


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_steps_that_share_what_does_not_change_are_single_steps(
    constraint: str | None,
) -> None:
    """In values and all gradients, also where the source is weighted by a metric."""
    graph = term_graph()
    for _, block in blocks(constraint, DOUBLE):
        edge_attr = random(graph.num_edges, RELATIONS) if block.reads else None
        source = random(NODES, CHANNELS).requires_grad_()
        metric = random(NODES).exp()
        terms = [
            ScaledTerm(block.beta(), SourceTerm(source, metric)),
            *block.energy(source, graph, edge_attr=edge_attr).terms[:-1],
        ]
        energy = Energy(terms, block.update.constraint, graph=graph)
        start = block.update.constraint.project(
            random(NODES, 1, CHANNELS)
        ).requires_grad_()
        steps = energy.descent(start)
        leaves = [start, source, *block.parameters()]
        shared = steps(steps(start))
        single = start
        for _ in range(2):
            single = energy.step(single)
        agree(shared, single, leaves, (1e-7, 1e-7), (1e-6, 1e-8), unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", CONVEX)
def test_states_at_rest_are_found_for_parameters_of_any_size_and_keep_few_tensors(
    constraint: str | None,
) -> None:
    """Also for states of any size; what backward keeps does not grow with the number of iterations."""
    for number in range(1000):
        torch.manual_seed(number)
        beta, mu, size, scale = (
            10 ** float(torch.empty(()).uniform_(-4, 4)) for _ in range(4)
        )
        graph = term_graph()
        source = scale * random(NODES, CHANNELS)
        part = WeightedGraph(CHANNELS, mu, symmetric=False, hops=1 + number % 2)
        block = CertifiedBlock(
            CHANNELS, [part], None, constraint=constraint, beta=beta
        ).double()
        with torch.no_grad():
            part.matrix.mul_(size)
        kept = []
        for block.num_layers in (1, None):
            found: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, found=found: found.append(t) or t, lambda t: t
            ):
                z = block(source, graph)
            kept.append(len(found))
        assert kept[1] <= 3 * kept[0]  # of hundreds of steps
        with torch.no_grad():
            after = block.energy(source, graph).step(z.unsqueeze(1)).squeeze(1)
            assert float((after - z).norm()) <= 1e-11 * float(z.norm())
        z.sum().backward()
        assert all(
            bool(parameter.grad.isfinite().all()) for parameter in block.parameters()
        )


test_bad_terms_are_refused_with_a_sentence = refuses(
    (lambda: ScaledTerm(-1.0, mlp_term("tanh")), "must"),
    (lambda: MatrixTerm(SparseCoupling(term_graph()), torch.eye(3)), "must"),
    (
        lambda: MatrixTerm(SparseCoupling(term_graph()), None, torch.ones(3)),
        "norms must be .1., one per relation",
    ),
    (lambda: PairTerm(get_penalty("simple"), torch.eye(3)), "projection must be"),
    (
        lambda: AttentionTerm(
            *2 * [torch.eye(4)[None]], prior=SparseCoupling(Graph(5), torch.ones(0, 3))
        ),
        "prior must",
    ),
    (
        lambda: AttentionTerm(
            *2 * [torch.eye(5)[None]], prior=SparseCoupling(Graph(5))
        ).value(random(NODES, 1, CHANNELS), term_graph()),
        "z must have 5 rows",
    ),
    (lambda: AttentionTerm(torch.eye(3)[None], torch.eye(4)[None]), "must"),
    (lambda: Energy([1.0]), "must"),
    (lambda: WeightedGraph(4, edge_dim=2)(torch.zeros(NODES, 4), term_graph()), "must"),
)


@pytest.mark.filterwarnings("error")
def test_a_term_with_a_learned_weight_is_shown_without_a_warning() -> None:
    torch.set_warn_always(True)
    try:
        learned = ScaledTerm(
            nn.Parameter(torch.tensor(0.1)), PairTerm(get_penalty("simple"))
        )
        assert repr(0.5 * learned) == "0.5 * 0.1 * PairTerm(SimplePenalty())"
    finally:
        torch.set_warn_always(False)


def test_edges_of_prior_zero_count_for_nothing_in_the_value() -> None:
    query = torch.eye(CHANNELS, dtype=DOUBLE).unsqueeze(0)
    ends = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    weight = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=DOUBLE)
    # the loop of node 0 is so much closer that others underflow
    kept = weight > 0
    z = 50 * random(4, 1, CHANNELS)
    values = [
        AttentionTerm(
            query, query, prior=SparseCoupling(graph, nonnegative=True)
        ).value(z, graph)
        for graph in (Graph(4, ends, weight), Graph(4, ends[:, kept], weight[kept]))
    ]
    torch.testing.assert_close(*values)


def test_weights_of_any_sign_raise_no_energy() -> None:
    graph = Graph(NODES, torch.randint(NODES, (2, 24)), random(24), validate=False)
    block = CertifiedBlock(
        CHANNELS, [WeightedGraph(CHANNELS)], 6, constraint=None
    ).double()
    x = random(NODES, CHANNELS)
    assert block.certificate(x, graph)
    assert bool((block.energies(x, graph).diff() <= 0).all())


def test_values_that_cancel_are_certified() -> None:
    loops = torch.randint(NODES, (24,)).expand(2, -1)
    block = CertifiedBlock(
        CHANNELS, [WeightedGraph(CHANNELS, matrix="identity")], constraint=None
    ).double()
    assert all(
        block.certificate(random(NODES, CHANNELS), loops, torch.rand(24, dtype=DOUBLE))
        for _ in range(9)
    )


class Goal(nn.Module, EnergyTerm):
    def __init__(self) -> None:
        super().__init__()
        self.goal = nn.Parameter(torch.ones(CHANNELS))

    def value(self, z: Tensor, graph: Graph) -> Tensor:
        return (z - self.goal).square().sum()

    def half_gradient(self, z: Tensor, graph: Graph) -> Tensor:
        return z - self.goal

    def bound(self, z: Tensor, graph: Graph) -> Tensor:
        return z.new_full((1, 1, 1), 0.5)


def test_a_term_may_be_a_module() -> None:
    block = CertifiedBlock(CHANNELS, [Goal()], 1, constraint=None, beta=0.5).double()
    x = random(NODES, CHANNELS)
    assert len([*block.terms.parameters()]) == 1
    torch.testing.assert_close(block(x), torch.ones_like(x))  # no part of x is left
