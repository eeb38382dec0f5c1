"""The kNN graph and its transform against distances of all pairs."""

from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from torch.testing import assert_close
from torch_geometric.data import Batch, Data

from diffusion_mp import AdjacencyDiffusivity, DiffusionConv, DiffusionGNN, GatedGCN
from diffusion_mp.data import KNNGraph, knn_graph
from helpers import built, close, refuses


def neighbours(distance, k):
    """Pairs of which one is among the k nearest of the other, where no distances tie."""
    distance = distance.fill_diagonal_(float("inf"))
    near = distance <= distance.kthvalue(k, dim=1, keepdim=True).values
    near &= distance < float("inf")
    return near | near.t()


@pytest.mark.parametrize("channels", [3, 70])  # searched in a tree, and pair by pair
@pytest.mark.parametrize(
    ("offset", "dtype", "metric", "sharpness", "k"),
    [
        (0, torch.float32, "euclidean", 8.0, 1),
        (0, torch.float64, "euclidean", 8.0, 20),
        (0, torch.float64, "cosine", 4.5, 5),
        (1e4, torch.float32, "euclidean", 8.0, 4),
        (1e4, torch.float64, "euclidean", 8.0, 4),
        (1e8, torch.float64, "euclidean", 8.0, 4),
        (1e12, torch.float64, "euclidean", 8.0, 4),
    ],
)
# One cloud far from the origin, where nothing cancels, or two.
@pytest.mark.parametrize("sides", [1, 2])
def test_neighbours_and_weights_are_those_of_all_pairs(
    channels, offset, dtype, metric, sharpness, k, sides, generator
):
    x = (
        torch.randn(60, channels, generator=generator, dtype=torch.float64) + offset
    ).to(dtype)
    x = x.abs() if metric == "cosine" else x
    x[: 30 * (sides - 1)] *= -1
    rows = torch.nn.functional.normalize(x) if metric == "cosine" else x.double()
    square = (rows.unsqueeze(1) - rows).square().sum(2)
    square = square.masked_fill(square > 2, torch.inf) if metric == "cosine" else square
    # the row itself is infinitely far
    near = neighbours(square, k)
    reach = square.kthvalue(k, dim=1).values
    weights = torch.exp(-sharpness * square / (reach[:, None] * reach).sqrt())[near]
    data = KNNGraph(k, metric, weighted=True, sharpness=sharpness)(Data(x=x))
    assert torch.equal(data.edge_index.t(), near.nonzero())
    assert torch.equal(knn_graph(x.requires_grad_(), k, metric), data.edge_index)
    assert_close(
        data.edge_weight.double(), weights / weights.mean(), rtol=1e-5, atol=1e-6
    )
    assert data.edge_weight.dtype == dtype
    assert "edge_weight" not in KNNGraph(2)(Data(x=x))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_an_approximate_search_finds_nearly_all_neighbours_at_exact_distances(
    metric, scale, generator
):
    """All of them where there are few clusters; nothing is lost where a row has copies or is zero."""
    for count, least in ((3, 1.0), (900, 1.0), (6000, 0.9)):
        x = torch.rand(count, 20, generator=generator, dtype=torch.float64)
        x[: count // 3] *= 4
        # A row far from the others, for no ties, and a row of zeros; then copies of the first.
        x[:2] = 0
        x[0, 0] = 9
        x[count // 2 :: 60] = x[0]
        exact, nearly = (
            KNNGraph(min(count - 1, 8), metric, weighted=True, approximate=approximate)(
                Data(x=scale * x)
            )
            for approximate in (False, True)
        )
        pairs = [
            set(map(tuple, data.edge_index.T.tolist())) for data in (exact, nearly)
        ]
        assert len(pairs[0] & pairs[1]) >= least * len(pairs[0])
        if least == 1:
            assert_close(nearly.edge_weight, exact.edge_weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("channels", [3, 70])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_the_unit_does_not_matter(channels, metric, scale, generator):
    x = torch.rand(41, channels, generator=generator, dtype=torch.float64)
    data, scaled = (
        KNNGraph(5, metric, weighted=True)(Data(x=rows)) for rows in (x, scale * x)
    )
    assert torch.equal(scaled.edge_index, data.edge_index)
    assert_close(scaled.edge_weight, data.edge_weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("channels", [3, 70])
def test_a_row_infinitely_far_outside_moves_nobody_else(channels, generator):
    x = torch.randn(41, channels, generator=generator, dtype=torch.float64)
    alone = knn_graph(x, 5)
    both = knn_graph(
        torch.cat([x, torch.full((1, channels), 1e300, dtype=torch.float64)]), 5
    )
    assert torch.equal(both[:, (both != 41).all(0)], alone)
    assert (both == 41).sum() == 10


def test_copies_of_a_row_are_its_neighbours_and_not_the_row_itself(generator):
    """More copies than neighbours, so that the row itself need not be among those that are found."""
    x = torch.randn(3, 70, generator=generator).repeat_interleave(20, 0)
    source, target = knn_graph(x, 4)
    assert not (source == target).any()
    assert torch.equal(source // 20, target // 20)
    assert source.bincount().min() >= 4


@pytest.mark.parametrize("k", [1, 6, 15])
def test_neighbours_by_angle_have_something_in_common(k, generator):
    x = torch.rand(21, 12, generator=generator)
    # two kinds of rows at right angles, and one without anything
    x[:10, :6] = 0
    x[10:, 6:] = 0
    x[3] = 0
    unit = torch.nn.functional.normalize(x.double())
    distance = (1 - unit @ unit.t()).masked_fill(unit @ unit.t() == 0, float("inf"))
    data = KNNGraph(k, "cosine")(Data(x=x))
    assert torch.equal(data.edge_index.t(), neighbours(distance, k).nonzero())
    assert torch.equal(knn_graph(x, k, "cosine"), data.edge_index)
    assert 3 not in data.edge_index


@pytest.mark.parametrize("lonely", [0, 1, 2])
def test_rows_of_zeros_have_no_angle(lonely):
    x = torch.zeros(5, 3)
    x[:lonely, 0] = 1
    assert knn_graph(x, 3, "cosine").tolist() == (
        [[0, 1], [1, 0]] if lonely == 2 else [[], []]
    )


def test_the_data_stay_and_a_copy_has_the_edges():
    data = Data(x=torch.arange(4.0).unsqueeze(1), y=torch.arange(4))
    joined = KNNGraph(1)(data)
    assert "edge_index" not in data
    assert joined.y is data.y
    said = "KNNGraph(k=3, metric='cosine', weighted=True, sharpness=8.0, approximate=False)"
    assert repr(KNNGraph(3, "cosine", weighted=True)) == said


without_faiss = patch.dict("sys.modules", faiss=None)
test_what_does_not_fit = refuses(
    (
        without_faiss(lambda: knn_graph(torch.eye(3), 1, approximate=True)),
        ModuleNotFoundError,
        "faiss",
    ),
    (lambda: KNNGraph(3, approximate=1), TypeError, "approximate"),
    (lambda: KNNGraph(3, weighted=1), TypeError, "weighted"),
    (lambda: KNNGraph(3, sharpness=-1.0), ValueError, "sharpness"),
)


def test_the_transform_replaces_what_the_data_says_of_other_edges():
    x = torch.tensor([[0.0], [1.0], [5.0], [7.0]])
    edges = torch.zeros(2, 4, dtype=torch.long)
    old = Data(
        x=x,
        edge_index=edges,
        edge_weight=torch.rand(4),
        edge_attr=torch.rand(4, 2),
        adj_t=torch.eye(4).to_sparse(),
    )
    assert set(KNNGraph(1)(old).keys()) == {"x", "edge_index"}
    with pytest.raises(ValueError, match=r"KNNGraph takes one graph; got a batch of 2"):
        KNNGraph(1)(Batch.from_data_list([old, old]))


@pytest.mark.parametrize(
    ("metric", "k"), [("euclidean", 1), ("euclidean", 6), ("cosine", 4)]
)
def test_new_rows_receive_from_their_nearest_rows(metric, k, generator):
    x = torch.rand(40, 5, generator=generator, dtype=torch.float64)
    new = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    # A copy of a row, at distance zero.
    new[0] = x[3]
    knn = KNNGraph(k, metric, weighted=True, sharpness=3.0)
    data = knn(Data(x=x, y=torch.arange(40)))
    more = knn.attach(data, new)
    assert sorted(more.keys()) == ["edge_index", "edge_weight", "x"]
    assert_close(more.x, torch.cat([x, new]), rtol=0, atol=0)
    old = data.num_edges
    assert_close(more.edge_index[:, :old], data.edge_index, rtol=0, atol=0)
    assert_close(more.edge_weight[:old], data.edge_weight, rtol=0, atol=0)

    near, others = (normalize(new), normalize(x)) if metric == "cosine" else (new, x)
    square = (near.unsqueeze(1) - others).square().sum(2)
    closest = square.topk(k, largest=False)
    source, target = more.edge_index[:, old:]
    assert torch.equal(target, torch.arange(40, 47).repeat_interleave(k))
    assert torch.equal(source.view(7, k), closest.indices)
    among = (others.unsqueeze(1) - others).square().sum(2).fill_diagonal_(torch.inf)
    reach = among.kthvalue(k, dim=1).values
    scale = (closest.values[:, -1:] * reach[closest.indices]).sqrt()
    weights = torch.exp(-3 * closest.values / scale).nan_to_num(1.0)
    # Relative to an edge of the graph, whose weight is known by the same formula.
    i, j = data.edge_index[:, 0]
    first = torch.exp(-3 * among[i, j] / (reach[i] * reach[j]).sqrt())
    expected = weights * (data.edge_weight[0] / first)
    assert_close(more.edge_weight[old:].view(7, k), expected, rtol=1e-9, atol=1e-12)

    unweighted = KNNGraph(k, metric)
    plain = unweighted.attach(unweighted(Data(x=x)), new)
    assert torch.equal(plain.edge_index, more.edge_index)
    assert "edge_weight" not in plain


CONVS = ["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]
NETWORKS = {
    conv: lambda conv=conv: DiffusionGNN(5, 8, 3, conv=conv, dropout=0.5)
    for conv in CONVS
} | {
    "row": lambda: DiffusionConv(5, 3, AdjacencyDiffusivity("row", self_loops="add")),
    "gatedgcn": lambda: GatedGCN(5, 8, 3, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_row_neither_moves_the_others_nor_depends_on_them(name, generator):
    x = torch.rand(40, 5, generator=generator, dtype=torch.float64)
    new = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    knn = KNNGraph(4, weighted=name != "gatedgcn")
    model = built(NETWORKS[name]).double().eval()
    data = knn(Data(x=x))

    def predicted(rows):
        return model(rows.x, rows.edge_index, rows.edge_weight).detach()

    together = predicted(knn.attach(data, new))
    close(together[:40], predicted(data))
    for number, row in enumerate(new.split(1)):
        close(predicted(knn.attach(data, row))[-1], together[40 + number])


def test_new_rows_are_predicted_as_well_as_rows_of_the_graph(generator):
    y = torch.arange(600) % 3
    centres = 2 * torch.randn(3, 8, generator=generator)
    x = centres[y] + torch.randn(600, 8, generator=generator)
    knn = KNNGraph(10)

    def accuracy(rows, train, test):
        data = knn(Data(x=x[rows]))
        model = built(lambda: DiffusionGNN(8, 16, 3, conv="gcn"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(50):
            optimizer.zero_grad()
            out = model.train()(data.x, data.edge_index)
            cross_entropy(out[train], y[train]).backward()
            optimizer.step()
        if test[0] >= len(data.x):
            data = knn.attach(data, x[test])
        found = model.eval()(data.x, data.edge_index)[test].argmax(1)
        return float((found == y[test]).double().mean())

    train = torch.arange(60)
    test = torch.arange(400, 600)
    transductive = accuracy(torch.arange(600), train, test)
    inductive = accuracy(torch.arange(400), train, test)
    assert transductive > 0.9
    assert abs(inductive - transductive) <= 0.02


@pytest.mark.usefixtures("no_typecheck")
def test_rows_that_cannot_be_attached():
    knn = KNNGraph(2)
    data = knn(Data(x=torch.eye(5)))
    weighted = KNNGraph(2, weighted=True)(data)
    new = torch.ones(2, 5)
    refused = [
        (lambda: knn.attach(data.x, new), TypeError, "data must be a torch_geometric"),
        (
            lambda: knn.attach(data, new[:, :4]),
            ValueError,
            "x_new must have 5 channels",
        ),
        (lambda: knn.attach(data, new.long()), TypeError, "x_new must be floating"),
        (lambda: knn.attach(data, new / 0), ValueError, "x_new must be finite"),
        (
            lambda: knn.attach(Data(x=data.x), new),
            ValueError,
            "data must have the edges",
        ),
        (lambda: knn.attach(weighted, new), ValueError, "data must have the edges"),
        (lambda: KNNGraph(2, weighted=True).attach(data, new), ValueError, "data must"),
    ]
    for call, error, said in refused:
        with pytest.raises(error, match=said):
            call()
