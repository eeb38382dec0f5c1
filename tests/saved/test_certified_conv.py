"""``CertifiedConv`` answers as it did when its source was passed: outputs, gradients, energies, and old state dicts.

``certified_conv.pt`` was written by the class of version 0.1.0, with x as the ``source`` of every call.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_mp import Graph
from diffusion_mp.energies import MixturePenalty
from diffusion_mp.layers import CertifiedConv

CASES: list[dict[str, Any]] = torch.load(
    Path(__file__).with_name("certified_conv.pt"), weights_only=True
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["options"]))
def test_values_and_gradients_of_the_former_class(case: dict[str, Any]) -> None:
    conv = CertifiedConv(6, **case["options"]).double()
    conv.load_state_dict(case["state"])
    x = case["x"].clone().requires_grad_()
    edges = case["edge_index"], case["edge_weight"], case["batch"]
    out = conv(x, *edges)
    # A limit is as exact as the residual at which the iteration ends.
    if case["options"]["num_layers"]:
        close = {"rtol": 1e-12, "atol": 1e-12}
    else:
        close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out, case["out"], **close)
    energy = conv.energy(x, Graph.coerce(x, *edges))
    torch.testing.assert_close(energy(conv.by_head(out)), case["energy"], **close)
    pull = torch.arange(out.numel(), dtype=torch.float64).cos().view_as(out)
    state = conv.state_dict(keep_vars=True)
    leaves = [x, *(state[name] for name in case["state"])]
    grads = torch.autograd.grad((out * pull).sum(), leaves, allow_unused=True)
    for got, expected in zip(grads, case["grads"], strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(
                got, expected, rtol=1e3 * close["rtol"], atol=1e2 * close["atol"]
            )


def test_names_of_a_learned_penalty_in_a_state_dict() -> None:
    conv = CertifiedConv(4, penalty=MixturePenalty([0.5]), projection="tied")
    state = conv.state_dict()
    learned = {"attention.of_pairs.log_widths", "attention.of_pairs.log_weights"}
    assert learned | {"weight", "lam.raw", "mu.raw"} <= set(state)
    conv.load_state_dict(state)
