"""One list of everything with laws to obey: a new class or option is tested by being listed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion_mp import couplings, diffusivities
from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    SparseCoupling,
    UniformCoupling,
    distance_features,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    EdgeDiffusivity,
    GATDiffusivity,
    GaussianDiffusivity,
    IdentityDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.energies import SoftmaxPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.testing import check_coupling, check_diffusivity

PTR = torch.tensor([0, 4, 4, 5, 11])
EDGES = torch.tensor([[0, 1, 1, 2, 2, 0, 5, 6, 7, 5], [1, 0, 2, 2, 2, 3, 6, 5, 8, 7]])  # loops, repeats, isolated nodes


def leaf(*shape: int, seed: int = 0, positive: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return (values.abs() + 0.1 if positive else values).requires_grad_()


def features(heads: int, *, positive: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return tuple(leaf(11, heads, 3, seed=seed, positive=positive, dtype=dtype) for seed in (1, 2))  # type: ignore


def tied(score: str, normalize: bool) -> Coupling:
    query, key = distance_features(leaf(11, 2, 3))
    return PairwiseCoupling(query, key, PTR, score, normalize=normalize, symmetric=not normalize)  # type: ignore


def symmetric_low_rank() -> Coupling:
    query = leaf(11, 2, 3)
    return LowRankCoupling(query, query, PTR, symmetric=True)


def graph(weighted: bool = False) -> Graph:
    return Graph(11, EDGES, leaf(10, positive=True) if weighted else None, ptr=PTR)


COUPLINGS: dict[str, Callable[[], Coupling]] = {
    "identity": lambda: IdentityCoupling(11, dtype=torch.float64),
    "identity-no-node": lambda: IdentityCoupling(0, dtype=torch.float64),
    "uniform": lambda: UniformCoupling(11, dtype=torch.float64),
    "uniform-ragged": lambda: UniformCoupling(11, PTR, dtype=torch.float64),
    "uniform-sum": lambda: UniformCoupling(11, PTR, normalize=False, dtype=torch.float64),
    "uniform-float32": lambda: UniformCoupling(11, PTR, dtype=torch.float32),
    "sparse-ragged": lambda: SparseCoupling(graph(True)),
    "sparse-ones": lambda: SparseCoupling(Graph(11, EDGES), torch.ones(10, dtype=torch.float64), nonnegative=True),
    "sparse-no-edge": lambda: SparseCoupling(
        Graph(3, torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)), symmetric=True
    ),
    "sparse-heads-ragged": lambda: SparseCoupling(graph(), leaf(10, 2)),
    "sparse-symmetric": lambda: SparseCoupling(
        Graph(4, torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 3]])),
        torch.tensor([0.5, 0.5, 2, 2, 1], dtype=torch.float64),
        symmetric=True,
        nonnegative=True,
    ),
    "sparse-row-stochastic": lambda: SparseCoupling(
        Graph(3, torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])),
        torch.tensor([1, 0.25, 1, 0.75], dtype=torch.float64),
        row_stochastic=True,
        nonnegative=True,
    ),
    "sparse-float32": lambda: SparseCoupling(graph(), leaf(10, 2, dtype=torch.float32)),
    "low-rank": lambda: LowRankCoupling(*features(1)),
    "low-rank-heads": lambda: LowRankCoupling(*features(2)),
    "low-rank-ragged": lambda: LowRankCoupling(*features(2), PTR),
    "low-rank-normalized": lambda: LowRankCoupling(*features(2, positive=True), PTR, normalize=True, nonnegative=True),
    "low-rank-symmetric": symmetric_low_rank,
    "low-rank-distance": lambda: LowRankCoupling(*distance_features(leaf(11, 2, 3)), PTR, symmetric=True),
    "low-rank-float32": lambda: LowRankCoupling(*features(2, dtype=torch.float32), PTR),
    "pairwise-exp": lambda: PairwiseCoupling(*features(2)),
    "pairwise-exp-ragged": lambda: PairwiseCoupling(*features(2), PTR),
    "pairwise-exp-unnormalized": lambda: PairwiseCoupling(*features(2), PTR, normalize=False),
    "pairwise-sigmoid": lambda: PairwiseCoupling(*features(1), score="sigmoid"),
    "pairwise-sigmoid-ragged": lambda: PairwiseCoupling(*features(2), PTR, score="sigmoid"),
    "pairwise-sigmoid-unnormalized": lambda: PairwiseCoupling(*features(2), PTR, score="sigmoid", normalize=False),
    "pairwise-gaussian": lambda: tied("exp", True),
    "pairwise-gaussian-symmetric": lambda: tied("exp", False),
    "pairwise-distance-sigmoid": lambda: tied("sigmoid", False),
    "pairwise-float32": lambda: PairwiseCoupling(*features(2, dtype=torch.float32), PTR),
    "scaled": lambda: 0.5 * LowRankCoupling(*features(2), PTR),
    "scaled-negative": lambda: -2.0 * SparseCoupling(graph(True), nonnegative=True),
    "scaled-learnable": lambda: leaf() * PairwiseCoupling(*features(2), PTR),
    "scaled-by-head": lambda: leaf(2) * PairwiseCoupling(*features(2), PTR),
    "sum-of-halves": lambda: 0.5 * PairwiseCoupling(*features(2), PTR)
    + 0.5 * UniformCoupling(11, PTR, dtype=torch.float64),
    "sum-with-graph": lambda: 0.5 * LowRankCoupling(*features(2), PTR) + 0.5 * SparseCoupling(graph(True)),
    "sum-nested": lambda: (IdentityCoupling(11, dtype=torch.float64) + SparseCoupling(graph(), leaf(10, 2))) * 0.5
    + LowRankCoupling(*features(1)),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings_obey_the_laws(name: str) -> None:
    check_coupling(COUPLINGS[name], ptr=PTR if "ragged" in name else None)


def listed_classes(builders: dict[str, Callable[[], object]]) -> set[type]:
    return {type(build()) for build in builders.values()}


def public_subclasses(package: ModuleType, base: type) -> set[type]:
    """The concrete classes that the package exports."""
    exported = [getattr(package, name) for name in package.__all__]
    classes = {value for value in exported if inspect.isclass(value) and issubclass(value, base)}
    return {value for value in classes if not inspect.isabstract(value)}


def test_every_public_coupling_is_listed() -> None:
    missing = public_subclasses(couplings, Coupling) - listed_classes(COUPLINGS)
    assert not missing, f"add these to COUPLINGS: {missing}"


# Options shared by the all-pair kinds; every value of every option occurs with every kind.
ALL_PAIR: dict[str, dict[str, Any]] = {
    "default": {},
    "heads": {"channels": 6, "heads": 2},
    "separate": {"channels": 4, "heads": 2, "projection": "separate"},
    "tied": {"channels": 4, "projection": "tied", "head_channels": 3},
    "tied-symmetric": {"channels": 4, "heads": 2, "projection": "tied", "row_stochastic": False},
    "symmetric": {"row_stochastic": False},
    "energy": {"normalize": None, "form": "distance"},
    "energy-symmetric": {"normalize": None, "form": "distance", "heads": 2, "row_stochastic": False},
    "distance-separate": {"channels": 4, "projection": "separate", "form": "distance"},
    "frobenius": {"normalize": "frobenius"},
    "frobenius-separate": {"channels": 4, "heads": 2, "projection": "separate", "normalize": "frobenius"},
}
KINDS = {
    "simple": SimpleDiffusivity,
    "sigmoid": SigmoidDiffusivity,
    "softmax": SoftmaxDiffusivity,
    "gaussian": GaussianDiffusivity,
}
DIRECTIONS_AND_LOOPS = (("directed", "keep"), ("undirected", "remaining"), ("pyg", "add"), ("directed", "remove"))
FROBENIUS = {"duplicated nodes": "the Frobenius norm grows with the number of nodes (ERRATA D1)"}


def learnable_half() -> Diffusivity:
    return torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) * SimpleDiffusivity()


DIFFUSIVITIES: dict[str, Callable[[], Diffusivity]] = {
    **{f"{kind}-{name}": partial(cls, **options) for kind, cls in KINDS.items() for name, options in ALL_PAIR.items()},
    "gaussian-bandwidth": lambda: GaussianDiffusivity(bandwidth=0.5),
    "identity": IdentityDiffusivity,
    "uniform": UniformDiffusivity,
    **{
        f"adjacency-{normalization}-{direction}-{loops}": partial(
            AdjacencyDiffusivity, normalization, direction=direction, self_loops=loops
        )
        for normalization in ("sym", "row", "sum")
        for direction, loops in DIRECTIONS_AND_LOOPS
    },
    "adjacency-error": lambda: AdjacencyDiffusivity("row", zero_degree="error"),
    "gat": lambda: GATDiffusivity(6),
    "gat-heads": lambda: GATDiffusivity(6, 3, negative_slope=0.1, self_loops="keep"),
    "gat-add": lambda: GATDiffusivity(6, 2, self_loops="add"),
    "gat-remove": lambda: GATDiffusivity(6, 2, self_loops="remove"),
    **{f"edge-{name}": partial(EdgeDiffusivity, name) for name in ("quadratic", "simple", "sigmoid", "gaussian")},
    "edge-softmax": lambda: EdgeDiffusivity(SoftmaxPenalty(6)),
    "edge-symmetric": lambda: EdgeDiffusivity("sigmoid", row_stochastic=False, self_loops="remaining"),
    "scaled": lambda: 0.5 * SigmoidDiffusivity(),
    "scaled-learnable": learnable_half,
    "scaled-by-head": lambda: torch.tensor([0.5, 2.0]) * SimpleDiffusivity(heads=2),
    "equation-24": lambda: 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"),
    "three-terms": lambda: SimpleDiffusivity(6, heads=2) + 0.5 * IdentityDiffusivity() + GATDiffusivity(6, 2),
}


@pytest.mark.parametrize("name", DIFFUSIVITIES)
def test_diffusivities_obey_the_laws(name: str) -> None:
    skip = dict(FROBENIUS) if "frobenius" in name else {}
    if name == "adjacency-error":
        skip = dict.fromkeys(("isolated nodes", "edge cases"), "a node of degree zero is refused, as asked")
    check_diffusivity(DIFFUSIVITIES[name], skip=skip)


def test_every_public_diffusivity_is_listed() -> None:
    missing = public_subclasses(diffusivities, Diffusivity) - listed_classes(DIFFUSIVITIES)
    assert not missing, f"add these to DIFFUSIVITIES: {missing}"
