"""What a part of a graph can not know, and what is no part of one, is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from diffusion_mp.diffusivities import AdjacencyDiffusivity, SimpleDiffusivity
from diffusion_mp.distributed import ShardedGraph
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.models import DIFFormer, NodeFormer
from diffusion_mp.updates import ImplicitEuler

EDGES, X = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.ones(4, 3)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process alone."""
    distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", world_size=1, rank=0)
    yield
    distributed.destroy_process_group()


def sharded(**options: Any) -> ShardedGraph:
    return ShardedGraph(EDGES, 4, **options)


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "bounds of other ranks": (lambda: sharded(bounds=[0, 2, 4]), ValueError, r"rise from 0 to num_nodes = 4"),
    "bounds of other nodes": (lambda: sharded(bounds=[0, 3]), ValueError, r"got \[0, 3\]"),
    "edges out of range": (lambda: ShardedGraph(EDGES + 1, 4), ValueError, r"edge_index must lie in \[0, 3\]"),
    "pairwise attention": (
        lambda: DIFFormer(3, 4, 2, kernel="sigmoid")(X, sharded()),
        TypeError,
        "PairwiseCoupling can not be taken over several ranks.*Use DIFFormer-s",
    ),
    "undirected": (
        lambda: AdjacencyDiffusivity(direction="undirected")(X, sharded()),
        ValueError,
        "Make the graph undirected .* before it is sharded",
    ),
    "transpose": (
        lambda: AdjacencyDiffusivity()(X, sharded()).T,
        NotImplementedError,
        "transpose of a coupling over several ranks is not available",
    ),
    "diagonal": (lambda: SimpleDiffusivity()(X, sharded()).diagonal(), NotImplementedError, "entries of a coupling"),
    "solver": (lambda: ImplicitEuler(1.0)(X, AdjacencyDiffusivity()(X, sharded())), CouplingMismatchError, "all rows"),
    "entries": (
        lambda: NodeFormer(3, 4, 2)(X, sharded(), return_coupling=True)[1][0].at(EDGES),
        NotImplementedError,
        "Export attention in one process",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("group", "no_typecheck")
def test_what_a_rank_can_not_do_is_refused(case: str) -> None:
    call, kind, sentence = CASES[case]
    with pytest.raises(kind, match=sentence):
        call()


def test_without_ranks_there_are_no_parts() -> None:
    with pytest.raises(ValueError, match=r"there are no ranks yet. Call torch.distributed.init_process_group first"):
        sharded()
