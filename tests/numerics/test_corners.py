"""No node, no edge, no position, no feature: defined, or refused in a sentence."""

# ruff: noqa: F403, F405 (everything public)
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_mp import *
from diffusion_mp.couplings import *

NOTHING = torch.zeros(2, 0, dtype=torch.long)


@pytest.mark.parametrize("nodes", [0, 1])
def test_label_propagation(nodes: int) -> None:
    known = torch.zeros(nodes, dtype=torch.long)
    assert LabelPropagation()(known, NOTHING).shape == (nodes, 1)
    assert LabelPropagation()(known - 1, NOTHING).tolist() == [[0.0]] * nodes  # no label is known
    assert LabelPropagation()(torch.zeros(nodes, 3), NOTHING).shape == (nodes, 3)


@pytest.mark.parametrize("nodes", [0, 1])
def test_linear_operators(nodes: int) -> None:
    one = torch.ones(nodes, 1, 2)
    for coupling in (
        IdentityCoupling(nodes),
        UniformCoupling(nodes),
        SparseCoupling(Graph(nodes, NOTHING)),
        LowRankCoupling(one, one),
    ):
        operator = coupling.as_linear_operator()
        assert operator.matvec(np.ones(nodes)).shape == operator.rmatvec(np.ones(nodes)).shape == (nodes,)
        assert operator.matmat(np.ones((nodes, 3))).shape == (nodes, 3)
        assert operator.rmatmat(np.ones((nodes, 0))).shape == (nodes, 0)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("placement", [None, "P1", "P5"])
def test_sequences_without_positions_or_tokens_count_as_zero(pooling: Any, causal: bool, placement: Any) -> None:
    model = PDETransformer([5], 8, 3, 1, 2, max_length=6, pooling=pooling, causal=causal, placement=placement).eval()
    nothing = model.head(torch.zeros(1, 8))
    torch.testing.assert_close(model(torch.zeros(2, 0, dtype=torch.long)), nothing.expand(2, -1))
    assert model(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
    tokens, mask = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[False] * 3, [False, True, True]])
    out = model(tokens, mask)
    torch.testing.assert_close(out[:1], nothing)
    torch.testing.assert_close(out[1:], model(tokens[1:, 1:]))


def test_log_features_are_needed() -> None:
    for nodes in (0, 3):
        none = torch.zeros(nodes, 1, 0)
        with pytest.raises(ValueError, match=r"log_query and log_key must have a feature at least.*\[\d, 1, 0\]"):
            LogLowRankCoupling(none, none)
    assert (LogLowRankCoupling(*[torch.zeros(0, 1, 2)] * 2) @ torch.zeros(0, 1, 3)).shape == (0, 1, 3)
