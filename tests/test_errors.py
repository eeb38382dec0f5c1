"""Bad input is answered by a sentence: which argument, what came, what was expected, before any arithmetic."""

# ruff: noqa: F403, F405 (everything public)
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from diffusion_mp import *
from diffusion_mp.couplings import *
from diffusion_mp.diffusivities import RelationalBias, edge_loss
from diffusion_mp.errors import SingularSystemError
from diffusion_mp.updates import fixed_point
from helpers import refuses

pytestmark = pytest.mark.usefixtures(
    "no_typecheck"
)  # our own sentences, not the test run's shape checks

X = torch.rand(4, 3)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
V = torch.rand(4, 1, 3)
DATA = Data(x=X, edge_index=EDGES)


def conv(x: Tensor = X, edge_index: Any = EDGES, *rest: Any, **named: Any) -> Any:
    return GCNConv(3, 2)(x, edge_index, *rest, **named)


def ring() -> SparseCoupling:
    both = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
    return SparseCoupling(Graph(4, both), symmetric=True, nonnegative=True)


# What is called, and what the sentence of the error says.
VALUES: list[tuple[Any, ...]] = [
    # the state
    (lambda: conv(torch.rand(2, 4, 3)), r"x must have two dimensions.*\[2, 4, 3\]"),
    (lambda: conv(torch.rand(4, 5)), r"x must have 3 channels.*\[4, 5\]"),
    (
        lambda: MixturePenalty().total(X.to("meta")),
        r"x must be on the device of the parameters of MixturePenalty, cpu; it is on meta",
    ),
    (
        lambda: MixturePenalty().coupling(X.to("meta")),
        "x must be on the device of the parameters of Mix",
    ),
    (
        lambda: certify(SimpleDiffusivity(heads=2, measure="distance", normalize=None), X, 0.5),
        r"x must have channels that 2 heads divide; got .*\[4, 3\]",
    ),
    (
        lambda: Energy("simple", source=X).surrogate(X, None, X[:3]),
        r"at must have the shape \[4, 3\]",
    ),
    (lambda: FunctionPenalty(torch.exp, domain=(0, "a")), "domain must be .*; got"),
    (
        lambda: DenseCoupling(torch.eye(4, device="meta")).symmetric,
        "matrix must have values; got .*meta",
    ),
    (lambda: ring().to("meta").to("cpu"), "device must be meta, .* no values to move"),
    (
        lambda: ring() + IdentityCoupling(4, device="meta"),
        "must couple nodes on one device; got cpu and m",
    ),
    (
        lambda: torch.ones((), device="meta") * ring(),
        "scale must be on the device of the coupling, cpu",
    ),
    (lambda: ring().to("meta").at(EDGES.to("meta")), "edge_index must have values"),
    (
        lambda: DFiFormer(3, 4, 2, edge_dim=[5])(X, EDGES, edge_attr=EDGES[0].to("meta")),
        "edge_attr .*cpu",
    ),
    # the edges
    (lambda: conv(X, EDGES.T), r"edge_index must be \[2, num_edges\].*transposed"),
    (lambda: conv(X, EDGES + 1), r"edge_index must lie in \[0, 3\].*from 1 to 4"),
    (lambda: conv(X[:0], EDGES), r"edge_index must lie in.*0 nodes"),
    (lambda: conv(X, None), r"AdjacencyDiffusivity works on observed edges"),
    (lambda: conv(X, Graph(5, EDGES)), r"x has 4 rows, but the graph has 5 nodes"),
    (
        lambda: Graph.from_sparse(torch.ones(2, 3).to_sparse_csr()),
        r"adjacency must be square.*\[2, 3\]",
    ),
    (lambda: Graph.from_data(Data()), r"data has no num_nodes"),
    # the weights
    (lambda: conv(X, EDGES, torch.ones(3, 2)), r"edge_weight.*edge_attr"),
    (
        lambda: conv(X, EDGES, torch.tensor([1.0, -0.5, 1.0])),
        r"edge_weight must be non-negative.*-0\.5",
    ),
    (
        lambda: conv(X, EDGES, torch.full((3,), 3e38)),
        r"edge_weight must add up to degrees of at most 5\.2e\+33, .*float32.*; the largest is 3e\+38\. D",
    ),
    (lambda: conv(X, None, torch.ones(3)), r"edge_weight needs edge_index"),
    (
        lambda: conv(X, Graph(4, EDGES), torch.ones(3)),
        r"edge_index is a Graph, which holds its weights",
    ),
    (
        lambda: conv(X, torch.eye(4).to_sparse_csr(), torch.ones(4)),
        r"a sparse adjacency holds its own weights",
    ),
    (
        lambda: conv(X[:0], EDGES, [0.5] * 0),
        r"edge_weight must be one-dimensional with one entry per edge \(3\); got a float32 tensor .*\[0\]",
    ),
    # the batch
    (lambda: conv(X, EDGES, None, torch.tensor([0, 1, 0, 1])), r"batch must be sorted.*argsort"),
    (
        lambda: conv(X, EDGES, None, torch.zeros(3).long()),
        r"batch must be \[num_nodes\] = \[4\].*\[3\]",
    ),
    (lambda: conv(X, EDGES, None, torch.tensor([-1, 0, 0, 0])), r"batch.*>= 0; got -1"),
    (
        lambda: conv(X, EDGES, None, torch.tensor([0, 0, 1, 1])),
        r"edge_index joins nodes of different graphs.*1 edges",
    ),
    (lambda: Graph(4, ptr=torch.tensor([0, 3, 2, 4])), r"ptr must rise.*\[0, 3, 2, 4\]"),
    (lambda: Graph(4, ptr=torch.tensor([0.0, 4.0])), r"ptr must be a one-dimensional integer"),
    (
        lambda: Graph(4, batch=torch.zeros(4).long(), ptr=torch.tensor([0, 4])),
        r"batch and ptr say the same thing",
    ),
    # options
    (lambda: DIFFormerConv(3, 3, kernel="linear"), r"kernel must be one of.*'linear'"),
    (
        lambda: PDETransformer([7], 8, 2, max_length=5, task="retrieve")(EDGES, other=EDGES + 7),
        r"column 0 of other must lie in 0\.\.6",
    ),
    (lambda: SimpleDiffusivity(5, heads=2), r"heads must divide.*2 heads, 5"),
    (lambda: SimpleDiffusivity(heads=2)(X), r"heads must divide.*2 heads, 3"),
    (lambda: GATDiffusivity(5, 2), r"heads must divide channels"),
    (
        lambda: DiffusionConv(6, 6, SimpleDiffusivity(heads=2), heads=3),
        r"heads must be 1 or the diffusivity's 2; got 3",
    ),
    (
        lambda: SimpleDiffusivity(projection="separate"),
        r"channels must be given for projection='separate'",
    ),
    (
        lambda: SGFormerDiffusivity(3, normalize=None),
        r"normalize must be 'row' or 'frobenius'; got None\. Row sums",
    ),
    (lambda: SGFormer(3, 4, 2, beta=1.5), r"beta must lie in \(0, 1\].*got 1\.5"),
    (lambda: SGFormerConv(3, 5), r"in_channels must equal the output's"),
    (lambda: DIFFormer(3, 4, 2, tau=0.0), r"tau must be finite and > 0; got 0"),
    (
        lambda: DiffusionConv(3, 3, SimpleDiffusivity(), validate=True)(
            torch.full((4, 3), float("nan"))
        ),
        r"x must be finite; 12 of its 12 entries",
    ),
    (lambda: DIFFormer(3, 4, 2, dropout=1.0), r"dropout must be a probability.*1\.0"),
    (lambda: GCNIIConv(3, theta=0.5), r"theta and layer go together"),
    (lambda: DIFFormer(3, 4, 2, num_layers=0), r"num_layers must be at least 1; got 0"),
    (
        lambda: DiffusionConv(3, 2, SimpleDiffusivity(), keep="state"),
        r"keep='state' adds x to the output, so in_channels must equal",
    ),
    (
        lambda: DiffusionConv(3, 2, SimpleDiffusivity(), transform=False),
        r"transform=False propagates x itself",
    ),
    (
        lambda: AdjacencyDiffusivity("row", zero_degree="error")(X, Graph(4, EDGES)),
        r"1 nodes? of the graph ha.*degree zero",
    ),
    # couplings
    (
        lambda: PolynomialCoupling(ring(), torch.rand(0)),
        r"coefficients must be \[degree\] or \[degree, heads\] with a degree of at least 1.*\[0\]",
    ),
    (
        lambda: PolynomialCoupling(
            SparseCoupling(Graph(4, EDGES), torch.rand(3, 2)), torch.rand(2, 3)
        ),
        r"coefficients must be .* one head or those of the coupling, which has 2; got .*\[2, 3\]",
    ),
    (
        lambda: RelationalBias()(X),
        r"RelationalBias works on observed edges; got a graph without any",
    ),
    (
        lambda: edge_loss(ring(), Graph(4)),
        r"edge_loss compares the coupling with observed edges; got a graph without edge_index\. Pass one",
    ),
    (
        lambda: edge_loss(ring(), Graph(5, EDGES)),
        r"coupling and graph must have the same nodes; got 4 and 5",
    ),
    (
        lambda: LowRankCoupling(torch.rand(4, 2, 3), torch.rand(4, 2, 3)) @ X,
        r"v must have three dimensions.*unsqueeze\(1\)",
    ),
    (lambda: IdentityCoupling(5) @ X, r"v must have 5 rows"),
    (
        lambda: LowRankCoupling(torch.rand(4, 2, 3), torch.rand(4, 2, 3)) @ torch.rand(4, 3, 3),
        r"v must have 2 heads",
    ),
    (lambda: LowRankCoupling(V, V[..., :2]), r"query and key must both"),
    (lambda: SparseCoupling(Graph(4, EDGES), torch.ones(5)), r"weight must be.*3 edges"),
    (lambda: IdentityCoupling(4).as_linear_operator(1), r"head must lie in \[0, 0\]"),
    # what an update or a theorem needs of a coupling
    (
        lambda: fixed_point(lambda z: torch.cat([z, z]), X),
        r"step\(z\) must be like z, a float32 tensor of shape \[4, 3\]; got .*\[8, 3\]",
    ),
    # kinds, dtypes and devices, the same sentences everywhere
    (
        lambda: IdentityCoupling(4) @ V.to("meta"),
        r"v must be on the device of the coupling, cpu; it is on meta",
    ),
    (lambda: Graph(4, EDGES.to("meta")).within(2), r"edge_index must have values"),
    (lambda: Graph(4, EDGES.to("meta")).is_symmetric, r"edge_index must have values"),
    (
        lambda: PenaltyDiffusivity(MixturePenalty())(X.to("meta")),
        r"x must be on the device of the parameters of PenaltyDiffusivity",
    ),
    (lambda: LowRankCoupling(V, V.to("meta")), r"key must be on the device"),
    (
        lambda: conv(X, EDGES, None, torch.tensor([0, 0, 0, 10**8])),
        r"batch must number the graphs of 4 nodes; it reaches 100000000.*torch\.unique",
    ),
    (
        lambda: ring().at(torch.tensor([[4], [0]])),
        r"edge_index must lie in \[0, 3\] for 4 nodes; it reaches from 0 to 4",
    ),
    (lambda: IdentityCoupling(3).at(torch.tensor([[-1], [0]])), r"edge_index must lie in \[0, 2\]"),
    (lambda: SumCoupling([]), r"terms must hold a coupling at least"),
    (
        lambda: SFiFormer(3, 4, 2, task="link")(
            X, EDGES, edge_label_index=torch.tensor([[-1], [0]])
        ),
        r"edge_label_index must lie in \[0, 3\].*from -1 to 0",
    ),
    (
        lambda: GPS(3, 4, 2, pe_channels=2)(X, EDGES, pe=(X, X[:, :2])),
        r"pe must be what LaplacianEncoder reads: eigenvalues must have the shape",
    ),
    # labels
    (
        lambda: LabelPropagation()(torch.tensor([0, 1, 0, 1]), EDGES, mask=torch.ones(4).long()),
        r"mask must name every node once, .*mask\.bool\(\)",
    ),
    (lambda: Equilibrium()(V, ring(), source=V), SingularSystemError, r"leak"),
]
TYPES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: conv(X, EDGES.tolist()),
        r"edge_index must be a tensor .*Convert it with torch\.as_tensor\(edge_index\)",
    ),
    (lambda: conv(torch.ones(4, 3).long()), r"x must be floating point.*x\.float\(\)"),
    (lambda: conv(X, EDGES.float()), r"edge_index must hold integers.*\.long\(\)"),
    (
        lambda: conv(DATA),
        r"got Data.* x is the tensor data\.x, as in model\(data\.x, data\.edge_index\)",
    ),
    (
        lambda: PDETransformer(3, 4, 2, heads=2, max_length=4)(DATA),
        r"x must be .* got Data.* x is the tensor data\.x",
    ),
    (
        lambda: conv(X, DATA),
        r"edge_index must be .* got Data.* edge_index is the tensor data\.edge_index, as in",
    ),
    (
        lambda: conv(HeteroData({"a": {"x": X}})),
        r"got HeteroData\(.*Number all nodes .* data\.to_homogeneous\(\)",
    ),
    (lambda: Graph.from_sparse(torch.eye(4)), r"adjacency must be a sparse tensor"),
    (lambda: Graph.from_data({"x": X}), r"data must be a torch_geometric Data or Batch; got dict"),
    (
        lambda: DIFFormer(3, 4, np.int64(2)),
        r"out_channels must be an integer; .* Pass int\(out_channels\)",
    ),
    (lambda: diagnose(DIFFormer(3, 4, 2), X, EDGES), r"DIFFormerConv got .* and Graph.* and gave"),
    (lambda: DIFFormerConv(3, 3, graph_weight=True), r"graph_weight must be a number; got True"),
    (lambda: SimpleDiffusivity() + 1, r"only be added to a diffusivity; got 1"),
    (
        lambda: fixed_point(lambda z: "z", X),
        r"step\(z\) must be a tensor of the shape of z; got 'z'",
    ),
    (
        lambda: fixed_point(torch.cos, X, energy="E"),
        r"energy must be a function, of the state; got 'E'",
    ),
    (
        lambda: fixed_point(torch.cos, X, energy=lambda z: z),
        r"energy\(z\) must be one number; got .*\[4, 3\]",
    ),
    (
        lambda: conv(X.double()),
        r"x must be float32, as the parameters of GCNConv are; got a float64 tensor.*x\.to\(torch\.float32\)",
    ),
    (lambda: DIFFormer(3, 4, 2)(X.double()), r"x must be float32, as the parameters of DIFFormer"),
    (
        lambda: SimpleDiffusivity(3, projection="tied")(X.double()),
        r"x must be float32, as the parameters of SimpleDiffusivity",
    ),
    (lambda: conv(X.cfloat()), r"x must be floating point; got a complex64.*real part"),
    (lambda: conv(X.to_sparse()), r"x must be a dense tensor.*sparse_coo.*x\.to_dense"),
    (lambda: conv(X, "edges"), r"edge_index must be a tensor.*got 'edges' \(str\)"),
    (
        lambda: conv(X, EDGES, None, ["a"] * 4),
        r"batch must be a tensor.*np\.unique\(batch, return_inverse=True\)",
    ),
    (lambda: ring().at(EDGES.float()), r"edge_index must hold integers"),
    (
        lambda: PairwiseCoupling(V, V, normalize=np.ones(2)),
        "normalize must be True or False; got a float64",
    ),
    (lambda: LowRankCoupling(V, V.double()), r"must have one dtype"),
    (lambda: GCNConv(3, 2, bias="no"), r"bias must be True or False; got 'no'"),
    (
        lambda: GPS(3, 4, 2, pe_channels=2)(X, EDGES, pe=X.double()),
        r"pe must be what LaplacianEncoder reads: eigenvectors must be float32",
    ),
    (lambda: LabelPropagation()(torch.rand(4), EDGES), r"y must hold class labels"),
]

test_bad_values = refuses(*VALUES, error=ValueError)
test_bad_types = refuses(*TYPES, error=TypeError)


def test_what_is_not_an_error() -> None:
    layer = GCNConv(3, 2)
    assert layer(X, torch.zeros(2, 0, dtype=torch.long)).shape == (4, 2)
    as_tensors = layer(X, EDGES, torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0, 0, 0, 0]))
    for weight, batch in (
        ([1.0, 0.5, 2.0], [0, 0, 0, 0]),
        (np.array([1, 0.5, 2]), np.zeros(4, np.int32)),
    ):
        assert torch.equal(layer(X, EDGES, weight, batch), as_tensors)
    assert (
        ring().at([[0, 1], [1, 0]]).tolist() == ring().at(torch.tensor([[0, 1], [1, 0]])).tolist()
    )
    assert Graph(np.int64(4), ptr=[0, 1, 4]).num_graphs == 2
    edges = EdgeIndex(EDGES, sparse_size=(4, 4))
    assert type(Graph(4, edges).edge_index) is Tensor
    assert ring().at(edges).shape == (3, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_indices_do_not_overflow(dtype: torch.dtype) -> None:
    """Keys of pairs are source · N + target: beyond N = 46 340 they need more than 32 bits."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.uint8:
        nodes = 200
    elif dtype == torch.int16:
        nodes = 30_000
    else:
        nodes = 70_000
    edges = torch.randint(nodes, (2, 20_000), generator=generator)
    narrow = Graph(nodes, edges.to(dtype))
    wide = Graph(nodes, edges)
    assert torch.equal(narrow.within(1).edges, wide.within(1).edges)
    assert narrow.within(1).edges.min() >= 0
    assert torch.equal(SparseCoupling(narrow).at(edges.to(dtype)), SparseCoupling(wide).at(edges))
