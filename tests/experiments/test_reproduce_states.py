"""Measures of the states of a model, against their formulas."""

import math

import pytest
import torch
from torch_geometric.utils import to_undirected

from diffusion_mp import DIFFormer
from diffusion_mp.graph import Graph
from diffusion_mp_experiments.reproduce.networks import DropoutSeenDIFFormer
from diffusion_mp_experiments.reproduce.states import measured, state_measures


@pytest.fixture
def graph():
    return Graph(7, to_undirected(torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 3]])))


def test_measures_are_their_formulas(graph):
    z = torch.randn(7, 3, dtype=torch.double)
    dense = torch.eye(7, dtype=torch.double)
    dense[graph.edge_index[0], graph.edge_index[1]] = 1
    root = dense.sum(1).rsqrt().diag()
    energy = float(torch.trace(z.T @ (torch.eye(7) - root @ dense @ root) @ z))
    share = torch.linalg.svdvals(z).square() / z.square().sum()
    found = state_measures(z, graph)
    assert found["energy"] == pytest.approx(energy)
    assert found["roughness"] == pytest.approx(energy / float(z.square().sum()))
    assert found["spread"] == pytest.approx(float((z - z.mean(0)).square().sum() / z.square().sum()))
    assert found["rank"] == pytest.approx(math.exp(-float((share * share.log()).sum())))


def test_what_is_all_alike_has_no_spread_and_one_direction(graph):
    found = state_measures(torch.ones(7, 3), graph)
    assert found["spread"] == pytest.approx(0, abs=1e-12)
    assert found["rank"] == pytest.approx(1)
    assert state_measures(torch.zeros(7, 3), graph)["spread"] == 0


def test_states_are_measured_once_before_any_layer_and_after_each(graph):
    model, x = DIFFormer(5, 4, 3, num_layers=3).eval(), torch.randn(7, 5)
    with measured(model) as states:
        model(x, graph)
        model(x, graph)
    assert {len(values) for values in states.values()} == {4}
    first = torch.relu(model.norms[0](model.encoder(x)))
    assert states["spread"][0] == pytest.approx(state_measures(first, graph)["spread"])
    with measured(model) as states:
        model(x, batch=torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert not states["rank"]  # two graphs have no spread in common


def test_dropout_that_the_attention_sees_is_none_in_evaluation(graph):
    torch.manual_seed(0)
    plain = DIFFormer(5, 4, 3, num_layers=2)
    seen = DropoutSeenDIFFormer(5, 4, 3, num_layers=2, dropout=0.5)
    plain_state = {name: value for name, value in plain.state_dict().items() if "norms" not in name}
    seen.load_state_dict(plain_state, strict=False)
    x = torch.randn(7, 5)
    assert torch.equal(seen.eval()(x, graph), plain.eval()(x, graph))
    seen.train()
    read = []
    seen.convs[0].diffusivity.register_forward_hook(lambda module, args, out: read.append(args[0]))
    seen(x, graph)
    assert (read[0] == 0).float().mean() > 0.2
