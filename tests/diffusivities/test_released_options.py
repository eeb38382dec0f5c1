"""Options that released code needs, each against its formula written out densely: values, gradients, refusals."""

# ruff: noqa: F403, F405 (everything public)
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.diffusivities import RelationalBias
from helpers import agree, close, randn

DOUBLE = torch.float64
PTR = torch.tensor([0, 4, 4, 5, 11])
# A loop at 2, a pair that comes twice, four steps from 7 to 10; 4 is alone.
EDGES = torch.tensor(
    [
        [0, 1, 1, 2, 2, 0, 5, 6, 7, 5, 5, 8, 9],
        [1, 2, 0, 2, 3, 3, 6, 7, 5, 8, 8, 9, 10],
    ]
)


def weights():
    """Positive, but for an edge of weight zero, which counts as none."""
    weight = randn(EDGES.size(1), seed=3).abs() + 0.1
    weight[1] = 0
    return weight.requires_grad_()


def assert_is(coupling, expected, leaves):
    """Dense entries, and the gradients of a product with random values."""
    close(coupling.to_dense(), expected)
    v = randn(expected.size(1), expected.size(0), 3, seed=8)
    agree(
        coupling @ v,
        torch.einsum("hij,jhd->ihd", expected, v),
        leaves,
        (1e-10, 1e-10),
        unused=True,
    )


def matrix(weight):
    return torch.zeros(11, 11, dtype=DOUBLE).index_put(
        (EDGES[1], EDGES[0]), weight, accumulate=True
    )


def inverse(degree, power):
    return torch.where(degree > 0, degree, torch.inf).pow(-power)


def degree_normalized(a, counts, normalization, direction="pyg"):
    """Entries of ``a`` over the degrees of ``counts``."""
    received = counts.sum(1)
    if normalization == "row":
        return inverse(received, 1)[:, None] * a
    sent = received if direction == "pyg" else counts.sum(0)
    if normalization == "sym":
        return inverse(received, 0.5)[:, None] * a * inverse(sent, 0.5)[None]
    return a


@pytest.mark.parametrize(
    ("normalization", "direction", "loops"),
    list(
        product(
            ["sym", "row", "sum"],
            ["directed", "undirected", "pyg"],
            ["keep", "add", "remaining", "remove"],
        )
    ),
)
@pytest.mark.parametrize("degrees", ["weighted", "count"])
def test_degrees_are_weighted_and_directed_or_count_edges(
    normalization, direction, loops, degrees
):
    weight = weights()
    a = matrix(weight)
    counts = matrix(weight if degrees == "weighted" else (weight > 0).double())
    if direction == "undirected":
        a = (a + a.T) / 2
        counts = (counts + counts.T) / 2
    eye = torch.eye(11, dtype=DOUBLE)
    diagonal = torch.diag(a.diagonal())
    if loops == "add":
        a = a + eye
        counts = counts + eye
    elif loops == "remaining":
        missing = torch.diag(1 - counts.diagonal().sign())
        # The two directions of a loop are parallel loops, which count with their mean.
        if direction == "undirected":
            a = a - diagonal / 2
            counts = counts - torch.diag(counts.diagonal()) / 2
        a = a + missing
        counts = counts + missing
    elif loops == "remove":
        a = a - diagonal
        counts = counts - torch.diag(counts.diagonal())
    diffusivity = AdjacencyDiffusivity(
        normalization, direction=direction, self_loops=loops, degrees=degrees
    )
    coupling = diffusivity(randn(11, 2, seed=1), Graph(11, EDGES, weight, ptr=PTR))
    assert_is(
        coupling, degree_normalized(a, counts, normalization, direction)[None], [weight]
    )


def test_counted_degrees_without_weights_and_of_a_part():
    x = randn(11, 2, seed=1)
    degree = torch.ones(11, 2, dtype=DOUBLE)
    both = [
        AdjacencyDiffusivity("sym", degrees=name)(x, Graph(11, EDGES, ptr=PTR))
        for name in ("weighted", "count")
    ]
    assert torch.equal(*(coupling.to_dense() for coupling in both))
    count = AdjacencyDiffusivity("sym", degrees="count")
    count(x, Graph(11, EDGES, full_degree=degree))
    with pytest.raises(
        ValueError,
        match=r"degrees='count' needs the number of edges .* Take degrees='weighted'",
    ):
        count(x, Graph(11, EDGES, weights().detach(), full_degree=degree))


def test_attention_and_graph_by_a_weight():
    x = randn(11, 2, seed=1).requires_grad_()
    weight = weights()
    attention = SigmoidDiffusivity()
    edges = AdjacencyDiffusivity("sum")
    graph = Graph(11, EDGES, weight)
    coupling = GraphAugmentedDiffusivity(attention, edges, 0.3)(x, graph)
    unit = x / x.norm(dim=1, keepdim=True)
    scores = (unit @ unit.T).sigmoid()
    expected = 0.7 * scores / scores.sum(1, keepdim=True) + 0.3 * matrix(weight)
    assert_is(coupling, expected[None], [x, weight])


ATTENTION = SigmoidDiffusivity(heads=2)
TERM = AdjacencyDiffusivity("row")


def dense(diffusivity, edges=EDGES):
    return diffusivity(randn(11, 4, seed=1), Graph(11, edges)).to_dense()


def test_attention_and_graph_are_the_algebra_and_without_edges_the_attention():
    both = dense(ATTENTION + TERM)
    mean = 0.5 * ATTENTION + 0.5 * TERM
    enhanced = AdjacencyEnhancedDiffusivity(ATTENTION, gamma=3.0)
    assert_close(dense(GraphAugmentedDiffusivity(ATTENTION, TERM)), both)
    assert_close(dense(GraphAugmentedDiffusivity(ATTENTION, TERM, 0.5)), dense(mean))
    assert_close(dense(enhanced), dense(0.75 * ATTENTION + 0.25 * enhanced.graph_term))
    for augmented in (
        enhanced,
        GraphAugmentedDiffusivity(ATTENTION, TERM),
        GraphAugmentedDiffusivity(ATTENTION, TERM, 0.5),
    ):
        assert torch.equal(dense(augmented, None), dense(ATTENTION, None))


@pytest.mark.parametrize("normalization", ["sum", "sym", "row"])
@pytest.mark.parametrize("gate", ["sigmoid", None])
@pytest.mark.parametrize("powers", ["reach", "walks"])
def test_powers_and_gates(normalization, gate, powers):
    """Hop p is who is reached in 1 … 2ᵖ⁻¹ steps, once and without weights, over degrees of its own; or walks (N7)."""
    diffusivity = RelationalBias(
        2, hops=3, normalization=normalization, powers=powers, gate=gate
    ).double()
    assert not diffusivity.bias.any()
    diffusivity.bias.data = randn(3, 2, seed=5)
    gates = diffusivity.bias.sigmoid() if gate else diffusivity.bias
    if powers == "reach":
        one = (matrix(weights().detach()) > 0).double()
    else:
        one = matrix(weights().detach())
    two = ((one + one @ one) > 0).double()
    four = ((two + two @ two) > 0).double()
    hops = torch.stack(
        [degree_normalized(a, a, normalization) for a in (one, two, four)]
    )
    if powers == "walks":
        hops = torch.stack([torch.linalg.matrix_power(hops[0], p) for p in (1, 2, 3)])
    coupling = diffusivity(randn(11, 2, seed=1), Graph(11, EDGES, weights(), ptr=PTR))
    assert coupling.nonnegative == (gate is not None)
    assert_is(coupling, torch.einsum("ph,pij->hij", gates, hops), [diffusivity.bias])


@pytest.mark.parametrize("projection", ["separate", "tied"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_stabiliser(projection, scale):
    """Also where norms are so large that ε is all that is left of most features."""
    options = {
        "heads": 3,
        "head_channels": 4,
        "projection": projection,
        "num_features": 7,
        "num_samples": 0,
    }
    diffusivity = KernelizedSoftmaxDiffusivity(
        5, tau=0.5, stabilizer=1e-3, **options
    ).double()
    x = (scale * randn(11, 5, seed=1)).requires_grad_()
    q = diffusivity.query(x).view(11, 3, 4).transpose(0, 1) / 0.5**0.5
    k = (
        q
        if projection == "tied"
        else diffusivity.key(x).view(11, 3, 4).transpose(0, 1) / 0.5**0.5
    )

    def features(part, over):
        along = part @ diffusivity.directions.T
        return (
            along
            - part.square().sum(2, keepdim=True) / 2
            - along.amax(over, keepdim=True)
        ).exp() + 1e-3

    expected = torch.zeros(3, 11, 11, dtype=DOUBLE)
    for rows in (
        slice(0, 4),
        slice(4, 5),
        slice(5, 11),
    ):  # the graphs of PTR that have nodes
        scores = features(q[:, rows], (2,)) @ features(k[:, rows], (1, 2)).mT
        expected[:, rows, rows] = scores / scores.sum(2, keepdim=True)
    assert_is(
        diffusivity(x, Graph(11, ptr=PTR)), expected, [x, *diffusivity.parameters()]
    )


def test_values_have_biases_and_a_bias_of_nothing_is_refused():
    layer = DiffusionConv(
        5, 4, SimpleDiffusivity(), heads=2, concat=True, bias=False, value_bias=True
    ).double()
    x = randn(11, 5, seed=1)
    _, coupling = layer(x, return_coupling=True)
    values = (x @ layer.value.weight.T + layer.value.bias).view(11, 2, 4)
    moved = 0.5 * values + 0.5 * torch.einsum(
        "hij,jhd->ihd", coupling.to_dense().expand(2, -1, -1), values
    )
    close(layer(x), moved.reshape(11, 8))
    with pytest.raises(
        ValueError, match=r"bias=True with projection=None\. Choose 'separate'"
    ):
        SimpleDiffusivity(4, bias=True)
    with pytest.raises(
        ValueError,
        match=r"value_bias=True with transform=False\. Leave one of them out",
    ):
        DiffusionConv(4, 4, SimpleDiffusivity(), transform=False, value_bias=True)


@pytest.mark.parametrize("projection", ["separate", "tied", None])
@pytest.mark.parametrize("layer", [DIFFormerConv, NodeFormerConv, SGFormerConv])
def test_a_layer_has_the_biases_of_what_it_has(layer, projection):
    options = {"projection": projection} | (
        {} if layer is NodeFormerConv else {"transform": True}
    )
    names = {
        name for name, _ in layer(4, 4, qkv_bias=True, **options).named_parameters()
    }
    biases = {
        name.split(".")[-2]
        for name in names
        if name.endswith(".bias") and "graph_term" not in name
    } - {"mix"}
    assert (
        biases
        == {
            "separate": {"query", "key", "value"},
            "tied": {"query", "value"},
            None: {"value"},
        }[projection]
    )
    plain = {name for name, _ in layer(4, 4, **options).named_parameters()}
    assert not [
        name
        for name in plain
        if name.endswith(("query.bias", "key.bias", "value.bias"))
    ]
