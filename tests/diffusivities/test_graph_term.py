"""Attention beside the observed graph: the algebra, with and without edges."""

from __future__ import annotations

import pytest
import torch

from diffusion_mp import (
    AdjacencyDiffusivity,
    AdjacencyEnhancedDiffusivity,
    Diffusivity,
    Graph,
    GraphAugmentedDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
)
from diffusion_mp.testing import check_diffusivity

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRAPH = Graph(5, torch.tensor([[0, 1, 2, 3, 2], [1, 0, 1, 2, 3]]))  # node 4 is isolated
ATTENTION, TERM = SigmoidDiffusivity(heads=2), AdjacencyDiffusivity("row")


def dense(diffusivity: Diffusivity) -> torch.Tensor:
    return diffusivity(X, GRAPH).to_dense()


def test_it_is_the_algebra() -> None:
    augmented = [GraphAugmentedDiffusivity(ATTENTION, TERM, mix) for mix in ("sum", "mean")]
    torch.testing.assert_close(dense(augmented[0]), dense(ATTENTION + TERM))
    torch.testing.assert_close(dense(augmented[1]), dense(0.5 * ATTENTION + 0.5 * TERM))
    enhanced = AdjacencyEnhancedDiffusivity(ATTENTION, gamma=3.0)
    torch.testing.assert_close(dense(enhanced), dense(0.75 * ATTENTION + 0.25 * enhanced.graph_term))


def test_a_joint_normalisation_divides_both_by_their_common_row_sum() -> None:
    both, joint = dense(ATTENTION + TERM), GraphAugmentedDiffusivity(ATTENTION, TERM, "joint")
    torch.testing.assert_close(dense(joint), both / both.sum(2, keepdim=True))
    torch.testing.assert_close(dense(joint)[:, 4], dense(ATTENTION)[:, 4])
    assert joint(X, GRAPH).row_stochastic
    check_diffusivity(GraphAugmentedDiffusivity(SimpleDiffusivity(), AdjacencyDiffusivity("sum"), "joint"), channels=4)


@pytest.mark.parametrize("mix", ["sum", "mean", "joint"])
def test_without_edges_it_is_the_attention(mix: str) -> None:
    augmented = GraphAugmentedDiffusivity(ATTENTION, TERM, mix)  # type: ignore[arg-type]
    assert torch.equal(augmented(X).to_dense(), ATTENTION(X).to_dense())
    assert torch.equal(AdjacencyEnhancedDiffusivity(ATTENTION)(X).to_dense(), ATTENTION(X).to_dense())
