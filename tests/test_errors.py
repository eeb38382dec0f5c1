"""Bad input is answered by a sentence about an argument, before any arithmetic; thirty sentences are given in full."""

# ruff: noqa: F403, F405 (everything public)
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from diffusion_mp import *
from diffusion_mp.checks import Count, checked
from diffusion_mp.couplings import *
from diffusion_mp.data import label_mask
from diffusion_mp.diagnostics import posterior_variance
from diffusion_mp.diffusivities import SumDiffusivity
from diffusion_mp.kernels.pairwise import pairwise_attention
from diffusion_mp.updates import fixed_point
from helpers import refuses

# Our own sentences, not the test run's shape checks.
pytestmark = pytest.mark.usefixtures("no_typecheck")

X = torch.rand(4, 3)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
V = torch.rand(4, 1, 3)
DATA = Data(x=X, edge_index=EDGES)
META = X.to("meta")
ROWS = torch.rand(4, 2, 3)


def conv(x: Any = X, edge_index: Any = EDGES, *rest: Any, **named: Any) -> Any:
    return GCNConv(3, 2)(x, edge_index, *rest, **named)


def weighted(weight: Any) -> Any:
    return conv(X, EDGES, weight)


def batched(batch: Any) -> Any:
    return conv(X, EDGES, None, batch)


def ring() -> SparseCoupling:
    both = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
    return SparseCoupling(Graph(4, both), symmetric=True, nonnegative=True)


#: Sentences that are compared as a whole, with those in `messages.json`.
GOLDEN: dict[str, Callable[[], Any]] = {
    "a padded batch": lambda: conv(torch.rand(2, 4, 3)),
    "other channels": lambda: conv(torch.rand(4, 5)),
    "whole numbers": lambda: conv(torch.ones(4, 3).long()),
    "another dtype": lambda: conv(X.double()),
    "another device": lambda: IdentityCoupling(4) @ V.to("meta"),
    "a sparse state": lambda: conv(X.to_sparse()),
    "Data for x": lambda: conv(DATA),
    "Data for edges": lambda: conv(X, DATA),
    "several kinds of nodes": lambda: conv(HeteroData({"a": {"x": X}})),
    "a pair of states": lambda: CertifiedConv(3)((X, X), EDGES),
    "transposed edges": lambda: conv(X, EDGES.T),
    "edges beyond the nodes": lambda: conv(X, EDGES + 1),
    "edges in a list": lambda: conv(X, EDGES.tolist()),
    "edges of fractions": lambda: conv(X, EDGES.float()),
    "no edges": lambda: conv(X, None),
    "a graph of other nodes": lambda: conv(X, Graph(5, EDGES)),
    "features as weights": lambda: weighted(torch.ones(3, 2)),
    "a negative weight": lambda: weighted(torch.tensor([1.0, -0.5, 1.0])),
    "a degree beyond range": lambda: weighted(torch.full((3,), 3e38)),
    "a mask as weights": lambda: weighted(torch.ones(3).bool()),
    "a batch as weights": lambda: weighted(torch.zeros(4).long()),
    "weights beside a graph": lambda: conv(X, Graph(4, EDGES), torch.ones(3)),
    "an unsorted batch": lambda: batched(torch.tensor([0, 1, 0, 1])),
    "edges between graphs": lambda: batched(torch.tensor([0, 0, 1, 1])),
    "words as a batch": lambda: batched(["a"] * 4),
    "a wrong option": lambda: DIFFormerConv(3, 3, kernel="linear"),
    "a number for a flag": lambda: GCNConv(3, 2, bias="no"),
    "a fraction for a count": lambda: DIFFormer(3, 4, 2.0),
    "values without heads": lambda: LowRankCoupling(ROWS, ROWS) @ X,
    "zeros and ones for a mask": lambda: LabelPropagation()(
        torch.tensor([0, 1, 0, 1]), EDGES, mask=torch.ones(4).long()
    ),
}
MESSAGES: dict[str, str] = json.loads(
    Path(__file__).with_name("messages.json").read_text("utf-8")
)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_sentence_in_full(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (its type is compared too)
        GOLDEN[name]()
    assert f"{caught.type.__name__}: {caught.value}" == MESSAGES[name]


test_bad_values = refuses(
    # the state
    (lambda: MixturePenalty().total(META), "x"),
    (
        lambda: certify(
            SimpleDiffusivity(heads=2, measure="distance", normalize=None), X, 0.5
        ),
        "x",
    ),
    (lambda: DenseCoupling(torch.eye(4, device="meta")).symmetric, "matrix"),
    (lambda: certify(CertifiedTransformer(-1, 4, 2)), "x must be given"),
    (lambda: pairwise_attention(V, V, V, score="cosine"), "score"),
    (lambda: ring().to("meta").to("cpu"), "device"),
    (lambda: ring() + IdentityCoupling(4, device="meta"), "device"),
    (lambda: torch.ones((), device="meta") * ring(), "scale"),
    (lambda: ring().to("meta").at(EDGES.to("meta")), "edge_index"),
    (
        lambda: DFiFormer(3, 4, 2, edge_dim=[5])(
            X, EDGES, edge_attr=EDGES[0].to("meta")
        ),
        "edge_attr",
    ),
    # the graph
    (lambda: Graph(4, EDGES.to("meta")).within(2), "edge_index"),
    (lambda: Graph.from_data(Data()), "data"),
    (lambda: conv(X, None, torch.ones(3)), "edge_weight"),
    (lambda: conv(X, torch.eye(4).to_sparse_csr(), torch.ones(4)), "edge_weight"),
    (lambda: Graph(4, batch=torch.zeros(4).long(), ptr=torch.tensor([0, 4])), "ptr"),
    # options
    (
        lambda: PDETransformer([7], 8, 2, max_length=5, task="retrieve")(
            EDGES, other=EDGES + 7
        ),
        "other",
    ),
    (lambda: SimpleDiffusivity(heads=2)(X), "heads"),
    (lambda: DiffusionConv(6, 6, SimpleDiffusivity(heads=2), heads=3), "heads"),
    (lambda: SimpleDiffusivity(projection="separate"), "channels"),
    (lambda: SGFormer(3, 4, 2, beta=1.5), "beta"),
    (lambda: SGFormerConv(3, 5), "in_channels"),
    (lambda: GCNIIConv(3, theta=0.5), "theta"),
    (lambda: DiffusionConv(3, 2, SimpleDiffusivity(), keep="state"), "in_channels"),
    (lambda: DiffusionConv(3, 2, SimpleDiffusivity(), transform=False), "in_channels"),
    # couplings
    (lambda: PolynomialCoupling(ring(), torch.rand(0)), "coefficients"),
    (
        lambda: PolynomialCoupling(
            SparseCoupling(Graph(4, EDGES), torch.rand(3, 2)), ROWS[0]
        ),
        "coefficients",
    ),
    (lambda: LowRankCoupling(ROWS, ROWS) @ torch.rand(4, 3, 3), "v"),
    (lambda: LowRankCoupling(V, V.to("meta")), "key"),
    (lambda: SparseCoupling(Graph(4, EDGES), torch.ones(5)), "weight"),
    (lambda: IdentityCoupling(4).as_linear_operator(1), "head"),
    (lambda: IdentityCoupling(4, device="meta").as_linear_operator(), "meta device"),
    (lambda: ring().at(torch.tensor([[4], [0]])), "edge_index"),
    (lambda: Equilibrium()(V, ring(), source=V), SingularSystemError, "leak"),
    # models
    (
        lambda: SFiFormer(3, 4, 2, task="link")(X, EDGES, edge_label_index=[[-1], [0]]),
        "edge_label_index",
    ),
    (lambda: GPS(3, 4, 2, pe_channels=2)(X, EDGES, pe=(X, X[:, :2])), "pe"),
    error=ValueError,
)
test_bad_types = refuses(
    (lambda: FunctionPenalty(torch.exp, domain=(0, "a")), "domain"),
    (lambda: SimpleDiffusivity(3, projection="tied")(X.double()), "x"),
    (lambda: Graph.from_sparse(torch.eye(4)), "adjacency"),
    (lambda: Graph.from_data({"x": X}), "data"),
    (lambda: diagnose(DIFFormer(3, 4, 2), X, EDGES), "DIFFormerConv"),
    (lambda: SumDiffusivity([SimpleDiffusivity(), 1.0]), "terms"),
    (lambda: LinearAttentionCoupling(V, V, constant="one"), "constant"),
    (lambda: DIFFormer(3, 4, 2)(X, EDGES, batch_size=2), "batch_size"),
    (lambda: DIFFormerConv(3, 3, graph_weight=True), "graph_weight"),
    (lambda: fixed_point(torch.cos, X, energy=lambda z: z), "energy"),
    (lambda: fixed_point(torch.cos, [0.5]), "x0"),
    (lambda: posterior_variance(torch.eye(3), 0.5), "coupling"),
    (lambda: PairwiseCoupling(V, V, normalize=np.ones(2)), "normalize"),
    (lambda: LowRankCoupling(V, V.double()), "dtype"),
    (lambda: GPS(3, 4, 2, pe_channels=2)(X, EDGES, pe=X.double()), "pe"),
    (lambda: LabelPropagation(2)(["b", "a", "b"], EDGES), "y"),
    (
        lambda: label_mask([torch.tensor([0, 1]), torch.tensor([1, 0])]),
        "y",
    ),
    (lambda: label_mask([[0], [1, 2]]), "y"),
    error=TypeError,
)


def test_a_word_for_return_coupling_is_refused():
    with pytest.raises(TypeError, match="return_coupling must be True or False"):
        conv(return_coupling="yes")


def test_values_of_a_starred_parameter_are_no_other_argument(no_typecheck):
    @checked
    def counted(*inputs: int, count: Count = 1) -> int:
        return count

    assert counted(0, -1) == 1
    with pytest.raises(ValueError, match="count must be"):
        counted(0, count=0)


def test_what_is_not_an_error():
    layer = GCNConv(3, 2)
    assert layer(X, torch.zeros(2, 0, dtype=torch.long)).shape == (4, 2)
    weight = [1.0, 0.5, 2.0]
    expected = layer(X, EDGES, torch.tensor(weight), torch.zeros(4).long())
    assert torch.equal(layer(X, EDGES, weight, [0] * 4), expected)
    arrays = (np.array(weight), np.zeros(4, np.int32))
    assert torch.equal(layer(X, EDGES, *arrays), expected)
    pairs = [[0, 1], [1, 0]]
    assert torch.equal(ring().at(pairs), ring().at(torch.tensor(pairs)))
    assert Graph(np.int64(4), ptr=[0, 1, 4]).num_graphs == 2
    edges = EdgeIndex(EDGES, sparse_size=(4, 4))
    assert type(Graph(4, edges).edge_index) is Tensor
    assert ring().at(edges).shape == (3, 1)


@pytest.mark.parametrize(
    ("dtype", "nodes"),
    [(torch.uint8, 200), (torch.int16, 30_000), (torch.int32, 70_000)],
)
def test_narrow_indices_do_not_overflow(dtype, nodes):
    """Keys of pairs are source · N + target: beyond N = 46 340 they need more than 32 bits."""
    edges = torch.randint(
        nodes, (2, 20_000), generator=torch.Generator().manual_seed(0)
    )
    narrow = Graph(nodes, edges.to(dtype))
    wide = Graph(nodes, edges)
    assert torch.equal(narrow.within(1).edges, wide.within(1).edges)
    assert torch.equal(
        SparseCoupling(narrow).at(edges.to(dtype)), SparseCoupling(wide).at(edges)
    )
