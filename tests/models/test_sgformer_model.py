"""SGFormer: how its two branches meet, with and without observed edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu

from diffusion_mp.couplings import Coupling
from diffusion_mp.models import SGFormer

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 0]])  # node 4 is isolated


def build(**options: Any) -> SGFormer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SGFormer(4, 6, 3, **{"gnn": "gcn", "num_gnn_layers": 2} | options).double().eval()


def state() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shared_encoder", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_equation_of_the_slides(alpha: float, shared_encoder: bool) -> None:
    model, x = build(alpha=alpha, beta=0.2, shared_encoder=shared_encoder, layer_norm=False), state()
    initial = relu(model.encoder[0](x))
    read = initial if shared_encoder else relu(model.gnn_encoder[0](x))
    attention = model.conv(initial)
    first, second = model.gnn.convs
    expected = model.decoder((1 - alpha) * attention + alpha * second(relu(first(read, EDGES)), EDGES))
    torch.testing.assert_close(model(x, EDGES), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(x), model.decoder(attention), rtol=1e-10, atol=1e-10)


def test_norms_stand_after_the_encoder_and_the_attention() -> None:
    model, x = build(), state()
    initial = relu(layer_norm(model.encoder[0](x), [6]))
    expected = model.decoder(layer_norm(model.conv(initial), [6]))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def test_an_empty_edge_list_is_a_graph() -> None:
    """No observed edges is Z alone; observed none at all, the GNN still sees every node by itself."""
    model, x = build(), state()
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert not torch.allclose(model(x, nothing), model(x))


def test_the_exported_attention() -> None:
    logits, couplings = build(heads=2)(state(), EDGES, return_coupling=True)
    assert len(couplings) == 1
    assert isinstance(couplings[0], Coupling)
    assert couplings[0].heads == 2
    torch.testing.assert_close(couplings[0].to_dense().sum(2), torch.ones(2, 5, dtype=torch.float64))
    assert logits.shape == (5, 3)


def test_every_parameter_learns() -> None:
    for options in ({}, {"shared_encoder": False, "gnn": "gat", "heads": 2}):
        model = build(**options)
        model(state(), EDGES).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_the_dropouts_are_separate_and_one_stands_for_both() -> None:
    assert build(dropout=0.3).gnn.dropout == 0.3
    model = build(dropout=0.3, gnn_dropout=0.1)
    assert (model.conv.dropout, model.dropout, model.gnn.dropout) == (0.3, 0.3, 0.1)
