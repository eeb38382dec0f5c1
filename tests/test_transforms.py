"""What torch wraps around layers beside its transforms, which are in test_transform_matrix.py."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from diffusion_mp import GCNConv, NodeFormerConv
from helpers import built, randn

EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 4]])


def test_noise_is_not_drawn_again_by_checkpoints():
    layer = built(lambda: NodeFormerConv(4, 4, num_samples=2)).double()
    out = checkpoint(layer, randn(6, 4), EDGES, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"would draw other noise .* num_samples=0"):
        out.sum().backward()


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        prune.random_unstructured,
    ],
)
def test_weights_that_are_computed_are_copied_and_saved(
    wrap,
):
    pruned = wrap is prune.random_unstructured
    options = {"amount": 0.5} if pruned else {}
    layer, other = (GCNConv(4, 4).eval() for _ in range(2))
    for part in (layer, other):
        wrap(part.value, "weight", **options)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 4)
    assert_close(other(x, EDGES), layer(x, EDGES))
    if not pruned:  # torch copies no pruned weight
        assert_close(copy.deepcopy(layer)(x, EDGES), layer(x, EDGES))
