"""The table of public classes: one entry here, or in `model_cases` for a model, registers a class with all tests.

`test_laws.py` applies the laws to every entry and names the classes that are missing. Tests of precision, ranges,
export and transforms take their instances from here too.
"""

# ruff: noqa: F403, F405 (everything public)
import math
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from diffusion_mp import *
from diffusion_mp.couplings import *
from diffusion_mp.diffusivities import (
    EdgeSparseFlowDiffusivity,
    Positive,
    RelationalBias,
)
from diffusion_mp.energies import *
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.energies.matrix_terms import ACTIVATIONS
from diffusion_mp.layers import (
    CertifiedBlock,
    GPSBlock,
    Neighbours,
    RowAttention,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.layers.graph_layer import GraphLayer
from helpers import randn
from model_cases import MODELS

DOUBLE = torch.float64
PTR = torch.tensor([0, 4, 4, 5, 11])
MEMBER = torch.repeat_interleave(torch.arange(4), PTR.diff())
# With loops, repeated edges and isolated nodes.
EDGES = torch.tensor([[0, 1, 1, 2, 2, 0, 5, 6, 7, 5], [1, 0, 2, 2, 2, 3, 6, 5, 8, 7]])


def leaf(*shape: int, seed: int = 0, positive: bool = False) -> Tensor:
    values = randn(*shape, seed=seed)
    return (values.abs() + 0.1 if positive else values).requires_grad_()


def features(heads: int, *, positive: bool = False) -> list[Tensor]:
    return [leaf(11, heads, 3, seed=seed, positive=positive) for seed in (1, 2)]


def tied(score: str, normalize: bool) -> Coupling:
    query, key = distance_features(leaf(11, 2, 3))
    kind = "mutual" if normalize else "symmetric"
    return PairwiseCoupling(query, key, PTR, score, normalize=normalize, **{kind: True})  # type: ignore


def flow(
    heads: int = 2,
    *,
    ptr: Tensor | None = PTR,
    **options: Any,
) -> Coupling:
    query, key, *friction = (
        0.6 * leaf(11, heads, 3, seed=seed) for seed in (1, 2, 3, 4)
    )
    return SparseFlowCoupling(query, key, *friction, ptr, **{"lam": 0.05} | options)


def symmetric_low_rank() -> Coupling:
    query = leaf(11, 2, 3)
    return LowRankCoupling(query, query, PTR, positive_semidefinite=True)


def silent() -> Tensor:
    """Node 10 couples with nobody, not even with itself."""
    return (
        (leaf(11, 1, positive=True) * (torch.arange(11) < 10).unsqueeze(1))
        .detach()
        .requires_grad_()
    )


def mutual() -> Coupling:
    edges = torch.cat([EDGES, EDGES.flip(0)], dim=1)
    weight = torch.arange(1.0, 11.0, dtype=DOUBLE).repeat(2)
    return SparseCoupling(
        Graph(11, edges[:, edges.amax(0) < 10], weight, ptr=PTR), nonnegative=True
    )


def graph(weighted: bool = False) -> Graph:
    return Graph(11, EDGES, leaf(10, positive=True) if weighted else None, ptr=PTR)


def cauchy(z2: Tensor) -> Tensor:
    """Everybody's first idea of a decreasing function."""
    return 1 / (1 + z2)


undirected = partial(AdjacencyDiffusivity, direction="undirected")
COUPLINGS: dict[str, Callable[[], Coupling]] = {
    "distance": lambda: DistanceCoupling(cauchy, *features(2)),
    "distance-ragged": lambda: DistanceCoupling(
        cauchy, *2 * features(2)[:1], PTR, nonnegative=True, mutual=True
    ),
    "distance-row-normalized-ragged": lambda: row_normalized(
        DistanceCoupling(
            cauchy, *2 * features(2)[:1], PTR, nonnegative=True, mutual=True
        )
    ),
    "dense": lambda: DenseCoupling(leaf(11, 11)),
    "dense-heads-ragged": lambda: DenseCoupling(
        leaf(2, 11, 11) * (MEMBER[:, None] == MEMBER), PTR
    ),
    "dense-symmetric": lambda: DenseCoupling(
        leaf(11, 11, positive=True) + leaf(11, 11, positive=True).T
    ),
    "dense-row-stochastic": lambda: DenseCoupling(leaf(3, 11, 11).softmax(2)),
    "dense-no-node": lambda: DenseCoupling(torch.zeros(0, 0, dtype=DOUBLE)),
    "identity": lambda: IdentityCoupling(11, dtype=DOUBLE),
    "identity-no-node": lambda: IdentityCoupling(0, dtype=DOUBLE),
    "uniform": lambda: UniformCoupling(11, dtype=DOUBLE),
    "uniform-ragged": lambda: UniformCoupling(11, PTR, dtype=DOUBLE),
    "uniform-sum": lambda: UniformCoupling(11, PTR, normalize=False, dtype=DOUBLE),
    "uniform-sum-one-graph": lambda: UniformCoupling(11, normalize=False, dtype=DOUBLE),
    "sparse-ragged": lambda: SparseCoupling(graph(True)),
    "sparse-ones": lambda: SparseCoupling(
        Graph(11, EDGES), torch.ones(10, dtype=DOUBLE), nonnegative=True
    ),
    "sparse-no-edge": lambda: SparseCoupling(
        Graph(3, torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=DOUBLE)),
        symmetric=True,
    ),
    "sparse-heads-ragged": lambda: SparseCoupling(graph(), leaf(10, 2)),
    "sparse-symmetric": lambda: SparseCoupling(
        Graph(4, torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 3]])),
        torch.tensor([0.5, 0.5, 2, 2, 1], dtype=DOUBLE),
        symmetric=True,
        nonnegative=True,
    ),
    "sparse-row-stochastic": lambda: SparseCoupling(
        Graph(3, torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])),
        torch.tensor([1, 0.25, 1, 0.75], dtype=DOUBLE),
        row_stochastic=True,
        nonnegative=True,
    ),
    "low-rank": lambda: LowRankCoupling(*features(1)),
    "low-rank-heads": lambda: LowRankCoupling(*features(2)),
    "low-rank-ragged": lambda: LowRankCoupling(*features(2), PTR),
    "linear-attention": lambda: LinearAttentionCoupling(
        *features(2, positive=True), PTR, nonnegative=True
    ),
    "linear-attention-difformer": lambda: LinearAttentionCoupling(
        *features(2), PTR, constant=1.0, unit=True, nonnegative=True
    ),
    "linear-attention-sgformer": lambda: LinearAttentionCoupling(
        *features(2), PTR, own=1.0, unit=True
    ),
    "linear-attention-one-graph": lambda: LinearAttentionCoupling(
        *features(1), constant=2.0, own=0.5, unit=True
    ),
    "linear-attention-tied": lambda: LinearAttentionCoupling(
        *2 * features(2, positive=True)[:1],
        PTR,
        constant=0.5,
        own=0.25,
        nonnegative=True,
        mutual=True,
    ),
    "low-rank-symmetric": symmetric_low_rank,
    "low-rank-distance": lambda: LowRankCoupling(
        *distance_features(leaf(11, 2, 3)), PTR, symmetric=True
    ),
    "log-low-rank": lambda: LogLowRankCoupling(*features(1)),
    "log-low-rank-ragged": lambda: LogLowRankCoupling(*features(2), PTR),
    "log-low-rank-samples-ragged": lambda: LogLowRankCoupling(
        *features(2), PTR, leaf(11, 2, 4)
    ),
    "log-low-rank-unnormalized": lambda: LogLowRankCoupling(
        *features(2), PTR, leaf(11, 2, 2), normalize=False
    ),
    "log-low-rank-samples": lambda: LogLowRankCoupling(
        *features(2), None, leaf(11, 2, 4)
    ),
    "log-low-rank-transposed": lambda: (
        LogLowRankCoupling(*features(2), None, leaf(11, 2, 2), normalize=False).T
    ),
    "pairwise-exp": lambda: PairwiseCoupling(*features(2)),
    "pairwise-exp-ragged": lambda: PairwiseCoupling(*features(2), PTR),
    "pairwise-exp-unnormalized": lambda: PairwiseCoupling(
        *features(2), PTR, normalize=False
    ),
    "pairwise-sigmoid": lambda: PairwiseCoupling(*features(1), score="sigmoid"),
    "pairwise-sigmoid-ragged": lambda: PairwiseCoupling(
        *features(2), PTR, score="sigmoid"
    ),
    "pairwise-sigmoid-unnormalized": lambda: PairwiseCoupling(
        *features(2), PTR, score="sigmoid", normalize=False
    ),
    "pairwise-gaussian": lambda: tied("exp", True),
    "pairwise-gaussian-symmetric": lambda: tied("exp", False),
    "pairwise-distance-sigmoid": lambda: tied("sigmoid", False),
    "sparse-flow": lambda: flow(1, ptr=None),
    "sparse-flow-ragged": flow,
    "sparse-flow-finite-ragged": lambda: flow(alpha=0.1),
    "sparse-flow-constant-ragged": lambda: SparseFlowCoupling(
        *features(2), ptr=PTR, lam=0.3, alpha=1.0
    ),
    "sparse-flow-learnable-ragged": lambda: flow(
        lam=leaf(11, 1, positive=True), alpha=leaf(2, positive=True)
    ),
    "sparse-flow-softmax-ragged": lambda: flow(lam=0.0),
    "sparse-flow-zero-rows": lambda: flow(lam=50.0, alpha=1.0),
    "reweighted-ragged": lambda: ReweightedCoupling(
        LowRankCoupling(*features(2), PTR), leaf(11, 2), leaf(11, 1, seed=3)
    ),
    "reweighted-rows-of-one-head": lambda: ReweightedCoupling(
        LowRankCoupling(*features(1)), leaf(11, 3)
    ),
    "reweighted-rows": lambda: ReweightedCoupling(
        PairwiseCoupling(*features(1)), leaf(11, 3)
    ),
    "reweighted-columns-ragged": lambda: ReweightedCoupling(
        SparseCoupling(graph(True), nonnegative=True),
        None,
        leaf(11, 2, positive=True),
        nonnegative=True,
    ),
    "reweighted-symmetric": lambda: ReweightedCoupling(
        UniformCoupling(11, PTR, dtype=DOUBLE),
        *2 * [leaf(11, 2, positive=True)],
        symmetric=True,
        nonnegative=True,
    ),
    "row-normalized-ragged": lambda: row_normalized(
        LowRankCoupling(*features(2, positive=True), PTR, nonnegative=True)
    ),
    "row-normalized-symmetric-ragged": lambda: row_normalized(
        ReweightedCoupling(
            UniformCoupling(11, PTR, normalize=False, dtype=DOUBLE), *2 * [silent()]
        )
        * 0.5
        + 2.0 * mutual()
    ),
    "polynomial-reversible": lambda: PolynomialCoupling(
        row_normalized(mutual()), leaf(2)
    ),
    "row-normalized-sum": lambda: row_normalized(
        IdentityCoupling(11, dtype=DOUBLE)
        + 0.5 * LowRankCoupling(*features(2, positive=True), PTR)
    ),
    "symmetric-pairwise-ragged": lambda: symmetric_normalized(tied("sigmoid", False)),
    "symmetric-pairwise-off-diagonal-ragged": lambda: symmetric_normalized(
        tied("exp", False), diagonal=False
    ),
    "symmetric-sum-off-diagonal": lambda: symmetric_normalized(
        0.5 * tied("exp", False) + SparseCoupling(graph(True), nonnegative=True),
        diagonal=False,
    ),
    "off-diagonal-sparse-ragged": lambda: without_diagonal(
        SparseCoupling(graph(), leaf(10, 2))
    ),
    "pairwise-tied-unnormalized": lambda: PairwiseCoupling(
        *2 * [leaf(11, 2, 3) / 2], PTR, normalize=False, mutual=True
    ),
    "pairwise-tied-symmetric": lambda: PairwiseCoupling(
        *2 * features(2)[:1], PTR, normalize="symmetric", mutual=True
    ),
    "pairwise-tied-no-loops-ragged": lambda: PairwiseCoupling(
        *2 * features(2)[:1], PTR, loops=False, mutual=True
    ),
    "pairwise-no-loops-ragged": lambda: PairwiseCoupling(
        *features(2), PTR, loops=False
    ),
    "polynomial": lambda: PolynomialCoupling(
        SparseCoupling(graph(True), nonnegative=True), leaf(1)
    ),
    "polynomial-heads-ragged": lambda: PolynomialCoupling(
        SparseCoupling(graph(), leaf(10, 2)), leaf(3)
    ),
    "polynomial-by-head-ragged": lambda: PolynomialCoupling(
        SparseCoupling(graph(True), nonnegative=True),
        leaf(2, 3, positive=True),
        nonnegative=True,
    ),
    "polynomial-symmetric": lambda: PolynomialCoupling(
        symmetric_low_rank(), leaf(2, 2)
    ),
    **{
        f"neumann-{boundary}-ragged": partial(
            NeumannCoupling, 11, leaf(2, 2), (1, 3), boundary, PTR
        )
        for boundary in ("symmetric", "replicate", "drop", "periodic", "causal")
    },
    **{
        f"neumann-{boundary}": partial(
            NeumannCoupling, 11, leaf(3, 1, positive=True), (1, 2, 25), boundary
        )
        for boundary in ("symmetric", "replicate", "drop", "periodic", "causal")
    },
    "neumann-nonnegative": lambda: NeumannCoupling(
        11, leaf(1, 2, positive=True), nonnegative=True
    ),
    "neumann-replicate-one": lambda: NeumannCoupling(11, leaf(1, 2), (1,), "replicate"),
    "neumann-no-node": lambda: NeumannCoupling(0, leaf(1, 1)),
    "scaled": lambda: 0.5 * LowRankCoupling(*features(2), PTR),
    "scaled-negative": lambda: -2.0 * SparseCoupling(graph(True), nonnegative=True),
    "scaled-learnable": lambda: leaf() * PairwiseCoupling(*features(2), PTR),
    "scaled-by-head": lambda: leaf(2) * PairwiseCoupling(*features(2), PTR),
    "scaled-positive": lambda: ScaledCoupling(
        leaf(2, positive=True), tied("exp", False), nonnegative=True
    ),
    "simple-on-sphere-ragged": lambda: SimplePenalty().coupling(
        leaf(11, 2, 3), PTR, constraint=Sphere()
    ),
    "certified-ragged": lambda: (
        ScaledCoupling(
            leaf(positive=True),
            GaussianPenalty().coupling(leaf(11, 2, 3), PTR),
            nonnegative=True,
        )
        + 0.5 * SparseCoupling(graph(True).to_undirected(), nonnegative=True)
    ),
    "sum-of-halves": lambda: (
        0.5 * PairwiseCoupling(*features(2), PTR)
        + 0.5 * UniformCoupling(11, PTR, dtype=DOUBLE)
    ),
    "sum-with-graph": lambda: (
        0.5 * LowRankCoupling(*features(2), PTR) + 0.5 * SparseCoupling(graph(True))
    ),
    "sum-nested": lambda: (
        (IdentityCoupling(11, dtype=DOUBLE) + SparseCoupling(graph(), leaf(10, 2)))
        * 0.5
        + LowRankCoupling(*features(1))
    ),
}


# Options shared by the all-pair kinds; every value of every option occurs with every kind.
ALL_PAIR: dict[str, dict[str, Any]] = {
    "default": {},
    "heads": {"channels": 6, "heads": 2},
    "separate": {"channels": 4, "heads": 2, "projection": "separate"},
    "tied": {"channels": 4, "projection": "tied", "head_channels": 3},
    "tied-symmetric": {
        "channels": 4,
        "heads": 2,
        "projection": "tied",
        "row_stochastic": False,
    },
    "symmetric": {"row_stochastic": False},
    "energy": {"normalize": None, "measure": "distance"},
    "energy-symmetric": {
        "normalize": None,
        "measure": "distance",
        "heads": 2,
        "row_stochastic": False,
    },
    "distance-separate": {
        "channels": 4,
        "projection": "separate",
        "measure": "distance",
    },
    "frobenius": {"normalize": "frobenius"},
    "frobenius-separate": {
        "channels": 4,
        "heads": 2,
        "projection": "separate",
        "normalize": "frobenius",
    },
}
KINDS = {
    kind.__name__.removesuffix("Diffusivity").lower(): kind
    for kind in (
        SimpleDiffusivity,
        SigmoidDiffusivity,
        SoftmaxDiffusivity,
        GaussianDiffusivity,
    )
}
# Of these the quick run takes every kind with its defaults, and every option with one kind.
TAKEN = {f"{kind}-default" for kind in KINDS} | {
    f"{kind}-{name}" for kind, name in zip(cycle(KINDS), ALL_PAIR)
}
LEFT_OUT = {f"{kind}-{name}" for kind in KINDS for name in ALL_PAIR} - TAKEN
DIRECTIONS_AND_LOOPS = (
    ("directed", "keep"),
    ("undirected", "remaining"),
    ("pyg", "add"),
    ("directed", "remove"),
)
FROBENIUS = {
    "duplicated nodes": "the Frobenius norm grows with the number of nodes (ERRATA D1)"
}


class Tail(torch.nn.Module):
    """f = (1 + z²)^−a with a learned a > 0."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = Positive(1.0)

    def forward(self, z2: Tensor) -> Tensor:
        return (1 + z2) ** -self.exponent().to(z2.dtype)


class StateFriction(torch.nn.Module):
    """A friction of the user's own: the likeness of the states themselves."""

    def forward(self, x: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        return x.unsqueeze(1), x.unsqueeze(1)


DIFFUSIVITIES: dict[str, Callable[[], Diffusivity]] = {
    **{
        f"{kind}-{name}": partial(cls, **options)
        for kind, cls in KINDS.items()
        for name, options in ALL_PAIR.items()
    },
    "function": lambda: PenaltyDiffusivity(FunctionPenalty(cauchy)),
    "function-heads": lambda: PenaltyDiffusivity(
        FunctionPenalty(cauchy), 6, heads=2, normalize="row"
    ),
    "function-symmetric": lambda: PenaltyDiffusivity(
        FunctionPenalty(cauchy, torch.log1p), row_stochastic=False
    ),
    "function-learned": lambda: PenaltyDiffusivity(
        FunctionPenalty(Tail()), 4, projection="separate", normalize="row"
    ),
    "function-edges": lambda: EdgeDiffusivity(FunctionPenalty(cauchy)),
    "mixture": lambda: PenaltyDiffusivity(MixturePenalty()),
    "mixture-edges": lambda: EdgeDiffusivity(MixturePenalty([0.5, 2.0])),
    "mixture-heads": lambda: PenaltyDiffusivity(
        MixturePenalty([0.5, 2.0], [1.0, 0.1]), 6, heads=2, normalize="row"
    ),
    "mixture-symmetric": lambda: PenaltyDiffusivity(
        MixturePenalty((0.7,)), 4, projection="tied", row_stochastic=False
    ),
    "gaussian-bandwidth": lambda: GaussianDiffusivity(bandwidth=0.5),
    "kernelized": lambda: KernelizedSoftmaxDiffusivity(6),
    "kernelized-heads": lambda: KernelizedSoftmaxDiffusivity(
        6, heads=2, head_channels=3, num_features=5, logits="scaled_dot", num_samples=2
    ),
    "kernelized-state": lambda: KernelizedSoftmaxDiffusivity(
        6, heads=2, projection=None, num_features=40, tau=0.5
    ),
    "kernelized-tied": lambda: KernelizedSoftmaxDiffusivity(
        6, projection="tied", normalize="row", num_samples=0
    ),
    "kernelized-frobenius": lambda: KernelizedSoftmaxDiffusivity(
        6, normalize="frobenius", num_samples=0
    ),
    "kernelized-stabilized": lambda: KernelizedSoftmaxDiffusivity(
        6,
        heads=2,
        projection="tied",
        num_features=5,
        num_samples=0,
        stabilizer=1e-3,
        bias=True,
    ),
    "kernelized-edges": lambda: KernelizedSoftmaxDiffusivity(
        6, edge_regularization=0.5
    ),
    "identity": IdentityDiffusivity,
    "uniform": UniformDiffusivity,
    **{
        f"adjacency-{normalization}-{direction}-{loops}": partial(
            AdjacencyDiffusivity, normalization, direction=direction, self_loops=loops
        )
        for normalization in ("sym", "row", "sum")
        for direction, loops in DIRECTIONS_AND_LOOPS
    },
    "adjacency-count": lambda: AdjacencyDiffusivity(
        "sym", direction="pyg", degrees="count"
    ),
    "adjacency-count-row": lambda: AdjacencyDiffusivity(
        "row", self_loops="remaining", degrees="count"
    ),
    "gat": lambda: GATDiffusivity(6),
    "gat-edges": lambda: GATDiffusivity(6, 2, edge_dim=2),
    "gat-heads": lambda: GATDiffusivity(6, 3, negative_slope=0.1, self_loops="keep"),
    "gat-add": lambda: GATDiffusivity(6, 2, self_loops="add"),
    "gat-remove": lambda: GATDiffusivity(6, 2, self_loops="remove"),
    **{
        f"edge-{name}": partial(EdgeDiffusivity, name)
        for name in ("quadratic", "simple", "sigmoid", "gaussian")
    },
    "relational-bias": RelationalBias,
    "relational-bias-hops": lambda: RelationalBias(
        2, hops=3, normalization="row", self_loops="add"
    ),
    "relational-bias-undirected": lambda: RelationalBias(
        2, hops=2, normalization="sym", self_loops="remaining", direction="undirected"
    ),
    "relational-bias-pyg": lambda: RelationalBias(
        normalization="sym", self_loops="remove", direction="pyg"
    ),
    "relational-bias-reach": lambda: RelationalBias(
        2, hops=3, normalization="sym", powers="reach", gate=None
    ),
    "edge-softmax": lambda: EdgeDiffusivity(SoftmaxPenalty(6)),
    "edge-symmetric": lambda: EdgeDiffusivity(
        "sigmoid", row_stochastic=False, self_loops="remaining"
    ),
    "sgformer": lambda: SGFormerDiffusivity(6),
    "sgformer-heads": lambda: SGFormerDiffusivity(6, heads=2, head_channels=3),
    "sgformer-tied": lambda: SGFormerDiffusivity(6, heads=3, projection="tied"),
    "sgformer-no-projection": lambda: SGFormerDiffusivity(heads=2, projection=None),
    "sgformer-frobenius": lambda: SGFormerDiffusivity(
        6, heads=2, normalize="frobenius"
    ),
    "sparse-flow": lambda: SparseFlowDiffusivity(6),
    "sparse-flow-conserved": lambda: SparseFlowDiffusivity(
        6, heads=2, head_channels=3, alpha=math.inf, lam=3.0
    ),
    "sparse-flow-batch-max": lambda: SparseFlowDiffusivity(
        6, heads=2, projection="tied", lam_scale="batch_max"
    ),
    "sparse-flow-constant": lambda: SparseFlowDiffusivity(
        6, friction="constant", normalize="row", alpha=1.0
    ),
    "sparse-flow-state": lambda: SparseFlowDiffusivity(
        6, heads=2, projection=None, alpha=math.inf
    ),
    "sparse-flow-frobenius": lambda: SparseFlowDiffusivity(
        6, normalize="frobenius", friction=StateFriction()
    ),
    "sparse-flow-softmax": lambda: SparseFlowDiffusivity(6, heads=2, lam=0.0),
    "edge-sparse-flow": lambda: EdgeSparseFlowDiffusivity(6),
    "edge-sparse-flow-conserved": lambda: EdgeSparseFlowDiffusivity(
        6, heads=2, head_channels=3, alpha=math.inf, lam=0.5, self_loops="keep"
    ),
    "edge-sparse-flow-hops": lambda: EdgeSparseFlowDiffusivity(
        6, heads=2, projection="tied", hops=2, self_loops="add"
    ),
    "edge-sparse-flow-remove": lambda: EdgeSparseFlowDiffusivity(
        6, projection=None, alpha=1.0, self_loops="remove"
    ),
    "edge-sparse-flow-constant": lambda: EdgeSparseFlowDiffusivity(
        6, normalize="row", friction="constant", hops=3
    ),
    "edge-sparse-flow-softmax": lambda: EdgeSparseFlowDiffusivity(
        6, heads=3, lam=0.0, friction=StateFriction()
    ),
    "neumann": NeumannDiffusivity,
    "neumann-heads": lambda: NeumannDiffusivity(
        2, strides=(1, 2, 4), alpha=0.2, budget=0.25
    ),
    "neumann-any-alpha": lambda: NeumannDiffusivity(
        strides=(1, 3), boundary="periodic", alpha=3.0, budget=None
    ),
    "neumann-drop": lambda: NeumannDiffusivity(strides=(3,), boundary="drop"),
    "neumann-replicate": lambda: NeumannDiffusivity(
        2, strides=(2, 3), boundary="replicate"
    ),
    "neumann-causal": lambda: NeumannDiffusivity(boundary="causal", budget=1.0),
    "symmetric-attention": lambda: SymmetricDiffusivity(
        SimpleDiffusivity(6, heads=2, row_stochastic=False)
    ),
    "symmetric-off-diagonal": lambda: SymmetricDiffusivity(
        GaussianDiffusivity(row_stochastic=False), diagonal=False
    ),
    "symmetric-graph": lambda: SymmetricDiffusivity(undirected("sum")),
    "symmetric-sum": lambda: SymmetricDiffusivity(
        SigmoidDiffusivity(row_stochastic=False) + undirected("sum"), diagonal=False
    ),
    "simple-in-ball": lambda: SimpleDiffusivity(
        normalize=None, measure="distance", row_stochastic=False, constraint=Ball(100.0)
    ),
    "scaled": lambda: 0.5 * SigmoidDiffusivity(),
    "scaled-positive": lambda: (
        Positive(2.0) * SimpleDiffusivity(heads=2, row_stochastic=False)
    ),
    "scaled-learnable": lambda: (
        torch.nn.Parameter(torch.tensor(0.5, dtype=DOUBLE)) * SimpleDiffusivity()
    ),
    "scaled-by-head": lambda: torch.tensor([0.5, 2.0]) * SimpleDiffusivity(heads=2),
    "augmented-sum": lambda: GraphAugmentedDiffusivity(
        SigmoidDiffusivity(heads=2), AdjacencyDiffusivity("sym")
    ),
    "enhanced": lambda: AdjacencyEnhancedDiffusivity(
        SparseFlowDiffusivity(6, heads=2), gamma=0.5
    ),
    "enhanced-softmax": lambda: AdjacencyEnhancedDiffusivity(
        SoftmaxDiffusivity(6, projection="tied"), self_loops="add"
    ),
    "augmented-mean": lambda: GraphAugmentedDiffusivity(
        SimpleDiffusivity(), AdjacencyDiffusivity("row"), 0.5
    ),
    "augmented-weight": lambda: GraphAugmentedDiffusivity(
        SimpleDiffusivity(6, projection="separate", bias=True),
        AdjacencyDiffusivity("sym"),
        graph_weight=0.3,
    ),
    "equation-24": lambda: (
        0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym")
    ),
    "neumann-and-uniform": lambda: (
        0.5 * NeumannDiffusivity(2) + 0.5 * UniformDiffusivity()
    ),
    "three-terms": lambda: (
        SimpleDiffusivity(6, heads=2)
        + 0.5 * IdentityDiffusivity()
        + GATDiffusivity(6, 2)
    ),
}


def source(x: Tensor) -> dict[str, Tensor]:
    """A source as a function of the state, so that it is renamed and batched with it."""
    return {"source": 1 - x.cos()}


def mlp(channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(channels, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )


class AsConv(GraphLayer):
    """A layer for sequences, called as layers for graphs are."""

    def __init__(self, layer: PDEDiffusion1d) -> None:
        super().__init__()
        self.layer = layer
        self.in_channels = layer.in_channels

    def forward(
        self,
        x: Tensor,
        edge_index: Graph | None,
        edge_weight: None = None,
        batch: Any = None,
        **options: Any,
    ) -> Any:
        return self.layer(
            x, batch=batch if edge_index is None else edge_index.batch, **options
        )


def certified(constraint: str | None) -> DiffusionConv:
    attention = Positive(0.5) * GaussianDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    )
    graph_term = Positive(2.0) * undirected("sym")
    step = CertifiedStep(Positive(1.0), constraint=constraint)
    return DiffusionConv(
        4, 4, attention + graph_term, step, transform=False, bias=False
    )


SEQUENCES: dict[str, dict[str, Any]] = {
    "default": {},
    "heads": {
        "heads": 2,
        "per": "head",
        "strides": (1, 2, 4),
        "budget": 0.25,
        "norm": True,
    },
    "channels": {"per": "channel", "strides": (3, 5), "boundary": "drop", "alpha": 0.4},
    "replicate": {"strides": (1, 2), "boundary": "replicate"},
    "periodic": {
        "boundary": "periodic",
        "update": HeatKernel(2.0),
        "alpha": 3.0,
        "budget": None,
    },
    "causal": {"boundary": "causal", "strides": (1, 2), "heads": 2},
    "implicit": {"update": ImplicitEuler(2.0), "strides": (1, 4)},
    "trapezoidal": {
        "update": CrankNicolson(1.0),
        "per": "channel",
        "alpha": 2.0,
        "budget": None,
    },
    "equilibrium": {"update": Equilibrium(leak=0.5), "per": "head", "heads": 2},
}

Layer = Callable[[], torch.nn.Module]
# how to build it, or that and options of check_layer
CALLED: dict[str, Layer | tuple[Layer, dict[str, Any]]] = {
    "generic": lambda: DiffusionConv(4, 3, SimpleDiffusivity()),
    "generic-no-edges": (
        lambda: DiffusionConv(4, 3, SigmoidDiffusivity()),
        {"edges": False},
    ),
    "generic-concat": lambda: DiffusionConv(
        4, 3, SimpleDiffusivity(heads=2), heads=2, concat=True
    ),
    "generic-mean-of-heads": lambda: DiffusionConv(
        4, 3, GaussianDiffusivity(heads=2), heads=2, bias=False
    ),
    "generic-shared-diffusivity": lambda: DiffusionConv(
        4, 3, UniformDiffusivity(), heads=3, concat=True
    ),
    "generic-shared-values": lambda: DiffusionConv(
        4, 3, SoftmaxDiffusivity(heads=2), concat=True
    ),
    "generic-no-transform": lambda: DiffusionConv(
        4, 4, SimpleDiffusivity(), transform=False, bias=False
    ),
    "generic-state-in-heads": lambda: DiffusionConv(
        4, 2, SimpleDiffusivity(heads=2), heads=2, transform=False, concat=True
    ),
    "generic-uniform-alone": lambda: DiffusionConv(
        4,
        4,
        UniformDiffusivity(),
        ExplicitEuler(1.0, "residual"),
        transform=False,
        bias=False,
    ),
    "generic-identity-alone": lambda: DiffusionConv(
        4,
        4,
        IdentityDiffusivity(),
        ExplicitEuler(1.0, "residual"),
        transform=False,
        bias=False,
    ),
    "generic-keep-state": lambda: DiffusionConv(
        4, 4, SimpleDiffusivity(), keep="state"
    ),
    "generic-reads-values": lambda: DiffusionConv(
        4, 3, SimpleDiffusivity(), reads="values"
    ),
    "generic-steps": lambda: DiffusionConv(4, 3, AdjacencyDiffusivity("row"), steps=3),
    "generic-dropout": lambda: DiffusionConv(4, 3, SimpleDiffusivity(), dropout=0.5),
    "generic-residual": lambda: DiffusionConv(
        4, 3, SimpleDiffusivity(), ExplicitEuler(0.3, "residual")
    ),
    "generic-source": (
        lambda: DiffusionConv(
            4, 4, SimpleDiffusivity(), ExplicitEuler(0.3, beta=1.0, leak=0.2)
        ),
        {"extra": source},
    ),
    "generic-default-source": lambda: DiffusionConv(
        4, 3, SimpleDiffusivity(), ExplicitEuler(0.3, beta=1.0)
    ),
    "generic-implicit": lambda: DiffusionConv(
        4, 3, undirected("sym"), ImplicitEuler(2.0)
    ),
    "generic-heat": lambda: DiffusionConv(4, 3, undirected("sym"), HeatKernel(1.0)),
    "generic-trapezoidal": lambda: DiffusionConv(
        4, 3, undirected("sym"), CrankNicolson(2.0)
    ),
    "generic-momentum": lambda: DiffusionConv(
        4,
        3,
        undirected("sym"),
        MomentumStep(0.4, 0.5, 6, "residual", beta=0.3, leak=0.2),
    ),
    "generic-positions": (
        lambda: DiffusionConv(
            4, 4, NeumannDiffusivity(), ExplicitEuler(1.0), transform=False, bias=False
        ),
        {"edges": False},
    ),
    "generic-equilibrium": lambda: DiffusionConv(
        4, 3, undirected("sym"), Equilibrium(leak=0.5)
    ),
    **{
        f"generic-certified-{constraint}": (
            partial(certified, constraint),
            {"extra": source},
        )
        for constraint in CONSTRAINTS
    },
    "difformer-conv": lambda: DIFFormerConv(4, 4),
    "difformer-conv-values": lambda: DIFFormerConv(
        4, 4, transform=True, keep="values", bias=True
    ),
    "difformer-conv-reads-values": lambda: DIFFormerConv(
        4, 3, 2, reads="values", projection="separate"
    ),
    "difformer-conv-no-edges": (lambda: DIFFormerConv(4, 4), {"edges": False}),
    "difformer-conv-separate": lambda: DIFFormerConv(
        4, 4, 2, projection="separate", graph="mean", keep="state", bias=False
    ),
    "difformer-conv-tied": lambda: DIFFormerConv(
        4, 4, 2, kernel="sigmoid", projection="tied", graph=None
    ),
    "difformer-conv-frobenius": lambda: DIFFormerConv(
        4, 4, kernel="simple", projection="separate", normalize="frobenius"
    ),
    "difformer-conv-softmax": lambda: DIFFormerConv(
        4, 4, kernel="softmax", self_loops="keep", tau=0.2
    ),
    "difformer-conv-gaussian": lambda: DIFFormerConv(
        4, 4, kernel="gaussian", normalize=None, transform=False
    ),
    "difformer-conv-source": (
        lambda: DIFFormerConv(4, 4, beta=0.5, leak=0.1),
        {"extra": source},
    ),
    "difformer-conv-released": lambda: DIFFormerConv(
        4,
        4,
        2,
        projection="separate",
        transform=True,
        qkv_bias=True,
        graph_weight=0.3,
        direction="pyg",
        degrees="count",
    ),
    "sgformer-conv": lambda: SGFormerConv(4, 4),
    "sgformer-conv-no-edges": (lambda: SGFormerConv(4, 4, beta=1.0), {"edges": False}),
    "sgformer-conv-reads-values": lambda: SGFormerConv(4, 4, 2, reads="values"),
    "sgformer-conv-source": (
        lambda: SGFormerConv(4, 4, 3, beta=0.3, dropout=0.5, bias=True),
        {"extra": source},
    ),
    "sgformer-conv-concat": lambda: SGFormerConv(
        4, 2, 2, projection="tied", concat=True
    ),
    "sgformer-conv-no-transform": lambda: SGFormerConv(
        4, 4, 2, projection=None, transform=False
    ),
    "sgformer-conv-frobenius": lambda: SGFormerConv(4, 4, 2, normalize="frobenius"),
    "multi-head": lambda: MultiHeadConv(
        4, 3, SoftmaxDiffusivity(heads=2), 2, head_channels=5, bias=False
    ),
    "multi-head-residual": lambda: MultiHeadConv(
        4, 4, GATDiffusivity(6, 3), 3, head_channels=2, residual=True, reads="values"
    ),
    "nodeformer-conv": lambda: NodeFormerConv(4, 3, 2),
    "nodeformer-conv-slides": lambda: NodeFormerConv(
        4, 3, 2, relational_bias="sum", hops=1, tau=0.25, logits="dot", num_samples=10
    ),
    "nodeformer-conv-no-edges": (lambda: NodeFormerConv(4, 3), {"edges": False}),
    "nodeformer-conv-normalized": lambda: NodeFormerConv(
        4, 3, 2, head_channels=5, relational_bias="sym", hops=2, logits="scaled_dot"
    ),
    "nodeformer-conv-row": lambda: NodeFormerConv(
        4, 4, relational_bias="row", normalize="row", num_samples=0
    ),
    "nodeformer-conv-no-bias": lambda: NodeFormerConv(
        4,
        2,
        2,
        relational_bias=None,
        projection=None,
        tau=1.0,
        num_features=7,
        bias=False,
    ),
    "nodeformer-conv-released": lambda: NodeFormerConv(
        4,
        3,
        2,
        relational_bias="sym",
        hops=2,
        powers="reach",
        gate=None,
        qkv_bias=True,
        stabilizer=1e-6,
    ),
    "sfi-conv": lambda: SFiConv(4, 4, 2),
    "sfi-conv-no-edges": (lambda: SFiConv(4, 4), {"edges": False}),
    "sfi-conv-conserved": lambda: SFiConv(
        4,
        6,
        3,
        head_channels=5,
        alpha=math.inf,
        lam=3.0,
        gamma=2.0,
        residual=False,
        bias=True,
    ),
    "sfi-conv-alone": lambda: SFiConv(
        4,
        4,
        2,
        adjacency=False,
        friction="constant",
        projection="tied",
        normalize="row",
    ),
    "sfi-conv-dense": lambda: SFiConv(
        4, 4, 2, lam=0.0, projection=None, self_loops="add", dropout=0.5
    ),
    "sfi-conv-published-scale": lambda: SFiConv(4, 4, lam_scale="batch_max"),
    "sfi-conv-hops": lambda: SFiConv(4, 4, 2, hops=2),
    "gated-gcn": lambda: GatedGCNConv(4),
    "gated-gcn-layer-norm": lambda: GatedGCNConv(
        4, norm="layer", residual=False, dropout=0.5
    ),
    "gated-gcn-no-norm": lambda: GatedGCNConv(4, norm=None, eps=0.1),
    "gps-block": lambda: GPSBlock(4, GatedGCNConv(4), SFiConv(4, 4, 2, residual=False)),
    "gps-block-no-edges": (
        lambda: GPSBlock(4, GatedGCNConv(4), SFiConv(4, 4, lam=0.0, residual=False)),
        {"edges": False},
    ),
    "gps-block-local": lambda: GPSBlock(4, GCNConv(4, 4), norm="layer", dropout=0.2),
    "gps-block-attention": lambda: GPSBlock(4, None, DIFFormerConv(4, 4), norm=None),
    **{
        f"pde-diffusion-{name}": (
            lambda options=options: AsConv(PDEDiffusion1d(4, **options)),
            {"edges": False},
        )
        for name, options in SEQUENCES.items()
    },
    "mlp": lambda: MLPConv(4, 3),
    "gcn": lambda: GCNConv(4, 3),
    "gcn-sums": lambda: GCNConv(4, 3, normalize=False),
    "gcn-keep": lambda: GCNConv(4, 3, self_loops="keep", bias=False),
    "sgc": lambda: SGConv(4, 3, K=3),
    "gin": lambda: GINConv(4, mlp(4), eps=0.2),
    "gin-learnable": lambda: GINConv(4, mlp(4), train_eps=True),
    "gat": lambda: GATConv(4, 3),
    "gat-concat": lambda: GATConv(4, 3, 2, negative_slope=0.1),
    "gat-mean": lambda: GATConv(4, 3, 2, concat=False, self_loops="add", bias=False),
    "gat-residual": lambda: GATConv(
        4, 3, 2, dropout=0.3, residual=True, value_dropout=0.2
    ),
    "appnp": lambda: APPNPConv(4, K=4, alpha=0.2),
    "appnp-all-pairs": lambda: APPNPConv(
        4, K=2, diffusivity=SoftmaxDiffusivity(4, heads=2)
    ),
    "appnp-limit": lambda: APPNPConv(
        4,
        K=None,
        diffusivity=SymmetricDiffusivity(GaussianDiffusivity(row_stochastic=False)),
    ),
    "gcnii": (lambda: GCNIIConv(4, 0.2, theta=0.5, layer=2), {"extra": source}),
    "gcnii-plain": lambda: GCNIIConv(4),
    "difformer-published": lambda: DIFFormer(
        4,
        6,
        3,
        heads=2,
        projection="separate",
        transform=True,
        activation="relu",
        dropout=0.2,
        tau=0.5,
        layer_norm=True,
    ),
    "certified-conv": lambda: CertifiedConv(4),
    "certified-conv-no-edges": (lambda: CertifiedConv(4, heads=2), {"edges": False}),
    "certified-conv-source": (
        lambda: CertifiedConv(
            4, penalty="gaussian", constraint="nonnegative", heads=2, projection="tied"
        ),
        {"extra": source},
    ),
    "certified-conv-sphere": (
        lambda: CertifiedConv(4, constraint="sphere", graph=undirected("sum")),
        {"extra": source},
    ),
    "certified-conv-no-attention": lambda: CertifiedConv(
        4, penalty=None, constraint=None
    ),
    "certified-conv-source-alone": lambda: CertifiedConv(
        4, penalty=None, constraint=None, graph=False, num_layers=None
    ),
    "certified-inputs": lambda: CertifiedDIFFormer(
        4,
        6,
        3,
        2,
        inputs=GaussianDiffusivity(row_stochastic=False),
        graph=False,
        encoder_layers=1,
    ),
    "certified-at-rest": lambda: CertifiedDIFFormer(
        4, 6, 3, None, penalty="gaussian", constraint="nonnegative", lam=0.1, mu=1.0
    ),
    "certified-block": lambda: CertifiedBlock(
        4, [WeightedGraph(4), RowAttention(4, 2), TiedMLP(4, 6)]
    ),
    "certified-block-sphere": lambda: CertifiedBlock(
        4, [WeightedGraph(4, gate=True)], 3, constraint="sphere"
    ),
    "certified-block-at-rest": lambda: CertifiedBlock(
        4, [WeightedGraph(4)], None, constraint=None
    ),
    "certified-block-diagonal": lambda: CertifiedBlock(
        4, [WeightedGraph(4, matrix="diagonal", symmetric=False)], 3
    ),
    # Without ReLU: rounding decides about its derivative at a row of zeros between rows of zeros.
    "certified-block-neighbours": lambda: CertifiedBlock(
        4, [Neighbours(4, penalty="sigmoid")], 3, constraint=None
    ),
    "certified-block-identity": lambda: CertifiedBlock(
        4, [WeightedGraph(4, matrix="identity", hops=2)], 3
    ),
    "certified-transformer": lambda: CertifiedTransformer(
        4, 6, 3, 2, attention="neighbours", mlp_channels=5, layer_norm=True, dropout=0.2
    ),
    "certified-transformer-directed": lambda: CertifiedTransformer(
        4,
        6,
        3,
        1,
        3,
        symmetric=False,
        hops=2,
        attention="all",
        heads=2,
        constraint="ball",
    ),
    "nodeformer-max": lambda: NodeFormer(
        4, 6, 3, jump="max", activation="elu", residual=False, dropout=0.2
    ),
    "gnn-gin": lambda: DiffusionGNN(4, 6, 3, conv="gin"),
    "gnn-jumps": lambda: DiffusionGNN(4, 6, 3, 2, norm="layer", act="elu", jk="cat"),
    "gnn-jumps-gat": lambda: DiffusionGNN(
        4, 6, 3, 2, conv="gat", heads=2, norm="batch", jk="max"
    ),
    "sgformer-pyg": lambda: SGFormer.like_pyg(4, 6, 3, qkv_bias=True),
    "sgformer-cat": lambda: SGFormer(
        4, 6, 3, trans_num_layers=2, aggregate="cat", dropout=0.2
    ),
    "gated-gcn-model": lambda: GatedGCN(4, 6, 3, 2),
    "gps-attention": lambda: GPS(
        4, 6, 3, 1, heads=2, local=False, norm="layer", attention={"hops": 1}
    ),
    "gnn-one-layer": lambda: DiffusionGNN(4, 6, 3, 1, conv="gat", dropout=0.0),
}
#: How to build each layer or model called as `layer(x, edge_index, edge_weight, batch)`, and options of `check_layer`.
LAYERS = {
    name: case if isinstance(case, tuple) else (case, {})
    for name, case in CALLED.items()
}
LAYERS |= {
    f"model-{name}": (case.build, {})
    for name, case in MODELS.items()
    if case.per_node
    and {"x"} <= set(case.names) <= {"x", "edge_index", "edge_weight", "batch"}
}
# With seed 0 the features of a node are all zero after some of the ten layers of GAT: with biases that start from
# zero it then stays at the kink of the ReLU, where finite differences are half a slope.
LAYERS["model-sgformer-options"][1]["seed"] = 1


# Of the states [NODES, 1, CHANNELS] on which terms of an energy are checked.
NODES = 9
CHANNELS = 5
RELATIONS = 3
HEADS = 2


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def term_graph(edges: int = 24) -> Graph:
    return Graph(NODES, torch.randint(NODES, (2, edges)), ptr=None)


def symmetric_weights(graph: Graph) -> SparseCoupling:
    """Without loops, whose cost is zero: where all other weights underflow, their rounding is all that is left."""
    edges = graph.edges[:, graph.edges[0] != graph.edges[1]]
    weight = torch.rand(edges.size(1), 1, dtype=DOUBLE)
    both = Graph(NODES, torch.cat([edges, edges.flip(0)], 1))
    return SparseCoupling(both, weight.repeat(2, 1), nonnegative=True)


def matrix_term(graph: Graph, **options: object) -> MatrixTerm:
    weight = random(graph.num_edges, RELATIONS)
    return MatrixTerm(
        SparseCoupling(graph, weight, symmetric=False),
        random(RELATIONS, CHANNELS, CHANNELS),
        **options,
    )


def one_matrix_term(graph: Graph) -> MatrixTerm:
    b = random(1, CHANNELS, CHANNELS)
    return MatrixTerm(symmetric_weights(graph), b + b.mT, symmetric=True)


def attention_term(graph: Graph, prior: bool = False) -> AttentionTerm:
    query = random(HEADS, 4, CHANNELS)
    key = random(HEADS, 4, CHANNELS)
    weight = SparseCoupling(graph, torch.rand(graph.num_edges, dtype=DOUBLE))
    return AttentionTerm(query, key, 0.7, weight if prior else None)


def mlp_term(activation: str) -> MLPTerm:
    return MLPTerm(random(7, CHANNELS), random(7), activation)


TERMS: dict[str, Callable[[Graph], EnergyTerm]] = {
    "source": lambda graph: SourceTerm(
        random(NODES, CHANNELS), torch.rand(NODES, dtype=DOUBLE)
    ),
    "graph": lambda graph: CouplingTerm(symmetric_weights(graph)),
    "pairs": lambda graph: PairTerm(
        get_penalty("gaussian"), random(2, 3, CHANNELS), mean=True
    ),
    "matrices": matrix_term,
    "two hops": lambda graph: matrix_term(graph, hops=2),
    "one symmetric matrix": one_matrix_term,
    "diagonals": lambda graph: MatrixTerm(
        SparseCoupling(graph, random(graph.num_edges, RELATIONS)),
        random(RELATIONS, CHANNELS),
    ),
    "identities": lambda graph: MatrixTerm(
        SparseCoupling(graph, random(graph.num_edges, RELATIONS)), None
    ),
    "attention": attention_term,
    "attention to neighbours": lambda graph: attention_term(graph, prior=True),
    **{f"MLP, {name}": lambda graph, name=name: mlp_term(name) for name in ACTIVATIONS},
    "twice attention": lambda graph: 2.0 * attention_term(graph),
    "linear": lambda graph: LinearTerm(random(NODES, CHANNELS)),
    "edges": lambda graph: EdgeTerm(get_penalty("sigmoid"), symmetric_weights(graph)),
}
