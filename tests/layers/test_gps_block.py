"""The GraphGPS block: its two branches, with and without edges."""

import pytest
import torch

from diffusion_mp.layers import GatedGCNConv, GCNConv, GPSBlock, MLPConv, SFiConv
from diffusion_mp.testing.laws import seeded
from helpers import built, randn, refuses

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 0]])


def build(local: bool = True, attention: bool = True, dropout: float = 0.0) -> GPSBlock:
    with seeded(0):
        first = GatedGCNConv(4) if local else None
        second = SFiConv(4, 4, 2, residual=False) if attention else None
        return GPSBlock(4, first, second, dropout=dropout).double().eval()


X, E = randn(5, 4, seed=1), randn(5, 4, seed=2)


def test_the_branches_meet_before_the_feed_forward_network() -> None:
    block = build()
    local, edges = block.local(X, EDGES, edge_attr=E)
    total = block.local_norm(local) + block.attention_norm(X + block.attention(X, EDGES))
    got, got_edges = block(X, EDGES, edge_attr=E)
    torch.testing.assert_close(got, block.norm(total + block.ffn(total)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_edges, edges, rtol=1e-10, atol=1e-10)
    total = block.attention_norm(X + block.attention(X))  # without edges the attention is alone
    torch.testing.assert_close(block(X), block.norm(total + block.ffn(total)), rtol=1e-10, atol=1e-10)


def test_either_branch_may_be_missing() -> None:
    local, attention = build(attention=False), build(local=False)
    total = local.local_norm(local.local(X, EDGES))
    torch.testing.assert_close(local(X, EDGES), local.norm(total + local.ffn(total)))
    _, edges, coupling = attention(X, EDGES, edge_attr=E, return_coupling=True)
    assert torch.equal(edges, E)
    assert coupling.heads == 2
    assert local(X, EDGES, return_coupling=True)[1].heads == 4


test_branches_that_do_not_fit_are_refused = refuses(
    (lambda: build(attention=False)(X), ValueError, "works on observed edges"),
    (lambda: GPSBlock(4), ValueError, "needs local or attention, or both; got neither"),
    (lambda: GPSBlock(4, GatedGCNConv(4), MLPConv(4, 3)), ValueError, "attention must map 4 channels to 4; got 4 to 3"),
    (lambda: GPSBlock(4, GatedGCNConv(3)), ValueError, "local must map 4 channels to 4; got 3 to 3"),
)


def test_a_layer_without_a_residual_of_its_own_gets_one() -> None:
    block = built(lambda: GPSBlock(4, GCNConv(4, 4), norm="layer")).double().eval()
    total = block.local_norm(X + block.local(X, EDGES))
    out, edges = block(X, EDGES, edge_attr=E)
    torch.testing.assert_close(out, block.norm(total + block.ffn(total)), rtol=1e-10, atol=1e-10)
    assert torch.equal(edges, E)


@pytest.mark.parametrize("attention", [True, False])
def test_dropout_acts_on_what_a_branch_adds(attention: bool) -> None:
    branch = MLPConv(4, 4)
    block = GPSBlock(4, *((None, branch) if attention else (branch, None)), norm=None, dropout=0.5).double()
    block.ffn = torch.nn.Identity()  # the output is twice the sum of the branches
    change = branch(X)
    with seeded(0):
        added = block(X, EDGES) / 2 - X
    kept = added != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(added[kept], 2 * change[kept])
