"""Numbers at the ends of the range: norms, distances and sums that over- or underflow if computed plainly.

And no node, no edge, no position, no feature: defined, or refused in a sentence.
"""

# ruff: noqa: F403, F405 (everything public)
import warnings

import pytest
import torch
from precision_cases import channels_of
from torch.testing import assert_close

from cases import LAYERS
from diffusion_mp import *
from diffusion_mp.couplings import *
from diffusion_mp.kernels.linear_attention import linear_attention
from diffusion_mp.runtime.precision import quotient, reciprocal
from diffusion_mp.testing import tolerance
from helpers import built

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def randn(generator):
    """Normal numbers, drawn in double precision whatever the dtype."""

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw


def near(got, expected, operation, dtype):
    """Both are equal up to the tolerance of the operation in that dtype."""
    options = tolerance(operation, dtype)._asdict()
    assert_close(got.double(), expected.double(), **options)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1.0, 1e10, 1e20, 1e25])
def test_every_backend_divides_by_norms_of_any_size(backend, scale, randn):
    """Rows of ordinary, tiny, huge and zero norm side by side, forth and back, against double precision."""
    options = {"constant": 1.0, "own": 0.5, "unit": True}
    q, k, v, weight = (randn(9, 2, 3) for _ in range(4))
    if scale != 1e25:  # where no row is short, long ones alone are to be seen
        q = q.index_fill(0, torch.tensor([2]), 0.0)
        k = k.index_fill(0, torch.tensor([5]), 0.0)
    q[4:] = scale * q[4:]
    k[:4] = scale * k[:4]
    results = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = linear_attention(*leaves, **options, backend=name)  # type: ignore[arg-type]
        results.append(
            [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
        )
    size = torch.tensor([1.0, 1.0, scale], dtype=torch.float64)[
        [0] * 4 + [2] * 5, None, None
    ]
    one = torch.ones_like(size)
    for got, expected, length in zip(
        *results, (one, size, scale / size, one), strict=True
    ):
        assert_close(got * length, expected * length, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_frobenius_norm(dtype, ragged, randn):
    """One norm for a graph: no derivative at zero, no overflow of squares (in float16 that is at 256)."""
    diffusivity = SimpleDiffusivity(normalize="frobenius")
    ptr = torch.tensor([0, 3, 3, 8]) if ragged else None
    x = randn(8, 5, dtype=dtype)
    zeros = torch.zeros_like(x).requires_grad_()
    out = diffusivity(zeros, Graph(8, ptr=ptr)) @ torch.ones(8, 1, 1, dtype=dtype)
    (grad,) = torch.autograd.grad(out.sum(), zeros)
    assert not grad.any()
    for scale in (1e20, 1e-20) if dtype.itemsize > 2 else (1e3,):
        q, _ = diffusivity.queries_and_keys(scale * x, Graph(8, ptr=ptr))
        expected, _ = diffusivity.queries_and_keys(x.double(), Graph(8, ptr=ptr))
        assert_close(
            q.double(), expected, **tolerance("layer", dtype)._asdict() | {"rtol": 2e-2}
        )


def test_reciprocals_are_finite():
    degree = torch.tensor([0.0, 1e-45, 1e-40, -1e-40, 2.0]).requires_grad_()
    result = reciprocal(degree)
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]
    (grad,) = torch.autograd.grad(result.sum(), degree)
    assert grad.tolist() == [0.0, 0.0, 0.0, 0.0, -0.25]
    assert reciprocal(torch.tensor([1.2e-38, -1.2e-38])).isfinite().all()
    part = torch.tensor([3e-40, 1e-30, 2e-30]).requires_grad_()
    total = torch.tensor([0.0, 2e-30, 2e-30])
    assert quotient(part, total).tolist() == [0.0, 0.5, 1.0]
    (grad,) = torch.autograd.grad(quotient(part, total.requires_grad_()).sum(), total)
    assert_close(grad, torch.tensor([0.0, -2.5e29, -5e29]))


def test_half_precision_sums_over_many_nodes():
    """70 000 is infinite in float16; so every row would be zero."""
    nodes = 70_000
    ones = torch.ones(nodes, 1, 1, dtype=torch.float16)
    mean = UniformCoupling(nodes, dtype=torch.float16) @ ones
    assert torch.equal(mean, ones)
    rows = LowRankCoupling(ones, ones, positive_semidefinite=True)
    assert (rows.degree() == nodes).all()
    assert torch.equal(row_normalized(rows) @ ones, ones)


def test_tiny_and_zero_weights():
    """The product of two degrees underflows where their roots do not."""
    edges = torch.tensor(
        [
            [0, 1, 1, 2],
            [1, 0, 2, 1],
        ]
    )
    for normalization in ("sym", "row"):
        diffusivity = AdjacencyDiffusivity(normalization)  # type: ignore[arg-type]
        ordinary, tiny = (
            diffusivity(
                torch.zeros(3, 1), Graph(3, edges, torch.full((4,), weight))
            ).to_dense()
            for weight in (1.0, 1e-30)
        )
        assert_close(tiny, ordinary)
    edges = torch.tensor(
        [
            [0, 1, 1, 2],
            [1, 0, 2, 2],
        ]
    )
    for normalization in ("sym", "row", "sum"):
        weight = torch.tensor([0.0, 0.0, 1.0, 1.0]).requires_grad_()
        coupling = AdjacencyDiffusivity(normalization)(
            torch.zeros(3, 1), Graph(3, edges, weight)
        )  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad((coupling @ torch.ones(3, 1, 1)).sum(), weight)
        assert grad.isfinite().all(), normalization


@pytest.mark.parametrize("penalty", ["gaussian", "sigmoid"])
@pytest.mark.parametrize("channels", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_edge_attention_of_distant_neighbours(
    penalty, channels, dtype, generator, randn
):
    """f(‖x_i − x_j‖²) underflows, its share of the row does not."""
    x = randn(200, channels, dtype=dtype).requires_grad_()
    edges = torch.randint(200, (2, 1000), generator=generator)
    edges = edges[:, edges[1] > 5]
    graph = Graph(200, edges)
    coupling = EdgeDiffusivity(penalty)(x, graph)
    reached = torch.zeros(200).index_fill(0, edges[1], 1.0)
    assert_close(coupling.degree().flatten().float(), reached, rtol=0, atol=1e-5)
    entries = coupling.at(edges).double()
    expected = EdgeDiffusivity(penalty)(x.double(), graph).at(edges)
    near(entries, expected, "entries", torch.float32)
    (grad,) = torch.autograd.grad((coupling @ x.unsqueeze(1)).sum(), x)
    assert grad.isfinite().all()


BY_DISTANCE = {
    "simple": lambda: SimpleDiffusivity(normalize=None, measure="distance"),
    "simple, not normalised": lambda: SimpleDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    ),
    "sigmoid": lambda: SigmoidDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    ),
    "softmax": lambda: SoftmaxDiffusivity(4, normalize=None, measure="distance"),
    "gaussian": lambda: GaussianDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    ),
    "narrow gaussian": lambda: GaussianDiffusivity(
        bandwidth=0.01, normalize=None, measure="distance"
    ),
    "mixture": lambda: PenaltyDiffusivity(MixturePenalty(), row_stochastic=False),
    "function": lambda: PenaltyDiffusivity(
        FunctionPenalty(lambda z2: 1 / (1 + z2)), row_stochastic=False
    ),
    "edges": lambda: EdgeDiffusivity("gaussian", row_stochastic=False),
    "edges, sigmoid": lambda: EdgeDiffusivity("sigmoid"),
}
PLACES = {
    **{
        f"offset {offset:g}": lambda x, offset=offset: x + offset
        for offset in (0.0, 100.0, 2e3, 1e4, 1e6)
    },
    **{
        f"scale {scale:g}": lambda x, scale=scale: scale * x
        for scale in (1e-4, 100.0, 1e4)
    },
    "two graphs far apart": lambda x: torch.cat([x[:25] + 1e5, x[25:] - 1e5]),
    "a far cluster": lambda x: torch.cat([x[:3] + 1e4, x[3:]]),
}


@pytest.mark.parametrize("make", BY_DISTANCE.values(), ids=BY_DISTANCE)
@pytest.mark.parametrize("move", PLACES.values(), ids=PLACES)
def test_distances_do_not_depend_on_where_rows_lie(make, move, generator, randn):
    """‖x‖² + ‖y‖² − 2x·y has no digits left far from the origin, so distances are measured from amid the rows."""
    x = move(randn(50, 4))
    v = randn(50, 1, 3)
    edges = torch.randint(25, (2, 120), generator=generator)
    batch = torch.arange(50) // 25
    graph = Graph(50, torch.cat([edges, edges + 25], 1), batch=batch)
    got, expected = (
        make()(x.to(dtype), graph) @ v.to(dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_blocks_do_not_depend_on_where_rows_lie(randn):
    x = 2e3 + 0.3 * randn(50, 4)
    model = DiffusionConv(
        4, 4, BY_DISTANCE["simple"](), ExplicitEuler(0.5), transform=False
    )
    complete = model.double()(x.double())
    blocks = full_graph_inference(model.float(), x, block_size=7, progress=False)
    # Four digits of what rows move.
    assert_close(blocks.double(), complete, rtol=5e-7, atol=0)


@pytest.mark.parametrize("score", ["exp", "sigmoid"])
@pytest.mark.parametrize("dtype", HALVES)
def test_distances_in_half_precision(score, dtype, randn):
    """Squared norms beyond 65 504 and their cancellation are nothing that half precision can hold."""
    x = (30 + 0.05 * randn(12, 1, 80)).to(dtype)
    coupling = PairwiseCoupling(*distance_features(x), score=score)
    got = coupling @ torch.eye(12).unsqueeze(1)
    exact = PairwiseCoupling(*distance_features(x.double()), score=score)
    expected = exact.to_dense()[0]
    near(got[:, 0], expected, "product", dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
def test_gates_of_nodes_without_senders(dtype, autocast, randn):
    """1/(0 + ε) is infinite in float16."""
    layer = GatedGCNConv(6, norm=None)
    x = randn(5, 6)
    edges = torch.tensor([[0, 1, 2], [1, 0, 1]])
    expected = layer(x, edges)
    if not autocast:
        layer = layer.to(dtype)
        x = x.to(dtype)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out, gates = layer(x, edges, return_coupling=True)
    out.float().sum().backward()
    near(out, expected, "layer", dtype)
    assert (gates @ x.unsqueeze(2)).isfinite().all()
    assert all(
        leaf.grad.isfinite().all()
        for leaf in (x, *layer.parameters())
        if leaf.grad is not None
    )


# Graphs of five nodes, one, none, seven, one, none and three.
MEMBER = torch.tensor([0] * 5 + [1] + [3] * 7 + [4] + [6] * 3)


def at_the_ends(randn, channels):
    """States of order one and the graph of every node: one node, several graphs, equal rows, and rows of every size."""
    x = randn(17, channels)
    yield x[:1], MEMBER[:1]
    yield x, MEMBER
    yield x[MEMBER], MEMBER
    yield x.index_fill(0, torch.arange(0, 17, 2), 1.0), 0 * MEMBER
    yield x * torch.logspace(-8, 0, 17).unsqueeze(1), MEMBER


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_finite_at_states_of_any_size(name, generator, randn):
    """Values and all gradients."""
    build, options = LAYERS[name]
    pairs = torch.randint(17, (2, 100), generator=generator)
    for state, member in at_the_ends(randn, channels_of(build)):
        edges = pairs[:, (pairs < len(state)).all(0)]
        if options.get("edges", True):
            edges = edges[:, member[edges[0]] == member[edges[1]]]
        else:
            edges = None
        for scale in (1e-30, 1e-10, 30.0, 1e4, 1e8):
            layer = built(build).eval()
            x = (scale * state).requires_grad_()
            out = layer(x, edges, batch=member, **options.get("extra", lambda x: {})(x))
            (out * torch.arange(out.numel()).cos().view(out.shape)).sum().backward()
            assert out.isfinite().all(), scale
            for leaf in (x, *layer.parameters()):
                assert leaf.grad is None or leaf.grad.isfinite().all(), scale


@pytest.mark.parametrize("projection", ["separate", "tied", None])
@pytest.mark.parametrize(
    "options", [{}, {"friction": "constant"}, {"hops": 1}, {"lam": 0.0}], ids=str
)
def test_equal_rows_flow_equally_at_any_size(projection, options, randn):
    """Products of matrices do not round all rows alike, and of scores of 1e16 that is everything."""
    layer = built(
        lambda: SFiConv(
            6, 6, 2, projection=projection, adjacency=False, residual=False, **options
        )
    )
    pairs = torch.cartesian_prod(torch.arange(17), torch.arange(17)).T
    edges = pairs[:, MEMBER[pairs[0]] == MEMBER[pairs[1]]]
    for scale in (1.0, 1e3, 1e5, 1e8):
        x = (scale * randn(17, 6))[MEMBER]
        with torch.no_grad():
            out = layer(x, edges, batch=MEMBER)
        for rows in out.split(MEMBER.bincount().tolist()):
            assert (
                not len(rows) or (rows - rows[0]).abs().max() <= 1e-5 * out.abs().max()
            )


def test_a_system_that_the_rounding_of_its_entries_decides_says_so(generator, randn):
    x = randn(20, 3)
    edges = torch.randint(20, (2, 60), generator=generator)
    coupling = AdjacencyDiffusivity("sym", direction="undirected")(x, Graph(20, edges))
    for update in (
        ImplicitEuler(1e6, "residual"),
        Equilibrium("residual", leak=1e-6),
        HeatKernel(1e4, "residual"),
    ):
        with pytest.warns(
            UserWarning, match=r"entries are rounded to torch.float32.*conservative"
        ):
            assert update(x, coupling).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ImplicitEuler(1e6)(x, coupling)
        ImplicitEuler(10.0, "residual")(x, coupling)


def test_the_heat_kernel_of_a_loose_bound(generator, randn):
    """A bound of the spectral radius that is too large by a is e^{ta} times the rounding: 10⁸ at t = 10⁴ once."""
    x = randn(40, 2, dtype=torch.float64)
    edges = torch.randint(40, (2, 100), generator=generator)
    coupling = AdjacencyDiffusivity(
        "sym", direction="undirected", self_loops="remaining"
    )(x, Graph(40, edges))
    values, vectors = torch.linalg.eigh(
        torch.eye(40, dtype=torch.float64) - coupling.to_dense()[0]
    )
    for t in (1.0, 1e4):
        exact = vectors @ ((-t * values.clamp(min=0)).exp()[:, None] * (vectors.T @ x))
        assert_close(
            HeatKernel(t, "residual")(x, coupling), exact, rtol=1e-6, atol=1e-8
        )


def test_a_sparse_coupling_in_single_precision_keeps_constants(generator):
    """Row sums that were rounded would be a leak of their own, as large as the one of a long step."""
    edges = torch.randint(30, (2, 90), generator=generator)
    edges = torch.cat([edges, edges.flip(0)], 1)
    weight = torch.rand(90, generator=generator).repeat(2)
    coupling = SparseCoupling(
        Graph(30, edges, weight), symmetric=True, nonnegative=True
    )
    ones = torch.ones(30, 1, 1)
    assert_close(ImplicitEuler(1e8)(ones, coupling), ones, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("placement", [None, "P1", "P5"])
def test_sequences_without_positions_or_tokens_count_as_zero(
    pooling, causal, placement
):
    model = PDETransformer(
        [5],
        8,
        3,
        1,
        2,
        max_length=6,
        pooling=pooling,
        causal=causal,
        placement=placement,
    ).eval()
    nothing = model.head(torch.zeros(1, 8))
    assert_close(model(torch.zeros(2, 0, dtype=torch.long)), nothing.expand(2, -1))
    assert model(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    mask = torch.tensor([[False] * 3, [False, True, True]])
    out = model(tokens, mask)
    assert_close(out[:1], nothing)
    assert_close(out[1:], model(tokens[1:, 1:]))
