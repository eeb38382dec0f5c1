"""Faults that could once be put into the source without a test that failed: here each of them is noticed."""

import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp.couplings import IdentityCoupling, SumCoupling, UniformCoupling
from diffusion_mp.data import PartOf
from diffusion_mp.testing import check_coupling


@pytest.mark.parametrize(
    ("factors", "row_stochastic"),
    [((0.5, 0.5), True), ((1.5, -0.5), True), ((0.25, 0.25), False), ((1.0, 1.0), False), ((0.5,), False)],
)
def test_a_sum_counts_its_factors(factors: tuple[float, ...], row_stochastic: bool) -> None:
    """Multiples of couplings whose rows sum to one have rows that sum to the sum of the factors."""
    ptr = torch.tensor([0, 2, 5])

    def build() -> SumCoupling:
        kinds = [UniformCoupling(5, ptr, dtype=torch.float64), IdentityCoupling(5, dtype=torch.float64)]
        return SumCoupling([factor * kind for factor, kind in zip(factors, kinds, strict=False)])

    coupling = build()
    assert coupling.row_stochastic is row_stochastic
    torch.testing.assert_close(coupling.degree()[:, 0], torch.full((5,), sum(factors), dtype=torch.float64))
    check_coupling(build, ptr=ptr)


def test_kept_edges_are_those_that_arrive_at_the_parts_own_nodes() -> None:
    """Node 0 is the part's own; the edge that arrives at node 1, the first of its halo, is not counted."""
    edge_index = torch.tensor([[1, 2, 0], [0, 0, 1]])  # two edges arrive at node 0, one of them from outside the part
    part = Data(n_id=torch.tensor([0, 1]), batch_size=1, edge_index=torch.tensor([[1, 0], [0, 1]]), num_nodes=2)
    batch = PartOf(Data(edge_index=edge_index, num_nodes=3))(part)
    assert batch.kept_edges == 0.5
